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
    # fmt: off
    return [
        number("Step", NUMBER, none(), "Steps committed.",
               {"step": f"{rec.STEP}{{{JOB}}}"}),
        number("Time left", SECONDS, none(),
               "Steps that are left, at the speed of the last 10 minutes.",
               {"left": f"{left} / (sum by (namespace, job) ({steps}) > 0)"}),
        number("Reward", NUMBER, none(), "Mean reward of the last batch.",
               {"reward": _trainer("reward")}),
        number("Goodput", SHARE, below(0.3, 0.6),
               "Share of the device time that trained or generated what was trained on.",
               {"goodput": f"{rec.GOODPUT}{{{JOB}}}"}),
        number("Engines", COUNT, below(1), "Engines that are there.",
               {"engines": promql.newest("sluice_rendezvous_engines")}),
        number("Alerts", COUNT, above(1), "Alerts of this job that fire.",
               {"alerts": firing}),
    ]
    # fmt: on


def _reward() -> list[Panel]:
    evaluation = f"max by (namespace, job, dataset) (sluice_trainer_evaluation_reward{{{JOB}}})"
    # fmt: off
    return [
        lines("Reward", NUMBER, none(),
              "Mean of the batch's rewards, and their standard deviation.",
              {"mean": _trainer("reward"), "standard deviation": _trainer("reward_std")}),
        lines("Evaluation", NUMBER, none(), "Mean reward of the newest evaluation of each dataset.",
              {"{{dataset}}": evaluation}),
        lines("Prompts with equal rewards", SHARE, above(0.8, 0.95),
              "Prompts whose samples all have the same reward: they teach nothing.",
              {"equal": _trainer("equal_rewards_ratio")}, highest=1),
    ]
    # fmt: on


def _policy() -> list[Panel]:
    # fmt: off
    return [
        lines("KL divergence", NUMBER, above(0.1, 1),
              "From the policy that began the batch (update), and from the reference model.",
              {"update": _trainer("update_kl"), "reference": _trainer("reference_kl")}),
        lines("Entropy", NUMBER, below(0.001, 0.05),
              "Mean entropy of a token, in nats. Near 0 the policy no longer explores.",
              {"entropy": _trainer("entropy")}),
        lines("Log-prob difference", NUMBER, above(0.05, 0.1),
              "Between trainer and engine, of a token. They should agree.",
              {"mean": _trainer("logprob_difference")}),
        lines("Loss", NUMBER, none(), "Loss of the step, its policy part, and the critic's.",
              {"loss": _trainer("loss"),
               "policy": _trainer("policy_loss"),
               "value": _trainer("value_loss")}),
        lines("Gradient norm", NUMBER, above(10, 100), "Before clipping.",
              {"norm": _trainer("gradient_norm")}),
        lines("Clipping", SHARE, above(0.2, 0.5), "Share of tokens whose ratio was clipped.",
              {"clipped": _trainer("clip_fraction")}),
        lines("Learning rate", NUMBER, none(), "Of the policy.",
              {"learning rate": _trainer("learning_rate")}, width=12),
        lines("Policy lag", NUMBER, above(2, 8),
              "Mean age of the samples' oldest tokens, in weight versions.",
              {"lag": _trainer("policy_lag_versions")}, width=12),
    ]
    # fmt: on


def _samples() -> list[Panel]:
    samples = promql.rate("sluice_trainer_samples_total", "outcome")
    # fmt: off
    return [
        lines("Response length", NUMBER, none(), "Tokens of the batch's responses.",
              {"mean": _trainer("response_tokens"), "longest": _trainer("response_tokens_max")}),
        lines("Truncated and failed", SHARE, above(0.2, 0.5),
              "Responses that were cut off at their limit; samples that failed.",
              {"truncated": _trainer("truncated_ratio"), "failed": _trainer("failed_ratio")},
              highest=1),
        lines("Samples", PER_SECOND, none(),
              "Samples of trained batches by what became of them; failed ones are not trained on.",
              {"{{outcome}}": samples}),
    ]
    # fmt: on


