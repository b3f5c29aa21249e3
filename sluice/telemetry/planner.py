"""Which split of a job's devices between trainer and engines would be fastest, from what they have
done so far.

The model, and what it assumes: a step's generation is so many device seconds of engines that
generate, whatever their number; its training so many of trainer devices that train; publishing,
saving and turns take the same time with any split. Then a synchronous step takes

    generation / engine devices + training / trainer devices + the rest,

and an asynchronous one the longer of the engines' and the trainer's part. Engines that wait for
the last response of a batch count as generating: a long tail does not shrink with more of them.
Waiting, starts and restarts are in no term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sluice.api import RLJobSpec, RLJobStatus

MIN_STEPS = 3
"""Fewer tell the start's story."""
WORTH_TELLING = 1.1


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of engines and trainer. overlapped: both work at the same time (rollout.mode:
    async).
    """

    engines: int
    trainer: int
    overlapped: bool


@dataclass(frozen=True, slots=True)
class Work:
    """A step's work. generation, training: device seconds; rest: seconds of the trainer besides."""

    generation: float
    training: float
    rest: float

    def seconds(self, split: Split) -> float:
        """The time of a step with this split."""
        generating = self.generation / split.engines
        training = self.training / split.trainer + self.rest
        return max(generating, training) if split.overlapped else generating + training


@dataclass(frozen=True, slots=True)
class Advice:
    """The fastest split, beside the present one. idle, waiting: shares of the engines' and the
    trainer's time without work, after their start.
    """

    now: Split
    best: Split
    speedup: float
    idle: float
    waiting: float

    def text(self) -> str:
        """`engines wait 61%, the trainer 8%: one engine device fewer ... gives about 1.3x`."""
        waits = f"engines wait {self.idle:.0%}, the trainer {self.waiting:.0%}"
        if self.speedup < WORTH_TELLING:
            return f"{waits}; no other split of these devices is 1.1 times as fast"
        changes = [
            _change(self.best.engines - self.now.engines, "engine"),
            _change(self.best.trainer - self.now.trainer, "trainer"),
            "rollout.mode: async" if self.best.overlapped and not self.now.overlapped else "",
        ]
        return f"{waits}: {', '.join(filter(None, changes))} gives about {self.speedup:.1f}x"


def work_of(states: Mapping[str, float], steps: int, now: Split) -> Work | None:
    """A step's work, from device seconds by `role/state`; None before there is enough of it."""
    generation, training = states.get("rollout/generating", 0), states.get("trainer/training", 0)
    if steps < MIN_STEPS or not generation or not training:
        return None
    others = ("publishing", "saving", "taking_turn")
    rest = sum(states.get(f"trainer/{state}", 0.0) for state in others) / now.trainer
    return Work(generation / steps, training / steps, rest / steps)


def splits(now: Split, *, engine_unit: int, trainer_unit: int) -> list[Split]:
    """All splits of as many devices, each with engines and a trainer of whole units."""
    total = now.engines + now.trainer
    every = [
        Split(engines, total - engines, overlapped)
        for engines in range(engine_unit, total, engine_unit)
        for overlapped in {now.overlapped, True}
    ]
    return [split for split in every if split.trainer % trainer_unit == 0]


def advise(
    states: Mapping[str, float], steps: int, spec: RLJobSpec, engines: int | None = None
) -> Advice | None:
    """Advice for a job on GPUs with engines apart from its trainer; None for others, and before
    there is enough to go by.

    states: device seconds by `role/state`. engines: how many there are, where the spec does not
    say.
    """
    rollout, trainer = spec.rollout, spec.trainer
    count = spec.replicas or engines
    if trainer.colocate or not trainer.gpus_per_node or not rollout.gpus_per_replica or not count:
        return None
    unit = rollout.gpus_per_replica * rollout.nodes_per_replica
    now = Split(count * unit, trainer.devices, rollout.mode == "async")
    work = work_of(states, steps, now)
    if work is None:
        return None
    choices = splits(now, engine_unit=unit, trainer_unit=trainer.model_parallel_size)
    best = min([now, *choices], key=lambda split: (work.seconds(split), split != now))
    sequential = replace(best, overlapped=now.overlapped)
    if work.seconds(sequential) < WORTH_TELLING * work.seconds(best):
        best = sequential  # older samples are worth it for a clear gain alone
    return Advice(
        now,
        best,
        work.seconds(now) / work.seconds(best),
        _share(states, "rollout", "idle"),
        _share(states, "trainer", "waiting"),
    )


def advice_for(spec: RLJobSpec, status: RLJobStatus) -> Advice | None:
    """Advice for a job of a cluster, from its status; None as `advise` has it."""
    if status.goodput is None or status.step is None:
        return None
    states = {name: float(seconds) for name, seconds in status.goodput.states.items()}
    return advise(states, status.step, spec, status.rollout_replicas)


def _share(states: Mapping[str, float], role: str, state: str) -> float:
    life = ("starting", "restarting")
    working = sum(
        seconds
        for key, seconds in states.items()
        if key.startswith(f"{role}/") and not key.endswith(life)
    )
    return states.get(f"{role}/{state}", 0.0) / working if working else 0.0


def _change(devices: int, role: str) -> str:
    """`two engine GPUs fewer`; empty where it stays as it is."""
    if not devices:
        return ""
    number = abs(devices)
    gpus = "GPU" if number == 1 else "GPUs"
    return f"{number} {role} {gpus} {'more' if devices > 0 else 'fewer'}"
