"""What a credit method cannot work with is refused before a run starts, in words that help."""

import re
from pathlib import Path

import pytest

from megatron_credit.batch.rollout import Prompt
from megatron_credit.credit import METHODS
from megatron_credit.data.config import DataConfig
from megatron_credit.trainer.check_credit import check_credit, check_prompts
from megatron_credit.trainer.config import RunConfig

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"
PRM = {"kind": "callable", "function": "megatron_credit.tasks.chain_sum_steps:score_steps"}
FROZEN = {"kind": "frozen", "model": MODEL}
ATTEMPTS = {"max_attempts": 2}


def config_of(method="grpo", options=None, **sections):
    """A run of this method; sections replace or add to what it has."""
    raw = {
        "run": {"directory": "runs/x"},
        "task": {},
        "policy": {"model": MODEL},
        "sampling": {"max_new_tokens": 8},
        "trainer": {"steps": 1},
        "credit": {"method": method, "options": options or {}},
    }
    for name, keys in sections.items():
        raw[name] = raw.get(name, {}) | keys
    return RunConfig.model_validate(raw)


def refusal(method, options=None, **sections):
    with pytest.raises(ValueError) as caught:
        check_credit(config_of(method, options, **sections))
    return str(caught.value)


NEEDED = {
    "cal_grpo": {"attempts": ATTEMPTS},
    "attempt_naive": {"attempts": ATTEMPTS},
    "verigate": {"prm": PRM},
    "prm_outcome": {"prm": PRM},
    "grpo_process": {"prm": PRM},
    "opd": {"evidence": {"teacher": FROZEN}},
}


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_starts_with_what_it_needs(method):
    check_credit(config_of(method, **NEEDED.get(method, {})))


def test_an_unknown_method_or_option():
    assert "credit.method='gpro' is unknown; use one of grpo, dr_grpo" in refusal("gpro")
    message = refusal("cepo", {"lam": 0.5})
    assert "unknown option 'lam'; did you mean 'lam0'?" in message


# Groups


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].needs_siblings])
def test_a_group_of_one(method):
    sections = NEEDED.get(method, {}) | {"trainer": {"samples_per_prompt": 1}}
    message = refusal(method, **sections)
    assert f"trainer.samples_per_prompt=1, but credit.method={method!r} compares" in message
    assert "use at least 2, better 8" in message


def test_a_teacher_of_its_own_needs_no_siblings():
    sections = NEEDED["opd"] | {"trainer": {"samples_per_prompt": 1}}
    check_credit(config_of("opd", **sections))


# Attempts and steps


@pytest.mark.parametrize("method", ["cal_grpo", "attempt_naive"])
def test_attempts_of_a_run_with_one(method):
    message = refusal(method)
    assert f"credit.method={method!r} gives credit to each of several attempts" in message
    assert "set attempts.max_attempts to 2 or more" in message


def test_attempts_do_not_need_a_method_that_tells_them_apart():
    check_credit(config_of("grpo", attempts=ATTEMPTS))


@pytest.mark.parametrize("method", ["verigate", "prm_outcome", "grpo_process"])
def test_steps_without_a_process_reward_model(method):
    message = refusal(method)
    assert f"credit.method={method!r} needs scores of reasoning steps" in message
    assert "add [prm]" in message


def test_a_process_reward_model_that_nobody_asks():
    assert "[prm] has no effect on credit.method='grpo'" in refusal("grpo", prm=PRM)


def test_a_process_reward_model_that_cannot_work():
    message = refusal("verigate", prm={"kind": "callable", "function": "nowhere.at_all:score"})
    assert "the process reward model cannot work" in message and "nowhere" in message


# Teachers


@pytest.mark.parametrize("teacher", [{}, {"kind": "ema"}, {"kind": "frozen"}])
def test_an_external_teacher_that_is_none(teacher):
    message = refusal("opd", evidence={"teacher": teacher} if teacher else {})
    assert "credit.method='opd' learns from another model" in message
    assert "evidence.teacher.model to its Hugging Face directory" in message


