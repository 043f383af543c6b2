"""Rollouts of several attempts: how a chain goes on, what is recorded and what it counts as."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer.record_cases import rollout
from transformers import AutoTokenizer

from megatron_credit.batch.rollout import Completion, Prompt, Span, VersionSpan
from megatron_credit.batch.rollout_files import read_rollouts, write_rollouts
from megatron_credit.credit import Group, assign
from megatron_credit.rewards.verdict import Verdict
from megatron_credit.rollouts.config import AttemptsConfig, SamplingConfig
from megatron_credit.trainer.attempts import attempt_signals
from megatron_credit.trainer.experience import pad_rows, to_sequence
from megatron_credit.trainer.feedback_turn import read_feedback_turn
from megatron_credit.trainer.sampler import Sampler, accuracy, group_metrics, verification

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"
END = 1
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "2 + 5 ="}], answer="7")
CHAT = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' and strips and '</think>' in m.content and not loop.last %}
{{- m.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{- m.content }}{% endif %}{{ '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{% endif %}"""
"""As Qwen writes conversations, with our names of the special tokens."""


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def flat(lists: Iterable[list]) -> list:
    return [item for one in lists for item in one]


# The feedback turn


def test_the_turn_of_the_shipped_tokenizer(tokenizer):
    turn = read_feedback_turn(tokenizer, PROMPT, "Wrong, try again.", (END,))
    assert turn.end_id == END
    assert tokenizer.decode(turn.token_ids) == "<|user|>Wrong, try again.<|assistant|>"
    assert turn.token_ids == ids_of(tokenizer, "<|user|>Wrong, try again.<|assistant|>")


def test_attempts_and_turns_are_the_conversation_of_the_template(tokenizer):
    """Token by token, for a template that ends turns by more than the stop token."""
    tokenizer.chat_template = CHAT
    feedback = "No: 2 + 5 again"
    turn = read_feedback_turn(tokenizer, PROMPT, feedback, (0, END))
    answers = ["<think>2+5=8</think>8", "9"]
    messages = PROMPT.messages.copy()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for answer in answers:
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": feedback},
        ]
        ids += [*ids_of(tokenizer, answer), END, *turn.token_ids]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == whole
    assert tokenizer.decode(turn.token_ids) == f"\n<|user|>\n{feedback}<|end|>\n<|assistant|>\n"


def error_of(tokenizer, *, template=CHAT, feedback="no", stop=(END,), **options):
    tokenizer.chat_template = template
    with pytest.raises(ValueError) as caught:
        read_feedback_turn(tokenizer, replace(PROMPT, template_options=options), feedback, stop)
    return str(caught.value)


def test_a_template_that_strips_thinking_is_refused(tokenizer):
    error = error_of(tokenizer, strips=True)
    assert "the chat template changes earlier turns (some leave out earlier thinking)" in error
    assert r"makes ...'end|>\n<|assistant|>\n7<|end|>\n<|user|>\nno' of ...'end|>" in error
    assert r"\n<|assistant|>\n<think>\n3 + 4\n</thin'; use a chat template that keeps" in error


def test_an_empty_thought_that_only_the_last_turn_has_is_refused(tokenizer):
    error = error_of(tokenizer, enable_thinking=False)
    assert r"makes ...'end|>\n<|assistant|>\n7<|end|>\n<|user|>\nno' of ...'end|>" in error
    assert r"\n<|assistant|>\n<think>\n\n</think>\n\n7'; use a chat template" in error


def test_other_templates_that_cannot_go_on_are_refused(tokenizer):
    single = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}<|user|>"
    error = error_of(tokenizer, template=single)
    assert "the chat template does not take a further turn: one turn" in error
    error = error_of(tokenizer, stop=(2, 5))
    assert r"goes on with '<|end|>\n<|user|>\nno<|end|>" in error
    assert "but the stop tokens are ['<|user|>', " in error
    deaf = CHAT.replace("{{- m.content }}", "{{- 'x' if loop.index0 == 2 else m.content }}")
    assert "does not show attempts.feedback = 'no': after" in error_of(tokenizer, template=deaf)


# Chains, by an engine and a verifier that say what a test wants


