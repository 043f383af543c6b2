"""What each metric of metrics.jsonl means.

python -m megatron_credit.trainer.metric_names > docs/metrics.md
"""

import re
import sys
from typing import NamedTuple


class Metric(NamedTuple):
    """One metric; `<...>` in a name stands for whatever a run calls it."""

    name: str
    unit: str
    meaning: str


METRICS = (
    Metric("step", "", "Rollout step; 0 is before any training."),
    Metric("loss", "", "Loss of the step: the sum over all trained tokens, divided once."),
    Metric("grad_norm", "", "Norm of the whole gradient before clipping."),
    Metric("lr", "", "Learning rate of the step."),
    Metric("reward/mean", "", "Mean reward of the rollouts that have a verdict."),
    Metric("reward/overlong", "share", "Rollouts whose reward sampling.overlong_buffer lowered."),
    Metric("reward/right", "share", "Rollouts whose answer is right."),
    Metric("reward/wrong", "share", "Rollouts whose answer is wrong."),
    Metric("reward/unparsed", "share", "Rollouts without an answer; their reward is 0."),
    Metric("reward/timeout", "share", "Rollouts whose verifier ran out of time; no verdict."),
    Metric("reward/error", "share", "Rollouts whose verifier failed; no verdict."),
    Metric(
        "group/equal_rewards",
        "share",
        "Groups whose rewards are all the same (or fewer than two): no gradient from them.",
    ),
    Metric(
        "group/resampled",
        "share",
        "Groups that stand in for one with equal rewards (trainer.resample_tries).",
    ),
    Metric("group/invalid_rewards", "rollouts", "Rollouts without a verdict, mean of the groups."),
    Metric("group/singleton", "share", "Groups with fewer than two verdicts."),
    Metric("rollout/tokens", "tokens", "Response tokens of the step."),
    Metric("rollout/length_mean", "tokens", "Mean length of a response."),
    Metric("rollout/length_max", "tokens", "Longest response."),
    Metric("rollout/dropped", "rollouts", "Sampled beside those of the step; see group/resampled."),
    Metric("rollout/engines", "engines", "Engines with the current weights when sampling ended."),
    Metric("rollout/engines_lost", "engines", "Engines that were lost while the step was sampled."),
    Metric("rollout/reissued", "requests", "Requests asked again because their engine was lost."),
    Metric("rollout/truncated", "share", "Responses that reached sampling.max_new_tokens."),
    Metric("credit/zero_tokens", "share", "Trained tokens whose advantage is 0."),
    Metric("credit/abs_mean", "", "Mean |advantage| of the trained tokens."),
    Metric("credit/max", "", "Largest |advantage|."),
    Metric("credit/weight_mean", "", "Mean factor that a token method puts on the advantage."),
    Metric("credit/weight_p10", "", "10th percentile of that factor."),
    Metric("credit/weight_p90", "", "90th percentile of that factor."),
    Metric("credit/weight_clip_low", "share", "Tokens whose factor was cut from below."),
    Metric("credit/weight_clip_high", "share", "Tokens whose factor was cut from above."),
    Metric("credit/no_evidence_rollouts", "rollouts", "Without the evidence a method reads."),
    Metric("credit/mixing", "", "lam of CEPO and RLSD, which their schedule lowers."),
    Metric("credit/kl_scale", "nat", "c of SC-GRPO: the divergence at which f is 1/2."),
    Metric("group/plain", "share", "Groups that SC-GRPO leaves to plain GRPO."),
    Metric("group/none_verified", "share", "Groups without a verified rollout (SC-GRPO's bonus)."),
    Metric("credit/controller_mean", "", "Mean controller w of VERPO."),
    Metric("credit/controller_on", "share", "Tokens with evidence whose controller is above 0."),
    Metric("credit/selected_tokens", "share", "Tokens that RLCSD selected."),
    Metric("credit/selected_to_zero", "share", "Selected tokens whose sign rule left 0."),
    Metric("credit/distilled_tokens", "share", "Trained tokens that are distilled."),
    Metric("credit/attempt_weight_mean", "", "Mean calibration weight w_k of the attempts."),
    Metric("credit/attempt_weight_min", "", "Smallest such weight."),
    Metric("credit/attempts_of_one", "attempts", "Attempts k that only one rollout reached."),
    Metric("credit/attempts_mean", "attempts", "Attempts of a rollout."),
    Metric("credit/verification_at_k", "share", "Rollouts that passed within their attempts."),
    Metric("credit/gate_open", "share", "Groups whose credit comes from the steps (VeriGate)."),
    Metric("credit/prm_failed", "share", "Groups whose process reward model failed."),
    Metric("credit/unscored_rollouts", "rollouts", "Rollouts without a process reward."),
    Metric("credit/unboxed_rollouts", "rollouts", "Without a boxed answer (GRAIL)."),
    Metric("credit/value_start", "", "Mean value of the prompt alone (RREDCoT)."),
    Metric("credit/value_end", "", "Mean value after the last segment (RREDCoT)."),
    Metric("credit/closing_abs", "", "Mean |reward - value after the last segment| (RREDCoT)."),
    Metric("credit/segments", "segments", "Segments of a rollout (RREDCoT)."),
    Metric("credit/unprobed_rollouts", "rollouts", "Without a whole probe (RREDCoT)."),
    Metric("credit/unparsed_rollouts", "rollouts", "Without a parsed answer (RREDCoT)."),
    Metric("evidence/rollouts", "share", "Rollouts that a teacher read behind evidence."),
    Metric("evidence/cut", "share", "Rollouts whose evidence was cut in its middle to fit."),
    Metric("evidence/no_room", "share", "Rollouts with evidence for which there was no room."),
    Metric("prm/rollouts", "rollouts", "Rollouts whose steps were to be scored."),
    Metric("prm/errors", "rollouts", "Those it failed on, which closes their group's gate."),
    Metric("attempts/pass_<k>", "share", "Passes at attempt k, of the rollouts that reached it."),
    Metric("attempts/reached_<k>", "share", "Rollouts that reached attempt k."),
    Metric("attempts/repeated", "share", "Attempts that say what the one before said."),
    Metric("policy/tokens", "tokens", "Trained tokens."),
    Metric("policy/loss_<name>", "nat", "Mean of a loss beside the surrogate, not yet weighed."),
    Metric("policy/tokens_<name>", "tokens", "Tokens that this mean is over."),
    Metric("policy/entropy", "nat", "Mean entropy of the policy at the trained tokens."),
    Metric("policy/ratio", "", "Mean ratio of the policy to the old policy."),
    Metric("policy/clip_low", "share", "Tokens whose ratio was cut at 1 - objective.clip_low."),
    Metric("policy/clip_high", "share", "Tokens whose ratio was cut at 1 + objective.clip_high."),
    Metric(
        "policy/importance_truncated",
        "share",
        "Tokens whose correction for the engine's log-prob was truncated or masked.",
    ),
    Metric("policy/kl_reference", "nat", "Mean KL to the reference policy, where it is computed."),
    Metric(
        "mismatch/logprob_abs",
        "nat",
        "Mean |engine's log-prob - trainer's| of the sampled tokens.",
    ),
    Metric("mismatch/logprob_abs_max", "nat", "The largest such difference."),
    Metric("mismatch/logprob_k3", "nat", "Estimate (k3) of KL(engine || trainer) per token."),
    Metric(
        "mismatch/after_sync_max",
        "nat",
        "Largest difference on one prompt right after the weight sync (trainer.check_sync).",
    ),
    Metric("optimizer/skipped", "share", "Updates that changed nothing: no finite gradient."),
    Metric("eval/accuracy", "share", "Right answers on held-out prompts at temperature 1."),
    Metric("eval/accuracy_greedy", "share", "The same, decoded greedily."),
    Metric("eval/verification_at_<k>", "share", "Held-out prompts passed within k attempts."),
    Metric("eval/verification_greedy_at_<k>", "share", "The same, decoded greedily."),
    Metric("eval/accuracy/<dataset>", "share", "The same of one dataset, where there are several."),
    Metric("eval/accuracy_greedy/<dataset>", "share", "The same, decoded greedily."),
    Metric("perf/tokens_per_s", "tokens/s", "Response tokens by the seconds of the step."),
    Metric("perf/sync_mb_per_s", "MB/s", "Bytes of the weights by the seconds of their sync."),
    Metric("timing/step_s", "s", "Rollout, signals, train and sync together."),
    Metric("timing/rollout_s", "s", "Sampling and grading."),
    Metric("timing/signals_s", "s", "Passes for the credit method's signals, and advantages."),
    Metric("timing/train_s", "s", "Forward, backward and optimizer; writing rollouts."),
    Metric("timing/sync_s", "s", "Weights to the engines."),
    Metric("timing/eval_s", "s", "Evaluation on held-out prompts."),
    Metric(
        "timing/checkpoint_s",
        "s",
        "Training stood still for the newest checkpoint; in the record after it was complete.",
    ),
    Metric("timing/checkpoint_write_s", "s", "Writing it while the run went on."),
)


def is_known(name: str) -> bool:
    """Whether the table has the metric."""
    return any(re.fullmatch(pattern(metric.name), name) for metric in METRICS)


def pattern(name: str) -> str:
    """A regular expression for the names that an entry stands for."""
    parts = re.split(r"<\w+>", name)
    return ".+".join(map(re.escape, parts))


def reference() -> str:
    """The table as Markdown."""
    lines = [
        "# Metrics",
        "",
        "One record a step in `metrics.jsonl` (null: not a number); TensorBoard, W&B and MLflow",
        "get the same names (`[loggers]`). Shares are between 0 and 1. Where a step has several",
        "updates, their metrics are means, those that end in `_max` maxima. `group/` and `credit/`",
        "numbers of a method are means over the groups that have them. Made by",
        "`python -m megatron_credit.trainer.metric_names`.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
    ]
    rows = [f"| `{name}` | {unit} | {escaped(meaning)} |" for name, unit, meaning in METRICS]
    return "\n".join([*lines, *rows]) + "\n"


def escaped(text: str) -> str:
    """Text in which a bar does not end the cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