@pytest.mark.parametrize("method", ["sc_grpo", "verpo"])
def test_a_teacher_compared_with_itself(method):
    evidence = {"baseline": "teacher", "teacher": {"kind": "current"}}
    message = refusal(method, evidence=evidence)
    assert 'evidence.baseline = "teacher" compares a teacher with itself' in message
    assert 'set evidence.teacher.kind to "ema" or "frozen"' in message


def test_a_slow_teacher_is_compared_with_itself_where_asked():
    check_credit(config_of("verpo", evidence={"baseline": "teacher"}))
    check_credit(
        config_of("sc_grpo", evidence={"baseline": "teacher", "teacher": {"kind": "frozen"}})
    )


def test_a_second_model_of_the_bridge():
    message = refusal("verpo", policy={"converter": "bridge"})
    assert "a teacher of kind 'ema' is a second model" in message
    assert 'set evidence.teacher.kind = "current"' in message
    current = {"teacher": {"kind": "current"}}
    check_credit(config_of("verpo", policy={"converter": "bridge"}, evidence=current))


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].evidence])
def test_routes_of_contexts_that_the_engine_never_saw(method):
    message = refusal(method, policy={"router_replay": True})
    assert f"policy.router_replay = true, but credit.method={method!r} reads contexts" in message


def test_routes_of_attempts():
    message = refusal("grpo", policy={"router_replay": True}, attempts=ATTEMPTS)
    assert "policy.router_replay = true does not work with [attempts]" in message
    check_credit(config_of("grpo", policy={"router_replay": True}))


# Losses


@pytest.mark.parametrize("normalisation", ["sequence_mean", "constant"])
def test_means_of_selected_tokens(normalisation):
    objective = {"normalisation": normalisation, "constant_length": 8}
    message = refusal("rlcsd", objective=objective)
    assert "credit.method='rlcsd' averages selected tokens apart from the others" in message
    assert repr(normalisation) in message
    check_credit(config_of("grpo", objective=objective))


# Sections and keys that nobody reads


@pytest.mark.parametrize("section", ["saliency", "probes"])
def test_a_section_that_nobody_reads(section):
    keys = {"saliency": {"leaf": "last"}, "probes": {"opening": "<answer>"}}[section]
    reader = {"saliency": "grail", "probes": "rredcot"}[section]
    message = refusal("grpo", **{section: keys})
    assert f"[{section}] has no effect on credit.method='grpo', which does not read it" in message
    check_credit(config_of(reader, **{section: keys}))


CHANGED = {
    "teacher": {"kind": "ema"},
    "baseline": "teacher",
    "template": "wrapped",
    "exclude_self": True,
    "negatives": 2,
    "contrast": "pair",
    "divergence": "reverse",
    "top_k": 5,
    "lambda_ref": 0.5,
    "lambda_evi": 0.5,
    "beta": 0.25,
}
READ = {
    "grpo": set(),
    "cal_grpo": set(),
    "grail": set(),
    "rredcot": set(),
    "opd": {"teacher"},
    "rlcsd": {"teacher"},
    "cepo": {"teacher", "template", "exclude_self"},
    "rlsd": {"teacher", "template"},
    "sc_grpo": {"teacher", "baseline"},
    "verpo": {
        *("teacher", "baseline", "contrast", "divergence", "top_k", "negatives"),
        *("lambda_ref", "lambda_evi"),
    },
    "opsd": {"teacher", "beta", "top_k"},
    "sdpo": {"teacher", "beta", "top_k"},
    "srpo": {"teacher", "beta", "top_k"},
}