def _time() -> list[Panel]:
    phases = promql.rate("sluice_trainer_phase_seconds_total", "phase")
    engines = promql.rate("sluice_rollout_phase_seconds_total", *promql.OF_JOB, "phase")
    of_all = promql.rate("sluice_rollout_phase_seconds_total")
    categories = f"sum by (namespace, job, category) ({rec.CATEGORIES}{{{JOB}}})"
    every = f"sum by (namespace, job) ({rec.CATEGORIES}{{{JOB}}})"
    shares = f"{categories} / on (namespace, job) group_left () ({every} > 0)"
    mean = promql.mean("sluice_trainer_step_seconds")
    # fmt: off
    return [
        lines("Trainer", SHARE, none(),
              "Where the trainer's time goes. Much waiting: more engines, or async mode.",
              {"{{phase}}": phases}, width=6, stacked=True, highest=1),
        lines("Engines", SHARE, none(),
              "Where the engines' time goes. Much tail, the last few responses of a batch: async "
              "mode.",
              {"{{phase}}": f"{engines} / on (namespace, job) group_left () ({of_all} > 0)"},
              width=6, stacked=True, highest=1),
        lines("Device time", SHARE, none(),
              "Where it went, mean of 10 minutes. Trained and generated count as goodput.",
              {"{{category}}": shares}, width=6, stacked=True, highest=1),
        lines("Step time", SECONDS, none(), "Mean, waiting included.",
              {"step": mean}, width=6),
        lines("Trained tokens", PER_SECOND, none(),
              "Tokens trained on in a second of the last step, those of prompts included.",
              {"tokens": _trainer("tokens_per_second")}, width=12),
        lines("Use of the GPUs", SHARE, below(0.1, 0.3),
              "Model FLOP/s in training as a share of the GPU's peak (MFU), where that is known.",
              {"MFU": _trainer("mfu_ratio")}, width=12, highest=1),
        lines("Gain of the fastest split", NUMBER, none(),
              "How many times as fast a step would be with the split of the GPUs beside this "
              "panel.",
              {"times as fast": f"{rec.SPEEDUP}{{{JOB}}}"}, width=12),
        lines("The fastest split", COUNT, none(),
              "GPUs of each role for the shortest step, by what they have done so far.",
              {"{{role}}": f"{rec.PLANNED}{{{JOB}}}"}, width=12),
    ]
    # fmt: on


def _generation() -> list[Panel]:
    requests = f"sum by (replica) (sluice_rollout_requests_at_engine{{{JOB}}})"
    waiting = f"sum by (replica) (sluice_rollout_requests_waiting{{{JOB}}})"
    rewards = promql.quantile(0.95, "sluice_rollout_reward_seconds")
    tools = promql.quantile(0.95, "sluice_rollout_tool_seconds", "tool")
    tokens = promql.rate("sluice_rollout_generated_tokens_total", "replica")
    failures = promql.rate("sluice_rollout_group_failures_total", "reason")
    judged = promql.rate("sluice_rollout_rewards_total", "outcome")
    # fmt: off
    return [
        lines("Generated tokens", PER_SECOND, none(), "Tokens that each engine makes in a second.",
              {"engine {{replica}}": tokens}),
        lines("Requests", COUNT, none(),
              "Requests at each engine, and those that wait for a place (rollout.concurrency).",
              {"at engine {{replica}}": requests, "waiting for engine {{replica}}": waiting}),
        lines("Time of a group", SECONDS, none(),
              "From its lease until it is submitted, rewards included.",
              promql.spread("sluice_rollout_group_seconds")),
        lines("Rewards", PER_SECOND, none(),
              "Samples judged in a second, by outcome. All but ok have no reward.",
              {"{{outcome}}": judged}),
        lines("Time of a reward, and of a tool's call", SECONDS, above(10, 60),
              "95th percentile, waiting included.",
              {"reward": rewards, "{{tool}}": tools}),
        lines("Failed groups", PER_SECOND, above(0.1, 1),
              "Groups that a worker gave back because of an error of their own.",
              {"{{reason}}": failures}),
    ]
    # fmt: on


def _checkpoints() -> list[Panel]:
    behind = f"clamp_min({rec.STEP}{{{JOB}}} - {promql.newest('sluice_buffer_checkpoint_step')}, 0)"
    # fmt: off
    return [
        lines("Steps since the last checkpoint", COUNT, none(),
              "What a failure of the trainer would cost.",
              {"steps": behind}),
        lines("Time of a checkpoint", SECONDS, above(600, 1800),
              "Mean of the last hour, from its beginning until it is durable.",
              {"checkpoint":
               f"increase(sluice_trainer_checkpoint_seconds_sum{{{JOB}}}[1h]) / "
               f"(increase(sluice_trainer_checkpoint_seconds_count{{{JOB}}}[1h]) > 0)"}),
        lines("Size of a checkpoint", BYTES, none(), "Of the last one.",
              {"checkpoint": _trainer("checkpoint_bytes")}),
    ]
    # fmt: on
