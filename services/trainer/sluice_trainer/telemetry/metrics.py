"""Prometheus metrics of the trainer, which rank 0's pod serves from the record of each step.

Records have slime's names (`rollout/raw_reward`); Prometheus names have a role and a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.telemetry.phases import Phases, process_age
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common

if TYPE_CHECKING:
    from sluice_trainer.weights.outcome import UpdateOutcome

_STEP_BUCKETS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_UPDATE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)

PHASES = Phases(
    "sluice_trainer_phase_seconds",
    "Time in each phase: starting (until the first engine has its weights), waiting (for samples), "
    "training, publishing (weights), saving, taking_turn (of shared GPUs), evaluating, exporting.",
    first="starting",
    before=process_age(),
)
STEP_SECONDS = Histogram(
    "sluice_trainer_step_seconds",
    "Time since the end of the step before, including a checkpoint in between.",
    buckets=_STEP_BUCKETS,
)
UPDATE_SECONDS = Histogram(
    "sluice_trainer_weight_update_seconds",
    "Time of a weight update by phase: prepare, pause, transfer, verify, resume; paused: while "
    "engines generated no tokens; write, publish: to a store; whole: all phases.",
    ["phase"],
    buckets=_UPDATE_BUCKETS,
)
UPDATE_BYTES = Counter(
    "sluice_trainer_weight_update_bytes",
    "Bytes of weights sent, over all engines, or published to a store.",
)
UPDATE_DELTA = Gauge(
    "sluice_trainer_weight_delta_ratio",
    "Bytes of the newest version's delta in the store to bytes of all weights; 0 if it has none.",
)
UPDATE_FAILURES = Counter(
    "sluice_trainer_weight_update_failures",
    "Engines that did not complete an update, and updates that a store did not take.",
)
UPDATE_RELAYED = Counter(
    "sluice_trainer_weight_update_relayed", "Engines that got the weights from another engine."
)
UPDATE_REROUTED = Counter(
    "sluice_trainer_weight_update_rerouted",
    "Engines that should have got the weights from another engine, but got them from the trainer "
    "or did not get them.",
)
TOKENS = Counter("sluice_trainer_tokens", "Tokens trained on, including those of prompts.")
SAMPLES = Counter(
    "sluice_trainer_samples",
    "Samples of trained batches. outcome: completed, truncated, failed (not trained on).",
    ["outcome"],
)
CHECKPOINT_SECONDS = Histogram(
    "sluice_trainer_checkpoint_seconds",
    "Time from the start of a checkpoint until it is durable.",
    buckets=_STEP_BUCKETS,
)
CHECKPOINT_BYTES = Gauge("sluice_trainer_checkpoint_bytes", "Size of the last checkpoint.")
CHECKPOINT_STEP = Gauge("sluice_trainer_checkpoint_step", "Step of the last durable checkpoint.")
EVALUATION_REWARD = Gauge(
    "sluice_trainer_evaluation_reward", "Mean reward of the newest evaluation.", ["dataset"]
)
HELD_OUT_LOSS = Gauge(
    "sluice_trainer_held_out_loss", "Loss of held-out rows with given answers.", ["dataset"]
)
HELD_OUT_ACCURACY = Gauge(
    "sluice_trainer_held_out_accuracy_ratio",
    "Share of held-out pairs whose chosen answer has the higher reward.",
    ["dataset"],
)
ENGINE_PRECISION = Gauge(
    "sluice_trainer_engine_precision",
    "1 for the precision in which engines compute: of their weights, and of their KV cache.",
    ["precision", "kv_cache_dtype"],
)
# Name in the record of a step -> (name of the metric, its description).
GAUGES = {
    "rollout/raw_reward": ("reward", "Mean reward of the batch."),
    "rollout/reward_std": ("reward_std", "Standard deviation of the batch's rewards."),
    "rollout/zero_std/ratio": ("equal_rewards_ratio", "Prompts whose rewards are all equal."),
    "rollout/advantages": ("advantage", "Mean advantage of the batch's tokens."),
    "train/loss": ("loss", "Loss."),
    "train/pg_loss": ("policy_loss", "Policy part of the loss."),
    "train/value_loss": ("value_loss", "Loss of the critic."),
    "train/kl_loss": ("reference_kl", "KL from the reference."),
    "train/ppo_kl": ("update_kl", "KL from the policy at the batch's start."),
    "train/entropy_loss": ("entropy", "Mean entropy of a token, in nats."),
    "train/pg_clipfrac": ("clip_fraction", "Share of tokens whose ratio was clipped."),
    "train/rewards/accuracies": (
        "reward_accuracy_ratio",
        "Pairs whose chosen answer has the higher reward.",
    ),
    "train/rewards/margins": ("reward_margin", "Mean reward of chosen less rejected answers."),
    "train/grad_norm": ("gradient_norm", "Norm of the gradient before clipping."),
    "train/lr-pg_0": ("learning_rate", "Learning rate."),
    "rollout/response_len/mean": ("response_tokens", "Mean length of a response."),
    "rollout/response_len/max": ("response_tokens_max", "Length of the longest response."),
    "rollout/truncated_ratio": ("truncated_ratio", "Responses cut off at their limit."),
    "rollout/spec_accept_length": (
        "speculative_acceptance_length",
        "Tokens of responses for each pass that verifies proposed ones.",
    ),
    "train/mtp_loss": ("mtp_loss", "Loss of the layer that predicts a further token."),
    "train/mtp_accuracy": (
        "mtp_accuracy_ratio",
        "Tokens that the layer for a further token finds the most likely.",
    ),
    "rollout/failed_ratio": ("failed_ratio", "Samples that failed."),
    "rollout/policy_lag": ("policy_lag_versions", "Mean age of the samples' oldest tokens."),
    "train/train_rollout_logprob_abs_diff": (
        "logprob_difference",
        "Mean difference of the log-probs of trainer and engine.",
    ),
    "train/train_rollout_logprob_abs_diff_max": (
        "logprob_difference_max",
        "Largest difference of the log-probs of trainer and engine.",
    ),
    "perf/tokens_per_second": ("tokens_per_second", "Tokens of the step by its time."),
    "perf/actor_train_tflops": ("tflops_per_gpu", "Model TFLOP/s of each GPU in training."),
    "perf/mfu": ("mfu_ratio", "Model FLOP/s in training as a share of the GPU's peak."),
    "perf/images_per_second": ("images_per_second", "Images of the step's sequences by its time."),
    "perf/image_decode_time": (
        "image_decode_seconds",
        "Time in which the slowest rank decoded and scaled images.",
    ),
    "perf/tower_time": (
        "tower_seconds",
        "Time of the slowest rank's forward passes through vision towers.",
    ),
    "perf/tower_time_ratio": ("tower_time_ratio", "The same as a share of the step."),
    "perf/image_cache_hit_ratio": (
        "image_cache_hit_ratio",
        "Images that a pass needed and that were not decoded for it.",
    ),
}


class _LastStep(Collector):
    """The record of the last step.

    Metrics that the record lacks are not exported, and no metric is before the first step.
    """

    def __init__(self) -> None:
        self.record: Mapping[str, float] = {}
        self.step = 0
        self.total_steps = 0

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("sluice_trainer_step", "Steps trained.", value=self.step)
        yield GaugeMetricFamily(
            "sluice_trainer_total_steps", "Steps of the job.", value=self.total_steps
        )
        record = self.record
        for name, (metric, text) in GAUGES.items():
            if name in record:
                yield GaugeMetricFamily(f"sluice_trainer_{metric}", text, value=record[name])


LAST_STEP = _LastStep()
REGISTRY.register(LAST_STEP)


def record_start(step: int, total_steps: int) -> None:
    """Export the step at which training starts, 0 or a checkpoint's."""
    LAST_STEP.step, LAST_STEP.total_steps = step, total_steps


