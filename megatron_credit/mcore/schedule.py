"""The learning rate of each optimizer step; light to import."""

import math

from megatron_credit.mcore.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Rises linearly, so that step 0 of w warm-up steps has lr / w and not 0, which would waste its
    rollouts; then falls from lr to min_lr, reached at decay_steps, along a line or half a cosine.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.decay_steps is None:
        return config.lr
    span = config.decay_steps - config.warmup_steps
    done = min((step - config.warmup_steps) / span, 1.0)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left
