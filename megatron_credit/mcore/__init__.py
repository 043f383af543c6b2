"""The trainer's side of Megatron-Core: set-up, model, weights in and out, forward, optimizer step.

This package is the only importer of `megatron.core`. It exports nothing, so that `mcore.config` and
`mcore.architecture` import without torch or megatron; without CUDA, `cpu_mode.enable()` must run
before any other module of the package is imported.

Shape letters: T packed tokens, L tokens of one sequence, B sequences of a batch, N query heads,
G key-value heads, D size of a head, F rotary frequencies (half of D), H hidden, V vocabulary (this
rank's rows), C context ranks.
"""