@pytest.mark.parametrize("method", list(READ))
@pytest.mark.parametrize("key", list(CHANGED))
def test_keys_of_evidence_that_nobody_reads(method, key):
    evidence = {"teacher": {"kind": "ema"}} if key == "baseline" and method == "sc_grpo" else {}
    sections = NEEDED.get(method, {}) | {"evidence": evidence | {key: CHANGED[key]}}
    if method == "opd":
        sections["evidence"] = {"teacher": FROZEN} | sections["evidence"]
        if key == "teacher":
            sections["evidence"]["teacher"] = FROZEN
    if key in READ[method]:
        check_credit(config_of(method, **sections))
        return
    message = refusal(method, **sections)
    if key == "baseline":
        # A teacher that is the policy comes before what nobody reads.
        assert "evidence.baseline" in message
        return
    assert re.search(rf"evidence\.{key} = .* has no effect on credit\.method='{method}'", message)
    assert "leave it out" in message


def test_the_loss_along_the_evidence_is_of_one_mode():
    message = refusal("verpo", {"mode": "advantage"}, evidence={"lambda_evi": 0.5})
    assert "evidence.lambda_evi = 0.5 has no effect" in message
    assert (
        "it reads baseline, contrast, divergence, lambda_ref, negatives, teacher, top_k" in message
    )


def test_nothing_draws_a_policy_to_itself():
    evidence = {"lambda_ref": 0.5, "teacher": {"kind": "current"}}
    assert "evidence.lambda_ref = 0.5 has no effect" in refusal("verpo", evidence=evidence)


# Prompts


def prompts(answers=("1", "2"), **metadata):
    return [
        Prompt(id=f"p{at}", messages=[], answer=answer, metadata=metadata)
        for at, answer in enumerate(answers)
    ]


@pytest.mark.parametrize("method", ["cepo", "rlsd"])
def test_prompts_without_reference_answers(method):
    config = config_of(method)
    with pytest.raises(ValueError, match="shows the reference answer, but none of 2 prompts look"):
        check_prompts(config, prompts(("", "")))
    (remark,) = check_prompts(config, prompts(("1", "")))
    assert "1 of 2 prompts looked at have none, as p1: their rollouts keep the plain" in remark
    assert check_prompts(config, prompts()) == []


def test_prompts_without_reference_solutions():
    config = config_of("opsd")
    with pytest.raises(ValueError, match="shows the reference solution, but none of 2 prompts"):
        check_prompts(config, prompts())
    assert check_prompts(config, prompts(solution="1+0=1")) == []
    mixed = [*prompts(("1",), solution="x"), *prompts(("1",))]
    assert len(check_prompts(config, mixed)) == 1


def test_boxes_of_answers_in_tags():
    with pytest.raises(ValueError, match=r"needs answers in \\boxed\{\.\.\}, but they are looked"):
        check_prompts(config_of("grail"), prompts())
    assert check_prompts(config_of("grail", task={"answer_format": "boxed"}), prompts()) == []


@pytest.mark.parametrize("place", ["tags", "boxed", "auto"])
def test_boxes_of_other_tasks_and_of_files(place):
    gym = {"kind": "gym", "datasets": [{"name": "chain_sum"}], "answer_in": place}
    verifier = {"kind": "math", "answer_in": place}
    files = {"train": "train.jsonl", "verifier": verifier}
    for config in (
        config_of("grail", task=gym),
        config_of("grail").model_copy(update={"task": None, "data": data_of(files)}),
    ):
        if place == "tags":
            with pytest.raises(ValueError, match=r"they are looked for in 'tags'"):
                check_prompts(config, prompts())
        else:
            assert check_prompts(config, prompts()) == []


def data_of(keys):
    return DataConfig.model_validate(keys)


@pytest.mark.parametrize("method", ["grpo", "verpo", "sc_grpo", "rredcot", "opd"])
def test_nothing_is_asked_of_the_prompts_of_others(method):
    config = config_of(method, **NEEDED.get(method, {}))
    assert check_prompts(config, prompts(("", ""))) == []
