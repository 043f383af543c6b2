"""What travels between the stages: prompts, rollouts, training sequences, packed micro-batches.

Shape letters: N rollouts of a group, L prompt + response tokens of one rollout, T response tokens of
one rollout, P positions of a packed micro-batch, B sequences of a micro-batch.
"""
