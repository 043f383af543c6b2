"""Predicted memory of a trainer rank and of the engine, from sizes alone; light to import.

Parameters, gradients and optimizer state are counted exactly, but for the padding of megatron's
buffers (a few hundred elements a bucket). Activations are what autograd keeps in our own torch
blocks, counted as arXiv 2205.05198 counts GPT's and compared with saved-tensor hooks in the tests;
Transformer Engine's fused blocks keep less.

Letters: H hidden, Q all query heads (heads x head size), K all key-value heads, F feed-forward, I
an expert's feed-forward, V vocabulary, T tokens of a micro-batch on one context rank.
"""

from dataclasses import dataclass

from megatron_credit.mcore.architecture import (
    Architecture,
    data_parallel_size,
    padded_vocab_size,
)
from megatron_credit.mcore.config import (
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    TeacherConfig,
)

FP32 = 4
BYTES = {"fp32": 4, "bf16": 2}
HEAD_TILE = 1024 * 512 * FP32
"""A tile of logits of `credit_kernels.linear_logprob`."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one trainer rank at the peak of a step, the process itself apart."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What autograd keeps."""
    backward: int
    """Gradients of a layer's activations while the backward pass is in it: as large as they are."""
    teacher: int
    """A copy of the weights that reads evidence; for an average in bf16 one in float32 too."""
    head: int
    """Workspace of the output head, which never makes logits of all tokens; last stage only."""

    @property
    def total(self) -> int:
        """Everything together."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes of one rank of the engine."""

    weights: int
    kv_per_token: int
    """Keys and values of one token of context."""


@dataclass(frozen=True, kw_only=True)
class CheckpointMemory:
    """Bytes of a checkpoint, on all ranks together."""

    weights: int
    optimizer: int
    """float32 masters of the weights, and Adam's moments."""
    teacher: int
    """The float32 average of an `ema` teacher."""

    @property
    def total(self) -> int:
        """Everything together."""
        return self.weights + self.optimizer + self.teacher


@dataclass(frozen=True)
class Parameters:
    """Numbers that one rank holds."""

    dense: int
    """All but those of experts; shared by the ranks of a data-parallel group."""
    expert: int
    """Of the experts of this rank."""


