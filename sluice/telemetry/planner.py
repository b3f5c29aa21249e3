"""Which split of a job's devices between trainer and engines would be fastest, from what they have
done so far.

The model, and what it assumes: a step's generation is so many device seconds of engines that
generate, whatever their number; its training so many of trainer devices that train; publishing,
saving and turns take the same time with any split, and so does the tail, in which an engine waits
for the last few responses of a batch. Then a synchronous step takes

    generation / engine devices + tail + training / trainer devices + the rest,

and an asynchronous one the longer of the engines' part, where the tail lies beside the generation
of later batches, and the trainer's. There the tail takes TAIL_WORK of its time: its tokens are to
be made all the same, and each takes longer beside many others. At most `maxStaleness` + 1 batches
are under way at a time, so it takes no less than a synchronous step by that number. Waiting, starts
and restarts are in no term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.api import RLJobSpec, RLJobStatus

# Fewer tell the start's story.
MIN_STEPS = 3
WORTH_TELLING = 1.1
# Times as fast, for which devices are spoken of that the job has not.
WORTH_BUYING = 1.3
# rollout.maxStaleness that a synchronous job may be told to try.
STALENESS = (1, 2)
TAIL_WORTH_TELLING = 0.2
# Of a tail's time, what its responses cost an engine that is full: 0.23 and 0.32 in two runs on
# H200s where 4 % of them have 2,048 tokens and all 120 on average (docs/results/planner.md).
TAIL_WORK = 0.3


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of engines and trainer. staleness: rollout.maxStaleness, in steps; 0: synchronous."""

    engines: int
    trainer: int
    staleness: int = 0

    @property
    def devices(self) -> tuple[int, int]:
        return self.engines, self.trainer


@dataclass(frozen=True, slots=True)
class Work:
    """A step's work. generation, training: device seconds. rest: seconds of the trainer besides;
    tail: of an engine, with the last few responses.
    """

    generation: float
    training: float
    rest: float
    tail: float = 0.0

    def seconds(self, split: Split) -> float:
        """The time of a step with this split."""
        generating = self.generation / split.engines
        training = self.training / split.trainer + self.rest
        sequential = generating + self.tail + training
        if not split.staleness:
            return sequential
        overlapped = generating + TAIL_WORK * self.tail
        return max(overlapped, training, sequential / (1 + split.staleness))


@dataclass(frozen=True, slots=True)
class Advice:
    """The fastest split, beside the present one. idle, waiting: shares of the engines' and the
    trainer's time without work, after their start; tail: of the engines' with the last few
    responses of a batch. more: devices more, and how many times as fast a step is with them; told
    where no other split is faster.
    """

    now: Split
    best: Split
    speedup: float
    idle: float
    waiting: float
    tail: float = 0.0
    more: tuple[Split, float] | None = None

    def text(self) -> str:
        """`engines wait 61%, the trainer 8%: one engine device fewer ... gives about 1.3x`."""
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
    """A step's work, from device seconds by `role/state`; None before there is enough of it."""
    generation, training = states.get("rollout/generating", 0), states.get("trainer/training", 0)
    if steps < MIN_STEPS or not generation or not training:
        return None
    others = ("publishing", "saving", "taking_turn")
    rest = sum(states.get(f"trainer/{state}", 0.0) for state in others) / now.trainer
    tail = states.get("rollout/tail", 0.0) / now.engines
    return Work(generation / steps, training / steps, rest / steps, tail / steps)


def splits(now: Split, *, engine_unit: int, trainer_unit: int) -> list[Split]:
    """All splits of as many devices, each with engines and a trainer of whole units."""
    total = now.engines + now.trainer
    every = [
        Split(engines, total - engines, now.staleness)
        for engines in range(engine_unit, total, engine_unit)
    ]
    return [split for split in every if split.trainer % trainer_unit == 0]


def fastest(work: Work, now: Split, choices: Sequence[Split]) -> Split:
    """The fastest of the choices. Of a synchronous job they are asynchronous too: older samples
    are worth it for a clear gain alone.
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
    """An engine more, or a copy of the model more to train, whichever gains more for each device,
    and how many times as fast a step is with it; None where neither is worth it.
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
    """Advice for a job on GPUs with engines apart from its trainer; None for others, and before
    there is enough to go by.

    states: device seconds by `role/state`.
    """
    rollout, trainer = spec.rollout, spec.trainer
    count = spec.replicas
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
    """Advice for a job of a cluster, from its status; None as `advise` has it."""
    if status.goodput is None or status.step is None:
        return None
    states = {name: float(seconds) for name, seconds in status.goodput.states.items()}
    return advise(states, status.step, spec)


def _mode(now: int, best: int) -> str:
    """The change of mode that makes samples so many steps older; empty where it stays."""
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
    """`two engine GPUs fewer`; empty where it stays as it is."""
    if not devices:
        return ""
    number = abs(devices)
    gpus = "GPU" if number == 1 else "GPUs"
    return f"{number} {role} {gpus} {'more' if devices > 0 else 'fewer'}"
