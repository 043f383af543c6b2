"""Reinforcement learning with verifiable rewards on Megatron-Core, credit where it was earned."""

__version__ = "0.1.0"
