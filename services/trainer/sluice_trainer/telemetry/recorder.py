"""The recorder of a run on rank 0: metrics, TensorBoard, sampled and dumped rollouts.

Metrics have slime's names.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import torch
from tensorboard.summary import Writer

from sluice import engines
from sluice.api import RLJob
from sluice.runtime.pod_env import Environment
from sluice.samples.sample import WORKER, SampleGroup
from sluice.samples.turns import BRANCH_TURNS, TIMED_OUT, TURNS
from sluice.telemetry import health, logs, rollouts, run_directory
from sluice.telemetry.group_accounting import Totals
from sluice.telemetry.pass_rate import pass_rates, powers_of_two
from sluice.trackers.settings import trackers_of
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.batch.images import FetchImages
from sluice_trainer.telemetry import tracker_processes, transcripts
from sluice_trainer.telemetry.metrics import (
    EVALUATION_REWARD,
    HELD_OUT_ACCURACY,
    HELD_OUT_LOSS,
)
from sluice_trainer.telemetry.thumbnails import Thumbnails
from sluice_trainer.telemetry.tracker_processes import TrackerProcess
from sluice_trainer.telemetry.transcripts import Decode, LazyDecoder

SAMPLED_GROUPS = 2
_RELEASES = ("sluice-rl", "torch", "transformers", "megatron-core", *engines.NAMES, "triton")


class Recorder:
    """Writes the run directory, which the trackers follow.

    Parameters
    ----------
    directory
        The run directory.
    attempt
        Attempt of the trainer.
    trackers
        Processes of the trackers.
    judged
        The samples that are trained on have rewards.
    fetch_images
        Fetches the images of prompts by their digests; None if the job has none.
    decode
        Decodes tokens for transcripts of episodes; None: no transcripts are written.

    """

    def __init__(
        self,
        directory: Path,
        attempt: int,
        trackers: Sequence[TrackerProcess] = (),
        *,
        judged: bool = True,
        fetch_images: FetchImages | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._judged = judged
        self._decode = decode
        self._directory = directory
        self._attempt = attempt
        self._trackers = trackers
        self._writer = Writer(str(directory / "tensorboard"))
        self._samples = directory / "samples"
        self._samples.mkdir(parents=True, exist_ok=True)
        self._thumbnails = Thumbnails(self._samples, fetch_images) if fetch_images else None
        earlier = list(run_directory.by_step(directory / run_directory.METRICS).values())
        self._watch = health.HealthMonitor(earlier)
        self._failures = directory / run_directory.FAILURES
        # Serial number of the last failed group that is written down.
        self.last_failure = max(
            (record["serial"] for record in run_directory.records(self._failures)), default=0
        )
        self._dropped: dict[str, int] | None = None if earlier else {}

    @classmethod
    def for_job(
        cls, env: Environment, job: RLJob, fetch_images: FetchImages | None = None
    ) -> Recorder:
        """Return the recorder of a trainer's rank 0."""
        directory = env.directory("run_dir")
        run_directory.write_json(directory / run_directory.VERSIONS, versions())
        trackers = [
            TrackerProcess(directory, tracker)
            for tracker in trackers_of(job, directory, env.variables)
        ]
        return cls(
            directory,
            env.attempt,
            trackers,
            judged=job.spec.judged,
            fetch_images=fetch_images,
            decode=LazyDecoder(Path(job.spec.model.path), job.spec.model.trust_remote_code),
        )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write down the record of a step, and warn about what looks wrong in it."""
        record = {"step": step, "attempt": self._attempt, "time": time.time(), **metrics}
        run_directory.append(self._directory / run_directory.METRICS, record)
        self._scalars(metrics, step)
        for tracker in self._trackers:
            tracker.watch()
        for warning in self._watch.see(record):
            logs.get().warning(warning.sentence(), kind=warning.kind)

    def record_non_step_time(self, part: str, step: int, seconds: Mapping[str, float]) -> None:
        """Write down the seconds, by phase, that belong to no step; `part` is start or end."""
        run_directory.append(
            self._directory / run_directory.SECONDS,
            {
                "part": part,
                "step": step,
                "attempt": self._attempt,
                "time": time.time(),
                "seconds": dict(seconds),
            },
        )

    def dropped(self, counters: Mapping[str, int]) -> dict[str, float]:
        """Return the groups that the dynamic filter dropped since the last step, by reason.

        `counters` are the buffer's since the start of the job.
        """
        now = {
            n.removeprefix("filtered_"): v for n, v in counters.items() if n.startswith("filtered_")
        }
        before, self._dropped = self._dropped, now
        if before is None:  # after a restart it is not known which step they belong to
            return {}
        new = {name: float(value - before.get(name, 0)) for name, value in now.items()}
        return {
            f"rollout/dynamic_filter/drop_{name}": value for name, value in new.items() if value > 0
        }

    def evaluation(self, evaluation: pb.Evaluation, examples: list[SampleGroup]) -> None:
        """Write down an evaluation and its examples."""
        name = evaluation.dataset
        metrics = {
            f"eval/{name}" if k == "reward" else f"eval/{name}/{k}": v
            for k, v in evaluation.metrics.items()
        }
        record = {"version": evaluation.version, "dataset": name, "time": time.time(), **metrics}
        # Trackers look for the samples once the record is there.
        self._write_samples(f"eval_{name}_{evaluation.version:07d}.jsonl", examples)
        run_directory.append(self._directory / run_directory.EVALUATION, record)
        self._scalars(metrics, evaluation.version)
        if "reward" in evaluation.metrics:
            EVALUATION_REWARD.labels(name).set(evaluation.metrics["reward"])

    def held_out(self, dataset: str, version: int, metrics: Mapping[str, float]) -> None:
        """Write down the metrics of a data set of `evaluation.heldOut`."""
        named = {f"eval/{dataset}/{name}": value for name, value in metrics.items()}
        record = {"version": version, "dataset": dataset, "time": time.time(), **named}
        run_directory.append(self._directory / run_directory.EVALUATION, record)
        self._scalars(named, version)
        HELD_OUT_LOSS.labels(dataset).set(metrics["loss"])
        if "rewards/accuracies" in metrics:
            HELD_OUT_ACCURACY.labels(dataset).set(metrics["rewards/accuracies"])

    def failures(self, failures: Sequence[pb.Failure]) -> None:
        """Write down which groups failed for good, and why."""
        for failure in failures:
            record = {
                "serial": failure.serial,
                "time": failure.time,
                "group_id": failure.group_id,
                "dataset": failure.dataset,
            }
            record |= {"evaluated_version": failure.version} if failure.version >= 0 else {}
            record |= {"row": failure.row, "leases": failure.leases, "reason": failure.reason}
            run_directory.append(self._failures, record)
            self.last_failure = failure.serial

    def totals(self, totals: Totals) -> None:
        """Write down the totals of the run, because the buffer may be gone after its end."""
        run_directory.write_json(self._directory / run_directory.TOTALS, totals.to_json())

    def samples(self, step: int, groups: list[SampleGroup]) -> None:
        """Write down the first groups of a step, for people to read."""
        self._write_samples(f"step_{step:07d}.jsonl", groups[:SAMPLED_GROUPS], judged=self._judged)

    def dump(self, step: int, groups: list[SampleGroup]) -> None:
        """Keep everything that the step trains on, from all ranks."""
        rollouts.write(self._directory / rollouts.DIRECTORY, step, groups)

    def close(self) -> None:
        self._writer.close()
        tracker_processes.close(self._trackers)

    def _scalars(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _write_samples(self, name: str, groups: list[SampleGroup], *, judged: bool = True) -> None:
        rows = [row for group in groups for row in self._rows(group)]
        lines = [
            json.dumps(row if judged else row | {"reward": None}, ensure_ascii=False)
            for row in rows
        ]
        (self._samples / name).write_text("\n".join(lines) + "\n")
        if self._thumbnails:
            self._thumbnails.write(groups)

    def _rows(self, group: SampleGroup) -> Iterator[dict[str, Any]]:
        chosen = [id(sample) for sample in transcripts.chosen(group)] if self._decode else []
        for sample in group.samples:
            row = _row(group, sample)
            if self._decode and id(sample) in chosen:
                row[transcripts.KEY] = transcripts.transcript(sample, self._decode)
            yield row


def versions() -> dict[str, str]:
    """Return the releases of the software, and the device, for comparisons of results."""
    releases = {}
    for name in _RELEASES:
        with contextlib.suppress(PackageNotFoundError):
            releases[name] = version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {"python": platform.python_version(), **releases, "device": device or "CPU"}


def _row(group: SampleGroup, sample: Any) -> dict[str, Any]:
    workers = [s.metadata[WORKER] for s in group.samples if WORKER in s.metadata]
    return {
        "group_id": group.group_id,
        "index": sample.index,
        "prompt": group.prompt.prompt,
        **{n: sample.metadata[n] for n in (TURNS, BRANCH_TURNS, TIMED_OUT) if n in sample.metadata},
        **({"images": sample.images} if sample.images else {}),
        "response": sample.response,
        "label": group.prompt.label,
        "reward": sample.reward,
        **({"seat_rewards": sample.seat_rewards} if sample.seat_rewards else {}),
        "status": str(sample.status),
        "response_length": sample.response_length,
        "weight_versions": [span.version for span in sample.weight_versions],
        **({WORKER: workers[0]} if workers else {}),
        **({"error": sample.error} if sample.error else {}),
    }


def batch_metrics(
    sequences: list[pb.Sequence], step: int, *, judged: bool = True, in_place: bool = False
) -> dict[str, float]:
    """Return the rollout/* metrics of a batch.

    Parameters
    ----------
    sequences
        Metadata of the samples.
    step
        Step that trains the batch.
    judged
        The samples have rewards.
    in_place
        A response that a weight update interrupts continues with the cache that the older weights
        computed (`weightSync.pauseMode`).

    """
    lengths = [s.response_length for s in sequences]
    answered = [s for s in sequences if s.response_length]
    lags = [step - 1 - s.min_version for s in answered]
    truncated = sum(s.status == common.SAMPLE_STATUS_TRUNCATED for s in sequences)
    failed = sum(s.status == common.SAMPLE_STATUS_FAILED for s in sequences)
    interrupted = sum(s.min_version < s.max_version for s in answered)
    return {
        **(reward_metrics(sequences) if judged else {}),
        "rollout/response_len/mean": fmean(lengths),
        "rollout/response_len/median": median(lengths),
        "rollout/response_len/max": max(lengths),
        "rollout/response_len/min": min(lengths),
        "rollout/total_lengths": fmean(s.length for s in sequences),
        "rollout/truncated_ratio": truncated / len(sequences),
        "rollout/failed_ratio": failed / len(sequences),
        "rollout/effective_response_len/mean": fmean(s.trainable_tokens for s in sequences),
        "rollout/policy_lag": fmean(lags) if lags else 0.0,
        "rollout/tokens": float(sum(s.length for s in sequences)),
        **({"rollout/old_cache_ratio": interrupted / len(sequences)} if in_place else {}),
    }


def reward_metrics(sequences: Sequence[pb.Sequence]) -> dict[str, float]:
    """Return the metrics of a batch's rewards."""
    rewards: dict[int, list[float]] = {}
    for sequence in sequences:
        rewards.setdefault(sequence.group_id, []).append(sequence.reward)
    equal = Counter(
        f"{group[0]:.1f}" for group in rewards.values() if max(group) - min(group) < 1e-6
    )
    rates = pass_rates(list(rewards.values()), powers_of_two(max(map(len, rewards.values()))))
    return {
        "rollout/raw_reward": fmean(s.reward for s in sequences),
        "rollout/reward_std": pstdev([s.reward for s in sequences]),
        "rollout/zero_std/ratio": equal.total() / len(rewards),
        **{f"rollout/zero_std/count_{reward}": float(count) for reward, count in equal.items()},
        **{f"passrate/{name}": rate for name, rate in rates.items()},
    }


def time_metrics(seconds: Mapping[str, float], record: Mapping[str, float]) -> dict[str, float]:
    """Return the perf/* metrics of a step's time.

    Waiting and saving also have slime's names.

    Parameters
    ----------
    seconds
        Seconds since the step before, by phase of the trainer.
    record
        Other metrics of the step: tokens, and with `data.images` images and the tower's time.

    """
    whole = sum(seconds.values())
    images = {}
    if "rollout/images" in record:
        images = {
            "perf/images_per_second": record["rollout/images"] / whole,
            "perf/tower_time_ratio": record["perf/tower_time"] / whole,
        }
    return {
        **{f"perf/seconds/{phase}": part for phase, part in sorted(seconds.items())},
        "perf/train_wait_time": seconds.get("waiting", 0.0),
        "perf/save_model_time": seconds.get("saving", 0.0),
        "perf/step_time": whole,
        "perf/tokens_per_second": record["rollout/tokens"] / whole,
        **images,
    }


def merge_shards(shards: Sequence[Sequence[SampleGroup]]) -> list[SampleGroup]:
    """Return whole groups in batch order, from shards of ranks among which they may be split."""
    groups: dict[int, SampleGroup] = {}
    for group in (group for shard in shards for group in shard):
        groups.setdefault(group.group_id, SampleGroup(group.prompt)).samples.extend(group.samples)
    for group in groups.values():
        group.samples.sort(key=lambda sample: sample.index)
    return [groups[group_id] for group_id in sorted(groups)]
