"""Compared with one forward pass a response, its token ids put together by hand."""

import json
import math
import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForTokenClassification,
)

from megatron_credit.rewards.prm.check import check_prm
from megatron_credit.rewards.prm.config import HfPrm
from megatron_credit.rewards.prm.hf_input import HfInput
from megatron_credit.rewards.prm.scorer import StepScorer
from megatron_credit.rewards.prm.steps import StepItem

# One token a character, so that ids can be written down without a tokenizer.
VOCABULARY = {
    token: number
    for number, token in enumerate(["<pad>", "<bos>", "<end>", *"abcdef0123456789+-=;\n"])
}
SIZES = {
    "vocab_size": len(VOCABULARY), "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.7,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<bos>{{ m['content'] }}{% endfor %}="


def save_tokenizer(path, *, bos: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <end>", special_tokens=[("<bos>", 1), ("<end>", 2)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<end>",
        unk_token="<pad>", chat_template=TEMPLATE,
    )  # fmt: skip
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Directories of tiny random models."""
    torch.manual_seed(0)
    base = tmp_path_factory.mktemp("prm")
    made = {
        "qwen2": Qwen2ForTokenClassification(
            Qwen2Config(**SIZES, num_key_value_heads=1, num_labels=3)
        ),
        "bert": BertForTokenClassification(BertConfig(**SIZES, num_labels=2)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1)),
    }
    for name, model in made.items():
        model.save_pretrained(base / name)
        save_tokenizer(base / name, bos=name != "qwen2")
    return {name: base / name for name in made}


def ids(text: str) -> list[int]:
    return [VOCABULARY[letter] for letter in text]


def random_items(count: int) -> list[StepItem]:
    rng = random.Random(5)

    def words(low: int, high: int) -> str:
        return "".join(rng.choices("abcdef0123456789+-=", k=rng.randint(low, high)))

    return [
        StepItem(words(1, 9), tuple(words(1, 12) + ";" for _ in range(rng.randint(1, 5))))
        for _ in range(count)
    ]


@torch.inference_mode()
def logits_at_steps(model, prefix: list[int], steps: list[list[int]]) -> torch.Tensor:
    """[S, V] float64: one response alone, without padding."""
    row = prefix + [token for step in steps for token in step]
    ends = torch.tensor([len(step) for step in steps]).cumsum(0) + len(prefix) - 1
    return model.eval()(input_ids=torch.tensor([row])).logits[0, ends].double()


def config(path, **options) -> HfPrm:
    return HfPrm(model=path, dtype="float32", step_separator=";", max_tokens=128, **options)


def assert_scores(found, expected) -> None:
    assert found.problem is None
    assert found.scores == pytest.approx(expected.tolist(), abs=1e-6)
    assert max(found.scores) - min(found.scores) > 1e-3 or len(found.scores) == 1


def test_token_classification(paths):
    model = Qwen2ForTokenClassification.from_pretrained(paths["qwen2"])
    items = random_items(11)
    expected = [
        logits_at_steps(model, ids(item.prompt), [ids(step) for step in item.steps])
        for item in items
    ]
    with StepScorer(config(paths["qwen2"], good_label=2, batch_size=4)) as scorer:
        scored, backwards = scorer.score(items), scorer.score(items[::-1])
        too_long = StepItem("a", ("b;" * 30, "c;" * 40))
        strange = StepItem("\ud800", ("a;",))
        failed = scorer.score([items[0], too_long, strange, items[1]])
    for found, logits in zip(scored, expected, strict=True):
        assert_scores(found, logits.softmax(-1)[:, 2])
    for found, again in zip(scored, backwards[::-1], strict=True):
        assert found.scores == pytest.approx(again.scores, abs=1e-6)
    assert failed[1].problem == "it has 141 tokens, max_tokens = 128"
    assert failed[2].problem is not None
    assert all(math.isnan(score) for found in failed[1:3] for score in found.scores)
    for found, alone in zip(failed[::3], scored, strict=False):
        assert found.scores == pytest.approx(alone.scores, abs=1e-6)


def test_a_model_that_sees_both_ways_gets_no_end_of_text(paths):
    model = BertForTokenClassification.from_pretrained(paths["bert"])
    items = random_items(5)
    with StepScorer(config(paths["bert"], good_label=0, keep_separator=False)) as scorer:
        scored = scorer.score(items)
    for item, found in zip(items, scored, strict=True):
        steps = [ids(step.removesuffix(";")) for step in item.steps]
        logits = logits_at_steps(model, [1, *ids(item.prompt)], steps)
        assert_scores(found, logits.softmax(-1)[:, 0])


def test_causal(paths):
    model = LlamaForCausalLM.from_pretrained(paths["llama"])
    items = random_items(11)
    options = {"head": "causal", "step_token": "\n", "chat_template": True}
    with StepScorer(config(paths["llama"], batch_size=3, **options)) as scorer:
        scored = scorer.score(items)
    for item, found in zip(items, scored, strict=True):
        prefix = [1, *ids(item.prompt), VOCABULARY["="]]
        logits = logits_at_steps(model, prefix, [ids(f"{step}\n") for step in item.steps])
        pair = logits[:, [VOCABULARY["+"], VOCABULARY["-"]]]
        assert_scores(found, torch.sigmoid(pair[:, 0] - pair[:, 1]))


def test_a_model_that_says_nan_gives_no_scores(paths, tmp_path):
    model = Qwen2ForTokenClassification.from_pretrained(paths["qwen2"])
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCABULARY["f"]] = math.nan
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, bos=False)
    with StepScorer(config(tmp_path)) as scorer:
        good, bad = scorer.score([StepItem("a", ("b;", "c;")), StepItem("a", ("b;", "f;"))])
    assert good.problem is None
    assert bad.problem is not None and "is nan, no number from 0 to 1" in bad.problem
    assert [math.isnan(score) for score in bad.scores] == [True, True]


def test_a_batch_that_takes_too_long_has_no_scores(tmp_path):
    """Scores that are there when somebody looks are taken: the model is slow enough for a process
    that has to wait for its turn."""
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16}
    model = Qwen2ForTokenClassification(Qwen2Config(**sizes, num_key_value_heads=1, num_labels=2))
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, bos=False)
    with StepScorer(config(tmp_path, timeout_s=1e-4)) as scorer:
        found = scorer.score([StepItem(letter, ("b" * 110 + ";",)) for letter in "abc"])
    assert {one.problem for one in found} == {"no scores within 0.0001 s"}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("none", {}, "has no config.json; name the directory"),
        ("llama", {}, "is a LlamaForCausalLM, but head = 'tokens'"),
        ("qwen2", {"head": "causal", "step_token": ";"}, "but head = 'causal'"),
        ("qwen2", {"good_label": 3}, "good_label = 3, but .* has the labels"),
        ("qwen2", {"step_token": "<extra_0>"}, "step_token = '<extra_0>' is no single token"),
        ("qwen2", {"max_tokens": 129}, "reads at most 128 tokens"),
        ("qwen2", {"device": "cuda:99"}, "device = 'cuda:99', but this process sees"),
        (
            "llama",
            {"head": "causal", "step_token": ";", "bad_token": "no"},
            "bad_token = 'no' is no single token",
        ),
    ],
)
def test_what_cannot_work_is_refused(paths, model, options, message):
    settings = {"max_tokens": 128, **options}
    with pytest.raises(ValueError, match=message):
        HfInput(HfPrm(model=paths["qwen2"].parent / model, **settings))


def test_the_check_before_a_run(paths):
    check_prm(config(paths["llama"], head="causal", step_token=";"))
    with pytest.raises(ValueError, match=r"cannot work: .* is a BertForTokenClassification"):
        check_prm(config(paths["bert"], head="causal", step_token=";"))


def test_a_head_without_weights_is_refused(paths, tmp_path):
    LlamaForCausalLM.from_pretrained(paths["llama"]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, bos=True)
    claimed = json.loads((tmp_path / "config.json").read_text())
    claimed["architectures"] = ["LlamaForTokenClassification"]
    (tmp_path / "config.json").write_text(json.dumps(claimed))
    with pytest.raises(ValueError, match=r"has no weights for score\.bias, score\.weight"):
        StepScorer(config(tmp_path))
