"""What rank 0 writes down of a run: metrics, TensorBoard events, sampled responses. Names are slime's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tensorboard.summary import Writer

from sluice.sample import SampleGroup
from sluice.telemetry import run_directory
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common

SAMPLED_GROUPS = 2


class Recorder:
    def __init__(self, directory: Path, attempt: int) -> None:
        self._directory = directory
        self._attempt = attempt
        self._writer = Writer(str(directory / "tensorboard"))
        (directory / "samples").mkdir(parents=True, exist_ok=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        record = {"step": step, "attempt": self._attempt, "time": time.time(), **metrics}
        run_directory.append(self._directory / run_directory.METRICS, record)
        self._scalars(metrics, step)

    def evaluation(self, evaluation: pb.Evaluation) -> None:
        name = evaluation.dataset
        metrics = {f"eval/{name}" if k == "reward" else f"eval/{name}/{k}": v for k, v in evaluation.metrics.items()}
        record = {"version": evaluation.version, "dataset": name, "time": time.time(), **metrics}
        run_directory.append(self._directory / run_directory.EVALUATION, record)
        self._scalars(metrics, evaluation.version)
        groups = [codec.group_from_message(message) for message in evaluation.examples]
        self._write_samples(f"eval_{name}_{evaluation.version:07d}.jsonl", groups)

    def samples(self, step: int, groups: list[SampleGroup]) -> None:
        self._write_samples(f"step_{step:07d}.jsonl", groups[:SAMPLED_GROUPS])

    def flush(self) -> None:
        self._writer.flush()

    def _scalars(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _write_samples(self, name: str, groups: list[SampleGroup]) -> None:
        lines = [json.dumps(_row(group, sample), ensure_ascii=False) for group in groups for sample in group.samples]
        (self._directory / "samples" / name).write_text("\n".join(lines) + "\n")


def _row(group: SampleGroup, sample: Any) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "index": sample.index,
        "prompt": group.prompt.prompt,
        "response": sample.response,
        "label": group.prompt.label,
        "reward": sample.reward,
        "status": str(sample.status),
        "response_length": sample.response_length,
        "weight_versions": [span.version for span in sample.weight_versions],
        **({"error": sample.error} if sample.error else {}),
    }


def batch_metrics(sequences: list[pb.Sequence], step: int) -> dict[str, float]:
    """rollout/* of a batch, from its sequences."""
    lengths = [s.response_length for s in sequences]
    rewards: dict[int, list[float]] = {}
    for sequence in sequences:
        rewards.setdefault(sequence.group_id, []).append(sequence.reward)
    made = [s for s in sequences if s.response_length]
    lags = [step - 1 - s.min_version for s in made]
    truncated = sum(s.status == common.SAMPLE_STATUS_TRUNCATED for s in sequences)
    failed = sum(s.status == common.SAMPLE_STATUS_FAILED for s in sequences)
    return {
        "rollout/raw_reward": fmean(s.reward for s in sequences),
        "rollout/response_len/mean": fmean(lengths),
        "rollout/response_len/median": median(lengths),
        "rollout/response_len/max": max(lengths),
        "rollout/response_len/min": min(lengths),
        "rollout/total_lengths": fmean(s.length for s in sequences),
        "rollout/truncated_ratio": truncated / len(sequences),
        "rollout/failed_ratio": failed / len(sequences),
        "rollout/zero_std/ratio": fmean(max(r) - min(r) < 1e-6 for r in rewards.values()),
        "rollout/policy_lag": fmean(lags) if lags else 0.0,
        "rollout/tokens": float(sum(s.length for s in sequences)),
    }
