"""Whether a credit method can work on this configuration and these questions, before any start."""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from megatron_credit.batch.rollout import Prompt, Rollout
from megatron_credit.credit import METHODS
from megatron_credit.credit.method import CreditMethod
from megatron_credit.credit.need import EvidenceNeed
from megatron_credit.rewards.config import AnswerSettings
from megatron_credit.rewards.prm.check import check_prm
from megatron_credit.tasks import ChainSumConfig, GymMixConfig
from megatron_credit.trainer.attempts import ATTEMPT
from megatron_credit.trainer.config import RunConfig
from megatron_credit.trainer.evidence_teacher import teacher_of
from megatron_credit.trainer.signals.attempts import AttemptSource
from megatron_credit.trainer.signals.choice import SOLUTION
from megatron_credit.trainer.signals.evidence import CONTRASTS
from megatron_credit.trainer.signals.probes import ProbeSource
from megatron_credit.trainer.signals.saliency import SaliencySource
from megatron_credit.trainer.signals.steps import StepSource
from megatron_credit.trainer.signals.teacher import TeacherSource

BOXES = ("boxed", "auto")
"""Places of an answer where a box may be found."""


def check_credit(config: RunConfig) -> None:
    """The method exists, its options are valid, and what it needs is configured; nothing is that it
    does not read."""
    method = METHODS.get(config.credit.method)
    if method is None:
        raise ValueError(
            f"credit.method={config.credit.method!r} is unknown; use one of {', '.join(METHODS)}"
        )
    configured = method.configure(config.credit.options)
    check_group_size(config, configured)
    check_attempts(config, configured)
    check_steps(config, configured)
    check_teacher(config, configured)
    check_normalisation(config, configured)
    refuse_unread_sections(config, configured)


def reads(method: CreditMethod, signals: Iterable[str]) -> bool:
    """Whether the method may need any of these."""
    return not set(method.needs).isdisjoint(signals)


def check_group_size(config: RunConfig, method: CreditMethod) -> None:
    """A group has somebody to be compared with."""
    if method.needs_siblings and config.trainer.samples_per_prompt < 2:
        raise ValueError(
            f"trainer.samples_per_prompt=1, but credit.method={method.name!r} compares rollouts of "
            "a group, so every advantage would be 0; use at least 2, better 8"
        )
    if config.trainer.resample_tries and config.trainer.samples_per_prompt < 2:
        raise ValueError(
            f"trainer.resample_tries={config.trainer.resample_tries} replaces groups whose rewards "
            "are all equal, which with trainer.samples_per_prompt=1 every group is; set it to 0"
        )


def check_attempts(config: RunConfig, method: CreditMethod) -> None:
    """Who gives credit to attempts has several."""
    needed = reads(method, AttemptSource.signals)
    if needed and config.attempts is None:
        raise ValueError(
            f"credit.method={method.name!r} gives credit to each of several attempts, but there is "
            "one attempt a rollout; set attempts.max_attempts to 2 or more"
        )
    if needed and config.sampling.overlong_buffer is not None:
        raise ValueError(
            f"sampling.overlong_buffer={config.sampling.overlong_buffer} has no effect on "
            f"credit.method={method.name!r}, which reads whether attempts passed, not rewards; "
            "leave it out"
        )
    if config.attempts is not None and config.policy.router_replay:
        raise ValueError(
            "policy.router_replay = true does not work with [attempts], whose experts come in "
            "pieces; turn it off"
        )


def check_steps(config: RunConfig, method: CreditMethod) -> None:
    """There is a process reward model where one is asked, and it can work."""
    needed = reads(method, StepSource.signals)
    if needed and config.prm is None:
        raise ValueError(
            f"credit.method={method.name!r} needs scores of reasoning steps, but no process reward "
            'model is configured; add [prm] with kind = "callable" and a function, or kind = "hf" '
            "and a model"
        )
    if config.prm is not None:
        if not needed:
            raise ValueError(unread("prm", method))
        check_prm(config.prm)


def check_teacher(config: RunConfig, method: CreditMethod) -> None:
    """There is an external teacher where one is asked, and who reads evidence can."""
    teacher, needs_other = teacher_of(config), reads(method, TeacherSource.signals)
    if needs_other and (teacher.kind != "frozen" or teacher.model is None):
        raise ValueError(
            f"credit.method={method.name!r} learns from another model; set evidence.teacher.kind = "
            '"frozen" and evidence.teacher.model to its Hugging Face directory'
        )
    if config.policy.converter == "bridge" and teacher.kind != "current":
        raise ValueError(
            f"a teacher of kind {teacher.kind!r} is a second model, which policy.converter = "
            '"bridge" cannot build; set evidence.teacher.kind = "current"'
        )
    if config.evidence.baseline == "teacher" and teacher.kind == "current":
        raise ValueError(
            'evidence.baseline = "teacher" compares a teacher with itself, which for a teacher of '
            'kind "current" is the policy already; set evidence.teacher.kind to "ema" or "frozen"'
        )
    if config.policy.router_replay and method.evidence is not None:
        raise ValueError(
            f"policy.router_replay = true, but credit.method={method.name!r} reads contexts that "
            "the engine never saw, whose experts nobody recorded; turn it off"
        )


def check_normalisation(config: RunConfig, method: CreditMethod) -> None:
    """Two means over tokens are only defined for a mean over tokens."""
    if "selected_NT" in method.gives and config.objective.normalisation != "token_mean":
        raise ValueError(
            f"credit.method={method.name!r} averages selected tokens apart from the others, which "
            'objective.normalisation = "token_mean" alone can do; it is '
            f"{config.objective.normalisation!r}"
        )


