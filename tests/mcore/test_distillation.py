"""Divergences from the teacher's view and their gradients are those of float64 arithmetic.

Under every layout, and whether the teacher's view shares the pass or has one of its own. All
layouts of one world size run one after another in the same processes.
"""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import distillation_worker, tiny_models, views_worker
from mcore.distillation_worker import CASES, KINDS
from mcore.views_worker import DENSE, TEACHER, TEMPERATURE
from objective.distillation_reference import generalised_jsd, with_tail
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5
LAYOUTS = [name for cases in CASES.values() for name in cases]
VOCABULARY = 131


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds what the workers wrote."""
    directory = tmp_path_factory.mktemp("distillation")
    tiny_models.write_tiny_model(directory, DENSE)
    tiny_models.tiny_model(DENSE, seed=1).save_pretrained(directory / TEACHER)
    for world_size in CASES:
        multiprocessing.spawn(
            distillation_worker.run,
            args=(world_size, str(directory / "rendezvous"), str(directory)),
            nprocs=world_size,
        )
    return directory


@pytest.fixture(scope="module")
def results(directory):
    """Of each layout by name."""
    return {name: torch.load(directory / f"{name}.pt") for name in LAYOUTS}


@pytest.fixture(scope="module")
def truths(directory):
    """By kind: float64 [3, T] of every token, and the gradient of the mixture by name."""
    found = {}
    for kind, (by_teacher, options) in KINDS.items():
        model, teacher = load(directory, DENSE), load(directory, TEACHER if by_teacher else DENSE)
        parts = [of_rollout(one, model, teacher, **options) for one in views()]
        values = [torch.cat(part) for part in zip(*parts, strict=True)]
        distillation_worker.mixture(*values).backward()
        named = ((name, parameter.grad) for name, parameter in model.named_parameters())
        found[kind] = torch.stack(values).detach(), dict(tiny_models.published(named))
    return found


def views():
    return views_worker.make_views(VOCABULARY)


def load(directory, kind):
    return AutoModelForCausalLM.from_pretrained(directory / kind, dtype=torch.float64)


def log_probs(model, view):
    """[T, V] of the response."""
    logit_TV = model(view.token_ids_L[None]).logits[0, view.num_prompt - 1 : -1]
    return (logit_TV / TEMPERATURE).log_softmax(-1)


def of_rollout(one, model, teacher, *, beta=0.5, top_k=None):
    """Log-prob, entropy and divergence of every response token."""
    student_TV = log_probs(model, one.plain)
    target_T1 = one.plain.token_ids_L[one.plain.num_prompt :, None]
    logprob_T = student_TV.gather(-1, target_T1)[:, 0]
    entropy_T = -(student_TV.exp() * student_TV).sum(-1)
    if one.teachers[0] is None:
        return logprob_T, entropy_T, torch.zeros_like(logprob_T)
    with torch.no_grad():
        teacher_TV = log_probs(teacher, one.teachers[0])
    if top_k is not None:
        top_TK = student_TV.detach().topk(top_k, -1).indices
        student_TV, teacher_TV = (
            with_tail(log_TV.gather(-1, top_TK)) for log_TV in (student_TV, teacher_TV)
        )
    return logprob_T, entropy_T, generalised_jsd(student_TV, teacher_TV, beta=beta)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_float64_arithmetic(results, truths, layout, kind):
    expected_3T, gradients = truths[kind]
    found = results[layout][kind]
    torch.testing.assert_close(
        found["values"].double(), expected_3T, rtol=TOLERANCE, atol=TOLERANCE
    )
    assert found["gradients"].keys() == gradients.keys()
    for key, gradient in gradients.items():
        gap = (found["gradients"][key].double() - gradient).abs().max()
        assert gap <= TOLERANCE * max(1.0, gradient.abs().max()), key


def test_the_truth_would_show_a_difference(truths):
    """Between kinds, and from the scores alone; rollouts without the view have 0."""
    sizes = [one.plain.num_response for one in views()]
    absent = [one.teachers[0] is None for one in views()]
    assert 0 < sum(absent) < len(absent)
    divergences = [values_3T[2] for values_3T, _ in truths.values()]
    for divergence_T in divergences:
        for part_T, lacks in zip(divergence_T.split(sizes), absent, strict=True):
            assert part_T.eq(0).all() if lacks else part_T.gt(1e-4).all()
    gaps = [(a - b).abs().max() for n, a in enumerate(divergences) for b in divergences[:n]]
    assert min(gaps) > 1e-3
    gradients = [torch.cat([g.flatten() for g in named.values()]) for _, named in truths.values()]
    gaps = [(a - b).abs().max() for n, a in enumerate(gradients) for b in gradients[:n]]
    assert min(gaps) > 0.01


@pytest.mark.parametrize(
    ("name", "message"), [("beta", "beta=2.0; expected 0"), ("top_k", "top_k=0; expected at least")]
)
def test_divergences_that_cannot_be_are_refused(directory, name, message):
    assert message in torch.load(directory / "refusals.pt")[name]
