"""Losses from views in the optimizer step, and the teachers that read the views.

All layouts of one world size run one after another in the same processes, because starting
processes is the slow part.
"""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import teaching_cases, teaching_worker, tiny_models
from mcore.teaching_cases import (
    BETA,
    CASES,
    COEFFICIENTS,
    FREE,
    KINDS,
    NEGATIVES,
    POSITIVE,
    STUDENT,
    TEACHER,
    TEMPERATURE,
    VOCABULARY,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_credit.mcore.config import TeacherConfig

TOLERANCE = 1e-5
EXACT = [name for cases in CASES.values() for name in cases]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds what the workers wrote: one file a case, and those of the checks."""
    directory = tmp_path_factory.mktemp("teaching")
    tiny_models.write_tiny_model(directory, STUDENT)
    tiny_models.tiny_model(STUDENT, seed=1).save_pretrained(directory / TEACHER)
    small = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
        tie_word_embeddings=False,
    )
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    model.save_pretrained(directory / "small")
    for world_size in CASES:
        multiprocessing.spawn(
            teaching_worker.run,
            args=(world_size, str(directory / "rendezvous"), str(directory)),
            nprocs=world_size,
        )
    return directory


@pytest.fixture(scope="module")
def results(directory):
    """Of each case by name."""
    return {name: torch.load(directory / f"{name}.pt") for name in EXACT}


@pytest.fixture(scope="module")
def checks(directory):
    """What was found in one layout, and over a checkpoint."""
    return torch.load(directory / "checks-1.pt") | torch.load(directory / "checks-2.pt")


def load(directory, name):
    return AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float64)


def log_softmaxes(model, view):
    """[T, V] of the response, at the sampling temperature."""
    logits_LV = model(view.token_ids_L[None]).logits[0]
    return (logits_LV[view.num_prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)


def kl(from_TV, to_TV):
    return (from_TV.exp() * (from_TV - to_TV)).sum(-1)


def covariance(p_TV, a_TV, b_TV):
    return (p_TV * a_TV * b_TV).sum(-1) - (p_TV * a_TV).sum(-1) * (p_TV * b_TV).sum(-1)


def evidence_losses(kind, log_TV, others, w_T):
    """Reference and evidence of one rollout, as methods.md section 6 has them; None: no views."""
    free_TV = others.get(FREE)
    if free_TV is None:
        return None, None
    is_reverse = kind == "reverse"
    reference_T = kl(log_TV, free_TV) if is_reverse else kl(free_TV, log_TV)
    negatives = [others[context].exp() for context in NEGATIVES if context in others]
    if POSITIVE not in others or not negatives:
        return reference_T, None
    q_free, q_positive, q_negative = free_TV.exp(), others[POSITIVE].exp(), sum(negatives)
    q_negative = q_negative / len(negatives)
    p_TV = log_TV.detach().exp()
    if is_reverse:
        return reference_T, reverse_evidence(log_TV, q_free, q_positive, q_negative, w_T)
    task, nuisance = q_positive - q_negative, (q_positive + q_negative) / 2 - q_free
    cov_T, var_T = covariance(p_TV, task, nuisance), covariance(p_TV, nuisance, nuisance)
    d_TV = task - (cov_T / (var_T + 1e-8))[:, None] * nuisance
    return reference_T, -w_T * (d_TV * log_TV).sum(-1)


def reverse_evidence(log_TV, q_free, q_positive, q_negative, w_T):
    p_TV = log_TV.detach().exp()

    def tangent(r_TV):
        return p_TV * (r_TV - (p_TV * r_TV).sum(-1, keepdim=True))

    task = q_positive.log() - q_negative.log()
    nuisance = (q_positive.log() + q_negative.log()) / 2 - q_free.log()
    xi_task, xi_nuisance = tangent(task), tangent(nuisance)
    var_T = covariance(p_TV, xi_nuisance, xi_nuisance)
    alpha_T = covariance(p_TV, xi_task, xi_nuisance) / (var_T + 1e-8)
    r_TV = task - alpha_T[:, None] * nuisance
    tilted_T = (q_negative.log() + w_T[:, None] * r_TV).logsumexp(-1)
    return tilted_T - w_T * (log_TV.exp() * r_TV).sum(-1)


def distillation(log_TV, teacher_TV):
    mixture_TV = (BETA * teacher_TV.exp() + (1 - BETA) * log_TV.exp()).log()
    return BETA * kl(teacher_TV, mixture_TV) + (1 - BETA) * kl(log_TV, mixture_TV)


@pytest.fixture(scope="module")
def truths(directory):
    """Of each kind: float64 metrics, and the gradient of the step's loss by name."""
    found = {}
    for kind in KINDS:
        student = load(directory, STUDENT)
        teacher = load(directory, TEACHER if kind == "distillation" else STUDENT)
        loss, metrics = step_loss(kind, student, teacher)
        loss.backward()
        named = ((name, parameter.grad) for name, parameter in student.named_parameters())
        found[kind] = metrics | {"loss": loss.item()}, dict(named)
    return found


def step_loss(kind, student, teacher):
    """The loss of a whole step and the means that it is made of, each from its own formula."""
    views = teaching_cases.make_views()
    teaching = teaching_cases.make_teaching(kind, views)
    surrogate = {True: [], False: []}
    taken = {one.name: [] for one in teaching.losses}
    for number, one in enumerate(views):
        plain = one.plain
        log_TV = log_softmaxes(student, plain)
        with torch.no_grad():
            others = {
                context: log_softmaxes(teacher, view)
                for context, view in enumerate(one.teachers, start=1)
                if view is not None
            }
        target_T1 = plain.token_ids_L[plain.num_prompt :, None]
        logprob_T = log_TV.gather(-1, target_T1)[:, 0]
        # On policy: the ratio is 1, and only its gradient counts.
        policy_T = -plain.advantage_T * (logprob_T - logprob_T.detach()).exp()
        for selected in (True, False):
            surrogate[selected].append(policy_T[plain.mask_T & (plain.selected_T == selected)])
        if kind == "distillation":
            values = {"distillation": distillation(log_TV, others[FREE]) if others else None}
        else:
            w_T = teaching.controller[number].double()
            pair = evidence_losses(kind, log_TV, others, w_T)
            values = dict(zip(("reference", "evidence"), pair, strict=True))
        for loss in teaching.losses:
            if values[loss.name] is not None:
                taken[loss.name].append(values[loss.name][loss.mask[number]])
    whole = sum(torch.cat(parts).mean() for parts in surrogate.values())
    metrics = {}
    for loss in teaching.losses:
        value_T = torch.cat(taken[loss.name])
        mean = value_T.sum() / max(len(value_T), 1)
        whole = whole + loss.coefficient * mean
        metrics[f"policy/loss_{loss.name}"] = mean.item()
        metrics[f"policy/tokens_{loss.name}"] = len(value_T)
    return whole, metrics


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXACT)
def test_the_loss_of_a_step_and_its_gradient_are_those_of_float64(results, truths, name, kind):
    metrics, gradients = truths[kind]
    found = results[name][kind]
    for each in found["all_metrics"]:
        for key, value in metrics.items():
            assert each[key] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), key
    assert found["gradients"].keys() == gradients.keys()
    for key, gradient in gradients.items():
        gap = (found["gradients"][key].double() - gradient).abs().max()
        assert gap <= TOLERANCE * max(1.0, gradient.abs().max()), key


