"""How the shipped models are made: a Qwen3 of 0.64 million parameters, and how it imitates.

Shape letters: B rows of a batch, L tokens of a row, M trained tokens, V vocabulary.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from megatron_credit.tasks.tokenizer import END_ID, MAX_LENGTH, PAD_ID, VOCAB_SIZE
from megatron_credit.tasks.warm_start_rows import NOT_TRAINED

logger = logging.getLogger(__name__)

BATCH_ROWS = 64
WARMUP_STEPS = 50
FINAL_LR_SHARE = 0.05


def build_model(*, max_length: int = MAX_LENGTH) -> Qwen3ForCausalLM:
    """The untrained model for contexts of `max_length` tokens, drawn from torch's current seed."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        bos_token_id=None,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    residual_std = 0.02 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.embed_tokens.weight":
                parameter.normal_(std=0.05)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.normal_(std=residual_std)
    return model


def build_optimizers(
    model: Qwen3ForCausalLM, *, lr_scale: float = 1.0
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms.

    AdamW alone is far behind after the same number of steps. `lr_scale` multiplies both rates.
    """
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, lr=lr_scale * 0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(others, lr=lr_scale * 3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def lr_share(step: int, num_steps: int) -> float:
    """Learning rate of a step (from 0) as a share of the peak: linear warm-up times a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * (step + 1) / num_steps))
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def imitation_loss(model: Qwen3ForCausalLM, token_ids_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """Mean cross entropy of the trained tokens. Padding is on the right, so causality hides it."""
    hidden_BLH = model.model(input_ids=token_ids_BL[:, :-1], use_cache=False).last_hidden_state
    trained_BL = labels_BL[:, 1:] != NOT_TRAINED
    logits_MV = model.lm_head(hidden_BLH[trained_BL])
    return cross_entropy(logits_MV, labels_BL[:, 1:][trained_BL])


def train(
    model: Qwen3ForCausalLM,
    batches: Iterator[tuple[Tensor, Tensor]],
    num_steps: int,
    *,
    lr_scale: float = 1.0,
) -> None:
    """`num_steps` steps of imitation, in place."""
    optimizers = build_optimizers(model, lr_scale=lr_scale)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, num_steps))
        for optimizer in optimizers
    ]
    model.train()
    for step, (token_ids_BL, labels_BL) in zip(range(1, num_steps + 1), batches, strict=False):
        loss = imitation_loss(model, token_ids_BL, labels_BL)
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 50 == 0 or step == num_steps:
            logger.info("step %d of %d: loss %.4f", step, num_steps, loss.item())
    model.eval()


def write_model(
    directory: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A directory that transformers and vLLM load."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # save_pretrained makes it readable by its owner only
    (directory / "model.safetensors").chmod(0o644)
