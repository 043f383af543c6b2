"""Which credit method learns faster: the same questions, seeds and numbers of rollouts for all."""
