"""Dashboard of one job: learning, time, generation and checkpoints."""

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
        "One job: learning, time, generation and checkpoints.",
        {
            "Now": _now(),
            "Reward": _reward(),
            "Policy": _policy(),
            "Samples": _samples(),
            "Time": _time(),
            "Images (data.images)": _images(),
            "Generation": _generation(),
            "Checkpoints": _checkpoints(),
        },
        one="job",
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
               "Time for the remaining steps at the speed of the last 10 minutes.",
               {"left": f"{left} / (sum by (namespace, job) ({steps}) > 0)"}),
        number("Reward", NUMBER, none(), "Mean reward of the last batch.",
               {"reward": _trainer("reward")}),
        number("Goodput", SHARE, below(0.3, 0.6),
               "Share of device time that trained or generated what was trained on.",
               {"goodput": f"{rec.GOODPUT}{{{JOB}}}"}),
        number("Engines", COUNT, below(1), "Joined engines.",
               {"engines": promql.newest("sluice_rendezvous_engines")}),
        number("Alerts", COUNT, above(1), "Firing alerts of this job.",
               {"alerts": firing}),
    ]
    # fmt: on


def _by_dataset(name: str) -> str:
    return f"max by (namespace, job, dataset) (sluice_trainer_{name}{{{JOB}}})"


def _reward() -> list[Panel]:
    # fmt: off
    return [
        lines("Reward", NUMBER, none(),
              "Mean and standard deviation of the batch's rewards.",
              {"mean": _trainer("reward"), "standard deviation": _trainer("reward_std")}),
        lines("Evaluation", NUMBER, none(), "Mean reward of the latest evaluation, by data set.",
              {"{{dataset}}": _by_dataset("evaluation_reward")}),
        lines("Prompts with equal rewards", SHARE, above(0.8, 0.95),
              "Prompts whose samples all have the same reward, so that they give no signal.",
              {"equal": _trainer("equal_rewards_ratio")}, highest=1),
    ]
    # fmt: on


def _policy() -> list[Panel]:
    precision = f"max by (namespace, job, precision) (sluice_trainer_engine_precision{{{JOB}}})"
    difference = (
        f"{_trainer('logprob_difference')} * on (namespace, job) group_left (precision) {precision}"
    )
    # fmt: off
    return [
        lines("KL divergence", NUMBER, above(0.1, 1),
              "From the policy at the batch's start (update) and from the reference model.",
              {"update": _trainer("update_kl"), "reference": _trainer("reference_kl")}),
        lines("Entropy", NUMBER, below(0.001, 0.05),
              "Mean entropy of a token, in nats. Near 0 the policy no longer explores.",
              {"entropy": _trainer("entropy")}),
        lines("Log-prob difference", NUMBER, above(0.05, 0.1),
              "Mean difference per token between trainer and engine, with the engine's precision; "
              "they should agree.",
              {"mean, engine in {{precision}}": difference}),
        lines("Loss", NUMBER, none(), "Total loss, policy loss, and loss of the critic.",
              {"loss": _trainer("loss"),
               "policy": _trainer("policy_loss"),
               "value": _trainer("value_loss")}),
        lines("Gradient norm", NUMBER, above(10, 100), "Norm before clipping.",
              {"norm": _trainer("gradient_norm")}),
        lines("Clipping", SHARE, above(0.2, 0.5), "Share of tokens whose ratio was clipped.",
              {"clipped": _trainer("clip_fraction")}),
        lines("Learning rate", NUMBER, none(), "Learning rate of the policy.",
              {"learning rate": _trainer("learning_rate")}, width=12),
        lines("Policy lag", NUMBER, above(2, 8),
              "Mean age of the oldest token of a sample, in weight versions.",
              {"lag": _trainer("policy_lag_versions")}, width=12),
        lines("Preferred answers", SHARE, none(),
              "Pairs whose chosen answer has the higher reward.",
              {"accuracy": _trainer("reward_accuracy_ratio")}, width=12, highest=1),
        lines("Reward margin", NUMBER, none(),
              "Mean reward of chosen answers less that of rejected ones.",
              {"margin": _trainer("reward_margin")}, width=12),
        lines("Held-out loss", NUMBER, none(), "Loss of rows that are not trained, by data set.",
              {"{{dataset}}": _by_dataset("held_out_loss")}, width=12),
        lines("Held-out accuracy", SHARE, none(),
              "Held-out pairs whose chosen answer has the higher reward.",
              {"{{dataset}}": _by_dataset("held_out_accuracy_ratio")}, width=12, highest=1),
    ]
    # fmt: on


