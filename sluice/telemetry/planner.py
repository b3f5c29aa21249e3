"""Planner: the fastest split of a job's devices between trainer and engines, from measured time.

Model: a step's generation takes a fixed number of device seconds of generating engines, and its
training a fixed number of training trainer devices, whatever their numbers. Publishing, saving,
turns of shared GPUs and the tail (an engine waits for the last few responses of a batch) take the
same time with any split. A synchronous step takes

    generation / engine devices + tail + training / trainer devices + rest,

and an asynchronous step the longer of the engines' and the trainer's part. In async mode the tail
overlaps with the generation of later batches and takes TAIL_WORK of its time, because its tokens
are still generated, each slower in a full batch. At most `maxStaleness` + 1 batches are in flight,
so a step takes at least the synchronous time divided by that number. Waiting, starts and restarts
are in no term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.api import RLJobSpec, RLJobStatus

# Fewer steps would mostly measure the start.
MIN_STEPS = 3
WORTH_TELLING = 1.1
# Speedup from which more devices than the job has are suggested.
WORTH_BUYING = 1.3
# Values of rollout.maxStaleness that are suggested to a synchronous job.
STALENESS = (1, 2)
TAIL_WORTH_TELLING = 0.2
# Share of a tail's time that its responses cost a full engine: 0.23 and 0.32 in two runs on H200s,
# in which 4 % of the responses have 2,048 tokens and the mean is 120 (docs/results/planner.md).
TAIL_WORK = 0.3


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of engines and trainer.

    `staleness` is rollout.maxStaleness in steps; 0 is synchronous.
    """

    engines: int
    trainer: int
    staleness: int = 0

    @property
    def devices(self) -> tuple[int, int]:
        return self.engines, self.trainer


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one step.

    Attributes
    ----------
    generation, training
        Device seconds.
    rest
        Seconds of the trainer outside training.
    tail
        Seconds of an engine with only the last few responses of a batch.

    """

    generation: float
    training: float
    rest: float
    tail: float = 0.0

    def seconds(self, split: Split) -> float:
        """Return the time of a step with this split."""
        generating = self.generation / split.engines
        training = self.training / split.trainer + self.rest
        sequential = generating + self.tail + training
        if not split.staleness:
            return sequential
        overlapped = generating + TAIL_WORK * self.tail
        return max(overlapped, training, sequential / (1 + split.staleness))


@dataclass(frozen=True, slots=True)
class Advice:
    """The fastest split compared with the present one.

    Attributes
    ----------
    speedup
        Time of a step now, divided by its time with the best split.
    idle, waiting
        Share of time that engines and trainer spend without work, after their start.
    tail
        Share of engine time spent on the last few responses of a batch.
    more
        A larger split and its speedup; reported only if no other split of these devices is
        faster.

    """

    now: Split
    best: Split
    speedup: float
    idle: float
    waiting: float
    tail: float = 0.0
    more: tuple[Split, float] | None = None

    def text(self) -> str:
        """Return text such as `engines wait 61%: 1 engine GPU fewer gives about 1.3x`."""
        waits = f"engines wait {self.idle:.0%}, the trainer {self.waiting:.0%}"
        if self.tail >= TAIL_WORTH_TELLING:
            waits += f"; engines spend {self.tail:.0%} on the last few responses of a batch"
        if self.speedup < WORTH_TELLING:
            return f"{waits}; no other split of these devices is 1.1 times as fast" + self._more()
        changes = [
            _change(self.best.engines - self.now.engines, "engine"),
            _change(self.best.trainer - self.now.trainer, "trainer"),
            _mode(self.now.staleness, self.best.staleness),
        ]
        return f"{waits}: {', '.join(filter(None, changes))} gives about {self.speedup:.1f}x"

    def _more(self) -> str:
        if self.more is None:
            return ""
        split, speedup = self.more
        engine = _change(split.engines - self.now.engines, "engine")
        trainer = _change(split.trainer - self.now.trainer, "trainer")
        return f"; {engine or trainer} would give about {speedup:.1f}x"


def work_of(states: Mapping[str, float], steps: int, now: Split) -> Work | None:
    """Return the work of a step from device seconds by `role/state`; None after too few steps."""
    generation, training = states.get("rollout/generating", 0), states.get("trainer/training", 0)
    if steps < MIN_STEPS or not generation or not training:
        return None
    others = ("publishing", "saving", "taking_turn")
    rest = sum(states.get(f"trainer/{state}", 0.0) for state in others) / now.trainer
    tail = states.get("rollout/tail", 0.0) / now.engines
    return Work(generation / steps, training / steps, rest / steps, tail / steps)


def splits(now: Split, *, engine_unit: int, trainer_unit: int) -> list[Split]:
    """Return all splits of as many devices into whole units of engines and trainer."""
    total = now.engines + now.trainer
    every = [
        Split(engines, total - engines, now.staleness)
        for engines in range(engine_unit, total, engine_unit)
    ]
    return [split for split in every if split.trainer % trainer_unit == 0]


def fastest(work: Work, now: Split, choices: Sequence[Split]) -> Split:
    """Return the fastest choice. For a synchronous job, asynchronous variants compete too.

    Older samples are only worth a clear gain.
    """

    def quickest(staleness: int) -> Split:
        ways = [replace(split, staleness=staleness) for split in (now, *choices)]
        return min(ways, key=lambda way: (work.seconds(way), way.devices != now.devices))

    best = quickest(now.staleness)
    for staleness in () if now.staleness else STALENESS:
        older = quickest(staleness)
        if work.seconds(best) >= WORTH_TELLING * work.seconds(older):
            best = older
    return best


def one_more(
    work: Work, now: Split, *, engine_unit: int, trainer_unit: int
) -> tuple[Split, float] | None:
    """Return the split with one more engine or model copy, whichever gains more per device.

    Returns
    -------
    The split and its speedup; None if neither is worth it.

    """
    larger = {
        replace(now, engines=now.engines + engine_unit): engine_unit,
        replace(now, trainer=now.trainer + trainer_unit): trainer_unit,
    }
    gains = {split: work.seconds(now) / work.seconds(split) for split in larger}
    worth = [split for split in larger if gains[split] >= WORTH_BUYING]
    best = max(worth, key=lambda split: (gains[split] - 1) / larger[split], default=None)
    return (best, gains[best]) if best else None


def advise(states: Mapping[str, float], steps: int, spec: RLJobSpec) -> Advice | None:
    """Return advice for a job on GPUs whose engines are apart from its trainer.

    Parameters
    ----------
    states
        Device seconds by `role/state`.
    steps
        Steps committed.
    spec
        The job.

    Returns
    -------
    None for other jobs, and before there are enough measurements.

    """
    rollout, trainer = spec.rollout, spec.trainer
    count = spec.own_engines
    if trainer.colocate or not trainer.gpus_per_node or not rollout.gpus_per_replica or not count:
        return None
    unit = rollout.gpus_per_replica * rollout.nodes_per_replica
    now = Split(count * unit, trainer.devices, rollout.max_staleness)
    work = work_of(states, steps, now)
    if work is None:
        return None
    choices = splits(now, engine_unit=unit, trainer_unit=trainer.model_parallel_size)
    best = fastest(work, now, choices)
    return Advice(
        now,
        best,
        work.seconds(now) / work.seconds(best),
        _share(states, "rollout", "idle"),
        _share(states, "trainer", "waiting"),
        _share(states, "rollout", "tail"),
        one_more(work, now, engine_unit=unit, trainer_unit=trainer.model_parallel_size),
    )


def advice_for(spec: RLJobSpec, status: RLJobStatus) -> Advice | None:
    """Return advice for a job of a cluster, from its status; None in the same cases as `advise`."""
    if status.goodput is None or status.step is None:
        return None
    states = {name: float(seconds) for name, seconds in status.goodput.states.items()}
    return advise(states, status.step, spec)


def _mode(now: int, best: int) -> str:
    """Name the change of mode that makes samples `best` steps old; empty if it stays."""
    return "" if now == best else f"rollout.mode: async with maxStaleness: {best}"


def _share(states: Mapping[str, float], role: str, state: str) -> float:
    life = ("starting", "restarting")
    working = sum(
        seconds
        for key, seconds in states.items()
        if key.startswith(f"{role}/") and not key.endswith(life)
    )
    return states.get(f"{role}/{state}", 0.0) / working if working else 0.0


def _change(devices: int, role: str) -> str:
    """Return text such as `2 engine GPUs fewer`; empty if the number stays."""
    if not devices:
        return ""
    number = abs(devices)
    gpus = "GPU" if number == 1 else "GPUs"
    return f"{number} {role} {gpus} {'more' if devices > 0 else 'fewer'}"
