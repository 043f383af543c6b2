"""Checks of teaching and of teachers within one layout, and over a checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mcore import teaching_cases as cases
from torch import Tensor

from megatron_credit.mcore.config import TeacherConfig

EMA = TeacherConfig(kind="ema", decay=0.75)
FROZEN = TeacherConfig(kind="frozen")


def alone(directory: Path) -> dict[str, Any]:
    """What one rank finds."""
    return {
        "inactive": inactive(directory),
        "reading": reading(directory),
        "literal": literal(directory, "fp32"),
        "literal_bf16": literal(directory, "bf16"),
        "skipped": skipped(directory),
        "frozen": frozen(directory),
        "other_model": other_model(directory),
        "refused": refusals(directory),
    }


def inactive(directory: Path) -> dict[str, Any]:
    """Metrics and weights after a step without teaching, and with losses that are off."""
    views = cases.make_views()
    found = {}
    for name in ("without", "coefficients", "masks"):
        policy = cases.build(cases.Case(), directory)
        teaching = cases.make_teaching("evidence", views)
        losses = teaching.losses
        if name == "coefficients":
            losses = tuple(replace(one, coefficient=0.0) for one in losses)
        elif name == "masks":
            losses = tuple(
                replace(one, mask=[torch.zeros_like(mask_T) for mask_T in one.mask])
                for one in losses
            )
        given = None if name == "without" else replace(teaching, losses=losses)
        metrics = cases.learn(policy, views, "evidence", teaching=given).metrics
        found[name] = {"metrics": metrics, "weights": cases.exported(policy.converter)}
        cases.stop()
    return found


def reading(directory: Path) -> dict[str, Any]:
    """Scores and steps from views that were read at once, and from views read anew."""
    found: dict[str, Any] = {}
    views = cases.make_views()
    options = {"temperature": cases.TEMPERATURE, "contrast": cases.FEC}
    for name in ("anew", "once"):
        policy = cases.build(cases.Case(), directory)
        read = policy.read_views(views) if name == "once" else None
        teacher = None if name == "once" else policy.chunks
        scores = policy.score_views(views, **options, teacher=teacher, reading=read)
        # Credit comes after the scores that it is made from.
        credited = [
            replace(one, plain=replace(one.plain, advantage_T=one.plain.advantage_T + 1))
            for one in views
        ]
        update = cases.learn(policy, credited, "evidence", reading=read)
        found[name] = {
            "scores": [vars(one) for one in scores],
            "metrics": update.metrics,
            "weights": cases.exported(policy.converter),
        }
        cases.stop()
    return found


def literal(directory: Path, dtype: str) -> list[float]:
    """A weight of the average, which began at 1, after weights of 3 and 1 + 2^-7, and its copy."""
    policy = cases.build(cases.Case(), directory, dtype=dtype)
    fill(policy, 1.0)
    policy.add_teacher(EMA)
    found = []
    for weight in (3.0, 1.0 + 2.0**-7):
        fill(policy, weight)
        policy.teacher_model.after_step()
        values = torch.cat([one.value.reshape(-1) for one in policy.teacher_model.averages])
        copies = torch.cat([one.reshape(-1) for one in policy.teacher[0].parameters()])
        for everywhere in (values, copies):
            assert everywhere.min() == everywhere.max()
            found.append(everywhere[0].item())
    cases.stop()
    return found


@torch.no_grad()
def fill(policy: Any, value: float) -> None:
    """All weights of the policy are this."""
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.fill_(value)


def skipped(directory: Path) -> dict[str, Any]:
    """The average before and after a step that could not be, and after one that could."""
    views = cases.make_views()
    policy = cases.build(cases.Case(), directory, lr=0.05)
    policy.add_teacher(EMA)
    cases.learn(policy, views, "evidence")
    before = cases.averages(policy)
    plain = [replace(one.plain, advantage_T=one.plain.advantage_T * torch.inf) for one in views]
    broken = [replace(one, plain=each) for one, each in zip(views, plain, strict=True)]
    metrics = cases.learn(policy, broken, "evidence").metrics
    between = cases.averages(policy)
    cases.learn(policy, views, "evidence")
    found = {"before": before, "metrics": metrics, "between": between}
    found["after"] = cases.averages(policy)
    cases.stop()
    return found


def frozen(directory: Path) -> dict[str, Any]:
    """Weights of a frozen teacher before and after a step, and the policy's."""
    policy = cases.build(cases.Case(), directory, lr=0.05)
    policy.add_teacher(FROZEN)
    before = cases.averages(policy)
    cases.learn(policy, cases.make_views(), "evidence")
    after, moved = cases.averages(policy), cases.exported(policy.converter)
    cases.stop()
    return {"before": before, "after": after, "policy": moved}