def _samples() -> list[Panel]:
    samples = promql.rate("sluice_trainer_samples_total", "outcome")
    # fmt: off
    return [
        lines("Response length", NUMBER, none(), "Tokens per response in the batch.",
              {"mean": _trainer("response_tokens"), "longest": _trainer("response_tokens_max")}),
        lines("Truncated and failed", SHARE, above(0.2, 0.5),
              "Responses cut off at their token limit, and failed samples.",
              {"truncated": _trainer("truncated_ratio"), "failed": _trainer("failed_ratio")},
              highest=1),
        lines("Samples", PER_SECOND, none(),
              "Samples of trained batches by outcome; failed samples are not trained on.",
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
              "Time of the trainer by phase. If it mostly waits, add engines or use async mode.",
              {"{{phase}}": phases}, width=6, stacked=True, highest=1),
        lines("Engines", SHARE, none(),
              "Time of the engines by phase. If the tail (the last few responses of a batch) is "
              "large, use async mode.",
              {"{{phase}}": f"{engines} / on (namespace, job) group_left () ({of_all} > 0)"},
              width=6, stacked=True, highest=1),
        lines("Device time", SHARE, none(),
              "Device time by category, mean over 10 minutes; trained and generated are goodput.",
              {"{{category}}": shares}, width=6, stacked=True, highest=1),
        lines("Step time", SECONDS, none(), "Mean, including waiting.",
              {"step": mean}, width=6),
        lines("Trained tokens", PER_SECOND, none(),
              "Tokens per second trained on in the last step, including prompts.",
              {"tokens": _trainer("tokens_per_second")}, width=12),
        lines("GPU utilisation", SHARE, below(0.1, 0.3),
              "Model FLOP/s in training as a share of the GPU's peak (MFU), if the peak is known.",
              {"MFU": _trainer("mfu_ratio")}, width=12, highest=1),
        lines("Speedup of the fastest split", NUMBER, none(),
              "Speedup of a step with the split of GPUs shown in the next panel.",
              {"speedup": f"{rec.SPEEDUP}{{{JOB}}}"}, width=12),
        lines("Fastest split", COUNT, none(),
              "GPUs per role for the shortest step, from measured time.",
              {"{{role}}": f"{rec.PLANNED}{{{JOB}}}"}, width=12),
    ]
    # fmt: on


def _images() -> list[Panel]:
    stored = promql.newest("sluice_buffer_image_bytes")
    # fmt: off
    return [
        lines("Trained images", PER_SECOND, none(),
              "Images per second in the sequences of the last step.",
              {"images": _trainer("images_per_second")}),
        lines("Time for images", SECONDS, none(),
              "Time of the slowest rank in a step: decoding and scaling, and the forward passes of "
              "the vision tower.",
              {"decoding": _trainer("image_decode_seconds"), "tower": _trainer("tower_seconds")}),
        lines("Share of the tower", SHARE, none(),
              "Its forward passes as a share of the step. A frozen tower sees each image once.",
              {"tower": _trainer("tower_time_ratio")}, highest=1),
        lines("Hits of the image cache", SHARE, none(),
              "Images that a pass needed and that were not decoded for it. Near 0 the images of a "
              "step do not fit into the trainer's caches, or each has one sample on a rank.",
              {"hits": _trainer("image_cache_hit_ratio")}, width=12, highest=1),
        lines("Stored images", BYTES, none(),
              "Bytes of images in the buffer, each counted once.",
              {"images": stored}, width=12),
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
    passes = promql.rate("sluice_rollout_speculative_passes_total", "replica")
    accepted = f"{tokens} / ({passes} > 0)"
    cached = promql.rate("sluice_rollout_cached_tokens_total", "replica")
    prompts = promql.rate("sluice_rollout_prompt_tokens_total", "replica")
    hits = f"{cached} / ({prompts} > 0)"
    # fmt: off
    return [
        lines("Generated tokens", PER_SECOND, none(), "Tokens per second of each engine.",
              {"engine {{replica}}": tokens}),
        lines("Requests", COUNT, none(),
              "Requests at each engine, and requests that wait for a slot (rollout.concurrency).",
              {"at engine {{replica}}": requests, "waiting for engine {{replica}}": waiting}),
        lines("Group time", SECONDS, none(),
              "From lease to submission, including rewards.",
              promql.spread("sluice_rollout_group_seconds")),
        lines("Rewards", PER_SECOND, none(),
              "Samples judged per second, by outcome; all but ok have no reward.",
              {"{{outcome}}": judged}),
        lines("Time of rewards and tool calls", SECONDS, above(10, 60),
              "95th percentile, including waiting.",
              {"reward": rewards, "{{tool}}": tools}),
        lines("Failed groups", PER_SECOND, above(0.1, 1),
              "Groups per second that a worker returned because they failed, by reason.",
              {"{{reason}}": failures}),
        lines("Acceptance length", NUMBER, none(),
              "With rollout.speculative: tokens for each pass that verifies proposed ones. Near 1 "
              "speculation costs time.",
              {"engine {{replica}}": accepted}),
        lines("MTP layer", NUMBER, none(),
              "With trainer.mtp: loss of the layer that predicts a further token, and the share of "
              "tokens that it finds the most likely.",
              {"loss": _trainer("mtp_loss"), "accuracy": _trainer("mtp_accuracy_ratio")}),
        lines("Prompt cache hit rate", SHARE, none(),
              "Tokens of prompts that the engine had in its prefix cache, as SGLang reports them. "
              "Low for agents: histories that change, or a cache that is too small.",
              {"engine {{replica}}": hits}),
    ]
    # fmt: on


def _checkpoints() -> list[Panel]:
    behind = f"clamp_min({rec.STEP}{{{JOB}}} - {promql.newest('sluice_buffer_checkpoint_step')}, 0)"
    # fmt: off
    return [
        lines("Steps since the last checkpoint", COUNT, none(),
              "Steps that would be lost if the trainer failed.",
              {"steps": behind}),
        lines("Checkpoint time", SECONDS, above(600, 1800),
              "From start until durable, mean over the last hour.",
              {"checkpoint":
               f"increase(sluice_trainer_checkpoint_seconds_sum{{{JOB}}}[1h]) / "
               f"(increase(sluice_trainer_checkpoint_seconds_count{{{JOB}}}[1h]) > 0)"}),
        lines("Checkpoint size", BYTES, none(), "Size of the last checkpoint.",
              {"checkpoint": _trainer("checkpoint_bytes")}),
    ]
    # fmt: on
