"""One job: what it learns, where its time goes, what its engines do."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from observability import promql
from observability import recording as rec
from observability.dashboards.frame import frame
from observability.panels import (
    BYTES,
    COUNT,
    JOB,
    NUMBER,
    PER_SECOND,
    SECONDS,
    SHARE,
    Panel,
    Query,
    above,
    below,
    lines,
    none,
    number,
)


def dashboard() -> Dashboard:
    return frame(
        "job",
        "One job: what it learns, where its time goes, what its engines do.",
        {
            "Now": _now(),
            "Reward": _reward(),
            "Policy": _policy(),
            "Samples": _samples(),
            "Time": _time(),
            "Generation": _generation(),
            "Checkpoints": _checkpoints(),
        },
        one_job=True,
    )


def _trainer(metric: str) -> str:
    return promql.newest(f"sluice_trainer_{metric}")


def _now() -> list[Panel]:
    steps = f"rate(sluice_trainer_step_seconds_count{{{JOB}}}[10m])"
    left = f"({_trainer('total_steps')} - {rec.STEP}{{{JOB}}})"
    firing = f'count(ALERTS{{alertname=~"Sluice.+",alertstate="firing",{JOB}}}) or vector(0)'
    return [
        number("Step", "Steps committed.", NUMBER, none(), Query(f"{rec.STEP}{{{JOB}}}", "step")),
        number(
            "Time left",
            "Steps that are left, at the speed of the last 10 minutes.",
            SECONDS,
            none(),
            Query(f"{left} / (sum by (namespace, job) ({steps}) > 0)", "left"),
        ),
        number(
            "Reward",
            "Mean reward of the last batch.",
            NUMBER,
            none(),
            Query(_trainer("reward"), "reward"),
        ),
        number(
            "Goodput",
            "Share of the device time that trained or generated what was trained on.",
            SHARE,
            below(0.3, 0.6),
            Query(f"{rec.GOODPUT}{{{JOB}}}", "goodput"),
        ),
        number(
            "Engines",
            "Engines that are there.",
            COUNT,
            below(1),
            Query(promql.newest("sluice_rendezvous_engines"), "engines"),
        ),
        number("Alerts", "Alerts of this job that fire.", COUNT, above(1), Query(firing, "alerts")),
    ]


def _reward() -> list[Panel]:
    evaluation = f"max by (namespace, job, dataset) (sluice_trainer_evaluation_reward{{{JOB}}})"
    return [
        lines(
            "Reward",
            "Mean of the batch's rewards, and their standard deviation.",
            NUMBER,
            none(),
            Query(_trainer("reward"), "mean"),
            Query(_trainer("reward_std"), "standard deviation"),
        ),
        lines(
            "Evaluation",
            "Mean reward of the newest evaluation of each dataset.",
            NUMBER,
            none(),
            Query(evaluation, "{{dataset}}"),
        ),
        lines(
            "Prompts with equal rewards",
            "Prompts whose samples all have the same reward: they teach nothing.",
            SHARE,
            above(0.8, 0.95),
            Query(_trainer("equal_rewards_ratio"), "equal"),
            highest=1,
        ),
    ]


def _policy() -> list[Panel]:
    return [
        lines(
            "KL divergence",
            "From the policy that began the batch (update), and from the reference model.",
            NUMBER,
            above(0.1, 1),
            Query(_trainer("update_kl"), "update"),
            Query(_trainer("reference_kl"), "reference"),
        ),
        lines(
            "Entropy",
            "Mean entropy of a token, in nats. Near 0 the policy no longer explores.",
            NUMBER,
            below(0.001, 0.05),
            Query(_trainer("entropy"), "entropy"),
        ),
        lines(
            "Log-prob difference",
            "Between trainer and engine, of a token. They should agree.",
            NUMBER,
            above(0.05, 0.1),
            Query(_trainer("logprob_difference"), "mean"),
        ),
        lines(
            "Loss",
            "Loss of the step, its policy part, and the critic's.",
            NUMBER,
            none(),
            Query(_trainer("loss"), "loss"),
            Query(_trainer("policy_loss"), "policy"),
            Query(_trainer("value_loss"), "value"),
        ),
        lines(
            "Gradient norm",
            "Before clipping.",
            NUMBER,
            above(10, 100),
            Query(_trainer("gradient_norm"), "norm"),
        ),
        lines(
            "Clipping",
            "Share of tokens whose ratio was clipped.",
            SHARE,
            above(0.2, 0.5),
            Query(_trainer("clip_fraction"), "clipped"),
        ),
        lines(
            "Learning rate",
            "Of the policy.",
            NUMBER,
            none(),
            Query(_trainer("learning_rate"), "learning rate"),
            width=12,
        ),
        lines(
            "Policy lag",
            "Mean age of the samples' oldest tokens, in weight versions.",
            NUMBER,
            above(2, 8),
            Query(_trainer("policy_lag_versions"), "lag"),
            width=12,
        ),
    ]


def _samples() -> list[Panel]:
    samples = promql.rate("sluice_trainer_samples_total", "outcome")
    return [
        lines(
            "Response length",
            "Tokens of the batch's responses.",
            NUMBER,
            none(),
            Query(_trainer("response_tokens"), "mean"),
            Query(_trainer("response_tokens_max"), "longest"),
        ),
        lines(
            "Truncated and failed",
            "Responses that were cut off at their limit; samples that failed.",
            SHARE,
            above(0.2, 0.5),
            Query(_trainer("truncated_ratio"), "truncated"),
            Query(_trainer("failed_ratio"), "failed"),
            highest=1,
        ),
        lines(
            "Samples",
            "Samples of trained batches by what became of them; failed ones are not trained on.",
            PER_SECOND,
            none(),
            Query(samples, "{{outcome}}"),
        ),
    ]


def _time() -> list[Panel]:
    phases = promql.rate("sluice_trainer_phase_seconds_total", "phase")
    engines = promql.rate("sluice_rollout_phase_seconds_total", *promql.OF_JOB, "phase")
    of_all = promql.rate("sluice_rollout_phase_seconds_total")
    categories = f"sum by (namespace, job, category) ({rec.CATEGORIES}{{{JOB}}})"
    every = f"sum by (namespace, job) ({rec.CATEGORIES}{{{JOB}}})"
    shares = f"{categories} / on (namespace, job) group_left () ({every} > 0)"
    mean = promql.mean("sluice_trainer_step_seconds")
    return [
        lines(
            "Trainer",
            "Where the trainer's time goes. Much waiting: more engines, or async mode.",
            SHARE,
            none(),
            Query(phases, "{{phase}}"),
            width=6,
            stacked=True,
            highest=1,
        ),
        lines(
            "Engines",
            "Where the engines' time goes. Much tail, the last few responses of a batch: async "
            "mode.",
            SHARE,
            none(),
            Query(f"{engines} / on (namespace, job) group_left () ({of_all} > 0)", "{{phase}}"),
            width=6,
            stacked=True,
            highest=1,
        ),
        lines(
            "Device time",
            "Where it went, mean of 10 minutes. Trained and generated count as goodput.",
            SHARE,
            none(),
            Query(shares, "{{category}}"),
            width=6,
            stacked=True,
            highest=1,
        ),
        lines(
            "Step time", "Mean, waiting included.", SECONDS, none(), Query(mean, "step"), width=6
        ),
        lines(
            "Trained tokens",
            "Tokens trained on in a second of the last step, those of prompts included.",
            PER_SECOND,
            none(),
            Query(_trainer("tokens_per_second"), "tokens"),
            width=12,
        ),
        lines(
            "Use of the GPUs",
            "Model FLOP/s in training as a share of the GPU's peak (MFU), where that is known.",
            SHARE,
            below(0.1, 0.3),
            Query(_trainer("mfu_ratio"), "MFU"),
            width=12,
            highest=1,
        ),
        lines(
            "Gain of the fastest split",
            "How many times as fast a step would be with the split of the GPUs beside this panel.",
            NUMBER,
            none(),
            Query(f"{rec.SPEEDUP}{{{JOB}}}", "times as fast"),
            width=12,
        ),
        lines(
            "The fastest split",
            "GPUs of each role for the shortest step, by what they have done so far.",
            COUNT,
            none(),
            Query(f"{rec.PLANNED}{{{JOB}}}", "{{role}}"),
            width=12,
        ),
    ]


def _generation() -> list[Panel]:
    requests = f"sum by (replica) (sluice_rollout_requests_at_engine{{{JOB}}})"
    waiting = f"sum by (replica) (sluice_rollout_requests_waiting{{{JOB}}})"
    rewards = promql.quantile(0.95, "sluice_rollout_reward_seconds")
    tools = promql.quantile(0.95, "sluice_rollout_tool_seconds", "tool")
    tokens = promql.rate("sluice_rollout_generated_tokens_total", "replica")
    failures = promql.rate("sluice_rollout_group_failures_total", "reason")
    judged = promql.rate("sluice_rollout_rewards_total", "outcome")
    return [
        lines(
            "Generated tokens",
            "Tokens that each engine makes in a second.",
            PER_SECOND,
            none(),
            Query(tokens, "engine {{replica}}"),
        ),
        lines(
            "Requests",
            "Requests at each engine, and those that wait for a place (rollout.concurrency).",
            COUNT,
            none(),
            Query(requests, "at engine {{replica}}"),
            Query(waiting, "waiting for engine {{replica}}"),
        ),
        lines(
            "Time of a group",
            "From its lease until it is submitted, rewards included.",
            SECONDS,
            none(),
            *promql.spread("sluice_rollout_group_seconds"),
        ),
        lines(
            "Rewards",
            "Samples judged in a second, by outcome. All but ok have no reward.",
            PER_SECOND,
            none(),
            Query(judged, "{{outcome}}"),
        ),
        lines(
            "Time of a reward, and of a tool's call",
            "95th percentile, waiting included.",
            SECONDS,
            above(10, 60),
            Query(rewards, "reward"),
            Query(tools, "{{tool}}"),
        ),
        lines(
            "Failed groups",
            "Groups that a worker gave back because of an error of their own.",
            PER_SECOND,
            above(0.1, 1),
            Query(failures, "{{reason}}"),
        ),
    ]


def _checkpoints() -> list[Panel]:
    behind = f"clamp_min({rec.STEP}{{{JOB}}} - {promql.newest('sluice_buffer_checkpoint_step')}, 0)"
    return [
        lines(
            "Steps since the last checkpoint",
            "What a failure of the trainer would cost.",
            COUNT,
            none(),
            Query(behind, "steps"),
        ),
        lines(
            "Time of a checkpoint",
            "Mean of the last hour, from its beginning until it is durable.",
            SECONDS,
            above(600, 1800),
            Query(
                f"increase(sluice_trainer_checkpoint_seconds_sum{{{JOB}}}[1h]) / "
                f"(increase(sluice_trainer_checkpoint_seconds_count{{{JOB}}}[1h]) > 0)",
                "checkpoint",
            ),
        ),
        lines(
            "Size of a checkpoint",
            "Of the last one.",
            BYTES,
            none(),
            Query(_trainer("checkpoint_bytes"), "checkpoint"),
        ),
    ]
