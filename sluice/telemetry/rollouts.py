"""Dumped rollouts: all samples that a step was trained on, one Parquet file per step.

    rollouts/step_0000007.parquet

Files are written if `debug.dumpRollouts` is set. `debug.replay` and any tool for Parquet read them.
One row is one sample; numbers are stored bit by bit as they were trained on. docs/evaluation.md
lists the columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sluice.samples.sample import (
    Prompt,
    Sample,
    SampleGroup,
    SampleStatus,
    TokenSequence,
    WeightSpan,
    compact,
)

DIRECTORY = "rollouts"
_NAME = re.compile(r"step_(\d+)\.parquet")


class DumpError(Exception):
    """A file is not a dump of a step. The message names the file and the problem."""


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step_{step:07d}.parquet"


def steps(directory: Path) -> dict[int, Path]:
    """Return the dumped steps of a directory, in order."""
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.glob("step_*.parquet"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def write(directory: Path, step: int, groups: Sequence[SampleGroup]) -> Path:
    """Write a step atomically: a file that exists is complete."""
    from pyarrow import Table, parquet

    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(directory, step)
    table = Table.from_pylist(list(_rows(step, groups)), schema=_schema())
    parquet.write_table(table, path.with_suffix(".tmp"), compression="zstd")
    path.with_suffix(".tmp").replace(path)
    return path


def read(path: Path) -> list[SampleGroup]:
    """Return the groups of a dumped step in batch order. Raises DumpError."""
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path, schema=_schema()).to_pylist()
        groups: dict[int, SampleGroup] = {}
        for row in rows:
            prompt = _prompt(row)
            groups.setdefault(prompt.group_id, SampleGroup(prompt)).samples.append(_sample(row))
        for group in groups.values():
            for sample in group.samples:
                sample.check()
    except (ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise DumpError(f"{path}: not a step that debug.dumpRollouts wrote: {error}") from error
    return list(groups.values())


def _schema() -> Any:
    from pyarrow import (
        field,
        float32,
        float64,
        int32,
        int64,
        list_,
        schema,
        string,
        struct,
        uint8,
        uint16,
    )

    span = struct([field("version", int64()), field("start", int32()), field("end", int32())])
    tokens = {
        "tokens": list_(int32()),
        "response_length": int32(),
        "loss_mask": list_(uint8()),
        "rollout_log_probs": list_(float32()),
        "teacher_log_probs": list_(float32()),
        "weight_versions": list_(span),
        "routed_experts": list_(list_(uint16())),
        "seat": string(),
        "images": list_(string()),
        "image_tokens": int32(),
    }
    return schema(
        {
            "step": int64(),
            "group_id": int64(),
            "index": int32(),
            "dataset": string(),
            "row": int64(),
            "epoch": int32(),
            "prompt": string(),
            "label": string(),
            "metadata": string(),
            "tools": string(),
            **tokens,
            "response": string(),
            "branches": list_(struct(list(tokens.items()))),
            "reward": float64(),
            "reward_parts": string(),
            "seat_rewards": string(),
            "status": string(),
            "error": string(),
            "sample_metadata": string(),
        }
    )


def _rows(step: int, groups: Iterable[SampleGroup]) -> Iterator[dict[str, Any]]:
    for group in groups:
        prompt = group.prompt
        shared = {
            "step": step,
            "group_id": prompt.group_id,
            "dataset": prompt.dataset,
            "row": prompt.row,
            "epoch": prompt.epoch,
            "prompt": json.dumps(prompt.prompt, ensure_ascii=False),
            "label": json.dumps(prompt.label, ensure_ascii=False),
            "metadata": json.dumps(prompt.metadata, ensure_ascii=False),
            "tools": json.dumps(prompt.tools, ensure_ascii=False),
        }
        for sample in group.samples:
            yield shared | {
                "index": sample.index,
                **_tokens(sample),
                "response": sample.response,
                "branches": [_tokens(branch) for branch in sample.branches],
                "reward": sample.reward,
                "reward_parts": json.dumps(sample.reward_parts),
                "seat_rewards": json.dumps(sample.seat_rewards),
                "status": str(sample.status),
                "error": sample.error,
                "sample_metadata": json.dumps(sample.metadata, ensure_ascii=False),
            }


def _tokens(sequence: TokenSequence) -> dict[str, Any]:
    return {
        "tokens": sequence.tokens,
        "response_length": sequence.response_length,
        "loss_mask": sequence.loss_mask,
        "rollout_log_probs": sequence.rollout_log_probs,
        "teacher_log_probs": sequence.teacher_log_probs,
        "weight_versions": [asdict(span) for span in sequence.weight_versions],
        "routed_experts": None
        if sequence.routed_experts is None
        else list(sequence.routed_experts),
        "seat": sequence.seat,
        "images": sequence.images,
        "image_tokens": sequence.image_tokens,
    }


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(
        group_id=row["group_id"],
        prompt=json.loads(row["prompt"]),
        label=json.loads(row["label"]),
        metadata=json.loads(row["metadata"]),
        tools=json.loads(row["tools"]),
        dataset=row["dataset"],
        row=row["row"],
        epoch=row["epoch"],
    )


def _sample(row: dict[str, Any]) -> Sample:
    return Sample(
        index=row["index"],
        response=row["response"],
        reward=row["reward"],
        reward_parts=json.loads(row["reward_parts"]),
        seat_rewards=json.loads(row["seat_rewards"] or "{}"),
        status=SampleStatus(row["status"]),
        metadata=json.loads(row["sample_metadata"]),
        error=row["error"],
        branches=[TokenSequence(**_sequence(branch)) for branch in row["branches"] or ()],
        **_sequence(row),
    )


def _sequence(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `TokenSequence`."""
    taught, experts = row["teacher_log_probs"], row.get("routed_experts")
    return {
        "tokens": np.asarray(row["tokens"], dtype=np.int32),
        "response_length": row["response_length"],
        "loss_mask": np.asarray(row["loss_mask"], dtype=np.uint8),
        "rollout_log_probs": np.asarray(row["rollout_log_probs"], dtype=np.float32),
        "weight_versions": [
            WeightSpan(s["version"], s["start"], s["end"]) for s in row["weight_versions"]
        ],
        "teacher_log_probs": None if taught is None else np.asarray(taught, dtype=np.float32),
        "routed_experts": None
        if experts is None
        else compact(np.asarray(experts, dtype=np.uint16)),
        "seat": row.get("seat") or "",
        "images": list(row.get("images") or ()),
        "image_tokens": row.get("image_tokens") or 0,
    }
