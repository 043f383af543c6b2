"""Saliency, reasoning steps, attempts, teachers: who is asked, and what is filled in."""

import math

import pytest
import torch
from trainer.signals.source_cases import ids_of, record, step, tokenizer

from megatron_credit.batch.rollout import Span
from megatron_credit.rewards.prm.steps import StepItem, StepScores
from megatron_credit.trainer.signals.attempts import AttemptSource
from megatron_credit.trainer.signals.config import SaliencySection
from megatron_credit.trainer.signals.saliency import SaliencySource
from megatron_credit.trainer.signals.steps import StepSource, question
from megatron_credit.trainer.signals.teacher import TeacherSource

# Saliency


class Salient:
    """Says the number of a token of the rollout, from 1."""

    def __init__(self):
        self.sequences, self.parts = [], []

    def saliency(self, sequences, answer_parts, section):
        self.sequences += sequences
        self.parts += answer_parts
        return [torch.arange(1.0, one.num_response + 1) for one in sequences]


def saliency_of(*groups, **options):
    policy = Salient()
    source = SaliencySource(SaliencySection(), policy, tokenizer())
    return source.compute(step("grail", *groups, **options)), policy


BOXED = "2+5=\\boxed{7}."
BOX_PARTS = [0, 0, 0, 0, *[1] * (len(ids_of("\\boxed{"))), 2, 3, 4]


def test_saliency_of_the_rollouts_that_are_weighed():
    """Wrong ones with a box; the answers of all."""
    right, wrong = record(0, 1.0, BOXED), record(1, 0.0, BOXED)
    open_box = record(2, 0.0, "2+5=\\boxed{7")
    found, policy = saliency_of([right, wrong, open_box])
    length = len(wrong.response_ids)
    assert len(policy.sequences) == 1
    (part_T,) = policy.parts
    assert part_T.tolist() == BOX_PARTS
    fields = found.fields[0]
    assert fields["answer_part_NT"].tolist()[:2] == [BOX_PARTS] * 2
    assert fields["answer_part_NT"][2].sum() == 0
    saliency_NT = fields["saliency_NT"]
    assert saliency_NT[1].tolist() == list(range(1, length + 1))
    assert not saliency_NT[0].any() and not saliency_NT[2].any()
    assert list(found.notes) == [(0, 1)]
    assert found.notes[0, 1].token_values == {"saliency": saliency_NT[1].tolist()}


def test_saliency_of_all_rollouts_where_the_method_says_so():
    group = [record(0, 1.0, BOXED), record(1, 0.0, BOXED + ".")]
    assert len(saliency_of(group, rollouts="both")[1].sequences) == 2
    assert len(saliency_of(group, rollouts="correct")[1].sequences) == 1
    assert saliency_of([record(0, 1.0, BOXED)] * 2)[0].fields == {}


def test_rollouts_that_are_the_same_are_read_once():
    found, policy = saliency_of([record(0, 1.0, BOXED), *[record(k, 0.0, BOXED) for k in (1, 2)]])
    assert len(policy.sequences) == 1
    saliency_NT = found.fields[0]["saliency_NT"]
    assert saliency_NT[1].any() and torch.equal(saliency_NT[1], saliency_NT[2])
    assert list(found.notes) == [(0, 1), (0, 2)]


def test_a_box_within_the_thinking_is_no_answer():
    text = "\\boxed{3}</think>"
    found, policy = saliency_of([record(0, 1.0, text + BOXED), record(1, 0.0, text)])
    thinking = len(ids_of(text))
    (first, second) = found.fields[0]["answer_part_NT"].tolist()
    assert first == [0] * thinking + BOX_PARTS
    assert not any(second) and policy.sequences == []


# Steps


class Judge:
    """Half marks for every step, none for a text with a 9."""

    def __init__(self):
        self.asked = []

    def score(self, items):
        self.asked += items
        return [
            StepScores((math.nan,) * len(one.steps), "it failed")
            if any("9" in text for text in one.steps)
            else StepScores(tuple((number + 1) / 2 for number in range(len(one.steps))))
            for one in items
        ]


def test_steps_of_the_groups_that_need_scores():
    judge = Judge()
    source = StepSource(judge, tokenizer(), separator=";")
    wrong = record(0, 0.0, "2+5=8;<answer>8</answer>", metadata={"expression": "2 + 5"})
    failed = record(1, 0.0, "9;9;9")
    mixed = [record(0, 1.0, "1;2"), record(1, 0.0, "1;2")]
    found = source.compute(step("verigate", mixed, [wrong, failed]))
    assert judge.asked == [
        StepItem("2 + 5 =", ("2+5=8;", "<answer>8</answer>"), {"expression": "2 + 5"}),
        StepItem("2 + 5 =", ("9;", "9;", "9"), {}),
    ]
    assert list(found.fields) == [1]
    fields = found.fields[1]
    assert fields["step_id_NT"].tolist() == [[0] * 6 + [1] * 3, [0, 0, 1, 1, 2, *[-1] * 4]]
    assert fields["step_score_NS"][0].tolist()[:2] == [0.5, 1.0]
    assert fields["step_score_NS"][1].isnan().all()
    assert found.metrics == {"prm/rollouts": 2.0, "prm/errors": 1.0}
    assert found.notes[1, 0].spans["step"] == [Span(0, 6, 0.5), Span(6, 9, 1.0)]
    spans = found.notes[1, 1].spans["step"]
    assert [(span.start, span.end) for span in spans] == [(0, 2), (2, 4), (4, 5)]


def test_nobody_is_asked_for_groups_of_unequal_rewards():
    judge = Judge()
    source = StepSource(judge, tokenizer(), separator=";")
    found = source.compute(step("verigate", [record(0, 1.0, "1"), record(1, 0.0, "1")]))
    assert judge.asked == [] and found.fields == {}


def test_the_question_is_what_the_user_said_last():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert question(record(0, 1.0, "1", messages=messages)) == "c"
    assert question(record(0, 1.0, "1", messages=[])) == ""


# Attempts and teachers


def test_attempts_are_those_of_the_records():
    spans = {"attempt": [Span(0, 1, 0.0), Span(2, 3, 1.0)]}
    twice = record(0, 1.0, "1+2", mask=[True, False, True], spans=spans)
    once = record(1, 0.0, "12", spans={"attempt": [Span(0, 2, 0.0)]})
    found = AttemptSource().compute(step("cal_grpo", [twice, once]))
    fields = found.fields[0]
    assert fields["attempt_id_NT"].tolist() == [[0, -1, 1], [0, 0, -1]]
    torch.testing.assert_close(
        fields["attempt_pass_NK"], torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), equal_nan=True
    )


def test_the_teacher_scores_every_rollout():
    class Teacher:
        def teacher_logprobs(self, sequences):
            return [torch.full((one.num_response,), -float(one.num_response)) for one in sequences]

    group = [record(0, 0.0, "123"), record(1, None, "1")]
    found = TeacherSource(Teacher()).compute(step("opd", group))
    logprob_NT = found.fields[0]["teacher_logprob_NT"]
    torch.testing.assert_close(
        logprob_NT,
        torch.tensor([[-3.0, -3.0, -3.0], [-1.0, torch.nan, torch.nan]]),
        equal_nan=True,
    )
    assert found.notes[0, 1].token_values == {"teacher_logprob": [-1.0]}


@pytest.mark.parametrize("method", ["verigate", "cal_grpo"])
def test_no_groups_no_signals(method):
    source = {
        "verigate": StepSource(Judge(), tokenizer(), separator=";"),
        "cal_grpo": AttemptSource(),
    }
    assert source[method].compute(step(method)).fields == {}
