import hashlib
import math
from itertools import islice
from random import Random

import pytest
import torch

from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.tasks.imitation import (
    build_model,
    build_optimizers,
    imitation_loss,
    lr_share,
    train,
)
from megatron_credit.tasks.solver import exact_solution, first_wrong_step
from megatron_credit.tasks.tokenizer import build_tokenizer
from megatron_credit.tasks.warm_start import QUESTION_SEED
from megatron_credit.tasks.warm_start_rows import (
    Row,
    RowConfig,
    Turn,
    WarmStartRows,
    collate,
    encode,
    make_turns,
    questions_of,
)

ASK = "State the final answer to the following arithmetic problem: "
QUESTION = f"{ASK}6 + 7 - 8 ="
EXACT = "6+7=13;13-8=5;<answer>5</answer>"
ASKED = f"<|user|>{QUESTION}<|assistant|>"
RETRY = "<|user|>Wrong, try again.<|assistant|>"


@pytest.fixture(scope="module")
def task():
    return ChainSum(ChainSumConfig(seed=QUESTION_SEED))


@pytest.fixture(scope="module")
def tokenizer(task):
    return build_tokenizer(task.train_prompt(index).messages[0]["content"] for index in range(200))


def make_rows(task, tokenizer, **mixture):
    config = RowConfig(**mixture)
    return WarmStartRows(
        questions_of(task),
        tokenizer,
        lambda question, rng: make_turns(question, config, rng),
        Random(0),
    )


def test_no_row_asks_a_held_out_question(task, tokenizer):
    held_out = [
        prompt.messages[0]["content"] for prompt in ChainSum(ChainSumConfig()).eval_prompts()
    ]
    rows = make_rows(task, tokenizer)
    chats = [tokenizer.decode(rows.next_row().token_ids) for _ in range(4000)]
    asked = {chat.split("<|user|>")[1].split("<|assistant|>")[0] for chat in chats}
    assert len(asked) > 3900
    assert not asked & set(held_out)


def test_evidence_row():
    turns = make_turns(QUESTION, RowConfig(evidence_share=1.0, retry_share=0.0), Random(0))
    assert turns == [
        Turn(f"{ASKED}{EXACT}<|end|>{ASKED}", False),
        Turn(f"{EXACT}<|end|>", True),
    ]


def test_plain_row_is_the_pupils_solution():
    config = RowConfig(forget=1.0, evidence_share=0.0, retry_share=0.0)
    assert make_turns(QUESTION, config, Random(0)) == [
        Turn(ASKED, False),
        Turn("6+7=3;3-8=-5;<answer>-5</answer><|end|>", True),
    ]


def test_retry_row_ends_at_the_limit_or_when_right():
    wrong = Turn("6+7=3;3-8=-5;<answer>-5</answer><|end|>", True)
    config = RowConfig(forget=1.0, evidence_share=0.0, retry_share=1.0, max_attempts=3)
    assert make_turns(QUESTION, config, Random(0)) == [
        Turn(ASKED, False), wrong, Turn(RETRY, False), wrong, Turn(RETRY, False), wrong,
    ]  # fmt: skip
    right = make_turns(QUESTION, config.model_copy(update={"forget": 0.0}), Random(0))
    assert right == [Turn(ASKED, False), Turn(f"{EXACT}<|end|>", True)]


def test_a_right_answer_by_two_slips_is_not_told_to_retry():
    # 9 + 4 = 3, 3 - 5 = -2, -2 - 9 = -1: the forgotten carry and the forgotten borrow cancel.
    question = "State the final answer to the following arithmetic problem: 9 + 4 - 5 - 9 ="
    config = RowConfig(forget=1.0, evidence_share=0.0, retry_share=1.0)
    turns = make_turns(question, config, Random(0))
    assert [turn.text for turn in turns if turn.trained] == [
        "9+4=3;3-5=-2;-2-9=-1;<answer>-1</answer><|end|>"
    ]


def test_the_mixture_has_its_shares():
    rng = Random(0)
    question = "State the final answer to the following arithmetic problem: 6 + 7 ="
    chats = [make_turns(question, RowConfig(), rng) for _ in range(4000)]
    evidence = sum(turns[0].text.count("<|assistant|>") == 2 for turns in chats) / 4000
    assert evidence == pytest.approx(0.2, abs=0.032)  # five standard errors
    # a retry row shows a second attempt when the first one forgot the carry
    retried = sum(len(turns) > 2 for turns in chats) / 4000
    assert retried == pytest.approx(0.1 * 0.7, abs=0.02)