def record_step(step: int, record: Mapping[str, float]) -> None:
    """Export the record of a step."""
    LAST_STEP.step, LAST_STEP.record = step, dict(record)
    exemplar = {"step": str(step)}
    STEP_SECONDS.observe(record["perf/step_time"], exemplar)
    TOKENS.inc(record["rollout/tokens"], exemplar)


def record_update(outcomes: Sequence[UpdateOutcome], seconds: float, version: int) -> None:
    """Export a weight update, with the slowest rank's time of each phase."""
    exemplar = {"version": str(version)}
    for phase in outcomes[0].seconds:
        slowest = max(outcome.seconds[phase] for outcome in outcomes)
        UPDATE_SECONDS.labels(phase).observe(slowest, exemplar)
    UPDATE_SECONDS.labels("whole").observe(seconds, exemplar)
    UPDATE_BYTES.inc(sum(outcome.bytes for outcome in outcomes))
    if full := outcomes[0].full_bytes:
        UPDATE_DELTA.set(outcomes[0].delta_bytes / full)
    UPDATE_FAILURES.inc(sum(len(outcome.failed) for outcome in outcomes))
    UPDATE_RELAYED.inc(sum(len(outcome.relayed) for outcome in outcomes))
    UPDATE_REROUTED.inc(sum(len(outcome.rerouted) for outcome in outcomes))


def count_samples(sequences: Sequence[pb.Sequence]) -> None:
    """Count the samples of a batch that has been trained."""
    outcomes = {
        common.SAMPLE_STATUS_FAILED: "failed",
        common.SAMPLE_STATUS_TRUNCATED: "truncated",
    }
    for sequence in sequences:
        SAMPLES.labels(outcomes.get(sequence.status, "completed")).inc()


def record_checkpoint(step: int, seconds: float, size: int) -> None:
    """Export a checkpoint of `size` bytes that has become durable."""
    CHECKPOINT_STEP.set(step)
    CHECKPOINT_SECONDS.observe(seconds, {"step": str(step)})
    CHECKPOINT_BYTES.set(size)