def other_model(directory: Path) -> dict[str, Any]:
    """Scores by a teacher of another family and size, and what is said of comparing with it."""
    policy = cases.build(cases.Case(), directory)
    policy.add_teacher(TeacherConfig(kind="frozen", model=directory / "small"))
    views = cases.make_views()
    plain = [one.plain for one in views]
    scored = policy.teacher_model.score(plain, temperature=cases.TEMPERATURE)
    said = cases.refusal(lambda: policy.read_views(views, teacher=policy.teacher))
    long = cases.make_sequence(torch.zeros(41, dtype=torch.int64), 3, torch.Generator())
    limit = cases.refusal(lambda: policy.teacher_model.score([long], temperature=1.0))
    cases.stop()
    return {"scored": [vars(one) for one in scored], "said": said, "limit": limit}


def refusals(directory: Path) -> dict[str, str]:
    """What is said of teaching that cannot be, before anything is changed."""
    policy = cases.build(cases.Case(), directory)
    before = cases.exported(policy.converter)
    views = cases.make_views()
    teaching = cases.make_teaching("evidence", views)
    reference, evidence = teaching.losses

    def learn(**options: Any) -> str:
        return cases.refusal(lambda: cases.learn(policy, views, "evidence", **options))

    everywhere = replace(evidence, mask=[one.plain.mask_T for one in views])
    said = {
        "absent": learn(teaching=replace(teaching, losses=(reference, everywhere))),
        "contrast": learn(teaching=replace(teaching, contrast=("fec", 7, 3, 1))),
        "fewer": cases.refusal(lambda: teaching.of([one.plain for one in views[:-1]])),
        "other views": learn(reading=policy.read_views(views[::-1])),
        "changed": str(
            [
                name
                for name, tensor in cases.exported(policy.converter).items()
                if not torch.equal(tensor, before[name])
            ]
        ),
    }
    read = policy.read_views(views)
    cases.learn(policy, views, "evidence", reading=read)
    said["stale"] = learn(reading=read)
    cases.stop()
    return said


def resumed(directory: Path) -> dict[str, Any]:
    """Averages and weights after a step beyond a checkpoint, in the run that wrote it and others;
    collective over two ranks."""

    def state(policy: Any) -> dict[str, dict[str, Tensor]]:
        return {"average": cases.averages(policy), "policy": cases.exported(policy.converter)}

    views, path = cases.make_views(), directory / "checkpoint"
    found: dict[str, Any] = {}
    for name, layout in {
        "went_on": cases.TP2,
        "same": cases.TP2,
        "pp2": cases.PP2,
        "vpp2": cases.PP2 | cases.VPP2,
        "dp2": {},
    }.items():
        policy = cases.build(cases.Case(layout), directory, lr=0.05)
        policy.add_teacher(EMA)
        cases.learn(policy, views, "evidence")
        if name == "went_on":
            cases.learn(policy, views, "evidence")
            policy.save(path)
        else:
            policy.load(path)
        found[name] = {"loaded": state(policy)}
        cases.learn(policy, views, "evidence")
        found[name] |= state(policy)
        cases.stop()
    policy = cases.build(cases.Case(), directory)
    found["without"] = cases.refusal(lambda: policy.load(path))
    policy.save(directory / "plain")
    policy.add_teacher(EMA)
    found["lacking"] = cases.refusal(lambda: policy.load(directory / "plain"))
    policy.add_teacher(FROZEN)
    start = cases.averages(policy)
    cases.learn(policy, views, "evidence")
    policy.load(directory / "plain")
    kept = cases.averages(policy)
    found["frozen_start"] = all(torch.equal(start[name], kept[name]) for name in start)
    cases.stop()
    return found