class Scripted:
    """An engine and a task: `answers` holds the text of each attempt of each sample.

    A text that ends in "~" was truncated, one in "!" ended by token 0. "7" is right, "?" has no
    verdict.
    """

    def __init__(self, tokenizer, answers):
        self.tokenizer = tokenizer
        self.remaining = [list(texts) for texts in answers]
        self.requests = []
        self.graded = []

    def generate(self, requests):
        self.requests.append(requests)
        if sum(one.num_samples for one in requests) == len(self.remaining):
            speaking = self.remaining
        else:
            speaking = [texts for texts in self.remaining if texts]
        samples = iter([self.completion(texts.pop(0)) for texts in speaking])
        return [[next(samples) for _ in range(one.num_samples)] for one in requests]

    def completion(self, text):
        ids = ids_of(self.tokenizer, text.strip("~!"))
        ids += [] if text.endswith("~") else [0 if text.endswith("!") else END]
        count = len(ids)
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * count,
            finish_reason="length" if text.endswith("~") else "stop",
            versions=[VersionSpan(4, 0, 1), VersionSpan(5, 1, count)] if count > 1 else [],
        )

    def grade(self, answers):
        self.graded += [text for _, text in answers]
        outcomes = {"7": "right", "?": "timeout"}
        return [Verdict(outcomes.get(text, "wrong"), text) for _, text in answers]

    def train_prompt(self, index):
        return replace(PROMPT, id=f"p{index}")


def scripted(tokenizer, answers, *, max_attempts: int | None = 3, seed=0):
    script = Scripted(tokenizer, answers)
    sampler = Sampler(
        task=script,
        tokenizer=tokenizer,
        engine=script,
        sampling=SamplingConfig(max_new_tokens=8, stop_token_ids=(END, 0)),
        seed=seed,
        attempts=None if max_attempts is None else AttemptsConfig(max_attempts=max_attempts),
    )
    return script, sampler


def test_a_chain_stops_at_its_first_pass_and_marks_what_was_sampled(tokenizer):
    script, sampler = scripted(tokenizer, [["12", "7"], ["7"]])
    ((second, first),) = sampler.train_groups(1, num_prompts=1, num_samples=2)
    turn = ids_of(tokenizer, "<|user|>Wrong, try again.<|assistant|>")
    one, two = [*ids_of(tokenizer, "12"), END], [*ids_of(tokenizer, "7"), END]
    a, b, c = len(one), len(one) + len(turn), len(one) + len(turn) + len(two)

    assert second.response_ids == [*one, *turn, *two]
    assert second.mask == [True] * a + [False] * (b - a) + [True] * (c - b)
    assert [math.isnan(x) for x in second.logprobs] == [not trained for trained in second.mask]
    assert second.spans == {"attempt": [Span(0, a, 0.0), Span(b, c, 1.0)]}
    assert second.versions == [(4, 0, 1), (5, 1, a), (4, b, b + 1), (5, b + 1, c)]
    assert second.text == "12<|end|><|user|>Wrong, try again.<|assistant|>7"
    assert (second.reward, second.outcome, second.parsed) == (1.0, "right", "7")
    assert (second.messages, second.metadata) == (PROMPT.messages, {})

    assert first.response_ids == two and first.mask == [True] * len(two)
    assert first.spans == {"attempt": [Span(0, len(two), 1.0)]}
    assert first.text == "7"
    (again,) = script.requests[1]
    assert again.prompt_ids == [*second.prompt_ids, *one, *turn]
    assert (again.num_samples, again.max_new_tokens) == (1, 8)
    assert script.graded == ["12", "7", "7"]


@pytest.mark.parametrize(
    ("texts", "scores", "outcome"),
    [
        (["1", "2", "3"], [0.0, 0.0, 0.0], "wrong"),
        (["1", "7~"], [0.0, 0.0], "unparsed"),  # truncated: failed, though it says what is right
        (["?~"], [0.0], "unparsed"),
        (["1", "?"], [0.0, math.nan], "timeout"),
        (["1!"], [0.0], "wrong"),  # ended by a token that no turn can follow
        (["7!"], [1.0], "right"),
    ],
)
def test_where_a_chain_ends(tokenizer, texts, scores, outcome):
    script, sampler = scripted(tokenizer, [texts])
    ((found,),) = sampler.train_groups(1, num_prompts=1, num_samples=1)
    assert script.remaining == [[]] and len(script.requests) == len(texts)
    assert [span.score for span in found.spans["attempt"]] == pytest.approx(scores, nan_ok=True)
    assert found.outcome == outcome
    assert found.reward == pytest.approx(scores[-1], nan_ok=True)
    assert found.finish_reason == ("length" if texts[-1].endswith("~") else "stop")