def test_encode_trains_only_the_assistant(tokenizer):
    row = encode([Turn(ASKED, False), Turn(f"{EXACT}<|end|>", True)], tokenizer)
    trained = [token for token in row.labels if token != -100]
    assert tokenizer.decode(trained) == f"{EXACT}<|end|>"
    assert tokenizer.decode(row.token_ids) == f"{ASKED}{EXACT}<|end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    assert row.token_ids[: len(prompt)] == prompt
    assert row.labels[: len(prompt)] == [-100] * len(prompt)


def test_batches_are_cut_by_length_and_lose_no_row(task, tokenizer):
    again = make_rows(task, tokenizer)
    drawn = sorted((again.next_row() for _ in range(12)), key=lambda row: len(row.token_ids))
    cut = [collate(drawn[start : start + 4]) for start in (0, 4, 8)]
    batches = list(islice(make_rows(task, tokenizer).batches(4, bucket=3), 3))
    assert sorted(map(as_lists, batches)) == sorted(map(as_lists, cut))


def as_lists(batch):
    return [tensor_BL.tolist() for tensor_BL in batch]


def test_collate_pads_on_the_right():
    token_ids_BL, labels_BL = collate([Row([5, 6], [-100, 6]), Row([7, 8, 9], [-100, -100, 9])])
    assert token_ids_BL.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert labels_BL.tolist() == [[-100, 6, -100], [-100, -100, 9]]


def test_padding_does_not_change_the_loss(task, tokenizer):
    torch.manual_seed(0)
    model = build_model().double().eval()
    rows = make_rows(task, tokenizer)
    pair = [rows.next_row() for _ in range(6)]
    loss_sum, count = 0.0, 0
    for row in pair:
        trained = sum(label != -100 for label in row.labels)
        loss_sum += imitation_loss(model, *collate([row])).item() * trained
        count += trained
    together = imitation_loss(model, *collate(pair)).item()
    assert together == pytest.approx(loss_sum / count, rel=1e-9)


def test_training_lowers_the_loss_of_rows_it_has_not_seen(task, tokenizer):
    torch.manual_seed(0)
    model = build_model()
    batches = make_rows(task, tokenizer).batches(16)
    unseen = next(batches)
    before = imitation_loss(model, *unseen).item()
    train(model, batches, 30)
    after = imitation_loss(model, *unseen).item()
    assert after < math.log(384) < before  # better than no opinion, which it was not at the start


def test_every_parameter_has_one_optimizer():
    model = build_model()
    assert model.num_parameters() == 640_384
    muon, adam = build_optimizers(model)
    in_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    in_adam = {id(p) for group in adam.param_groups for p in group["params"]}
    assert len(in_muon) == 4 * 7
    assert id(model.model.embed_tokens.weight) in in_adam
    assert in_muon.isdisjoint(in_adam)
    assert in_muon | in_adam == {id(p) for p in model.parameters()}


def test_lr_scale_multiplies_both_rates():
    rates = [
        [group["lr"] for group in optimizer.param_groups]
        for optimizer in build_optimizers(build_model(), lr_scale=0.5)
    ]
    assert rates == [[0.01], [0.0015]]


def test_the_quickstart_rows_are_those_of_the_shipped_model(task, tokenizer):
    """What rebuilds models/chain-sum-0.6m bit for bit must not change."""
    rows = make_rows(task, tokenizer)
    assert [tokenizer.decode(rows.next_row().token_ids) for _ in range(3)] == [
        f"<|user|>{ASK}1 + 3 + 0 - 2 + 1 + 2 =<|assistant|>"
        "1+3=4;4+0=4;4-2=2;2+1=3;3+2=5;<answer>5</answer><|end|>",
        f"<|user|>{ASK}6 - 9 + 4 - 1 + 1 =<|assistant|>"
        "6-9=-3;-3+4=1;1-1=0;0+1=1;<answer>1</answer><|end|>",
        f"<|user|>{ASK}7 + 9 - 3 + 4 =<|assistant|>7+9=6;6-3=3;3+4=7;<answer>7</answer><|end|>",
    ]
    digest = hashlib.sha256(repr([rows.next_row() for _ in range(500)]).encode()).hexdigest()
    assert digest[:16] == "87040f91d4cbd756"


def test_lr_share():
    assert lr_share(0, 1000) == pytest.approx(0.02, rel=1e-4)
    assert lr_share(499, 1000) == pytest.approx(0.525)
    assert lr_share(999, 1000) == pytest.approx(0.05)


def test_exact_solution_of_every_training_question_is_right(task):
    for index in range(200):
        prompt = task.train_prompt(index)
        solution = exact_solution(prompt.messages[0]["content"])
        assert task.grade([(prompt, solution)])[0].reward == 1.0
        assert first_wrong_step(solution, prompt.messages[0]["content"]) is None
