"""The training run: configuration, checks before the start, the loop, and what a run leaves behind.

Shape letters: N rollouts of a group, T response tokens, G groups of a step.
"""
