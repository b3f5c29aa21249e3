"""All time of a run belongs to its start, to a step or to its end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from sluice.api import RLJobSpec
from sluice.telemetry import run_directory
from sluice.telemetry.group_accounting import Totals
from sluice.telemetry.phases import Laps, Phases
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.loop import weight_update
from sluice_trainer.loop.loop import Loop
from sluice_trainer.loop.rollout_only import ALONE
from sluice_trainer.loop.run_records import RunRecords
from sluice_trainer.telemetry import metrics
from sluice_trainer.telemetry.recorder import Recorder
from sluice_trainer.weights.outcome import UpdateOutcome

STEPS = 4
GENERATE, TRAIN, PUBLISH, SAVE, WRITE, IMPORT, ENGINE = 3.0, 2.0, 1.0, 9.0, 0.5, 7.0, 20.0


class World:
    """Buffer, engines, rendezvous and policy of a run, whose work advances one clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.step = 0
        self.phases = Phases(
            "run_seconds",
            "x",
            first="starting",
            before=IMPORT,
            registry=CollectorRegistry(),
            clock=lambda: self.now,
        )
        self.engine_is_there = False
        self.waits_for_engine = True
        self.saving: int | None = None

    # member
    def set_state(self, state: str) -> None:
        self.phases.enter(state)

    # engines
    stack_name = None

    def joiners(self) -> bool:
        if self.waits_for_engine and not self.engine_is_there:
            self.now += ENGINE
            self.engine_is_there = True
            self.waits_for_engine = False
            return True
        return False

    # buffer
    def try_take(self, step: int, ranks: int) -> pb.TakeBatchResponse:
        self.now += GENERATE
        sequence = pb.Sequence(
            group_id=step,
            length=7,
            response_length=2,
            trainable_tokens=2,
            status=common.SAMPLE_STATUS_COMPLETED,
        )
        return pb.TakeBatchResponse(state=pb.TakeBatchResponse.STATE_READY, sequences=[sequence])

    def totals(self) -> Totals:
        return Totals({}, {})

    def __getattr__(self, name: str) -> Any:
        """Accept all other calls, which take no time and return None."""
        return lambda *_, **__: {} if name == "counters" else []

    # policy
    def engine_tensors(self, stack_name: object) -> Iterator[object]:
        return iter(())

    def begin_save(self, directory: Path, step: int, *, background: bool) -> None:
        self.now += SAVE
        self.saving = step

    def finish_save(self, directory: Path, *, wait: bool) -> int | None:
        durable, self.saving = self.saving, None
        self.now += WRITE if durable else 0.0
        return durable

    def learn(self, batch: object, groups: object) -> dict[str, float]:
        self.now += TRAIN
        return {}

    def update(self, *_: object, **__: object) -> list[UpdateOutcome]:
        self.now += PUBLISH if self.engine_is_there else 0.0
        seconds = dict.fromkeys(("prepare", "transfer", "paused"), 0.0)
        return [UpdateOutcome(("e",), {}, seconds, 0, in_turn=1)] if self.engine_is_there else []


@contextmanager
def run(directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[World]:
    world = World()
    monkeypatch.setattr(weight_update, "update_engines", world.update)
    spec = RLJobSpec.model_validate(
        {
            "model": {"path": "/model"},
            "data": {"prompts": [{"path": "/rows.jsonl"}]},
            "reward": {"type": "exact_match"},
            "rollout": {"replicas": 1, "batchSize": 1, "samplesPerPrompt": 2},
            "trainer": {"gpusPerNode": 0, "steps": STEPS},
            "checkpoint": {"everySteps": 2, "ephemeral": True} | changes,
        }
    )
    clients = cast("Any", SimpleNamespace(buffer=world, engines=world, member=world))
    recorder = Recorder(directory, 1)
    monkeypatch.setattr(metrics, "record_checkpoint", lambda *_: None)
    Loop(
        spec,
        cast("Any", world),
        world.learn,
        clients,
        ALONE,
        RunRecords(spec, ALONE, clients.buffer, recorder, _laps=Laps(world.phases)),
        checkpoints=directory,
        total_steps=STEPS,
        stop=threading.Event(),
    ).run()
    recorder.close()
    yield world


@pytest.mark.parametrize("beside", [True, False], ids=["async", "in training's way"])
def test_every_second_is_in_the_start_a_step_or_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    with run(tmp_path, monkeypatch, **{"async": beside}) as world:
        steps = run_directory.by_step(tmp_path / run_directory.METRICS)
        parts = list(run_directory.records(tmp_path / run_directory.SECONDS))
        spans = {part["part"]: sum(part["seconds"].values()) for part in parts}
        of_steps = sum(record["perf/step_time"] for record in steps.values())
        whole = world.now - 100.0 + IMPORT
        assert spans["start"] + of_steps + spans["end"] == pytest.approx(whole)
        assert spans["start"] == IMPORT + ENGINE + PUBLISH, "until the first engine has its weights"
        assert spans["end"] == SAVE + WRITE
        assert parts[0]["seconds"]["starting"] == IMPORT + ENGINE, "an engine's start is the job's"
        assert not parts[0]["seconds"].get("waiting")


def test_a_checkpoint_counts_towards_the_step_that_it_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(tmp_path, monkeypatch):
        steps = run_directory.by_step(tmp_path / run_directory.METRICS)
        usual = GENERATE + TRAIN + PUBLISH
        times = {step: record["perf/step_time"] for step, record in steps.items()}
        assert times == {1: usual, 2: usual, 3: usual + SAVE + WRITE, 4: usual}
        saved = {step: record["perf/save_model_time"] for step, record in steps.items()}
        assert saved == {1: 0.0, 2: 0.0, 3: SAVE + WRITE, 4: 0.0}
        rates = {step: record["perf/tokens_per_second"] for step, record in steps.items()}
        assert rates == {step: 7 / seconds for step, seconds in times.items()}


def test_the_phases_of_a_step_add_up_to_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(tmp_path, monkeypatch):
        for record in run_directory.by_step(tmp_path / run_directory.METRICS).values():
            parts = {k: v for k, v in record.items() if k.startswith("perf/seconds/")}
            assert sum(parts.values()) == record["perf/step_time"], json.dumps(record)
            assert parts["perf/seconds/training"] == TRAIN
            assert record["perf/train_wait_time"] == parts["perf/seconds/waiting"]
            assert record["perf/update_weights/engines_in_turn"] == 1