def test_every_loss_matters(truths):
    """Or the comparison with them would show nothing."""
    for kind in KINDS:
        metrics, gradients = truths[kind]
        assert max(gradient.abs().max() for gradient in gradients.values()) > 0.1
        for name, coefficient in COEFFICIENTS.items():
            if metrics.get(f"policy/tokens_{name}"):
                assert abs(coefficient * metrics[f"policy/loss_{name}"]) > 1e-3
    assert truths["sparse"][0]["policy/tokens_evidence"] == 0
    assert 0 < truths["sparse"][0]["policy/tokens_reference"] < 12


@pytest.mark.parametrize("name", EXACT)
def test_scores_of_a_step_that_teaches_stand_in_their_order(directory, results, name):
    student = load(directory, STUDENT)
    views = teaching_cases.make_views()
    with torch.no_grad():
        for one, found in zip(views, results[name]["evidence"]["scored"], strict=True):
            log_TV = log_softmaxes(student, one.plain)
            target_T1 = one.plain.token_ids_L[one.plain.num_prompt :, None]
            logprob_T = log_TV.gather(-1, target_T1)[:, 0].float()
            torch.testing.assert_close(found["logprob_T"], logprob_T, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", EXACT)
def test_the_average_does_not_depend_on_the_layout(results, name):
    for key, weight in results["one"]["average"].items():
        assert (results[name]["average"][key] - weight).abs().max() <= 1e-6, key


@pytest.mark.parametrize("name", ["coefficients", "masks"])
def test_a_step_whose_losses_are_off_is_the_one_without_them(checks, name):
    without, found = checks["inactive"]["without"], checks["inactive"][name]
    added = set(found["metrics"]) - set(without["metrics"])
    assert added == (
        set()
        if name == "coefficients"
        else {
            f"policy/{what}_{loss}"
            for what in ("loss", "tokens")
            for loss in ("reference", "evidence")
        }
    )
    assert all(found["metrics"][key] == 0 for key in added)
    assert {key: found["metrics"][key] for key in without["metrics"]} == without["metrics"]
    for key, weight in without["weights"].items():
        assert torch.equal(found["weights"][key], weight), key


def test_views_that_were_read_once_give_the_same_bits(checks):
    anew, once = checks["reading"]["anew"], checks["reading"]["once"]
    for one, other in zip(anew["scores"], once["scores"], strict=True):
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=0, equal_nan=True)
    assert once["metrics"] == anew["metrics"]
    for key, weight in anew["weights"].items():
        assert torch.equal(once["weights"][key], weight), key


