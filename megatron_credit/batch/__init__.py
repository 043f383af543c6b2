"""What travels between the stages: prompts, rollouts, training sequences, packed micro-batches.

Shape letters: N rollouts of a group, L prompt + response tokens of a rollout, T response tokens
of a rollout, P positions of a packed micro-batch, B sequences of a micro-batch.
"""
