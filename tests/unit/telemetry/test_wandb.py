"""Weights & Biases, offline: the files that a run leaves for the library to upload."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from sluice.telemetry import wandb


@pytest.mark.parametrize(
    "variables",
    [{}, {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, {"WANDB_MODE": "online"}],
    ids=str,
)
def test_wandb_is_off_unless_configured(tmp_path: Path, variables: dict[str, str]) -> None:
    assert wandb.start(tmp_path, "job", {}, variables) is None


def test_an_offline_run_has_the_metrics_under_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = wandb.start(tmp_path, "job", {"trainer": {"steps": 2}}, {"WANDB_MODE": "offline"})
    assert run is not None
    for step in (1, 2, 1):
        run.log({"rollout/raw_reward": step / 2}, step)
    run.close()
    assert _logged(next(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == [
        (1, 0.5),
        (2, 1.0),
        (1, 0.5),
    ]


def _logged(path: Path) -> list[tuple[int, float]]:
    """Return (step, reward) of what was logged.

    The file is LevelDB's log of protobuf records, after a header of 7 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, rows = path.read_bytes(), 7, []
    assert len(data) < 32768, "of one block; larger files have records that are split"
    while at < len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1
        record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            rows.append((int(values["step"]), float(values["rollout/raw_reward"])))
    return rows
