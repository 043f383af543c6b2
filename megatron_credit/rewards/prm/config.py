"""Configuration of process reward models; light to import."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_credit.rewards.config import FUNCTION_PATH
from megatron_credit.settings import Settings


class PrmSettings(Settings):
    """What every process reward model has."""

    step_separator: str = Field("\n", min_length=1)
    """The text that ends a step."""
    start_limit_s: float = Field(300.0, gt=0)
    """Seconds that a process may take to load the function or the model."""


class CallablePrm(PrmSettings):
    """A function of the user: function(prompt, steps) -> a score in [0, 1] for each step.

    A function with a parameter called `metadata` also gets what the data knows of the prompt.
    """

    kind: Literal["callable"] = "callable"
    """Which process reward model this is."""
    function: str = Field(pattern=FUNCTION_PATH)
    """package.module:function."""
    timeout_s: float = Field(10.0, gt=0, le=3600)
    """Seconds that one call may take; then its process is killed and the response has no scores."""
    memory_mb: int = Field(4096, ge=256)
    """Private memory of one process, in units of 2^20 bytes; a function that needs more gives no
    scores."""
    processes: int = Field(1, ge=1, le=256)
    """Processes that call the function, each one response at a time."""
    batch_size: int = Field(8, ge=1)
    """Responses handed to a process at once."""


class HfPrm(PrmSettings):
    """A model in a directory of the Hugging Face format, in one process."""

    kind: Literal["hf"] = "hf"
    """Which process reward model this is."""
    model: Path
    """The directory with config.json, tokenizer and weights; nothing is downloaded and no code in
    it is run."""
    head: Literal["tokens", "causal"] = "tokens"
    """tokens: a token-classification model, a softmax over its labels at the last token of each
    step; causal: a language model, a softmax over `good_token` and `bad_token` as what follows
    `step_token`."""
    good_label: int = Field(1, ge=0)
    """tokens: number of the label that means a good step."""
    good_token: str = "+"
    """causal: the token that means a good step, as it stands in the vocabulary, or a text that is
    one token."""
    bad_token: str = "-"
    """causal: the token that means a bad step."""
    step_token: str = ""
    """A token put behind each step, where the score is then read; causal needs one."""
    keep_separator: bool = True
    """Steps are shown to the model with the separators that end them."""
    chat_template: bool = False
    """The prompt is shown to the model as a user's message, in the chat template of the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the weights; scores are computed from the logits in float64."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda:\d+)$")
    """cpu or cuda:N."""
    threads: int = Field(1, ge=1)
    """CPU threads of the model."""
    batch_size: int = Field(8, ge=1)
    """Responses in one forward pass."""
    max_tokens: int = Field(4096, ge=1)
    """A prompt with its steps that has more tokens gets no scores: nothing is cut off."""
    timeout_s: float = Field(300.0, gt=0, le=3600)
    """Seconds that one forward pass may take; then the process is killed and its responses have no
    scores."""
    memory_mb: int = Field(32768, ge=1024)
    """Private host memory of the process, in units of 2^20 bytes; the weights pass through it."""

    @model_validator(mode="after")
    def _causal_reads_at_a_token(self) -> Self:
        if self.head == "causal" and not self.step_token:
            raise ValueError(
                "head = 'causal' needs step_token, the token behind each step at which the model "
                "was trained to say whether the step is good"
            )
        return self


AnyPrm = CallablePrm | HfPrm
PrmConfig = Annotated[AnyPrm, Field(discriminator="kind")]
"""A process reward model, told apart by `kind`."""
