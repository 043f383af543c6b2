"""Configuration of the signals: what the teachers are shown, saliency, answer probes."""

from typing import Literal

from pydantic import Field

from megatron_credit.credit.answer_span import Box
from megatron_credit.credit.segments import Segmenter
from megatron_credit.mcore.config import TeacherConfig
from megatron_credit.settings import Settings


class EvidenceSection(Settings):
    """The contexts behind which teachers read the rollouts, and what is made of them."""

    teacher: TeacherConfig | None = None
    """Whose weights read the evidence; without it what the method's paper uses."""
    baseline: Literal["policy", "teacher"] = "policy"
    """Who reads the plain context that a teacher is compared with: the policy, or the teacher too.
    Compared with itself, a frozen or slow teacher tells what the evidence does to it, not how far
    the policy has moved: its doubts, which the policy may have settled."""
    template: Literal["bare", "wrapped"] = "bare"
    """Where an answer stands: behind the assistant's header, or in a sentence of the user."""
    exclude_self: bool = False
    """The rollout whose wrong answer serves the group gets the next one itself."""
    negatives: int = Field(1, ge=1)
    """Most wrong siblings that a contrast averages."""
    contrast: Literal["fec", "pair", "fixed"] = "fec"
    """What is taken from the evidence: the part of right minus wrong that is not nuisance, right
    minus wrong, or right minus no evidence."""
    divergence: Literal["forward", "reverse"] = "forward"
    """Evidence on probabilities, or on log-probs."""
    top_k: int | None = Field(None, ge=1)
    """Tokens that are told apart; None: the whole vocabulary, or what the method's paper uses."""
    lambda_ref: float = Field(0.1, ge=0)
    """Weight of the term towards the evidence-free teacher."""
    lambda_evi: float = Field(1.0, ge=0)
    """Weight of the loss along the evidence."""
    beta: float = Field(0.5, ge=0, le=1)
    """Mixture of the distillation loss: 0 is KL(teacher || policy), 1 KL(policy || teacher)."""


class SaliencySection(Settings):
    """The activation backward pass from the boxed answer."""

    leaf: Literal["embedding", "first", "middle", "last"] = "embedding"
    """Whose gradient it is: the input embedding, or what the named layer puts out."""
    align: Literal["predictor", "token"] = "predictor"
    """Position of a token's saliency: the one that predicts it, or its own."""
    box: Box = "last"
    r"""Which complete \boxed{..} is the answer."""


class ProbesSection(Settings):
    """Answers put behind the states between the segments of a chain of thought."""

    segmenter: Segmenter = Segmenter()
    """How the chain is cut."""
    thinking_end: str = ""
    """What closes the model's thinking, as in </think>; put before the answer if the chain has not
    closed it. Empty: the model does not think apart."""
    opening: str = "\\boxed{"
    """What comes before an answer."""
    closing: str = Field("}", min_length=1)
    """What ends an answer; scored with it, so that an answer that begins another one does not
    count for it."""