def test_average_of_known_weights(checks):
    """1, then 3/4 of it and 1/4 of 3, then of 1 + 2^-7; bf16 has steps of 2^-7 there."""
    assert checks["literal"] == [1.5, 1.5, 1.376953125, 1.376953125]
    assert checks["literal_bf16"] == [1.5, 1.5, 1.376953125, 1.375]


def test_a_skipped_step_leaves_the_average(checks):
    found = checks["skipped"]
    assert found["metrics"]["optimizer/skipped"] == 1
    for key, weight in found["before"].items():
        assert torch.equal(found["between"][key], weight), key
    assert any(not torch.equal(found["after"][key], found["before"][key]) for key in found["after"])


def test_a_frozen_teacher_stays(checks):
    found = checks["frozen"]
    for key, weight in found["before"].items():
        assert torch.equal(found["after"][key], weight), key
    assert any(
        not torch.equal(found["policy"][key], found["before"][key]) for key in found["after"]
    )


def test_a_teacher_of_another_size_scores(directory, checks):
    model = load(directory, "small")
    found = checks["other_model"]
    with torch.no_grad():
        for one, scored in zip(teaching_cases.make_views(), found["scored"], strict=True):
            log_TV = log_softmaxes(model, one.plain)
            logprob_T = log_TV.gather(-1, one.plain.token_ids_L[one.plain.num_prompt :, None])[:, 0]
            gap_T = scored["logprob_T"].double() - logprob_T
            assert gap_T.abs().sum() <= TOLERANCE * len(gap_T)
    assert "the teacher has hidden size 24" in found["said"]
    assert "sequence 0 has 41 tokens, the teacher 40 positions" in found["limit"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "mask of 'evidence', sequence 3: the rollout lacks a view"),
        ("contrast", "names context 7; hidden has the contexts 0..4"),
        ("fewer", "teaching has views of 6 rollouts and the step 5 sequences"),
        ("other views", "the reading is of other views than these"),
        ("stale", "read after 0 optimizer steps and the policy has taken 1; read them again"),
        ("changed", "[]"),
    ],
)
def test_what_cannot_be_taught_is_refused(checks, name, message):
    assert message in checks["refused"][name]


def test_a_resumed_run_has_the_average_bit_for_bit(checks):
    for part in ("average", "policy"):
        for key, weight in checks["went_on"][part].items():
            assert torch.equal(checks["same"][part][key], weight), key
            assert torch.equal(
                checks["same"]["loaded"][part][key], checks["went_on"]["loaded"][part][key]
            )


@pytest.mark.parametrize("name", ["pp2", "vpp2", "dp2"])
def test_the_average_fits_another_layout(checks, name):
    for part in ("average", "policy"):
        for key, weight in checks["went_on"]["loaded"][part].items():
            assert torch.equal(checks[name]["loaded"][part][key], weight), key
        for key, weight in checks["went_on"][part].items():
            assert (checks[name][part][key] - weight).abs().max() <= 1e-6, key


def test_checkpoints_with_and_without_an_average_do_not_mix(checks):
    assert "has teacher=ema, but this run has teacher=none" in checks["without"]
    assert "has teacher=none, but this run has teacher=ema" in checks["lacking"]
    assert checks["frozen_start"]


def test_only_a_frozen_teacher_has_a_model_of_its_own():
    assert TeacherConfig().kind == "current"
    assert TeacherConfig(kind="frozen", model=Path("m")).model == Path("m")
    with pytest.raises(ValueError, match="only a frozen teacher has weights of its own"):
        TeacherConfig(kind="ema", model=Path("m"))
    with pytest.raises(ValueError, match="decay"):
        TeacherConfig(kind="ema", decay=1.0)