def refuse_unread_sections(config: RunConfig, method: CreditMethod) -> None:
    """ValueError for a section or a key that would have no effect."""
    for name, signals in (("saliency", SaliencySource.signals), ("probes", ProbeSource.signals)):
        if vars(config)[name] != type(vars(config)[name])() and not reads(method, signals):
            raise ValueError(unread(name, method))
    read = evidence_keys(method, reads_itself=teacher_of(config).kind == "current")
    for name, value in changed_keys(config.evidence).items():
        if name not in read:
            known = f"it reads {', '.join(sorted(read))}" if read else "it reads none of [evidence]"
            raise ValueError(
                f"evidence.{name} = {value!r} has no effect on credit.method={method.name!r}; "
                f"{known}; leave it out"
            )


def evidence_keys(method: CreditMethod, *, reads_itself: bool) -> set[str]:
    """The keys of [evidence] that make a difference to the method.

    A policy that `reads_itself` is its own evidence-free teacher, and nothing draws it there.
    """
    need, losses, read = method.evidence, method.losses(), set[str]()
    if need is not None or reads(method, TeacherSource.signals):
        read.add("teacher")
    if need is not None and need.positive == "answer":
        read |= {"template"} | ({"exclude_self"} if need.negative else set())
    if reads(method, ("teacher_kl_NT", *CONTRASTS)):
        read.add("baseline")
    if reads(method, CONTRASTS):
        read |= {"contrast", "divergence", "top_k", "negatives"}
    read |= {"lambda_ref"} if "reference" in losses and not reads_itself else set()
    read |= {"lambda_evi"} if "evidence" in losses else set()
    read |= {"beta", "top_k"} if "distillation" in losses else set()
    return read


def changed_keys(section: BaseModel) -> dict[str, object]:
    """The keys whose value is not the default."""
    defaults = type(section)()
    return {name: value for name, value in vars(section).items() if value != vars(defaults)[name]}


def unread(section: str, method: CreditMethod) -> str:
    """What is wrong with a section that the method does not read."""
    return (
        f"[{section}] has no effect on credit.method={method.name!r}, which does not "
        "read it; leave it out"
    )


def answer_place(config: RunConfig) -> str:
    """Where answers are looked for: boxed or auto if a box may be one."""
    if isinstance(config.task, ChainSumConfig):
        return config.task.answer_format
    if isinstance(config.task, GymMixConfig):
        return config.task.answer_in
    assert config.data is not None
    sources = (*config.data.train, *config.data.eval)
    verifiers = [config.data.verifier_of(source) for source in sources]
    # A function of the user may look for a box.
    places = [one.answer_in if isinstance(one, AnswerSettings) else "auto" for one in verifiers]
    found = [place for place in places if place in BOXES]
    return found[0] if found else places[0]


def check_prompts(config: RunConfig, prompts: list[Prompt]) -> list[str]:
    """What the method misses in these prompts, a line each for people; ValueError where no prompt
    can serve it."""
    method = METHODS[config.credit.method].configure(config.credit.options)
    name = f"credit.method={method.name!r}"
    place = answer_place(config)
    if reads(method, SaliencySource.signals) and place not in BOXES:
        raise ValueError(
            rf"{name} needs answers in \boxed{{..}}, but they are looked for in {place!r}; "
            'ask for boxes (task.answer_format = "boxed", or answer_in = "boxed" of the verifier)'
        )
    need = method.evidence
    if need is not None and need.positive == "answer":
        lacking = [prompt.id for prompt in prompts if not prompt.answer]
        return remark(lacking, prompts, f"{name} shows the reference answer", "data.columns.answer")
    if need is not None and need.positive == "solution":
        lacking = [prompt.id for prompt in prompts if not prompt.metadata.get(SOLUTION)]
        where = f"metadata {SOLUTION!r} (data.columns.metadata)"
        return remark(lacking, prompts, f"{name} shows the reference solution", where)
    return []


def check_records(config: RunConfig, rollouts: Sequence[Rollout]) -> None:
    """ValueError where recorded rollouts lack what the method reads of a record."""
    method = METHODS[config.credit.method].configure(config.credit.options)
    need = method.evidence
    if need is not None and not is_bare(config, need):
        lacking = [rollout for rollout in rollouts if not rollout.messages]
        if lacking:
            raise ValueError(
                f"credit.method={method.name!r} puts evidence among the messages of a prompt, but "
                f"{lacking[0].prompt_id} was recorded without them; sample the rollouts again"
            )
    if reads(method, AttemptSource.signals):
        lacking = [rollout for rollout in rollouts if ATTEMPT not in rollout.spans]
        if lacking:
            raise ValueError(
                f"credit.method={method.name!r} gives credit to attempts, but the record of "
                f"{lacking[0].prompt_id} does not say where they are; sample with [attempts]"
            )


def is_bare(config: RunConfig, need: EvidenceNeed) -> bool:
    """Whether evidence stands behind the prompt as it is, so that nothing is rendered again."""
    return need.positive == "answer" and config.evidence.template == "bare"


def remark(lacking: list[str], prompts: list[Prompt], what: str, where: str) -> list[str]:
    """Says how many prompts lack something; ValueError where all do."""
    if lacking and len(lacking) == len(prompts):
        raise ValueError(
            f"{what}, but none of {len(prompts)} prompts looked at has one; it comes from {where}"
        )
    if not lacking:
        return []
    return [
        f"{what}; {len(lacking)} of {len(prompts)} prompts looked at have none, as {lacking[0]}: "
        "their rollouts keep the plain advantage"
    ]
