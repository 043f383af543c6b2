"""The objective: advantages and log-probs in, a loss sum and sums of metrics out. Pure.

Shape letters: N rollouts of an optimizer step, T tokens of a packed micro-batch.
"""
