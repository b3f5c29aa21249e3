"""Micro-batches grow as far as the memory that steps took allows, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sluice.api import Trainer
from sluice_trainer.memory import headroom
from sluice_trainer.memory.headroom import StepMemory, StepWork, next_size
from sluice_trainer.step.micro_batch_size import MicroBatchSize
from sluice_trainer.step.packing import MicroBatch

GIB = 2**30
MOST = 32_768
# A step that needs 8 GiB more than its static 2 GiB.
SMALL = StepMemory(static=2 * GIB, peak=10 * GIB, usable=80 * GIB)


@pytest.mark.parametrize(
    ("work", "memory", "size", "expected"),
    [
        pytest.param(StepWork(8192, 8), SMALL, 8192, 16_384, id="much room"),
        pytest.param(
            StepWork(8192, 8), replace(SMALL, peak=2 * GIB), 8192, 16_384, id="no activations"
        ),
        pytest.param(
            StepWork(8192, 8), replace(SMALL, peak=33 * GIB), 8192, 16_384, id="up to the margin"
        ),
        pytest.param(
            StepWork(8192, 8), replace(SMALL, peak=34 * GIB), 8192, 8192, id="into the margin"
        ),
        pytest.param(
            StepWork(8192, 8),
            StepMemory(50 * GIB, 58 * GIB, 80 * GIB),
            8192,
            8192,
            id="a large model",
        ),
        pytest.param(
            StepWork(8192, 8),
            replace(SMALL, usable=20 * GIB),
            8192,
            8192,
            id="an engine on the GPU",
        ),
        pytest.param(
            StepWork(8192, 8), StepMemory(70 * GIB, 79 * GIB, 80 * GIB), 8192, 8192, id="full"
        ),
        pytest.param(
            StepWork(4096, 8),
            replace(SMALL, peak=18 * GIB),
            8192,
            8192,
            id="half rows, four times more",
        ),
        pytest.param(StepWork(4096, 8), SMALL, 8192, 16_384, id="half rows, much room"),
        pytest.param(StepWork(4095, 8), SMALL, 8192, None, id="rows too small to tell"),
        pytest.param(StepWork(0, 0), SMALL, 8192, None, id="nothing ran"),
        pytest.param(
            StepWork(30_000, 8),
            replace(SMALL, peak=60 * GIB),
            8192,
            16_384,
            id="a long sequence alone",
        ),
        pytest.param(StepWork(8192, 1), SMALL, 8192, None, id="one micro-batch"),
        pytest.param(StepWork(8192, 15, 2), SMALL, 8192, None, id="a pipeline that would idle"),
        pytest.param(StepWork(8192, 16, 2), SMALL, 8192, 16_384, id="a pipeline with many"),
        pytest.param(StepWork(MOST, 8), SMALL, MOST, MOST, id="as large as it gets"),
        pytest.param(StepWork(20_000, 8), SMALL, 20_000, MOST, id="not twice as large"),
    ],
)
def test_the_next_size_depends_on_the_memory_of_the_last_step(
    work: StepWork, memory: StepMemory, size: int, expected: int | None
) -> None:
    assert next_size(work, memory, size, MOST) == expected


@dataclass
class Probe:
    """A GPU on which a step needs 2 GiB, and 1 GiB more for each 1,024 tokens."""

    usable: float
    size: MicroBatchSize | None = None
    measured: int = 0
    released: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self.measured += 1

    def end(self) -> StepMemory:
        assert self.size
        peak = 2 * GIB + self.size.tokens * GIB // 1024
        return StepMemory(2 * GIB, peak, int(self.usable * GIB))

    def release(self) -> None:
        assert self.size
        self.released.append(self.size.tokens)


class Alone:
    """The `Ranks` of a single rank."""

    rank = 0

    def __init__(self) -> None:
        self.gathers = 0

    def gather(self, value: Any) -> list[Any]:
        self.gathers += 1
        return [value]


class TwoRanks(Alone):
    """The `Ranks` of two ranks, the other of which proposes these sizes."""

    def __init__(self, *answers: int | None) -> None:
        super().__init__()
        self._answers = iter(answers)

    def gather(self, value: Any) -> list[Any]:
        return [*super().gather(value), (next(self._answers), value[1])]


def grown(probe: Probe, ranks: Any, steps: int, *, tokens: int | None = None) -> list[float]:
    """Return the sizes of the steps; `tokens` are those of the largest row, None: the size."""
    size = probe.size = MicroBatchSize(8192, probe)
    sizes = []
    for _ in range(steps):
        size.begin_step()
        size.record(rows(tokens or size.tokens))
        sizes.append(size.end_step(ranks)["perf/micro_batch_tokens"])
    return sizes


def rows(tokens: int) -> list[MicroBatch]:
    row = SimpleNamespace(tokens=torch.empty(tokens))
    return [cast(MicroBatch, row)] * 4


def test_the_size_doubles_after_each_step_until_the_limit() -> None:
    probe, ranks = Probe(usable=80), Alone()
    assert grown(probe, ranks, 6) == [8192, 8192, 16_384, 32_768, 32_768, 32_768]
    assert probe.released == [16_384, 32_768]
    assert ranks.gathers == 2
    assert probe.measured == 3


def test_the_size_is_final_once_no_more_fits() -> None:
    probe, ranks = Probe(usable=30), Alone()
    assert grown(probe, ranks, 6) == [8192, 8192, 16_384, 16_384, 16_384, 16_384]
    assert ranks.gathers == 2


def test_the_size_stays_until_a_step_is_evidence() -> None:
    probe, ranks = Probe(usable=80), Alone()
    assert grown(probe, ranks, 4, tokens=100) == [8192] * 4
    assert ranks.gathers == 3


@pytest.mark.parametrize(
    ("answers", "sizes"),
    [
        pytest.param([16_384, 32_768], [8192, 8192, 16_384, 32_768], id="of one mind"),
        pytest.param([16_384, 16_384], [8192, 8192, 16_384, 16_384], id="the other is full"),
        pytest.param([8192], [8192, 8192, 8192, 8192], id="the other is full at once"),
        pytest.param(
            [None, 16_384, None], [8192, 8192, 8192, 16_384], id="the other does not know"
        ),
    ],
)
def test_ranks_agree_on_the_smallest_size(answers: list[int | None], sizes: list[float]) -> None:
    ranks = TwoRanks(*answers)
    assert grown(Probe(usable=80), ranks, 4) == sizes
    assert ranks.gathers == len(answers)


def test_growth_logs_the_fullest_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    grown(Probe(usable=80), Alone(), 2)
    output = capsys.readouterr().out
    assert "micro-batches of 16,384 tokens: a step took 10.0 of 80.0 GiB" in output


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Probe:
    probe = Probe(usable=80)
    monkeypatch.setattr(headroom, "PROBE", probe)
    return probe


@pytest.mark.parametrize(
    ("trainer", "tokens", "grows"),
    [
        pytest.param({}, 8192, True, id="nothing said"),
        pytest.param({"maxTokensPerGpu": 8192}, 8192, False, id="a number"),
        pytest.param({"deterministic": True}, 8192, False, id="deterministic"),
        pytest.param({"gpusPerNode": 0}, 2048, False, id="on a CPU"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_the_size_grows_only_if_the_job_does_not_set_it(
    trainer: dict[str, Any], tokens: int, grows: bool
) -> None:
    size = MicroBatchSize.for_trainer(Trainer.model_validate({"steps": 1, **trainer}))
    assert size.tokens == tokens
    size.begin_step()
    size.record(rows(tokens))
    assert bool(size.end_step(cast(Any, Alone()))) == grows
