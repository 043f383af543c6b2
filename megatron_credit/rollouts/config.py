"""Configuration of the engines and of sampling; light to import."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megatron_credit.settings import Settings


class EngineConfig(Settings):
    """The vLLM server that samples."""

    address: str | None = Field(None, pattern=r"^https?://[^/]+$")
    """http://host:port of a server that runs already; without it one is started on loopback."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the server that is started; 0 takes a free one."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Type of weights and activations in the engine."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt with its response, in tokens; unset: what the longest prompt of the run
    needs."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that are decoded together."""
    kv_cache_mib: int = Field(256, ge=1)
    """KV cache on a CPU, in MiB. On a GPU vLLM sizes it by `gpu_memory`."""
    gpu_memory: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that the engine may use."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks of the engine."""
    startup_timeout_s: float = Field(300.0, gt=0)
    """Seconds until a starting engine must answer."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Seconds until an engine must have answered a request for samples."""
    hang_timeout_s: float = Field(60.0, gt=0)
    """Seconds without a sign of life after which an engine that has requests counts as hanging;
    longer than its longest step."""
    sync_timeout_s: float = Field(300.0, gt=0)
    """Seconds that each step of a weight sync may take."""
    weight_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How weights travel: nccl between GPUs, gloo between CPUs; auto goes by the machine."""
    bucket_mib: int = Field(0, ge=0)
    """Weights are packed into broadcasts of about this size; 0 takes 8 MiB for gloo, whose buckets
    then stay in cache and overlap with loading, and 512 MiB for nccl."""


class SamplingConfig(Settings):
    """How responses are sampled."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits, in the engine and in the trainer alike."""
    max_new_tokens: int = Field(ge=1)
    """A response that reaches this length is truncated."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response and belong to it; empty: the tokenizer's end-of-sequence token."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens before `max_new_tokens` over which the reward of a training rollout falls linearly, by
    1 at the limit (DAPO, 2503.14476); unset: length does not count. Of several attempts the last
    one's length does."""
    top_p: float = 1.0
    """Must stay 1."""
    top_k: int = -1
    """Must stay -1."""
    min_p: float = 0.0
    """Must stay 0."""

    @field_validator("top_p", "top_k", "min_p")
    @classmethod
    def _whole_distribution(cls, value: float, info: ValidationInfo) -> float:
        allowed = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}[info.field_name]
        if value != allowed:
            raise ValueError(
                f"{info.field_name}={value} samples from a cut distribution, so the engine's "
                "log-probs are no longer the policy's and the importance ratio is biased; leave it "
                f"at {allowed}"
            )
        return value

    @model_validator(mode="after")
    def _buffer_fits(self) -> "SamplingConfig":
        if self.overlong_buffer is not None and self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is above max_new_tokens="
                f"{self.max_new_tokens}, so that an empty response would be too long; use at most "
                f"{self.max_new_tokens}"
            )
        return self


class AttemptsConfig(Settings):
    """Several attempts at a prompt in one context: after a wrong answer the policy is told so and
    answers again, until it passes. `sampling.max_new_tokens` holds for each attempt."""

    max_attempts: int = Field(ge=2)
    """Attempts of a rollout at most."""
    feedback: str = Field("Wrong, try again.", min_length=1)
    """What the user says after an attempt that failed."""