def test_without_attempts_everything_is_as_it_was(tokenizer):
    script, sampler = scripted(tokenizer, [["1"], ["7~"]], max_attempts=None)
    ((wrong, truncated),) = sampler.train_groups(1, num_prompts=1, num_samples=2)
    assert len(script.requests) == 1 and script.graded == ["1", "7"]
    assert wrong.spans == truncated.spans == {}
    assert (truncated.reward, truncated.finish_reason) == (1.0, "length")
    assert wrong.text == "1" and wrong.logprobs == [-0.5] * len(wrong.response_ids)


def test_a_probe_is_one_attempt(tokenizer):
    script, sampler = scripted(tokenizer, [["1", "7"]])
    script.eval_prompts = list
    assert sampler.probe(3).text == "1"
    assert len(script.requests) == 1


def seeds_of(tokenizer, answers, *, seed=0, step=1, num_samples=2):
    script, sampler = scripted(tokenizer, answers, seed=seed)
    sampler.train_groups(step, num_prompts=1, num_samples=num_samples)
    return [[one.seed for one in batch] for batch in script.requests]


def test_seeds_say_which_attempt_of_which_sample(tokenizer):
    seeds = seeds_of(tokenizer, [["1", "2", "3"], ["1", "2", "3"]])
    assert [len(batch) for batch in seeds] == [1, 2, 2]
    assert len(set(flat(seeds))) == 5
    assert seeds == seeds_of(tokenizer, [["4", "2", "3"], ["1", "5", "3"]])
    # Whether its sibling goes on changes nothing for a sample, nor do more samples.
    (_, (second,), _) = seeds_of(tokenizer, [["7"], ["1", "2", "3"]])
    assert second == seeds[1][1]
    more = seeds_of(tokenizer, [["1", "2", "3"]] * 4, num_samples=4)
    assert more[2][:2] == seeds[2]
    others = seeds_of(tokenizer, [["1", "2", "3"]] * 2, step=2)
    others += seeds_of(tokenizer, [["1", "2", "3"]] * 2, seed=1)
    assert not set(flat(others)) & set(flat(seeds))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_record_comes_back(tokenizer, tmp_path, suffix):
    _, sampler = scripted(tokenizer, [["1", "2", "7"], ["1", "?"]])
    (group,) = sampler.train_groups(1, num_prompts=1, num_samples=2)
    write_rollouts(tmp_path / f"r{suffix}", group)
    found = list(read_rollouts(tmp_path / f"r{suffix}"))
    assert repr(found) == repr(group)  # NaN is not equal to itself
    assert "NaN" not in (tmp_path / "r.jsonl").read_text() if suffix == ".jsonl" else True


def test_experts_of_several_attempts_are_refused(tokenizer):
    script, sampler = scripted(tokenizer, [["1", "7"]])
    plain = script.completion
    script.completion = lambda text: replace(plain(text), routed_experts="abc")
    with pytest.raises(ValueError, match=r"turn policy\.router_replay off, or leave \[attempts\]"):
        sampler.train_groups(1, num_prompts=1, num_samples=1)


# What the attempts come to


def chain(*scores, texts=None, sample=0, source=""):
    """An attempt of two tokens for each score, with one token of feedback between them."""
    texts = texts or range(len(scores))
    ids = flat([*([9] if k else []), text, 8] for k, text in enumerate(texts))
    spans = [Span(3 * k, 3 * k + 2, score) for k, score in enumerate(scores)]
    sampled = [place % 3 != 2 for place in range(len(ids))]
    return rollout(
        sample=sample,
        response_ids=ids,
        logprobs=[-0.5 if one else math.nan for one in sampled],
        mask=sampled,
        reward=scores[-1],
        source=source,
        spans={"attempt": spans},
    )