def trainer_memory(
    architecture: Architecture,
    *,
    policy: PolicyConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    num_processes: int,
    teacher: TeacherConfig | None = None,
) -> list[RankMemory]:
    """The memory of a rank of each pipeline stage; the ranks of a stage are alike.

    `check_parallel` accepted the layout. Micro-batches are taken to be full, and there to be as
    many as the pipeline can hold at once. A `teacher` is taken to be of the policy's size.
    """
    width = BYTES[policy.dtype]
    tokens = -(-policy.tokens_per_microbatch // parallel.context)
    memory = []
    for stage in range(parallel.pipeline):
        count = rank_parameters(architecture, parallel, stage)
        number = count.dense + count.expert
        is_last = stage == parallel.pipeline - 1
        memory.append(
            RankMemory(
                weights=number * width,
                gradients=number * FP32,
                optimizer=optimizer_bytes(
                    count, policy, optimizer, parallel, num_processes=num_processes
                ),
                activations=activation_bytes(architecture, policy, parallel, stage),
                teacher=number * teacher_bytes(policy, teacher),
                backward=tokens * layer_bytes_per_token(architecture, width, parallel),
                head=head_bytes(architecture, policy, parallel) if is_last else 0,
            )
        )
    return memory


def teacher_bytes(policy: PolicyConfig, teacher: TeacherConfig | None) -> int:
    """Bytes of a teacher for each parameter of the policy."""
    if teacher is None or teacher.kind == "current":
        return 0
    width = BYTES[policy.dtype]
    return width + (FP32 if teacher.kind == "ema" and width < FP32 else 0)


def engine_memory(
    architecture: Architecture, *, bytes_per_number: int, tensor: int
) -> EngineMemory:
    """The memory of each of `tensor` engine ranks: weights, and keys and values a token."""
    whole = rank_parameters(architecture, ParallelConfig(), 0)
    heads = max(1, architecture.num_kv_heads // tensor)
    per_layer = 2 * heads * architecture.head_dim
    return EngineMemory(
        weights=(whole.dense + whole.expert) * bytes_per_number // tensor,
        kv_per_token=architecture.num_layers * per_layer * bytes_per_number,
    )


def checkpoint_memory(
    architecture: Architecture,
    *,
    policy: PolicyConfig,
    optimizer: OptimizerConfig,
    teacher: TeacherConfig | None = None,
) -> CheckpointMemory:
    """The size of a checkpoint, which no layout changes."""
    whole = rank_parameters(architecture, ParallelConfig(), 0)
    number = whole.dense + whole.expert
    moments = 2 * FP32 if optimizer.kind == "adam" else 0
    average = FP32 if teacher is not None and teacher.kind == "ema" else 0
    return CheckpointMemory(
        weights=number * BYTES[policy.dtype],
        optimizer=number * (FP32 + moments),
        teacher=number * average,
    )


def rank_parameters(architecture: Architecture, parallel: ParallelConfig, stage: int) -> Parameters:
    """What a rank of a pipeline stage holds, padding rows of the vocabulary included.

    A layer: two norms 2H; attention (Q + 2K)H + HQ, split by tensor (and biases Q + 2K, head norms
    2 head sizes); a gated feed-forward 3FH, split by tensor, or a router EH and E experts of 3IH,
    split by expert and expert_tensor. The first stage has the embedding VH, the last the final norm
    H and the output VH, which is a copy of a tied embedding where that lies on another stage.
    """
    a, tensor = architecture, parallel.tensor
    hidden, query, key = a.hidden_size, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    layer = 2 * hidden + (2 * hidden * query + 2 * hidden * key) // tensor
    layer += (query + 2 * key) // tensor if a.qkv_bias else 0
    layer += 2 * a.head_dim if a.qk_norm else 0
    layer += a.num_experts * hidden if a.num_experts else 3 * a.ffn_size * hidden // tensor
    experts = 3 * a.expert_ffn_size * hidden * a.num_experts
    num_layers = a.num_layers // parallel.pipeline
    vocabulary = padded_vocab_size(a, tensor) // tensor * hidden
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1
    outer = vocabulary * is_first + hidden * is_last
    if is_last and not (a.tied_embeddings and is_first):
        outer += vocabulary
    return Parameters(
        dense=layer * num_layers + outer,
        expert=experts * num_layers // (parallel.expert * parallel.expert_tensor),
    )


def optimizer_bytes(
    count: Parameters,
    policy: PolicyConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    *,
    num_processes: int,
) -> int:
    """State of the optimizer: Adam's two float32 moments, and float32 copies of bf16 weights.

    The distributed optimizer (arXiv 1910.02054, stage 1) splits Adam's state over data x context
    ranks, that of experts over what expert x expert_tensor leave of tensor x context x data. SGD's
    is not split.
    """
    moments = 2 * FP32 if optimizer.kind == "adam" else 0
    each = moments + (FP32 if policy.dtype == "bf16" else 0)
    replicas, expert_replicas = 1, 1
    if parallel.distributed_optimizer and optimizer.kind == "adam":
        replicas = data_parallel_size(parallel, num_processes) * parallel.context
        split = parallel.expert * parallel.expert_tensor
        expert_replicas = max(1, replicas * parallel.tensor // split)
    return -(-count.dense * each // replicas) + -(-count.expert * each // expert_replicas)


def activation_bytes(
    architecture: Architecture, policy: PolicyConfig, parallel: ParallelConfig, stage: int
) -> int:
    """What autograd keeps for the backward pass on a rank of this stage.

    Plain 1F1B holds pipeline - stage micro-batches of the stage's layers; the interleaved schedule
    (virtual_pipeline - 1) x pipeline + 2 (pipeline - stage) - 1 chunks (arXiv 2104.04473). With
    full recomputation each layer keeps its input, and one layer at a time is whole. The last stage
    adds the final norm.
    """
    tokens = -(-policy.tokens_per_microbatch // parallel.context)
    width = BYTES[policy.dtype]
    split = parallel.tensor if parallel.sequence_parallel else 1
    kept = width * architecture.hidden_size // split
    whole = layer_bytes_per_token(architecture, width, parallel)
    num_chunks = parallel.virtual_pipeline
    layers = architecture.num_layers // (parallel.pipeline * num_chunks)
    if num_chunks == 1:
        in_flight = parallel.pipeline - stage
    else:
        in_flight = (num_chunks - 1) * parallel.pipeline + 2 * (parallel.pipeline - stage) - 1
    per_chunk = layers * (kept if policy.recompute == "full" else whole)
    extra = whole if policy.recompute == "full" else 0
    if stage == parallel.pipeline - 1:
        extra += (2 * FP32 + width) * architecture.hidden_size // split
    return tokens * (per_chunk * in_flight + extra)


def layer_bytes_per_token(architecture: Architecture, width: int, parallel: ParallelConfig) -> int:
    """What one layer keeps of one token, with numbers of `width` bytes.

    A norm keeps its input and the normalised input in float32, and its output: 8 + width each of H,
    and of Q and K with head norms. Attention keeps the rotated queries, its output and the input of
    the projection (3Q), and keys and values (2K, of all context ranks); the feed-forward 5F. Of
    each of a token's experts, H where it arrives and 6I. Tensor ranks split Q, K and F, sequence
    parallelism also H.
    """
    a, tensor = architecture, parallel.tensor
    split = tensor if parallel.sequence_parallel else 1
    query, key = a.num_heads * a.head_dim // tensor, a.num_kv_heads * a.head_dim // tensor
    norm = 2 * FP32 + width
    total = 2 * norm * a.hidden_size // split
    total += width * (3 * query + 2 * key * parallel.context)
    total += norm * (query + key) if a.qk_norm else 0
    if not a.num_experts:
        return total + 5 * width * a.ffn_size // tensor
    arriving = a.hidden_size * parallel.expert_tensor + 6 * a.expert_ffn_size
    return total + (width * a.experts_per_token * arriving + 4 * FP32 * a.num_experts) // split


def head_bytes(architecture: Architecture, policy: PolicyConfig, parallel: ParallelConfig) -> int:
    """Workspace of the output head in the backward pass.

    Four float32 copies of the hidden states (scaled, transposed, their gradient, and that of all
    positions), the gradient of the weight before it is added to the buffer, and tiles of logits.
    """
    tokens = -(-policy.tokens_per_microbatch // parallel.context)
    rows = padded_vocab_size(architecture, parallel.tensor) // parallel.tensor
    hidden = architecture.hidden_size
    weight = rows * hidden * BYTES[policy.dtype]
    return 4 * FP32 * tokens * hidden + weight + 3 * HEAD_TILE
