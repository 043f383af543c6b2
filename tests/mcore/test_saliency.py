"""Saliency is gradient times activation of float64 arithmetic under every layout, and training does
not notice that it was asked for.

All layouts of one world size run one after another in the same processes, because starting
processes is the slow part.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import saliency_worker, tiny_models
from mcore.saliency_worker import CASES, DENSE, EVERY, EXPERTS, LLAMA, TEMPERATURE, TIED
from transformers import AutoModelForCausalLM

TOLERANCE = {"fp32": 1e-5, "bf16": 0.05}
LAYOUTS = {name: case for cases in CASES.values() for name, case in cases.items()}
ASKED = [(name, *asked) for name, case in LAYOUTS.items() for asked in case.asked]
TRAINED = [name for name, case in LAYOUTS.items() if case.trains]
VOCABULARY = {DENSE: 131, TIED: 136, LLAMA: 131, EXPERTS: 131}
LAYERS = {"first": 0, "middle": 1, "last": 3}
"""Of the four layers, counted from 0, the one whose output is the leaf."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds what the workers wrote: one file a case, and those of the single-rank checks."""
    directory = tmp_path_factory.mktemp("saliency")
    for kind in VOCABULARY:
        tiny_models.write_tiny_model(directory, kind)
    for world_size in CASES:
        multiprocessing.spawn(
            saliency_worker.run,
            args=(world_size, str(directory / "rendezvous"), str(directory)),
            nprocs=world_size,
        )
    return directory


@pytest.fixture(scope="module")
def results(directory):
    """Of each case by name, what each rank found."""
    return {name: torch.load(directory / f"{name}.pt") for name in LAYOUTS}


@pytest.fixture(scope="module")
def truths(directory):
    """Of each model, leaf and alignment, float64 saliency of every response token."""
    return {
        kind: {
            asked: saliency_of_all(load(directory, kind), VOCABULARY[kind], *asked)
            for asked in EVERY
        }
        for kind in VOCABULARY
    }


def load(directory, kind):
    model = AutoModelForCausalLM.from_pretrained(
        directory / kind, dtype=torch.float64, experts_implementation="eager"
    )
    return model.requires_grad_(False)


def saliency_of_all(model, vocabulary, leaf, align, experts=None):
    """Of every response, one sequence at a time."""
    sequences, parts = saliency_worker.make_batch(vocabulary)
    found = []
    for number, (sequence, part_T) in enumerate(zip(sequences, parts, strict=True)):
        told = nullcontext() if experts is None else tiny_models.routed(model, experts[number])
        with told:
            norm_L = norms(model, sequence, part_T, leaf)
        shift = int(align == "predictor")
        first = sequence.num_prompt - shift
        found.append(norm_L[first : first + len(part_T)])
    return found


def norms(model, sequence, part_T, leaf):
    """[L]: at every position of the whole sequence, what comes after the box included."""
    held = []

    def hold(_layer, _args, output):
        held.append(output)
        output.retain_grad()

    ids_1L, num_prompt = sequence.token_ids_L[None], sequence.num_prompt
    embedded = model.get_input_embeddings()(ids_1L).requires_grad_()
    hook = nullcontext()
    if leaf == "embedding":
        held.append(embedded)
    else:
        hook = model.model.layers[LAYERS[leaf]].register_forward_hook(hold)
    with hook:
        logprob_LV = (model(inputs_embeds=embedded).logits[0] / TEMPERATURE).log_softmax(-1)
    loss = logprob_LV.sum() * 0.0
    for t, part in enumerate(part_T.tolist()):
        if part in (1, 2, 3):
            loss = loss - logprob_LV[num_prompt + t - 1, ids_1L[0, num_prompt + t]]
    loss.backward()
    (activation,) = held
    return (activation.grad * activation.detach())[0].square().sum(-1).sqrt()


@pytest.mark.parametrize(("name", "leaf", "align"), ASKED)
def test_saliency_is_that_of_float64_arithmetic_on_every_rank(results, truths, name, leaf, align):
    expected = truths[LAYOUTS[name].model][leaf, align]
    for found in results[name]:
        check(found[leaf, align], expected, TOLERANCE[LAYOUTS[name].dtype])


def check(found, expected, tolerance):
    assert len(found) == len(expected)
    for one_T, truth_T in zip(found, expected, strict=True):
        assert one_T.dtype == torch.float32
        # Relative throughout, because a method takes the logarithm; 0 is 0.
        torch.testing.assert_close(one_T.double(), truth_T, rtol=tolerance, atol=0)


def test_the_truth_tells_leaves_alignments_and_tokens_apart(truths):
    """Or the comparison with it would show nothing."""
    for by_leaf in truths.values():
        firsts = [by_leaf[asked][0] for asked in EVERY]
        for number, one_T in enumerate(firsts):
            assert one_T.max() > 1e-3
            for other_T in firsts[:number]:
                assert (one_T - other_T).abs().max() > 0.01 * one_T.max()
        # Before the box, in it, and where the box can no longer depend on it.
        at_token_T = by_leaf["embedding", "token"][0]
        assert at_token_T[:6].min() > 1e-4
        assert at_token_T[6:].max() == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_have_the_same_bits(results, name):
    first, *others = results[name]
    for other in others:
        for asked in LAYOUTS[name].asked:
            assert all(map(torch.equal, first[asked], other[asked]))


@pytest.mark.parametrize("name", TRAINED)
def test_training_does_not_notice(results, name):
    for found in results[name]:
        assert found["differences"] == []
        assert found["size"] > 50


def test_an_exception_in_the_backward_pass_leaves_nothing_behind(directory):
    found = torch.load(directory / "interrupted.pt")
    assert found == {"said": "interrupted", "changed": [], "again": True}


def test_experts_are_replayed(directory, truths):
    found = torch.load(directory / "replayed.pt")
    model = load(directory, EXPERTS)
    asked = "embedding", "predictor"
    check(found["found"], saliency_of_all(model, 131, *asked, experts=found["experts"]), 1e-5)
    own = truths[EXPERTS][asked][0]
    assert (found["found"][0] - own).abs().max() > 0.01 * own.max()


def test_without_a_box_there_is_no_saliency(directory):
    found = torch.load(directory / "edges.pt")
    assert found["empty"] == []
    assert [one_T.tolist() for one_T in found["unboxed"]] == [[], [0.0] * 6]
    assert {one_T.dtype for one_T in found["unboxed"]} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lists", "0 answer_parts for 1 sequences; expected one each"),
        ("shape", "answer_parts[0] has shape (8,) and type torch.int64; expected (9,)"),
        ("dtype", "answer_parts[0] has shape (9,) and type torch.int32; expected (9,)"),
        ("parts", "answer_parts[0] has values [1, 2, 3, 4, 5]; expected parts of 0 .. 4"),
        ("temperature", "temperature=0.0; expected a positive number"),
        ("leaf", "leaf='second'; expected one of embedding, first, middle, last"),
        ("align", "align='next'; expected one of predictor, token"),
        ("foreign", "sequence 0 has token ids outside of 0 .. 130"),
    ],
)
def test_what_cannot_be_read_is_refused(directory, name, message):
    assert message in torch.load(directory / "edges.pt")[name]