def test_signals_by_hand():
    ids, pass_NK = attempt_signals([chain(0.0, 1.0), chain(1.0), chain(0.0, math.nan)])
    assert [one.tolist() for one in ids] == [[0, 0, -1, 1, 1], [0, 0], [0, 0, -1, 1, 1]]
    assert ids[0].dtype == torch.int64 and pass_NK.dtype == torch.float32
    nan = math.nan
    assert pass_NK.tolist() == [
        [0.0, 1.0],
        pytest.approx([1.0, nan], nan_ok=True),
        pytest.approx([0.0, nan], nan_ok=True),
    ]


def test_credit_of_chains_by_hand():
    """One rollout passes at once, one is rescued, one fails twice, one has no verdict."""
    rollouts = [chain(1.0), chain(0.0, 1.0), chain(0.0, 0.0), chain(0.0, math.nan)]
    ids, pass_NK = attempt_signals(rollouts)
    group = Group(
        reward_N=torch.tensor([one.reward for one in rollouts]),
        mask_NT=pad_rows([to_sequence(one).mask_T for one in rollouts]),
        attempt_id_NT=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1),
        attempt_pass_NK=pass_NK,
    )
    advantage_NT = assign("cal_grpo", group).advantage_NT
    # Of two that failed attempt 1 one never passed: w_1 = 1/2. Only that one failed attempt 2.
    assert advantage_NT.tolist() == [
        [0.5, 0.5, 0.0, 0.0, 0.0],
        [-0.25, -0.25, 0.0, 1.0, 1.0],
        [-0.25, -0.25, 0.0, -1.0, -1.0],
        [0.0] * 5,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spans": {}}, "prompt 'a', sample 0 has no spans of attempts; sample rollouts with"),
        ({"spans": {"attempt": [Span(0, 2, 0.5), Span(3, 5, 1)]}}, "has an attempt with score 0.5"),
        ({"spans": {"attempt": [Span(0, 3, 0), Span(2, 5, 1)]}}, r"at \[\[0, 3\], \[2, 5\]\]; exp"),
        ({"spans": {"attempt": [Span(0, 6, 0)]}}, "within 5 response tokens"),
        ({"spans": {"attempt": [Span(0, 2, 0)]}}, "trains on response token 3, which belongs to"),
    ],
)
def test_records_that_do_not_say_their_attempts(changes, message):
    with pytest.raises(ValueError, match=message):
        attempt_signals([replace(chain(0.0, 1.0), **changes)])


def test_metrics_of_a_step():
    groups = [
        [chain(0.0, 0.0, texts=[1, 1]), chain(0.0, 1.0)],
        [chain(1.0), chain(0.0, math.nan), chain(0.0)],
    ]
    found = group_metrics(groups, max_attempts=3)
    plain = group_metrics(groups)
    assert {name: found[name] for name in found.keys() - plain.keys()} == {
        "attempts/pass_1": 1 / 5,
        "attempts/reached_2": 3 / 5,
        "attempts/pass_2": 1 / 2,  # one of the three has no verdict
        "attempts/reached_3": 0.0,
        "attempts/repeated": 1 / 3,
    }
    assert {name: found[name] for name in plain} == plain


def test_verification_at_k():
    rollouts = [
        chain(1.0, source="x"),
        chain(0.0, 1.0, source="x"),
        chain(0.0, 0.0, 1.0, source="y"),
        chain(0.0, math.nan, source="y"),
    ]
    assert accuracy(rollouts, "eval/accuracy") == {
        "eval/accuracy": 1 / 4,
        "eval/accuracy/x": 1 / 2,
        "eval/accuracy/y": 0.0,
    }
    assert verification(rollouts[:3:2], "eval/verification", 3) == {
        "eval/verification_at_2": 1 / 2,
        "eval/verification_at_2/x": 1.0,
        "eval/verification_at_2/y": 0.0,
        "eval/verification_at_3": 1.0,
        "eval/verification_at_3/x": 1.0,
        "eval/verification_at_3/y": 1.0,
    }
    assert verification(rollouts, "eval/verification", 2)["eval/verification_at_2"] == 1 / 2
    assert verification([], "eval/verification", 3) == {}
    plain = [rollout(sample=0), rollout(sample=1), rollout(sample=1, reward=math.nan)]
    assert accuracy(plain, "eval/accuracy") == {"eval/accuracy": 1 / 3}
