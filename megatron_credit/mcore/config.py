"""How the policy is laid out over processes, optimised and built: configuration only, light to
import."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from megatron_credit.settings import Settings

ConverterKind = Literal["builtin", "bridge"]


class ParallelConfig(Settings):
    """Sizes of the parallel axes; what remains of the world is data parallel."""

    tensor: int = Field(1, ge=1)
    """Ranks that share each weight matrix."""
    pipeline: int = Field(1, ge=1)
    """Pipeline stages, each with a share of the layers."""
    virtual_pipeline: int = Field(1, ge=1)
    """Model chunks per stage (interleaved schedule); 1 is the plain schedule."""
    context: int = Field(1, ge=1)
    """Ranks that share each sequence."""
    expert: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture-of-experts layer. They are taken from the tensor,
    context and data ranks."""
    expert_tensor: int = Field(1, ge=1)
    """Ranks that share each matrix of an expert, whatever `tensor` is. They are taken from the same
    ranks as those of `expert`."""
    sequence_parallel: bool = False
    """Split activations between tensor regions over the tensor ranks; needs tensor > 1."""
    distributed_optimizer: bool = True
    """Split the optimizer's state over the data ranks."""

    @model_validator(mode="after")
    def _axes_fit_together(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "sequence_parallel = true needs tensor > 1, got tensor = 1; "
                "raise tensor or turn sequence_parallel off"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_pipeline = {self.virtual_pipeline} needs pipeline > 1, got pipeline = 1; "
                "raise pipeline or set virtual_pipeline = 1"
            )
        return self


class OptimizerConfig(Settings):
    """The optimizer and its learning-rate schedule, counted in optimizer steps."""

    kind: Literal["adam", "sgd"] = "adam"
    """adam: AdamW, decoupled weight decay. sgd: without momentum."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay of the first and the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Adam's addition to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly; the first has lr / warmup_steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from lr to min_lr."""
    decay_steps: int | None = Field(None, ge=1)
    """Step at which min_lr is reached, warm-up included; needed unless the schedule is constant."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""

    @model_validator(mode="after")
    def _schedule_is_complete(self) -> Self:
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(
                f'schedule = "{self.schedule}" needs decay_steps, the step at which min_lr is '
                "reached; set it to the number of optimizer steps of the run"
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps = {self.decay_steps} must be above warmup_steps = {self.warmup_steps}"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} must not be above lr = {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: each must be at least 0 and below 1")
        return self


class PolicyConfig(Settings):
    """The model that is trained, and how it is computed."""

    model: Path
    """Hugging Face model directory: config.json, safetensors and tokenizer files."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of weights and activations; with bf16 the optimizer keeps float32 copies."""
    tokens_per_microbatch: int = Field(4096, ge=1)
    """Upper bound on the packed tokens of one micro-batch on one data rank."""
    recompute: Literal["none", "full"] = "none"
    """full: keep only each layer's input and compute the layer again in the backward pass."""
    random_weights: bool = False
    """Read config.json only and start from seeded random weights."""
    converter: ConverterKind = "builtin"
    """Who builds the model and converts its weights. bridge: NVIDIA's megatron-bridge, for families
    that are not built in; a separate installation, see docs/models.md."""
    router_replay: bool = False
    """Compute each token with the experts that it went to in the engine, so that the two never
    differ by which experts computed; for models with experts."""

    @model_validator(mode="after")
    def _bridge_reads_weights(self) -> Self:
        if self.converter == "bridge" and self.random_weights:
            raise ValueError(
                'converter = "bridge" cannot draw weights that are the same under every layout; '
                "set random_weights = false"
            )
        return self


class TeacherConfig(Settings):
    """Whose weights read the views that a method compares the policy with."""

    kind: Literal["current", "ema", "frozen"] = "current"
    """current: the policy as it is, which takes no memory. ema: a moving average of it. frozen: the
    weights that the run starts from, or those of `model`. Both are a second copy of the model on
    every rank, in the type of the policy; ema with bf16 takes another 4 bytes a parameter."""
    decay: float = Field(0.95, ge=0, lt=1)
    """ema: share of the average that an optimizer step leaves; the rest are the new weights."""
    model: Path | None = None
    """frozen: a Hugging Face model directory to take the weights from. Its tokens must be those of
    the policy; what compares whole distributions also needs its hidden size and vocabulary."""

    @model_validator(mode="after")
    def _model_is_frozen(self) -> Self:
        if self.model is not None and self.kind != "frozen":
            raise ValueError(
                f'model = "{self.model}" with kind = "{self.kind}"; only a frozen teacher has '
                'weights of its own: set kind = "frozen" or leave model out'
            )
        return self
