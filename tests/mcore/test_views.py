"""Statistics and losses of several views are those of float64 arithmetic under every layout.

All layouts of one world size run one after another in the same processes, because starting
processes is the slow part.
"""

from dataclasses import astuple
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from credit_kernels.evidence.reference import Plain
from mcore import tiny_models, views_worker
from mcore.views_worker import CASES, DENSE, EXPERTS, FEC, FREE, QUERIES, TEACHER, TEMPERATURE
from transformers import AutoModelForCausalLM

from megatron_credit.batch.views import ViewScores

TOLERANCE = 1e-5
EXACT = {name: case for cases in CASES.values() for name, case in cases.items()}
LOSSES = [name for name, case in EXACT.items() if case.losses]
ASKED = [(name, query) for name, case in EXACT.items() for query in case.queries]
ASKED += [(name, TEACHER) for name in LOSSES]
MODELS = (DENSE, EXPERTS)
VOCABULARY = 131


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds what the workers wrote: one file a case, and those of the single-rank checks."""
    directory = tmp_path_factory.mktemp("views")
    for kind in MODELS:
        tiny_models.write_tiny_model(directory, kind)
    tiny_models.tiny_model(DENSE, seed=1).save_pretrained(directory / TEACHER)
    for world_size in CASES:
        multiprocessing.spawn(
            views_worker.run,
            args=(world_size, str(directory / "rendezvous"), str(directory)),
            nprocs=world_size,
        )
    return directory


@pytest.fixture(scope="module")
def results(directory):
    """Of each case by name."""
    return {name: torch.load(directory / f"{name}.pt") for name in EXACT}


@pytest.fixture(scope="module")
def truths(directory):
    """Of each model, the statistics of every query, from logits in full."""
    views = views_worker.make_views(VOCABULARY)
    found = {}
    for kind in MODELS:
        model = load(directory, kind)
        with torch.no_grad():
            logits = [logits_of(one, model, model) for one in views]
        found[kind] = {
            name: [statistics(one, QUERIES[name]) for one in logits] for name in QUERIES
        }
    with torch.no_grad():
        dense, teacher = load(directory, DENSE), load(directory, TEACHER)
        logits = [logits_of(one, dense, teacher) for one in views]
    found[DENSE][TEACHER] = [statistics(one, {"contrast": FEC}) for one in logits]
    return found


def load(directory, kind):
    return AutoModelForCausalLM.from_pretrained(
        directory / kind, dtype=torch.float64, experts_implementation="eager"
    )


def logits_of(views, model, teacher):
    """{context: [T, V]} of the contexts that are there, and the response."""
    present = {
        context: (teacher if context else model)(view.token_ids_L[None]).logits[0, first:-1]
        for context, view in enumerate([views.plain, *views.teachers])
        if view is not None
        for first in [view.num_prompt - 1]
    }
    return present, views.plain.token_ids_L[views.plain.num_prompt :]


def plain_head(logits, *, contrast, **options):
    """The plain computation and its inputs: logits as hidden states, the identity as weight."""
    present, target_T = logits
    head = Plain(total=VOCABULARY, contrast=contrast, temperature=TEMPERATURE, **options)
    eye_VV = torch.eye(VOCABULARY, dtype=torch.float64)
    return head, torch.stack(list(present.values())), eye_VV, target_T


def present_contrast(present, contrast):
    """The contrast in terms of the contexts that are there; None without one that it needs."""
    if contrast is None:
        return None
    kind, positive, negative, free = contrast
    place = {context: number for number, context in enumerate(present)}
    if isinstance(negative, tuple):
        negative = tuple(place[context] for context in negative if context in place)
    elif negative is not None:
        negative = place.get(negative, ())
    if positive not in place or free not in place or negative == ():
        return None
    return kind, place[positive], negative, place[free]


def statistics(logits, query):
    """float64 `ViewScores` of one rollout."""
    present, target_T = logits
    contrast = present_contrast(present, query.get("contrast"))
    options = query if contrast is not None else {}
    head, *inputs = plain_head(logits, **options | {"contrast": contrast})
    found = astuple(head.stats(*inputs))
    nothing = torch.full((FREE + 1, len(target_T)), torch.nan, dtype=torch.float64)
    compared = [nothing.index_copy(0, torch.tensor(list(present)), one) for one in found[:4]]
    contrasted = [nothing[0]] * 4 if contrast is None else found[4:]
    return ViewScores(*compared, *(contrasted if "contrast" in query else ()))


@pytest.mark.parametrize(("name", "query"), ASKED)
def test_statistics_are_those_of_float64_arithmetic_on_every_rank(results, truths, name, query):
    expected = [vars(one) for one in truths[EXACT[name].model][query]]
    largest = {
        key: max(one[key].nan_to_num().abs().amax().item() for one in expected if one[key].numel())
        for key, value in expected[0].items()
        if value is not None
    }
    for scores in results[name]["all_scores"]:
        assert len(scores[query]) == len(expected)
        for found, truth in zip(scores[query], expected, strict=True):
            for key, value in truth.items():
                if value is None:
                    assert found[key] is None
                    continue
                assert found[key].dtype == torch.float32
                # A contrast's numbers are far below 1.
                bound = TOLERANCE * min(1.0, largest[key])
                torch.testing.assert_close(
                    found[key].double(), value, rtol=0, atol=bound, equal_nan=True
                )


def test_the_truth_tells_contexts_apart(truths):
    """Or the comparison with it would show nothing."""
    for kind in MODELS:
        one = truths[kind]["fec"][0]
        assert one.kl_teacher_student_CT[1:FREE].min() > 1e-3
        assert one.kl_teacher_student_CT[FREE].abs().max() < 1e-12
        assert (one.kl_teacher_student_CT - one.kl_student_teacher_CT)[1:FREE].abs().min() > 1e-5
        assert one.contrast_cost_T.max() > 1e-4
        assert one.logprob_CT[1:FREE].diff(dim=0).abs().min() > 1e-3


@pytest.mark.parametrize("name", EXACT)
def test_plain_views_alone_have_the_bits_of_score(results, name):
    for found, expected in zip(results[name]["bare"], results[name]["plain"], strict=True):
        assert torch.equal(found["logprob_CT"][0], expected["logprob_T"])
        assert torch.equal(found["entropy_CT"][0], expected["entropy_T"])


@pytest.mark.parametrize("name", EXACT)
def test_a_context_equal_to_the_plain_one_differs_by_rounding(results, name):
    """A row of a product may have another last bit among other rows."""
    rows = zip(results[name]["scores"]["fec"], results[name]["plain"], strict=True)
    for found, expected in rows:
        present_C = found["logprob_CT"].isfinite().all(-1)
        for context in (0, FREE):
            if present_C[context]:
                gap_T = found["logprob_CT"][context] - expected["logprob_T"]
                assert gap_T.abs().sum() <= 4e-6 * len(gap_T)


@pytest.fixture(scope="module")
def loss_truths(directory):
    """By kind: float64 losses of every token, and the gradient of the mixture by name."""
    found = {}
    for key, (by_teacher, options) in views_worker.LOSSES.items():
        model = load(directory, DENSE)
        teacher = load(directory, TEACHER) if by_teacher else model
        logprob_T, *losses = plain_losses(model, teacher, options)
        views_worker.mixture(logprob_T, *losses).backward()
        named = ((name, parameter.grad) for name, parameter in model.named_parameters())
        found[key] = torch.stack(losses).detach(), dict(tiny_models.published(named))
    return found


def plain_losses(model, teacher, options):
    """Log-prob, reference and evidence of every token."""
    views = views_worker.make_views(VOCABULARY)
    sizes = [one.plain.num_response for one in views]
    parts = []
    for one, w_T in zip(views, views_worker.controllers(views).split(sizes), strict=True):
        logits = logits_of(one, model, teacher)
        present, target_T = logits
        log_TV = (present[0] / TEMPERATURE).log_softmax(-1)
        picked_T = log_TV.gather(-1, target_T[:, None])[:, 0]
        contrast = present_contrast(present, options["contrast"])
        losses = [torch.zeros_like(picked_T)] * 2
        if contrast is not None:
            head, *inputs = plain_head(logits, **options | {"contrast": contrast})
            losses = head.loss(*inputs, w_T)
        elif FREE in present:
            free = list(present).index(FREE)
            alone = options | {"contrast": ("fixed", free, None, free)}
            head, *inputs = plain_head(logits, **alone)
            losses[0] = head.loss(*inputs, w_T)[0]
        parts.append((picked_T, *losses))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", views_worker.LOSSES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_are_those_of_float64_arithmetic(
    results, loss_truths, name, kind
):
    expected_2T, gradients = loss_truths[kind]
    found = results[name]["losses"][kind]
    torch.testing.assert_close(
        found["values"].double(), expected_2T, rtol=TOLERANCE, atol=TOLERANCE
    )
    assert found["gradients"].keys() == gradients.keys()
    assert max(gradient.abs().max() for gradient in gradients.values()) > 0.1
    for key, gradient in gradients.items():
        gap = (found["gradients"][key].double() - gradient).abs().max()
        assert gap <= TOLERANCE * max(1.0, gradient.abs().max()), key


def test_replayed_experts_are_those_of_the_plain_view_alone(directory, results):
    found = torch.load(directory / "replayed.pt")
    changed = 0.0
    rows = zip(*(found[key] for key in ("plain", "bare", "views")), strict=True)
    for (plain, bare, views), free in zip(rows, results["moe"]["scores"]["fec"], strict=True):
        assert torch.equal(bare["logprob_CT"][0], plain["logprob_T"])
        gap_T = views["logprob_CT"][0] - plain["logprob_T"]
        assert gap_T.abs().sum() <= TOLERANCE
        torch.testing.assert_close(
            views["logprob_CT"][1:], free["logprob_CT"][1:], rtol=0, atol=4e-6, equal_nan=True
        )
        if len(gap_T):
            changed = max(changed, (plain["logprob_T"] - free["logprob_CT"][0]).abs().max())
    assert changed > 0.01


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("contrast", "names context 5; hidden has the contexts 0..4"),
        ("divergence", "divergence='sideways'"),
        ("temperature", "temperature=0.0; expected a positive number"),
        ("uneven", "rollout 1 has 1 contexts and rollout 0 has 5; give None"),
        ("foreign", "rollout 0, context 1 has token ids outside of 0 .. 130"),
        ("long", "rollout 0, context 1 has 65 tokens, the model 64 positions; shorten"),
        ("empty", "[]"),
    ],
)
def test_what_cannot_be_scored_is_refused(directory, name, message):
    assert message in torch.load(directory / "refusals.pt")[name]
