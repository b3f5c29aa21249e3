"""Faults, drawn from a seed: the same seed and number give the same list."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.network import PAIRS
from tests.chaos.proxy import Harm

KILL, STOP = "kill -9", "SIGSTOP"
# The user ends `sluice run`, waiting for its pods or not, and starts it again.
LEAVE, LEAVE_AT_ONCE = "Ctrl-C", "Ctrl-C twice"
LASTING = (STOP, *Harm)
# Processes that may be killed or stopped; `run` is `sluice run` itself.
ROLES = ("engine", "worker", "buffer", "rendezvous", "trainer", "run")
LONGEST_SECONDS = 20.0
# Share of the faults that do not wait for recovery: they hit the recovery itself.
HASTY = 0.3


@dataclass(frozen=True)
class Fault:
    """A fault of a run.

    Parameters
    ----------
    kind
        What is done.
    target
        Role of the process, or (caller, server) of the connection.
    after
        Seconds that pass before it.
    seconds
        Seconds that it lasts; 0 for a moment.
    part
        For a kill, the process of the role, from its first (0.0) to the last that it started; for
        Ctrl-C twice, seconds between the two.
    hasty
        True if it does not wait until the run has recovered from the fault before.

    """

    kind: str
    target: str | tuple[str, str]
    after: float
    seconds: float
    part: float = 0.0
    hasty: bool = False

    def __str__(self) -> str:
        where = self.target if isinstance(self.target, str) else " -> ".join(self.target)
        length = f" for {self.seconds:.1f} s" if self.seconds else ""
        part = f", process {self.part:.2f}" if self.part and self.kind == KILL else ""
        hasty = ", without recovery" if self.hasty else ""
        return f"{self.kind} {where}{part}{length}, after {self.after:.1f} s{hasty}"


def draw(seed: int, number: int, longest: float = LONGEST_SECONDS) -> list[Fault]:
    """Draw rounds of faults, each with one fault of every kind in random order.

    The targets of a kind repeat only after all of them had their turn.
    """
    chance = random.Random(seed)
    kinds: list[str] = [KILL, LEAVE, LEAVE_AT_ONCE, *LASTING]
    targets = {kind: _decks(chance, _targets(kind)) for kind in kinds}
    faults: list[Fault] = []
    while len(faults) < number:
        chance.shuffle(kinds)
        faults += [_fault(chance, kind, next(targets[kind]), longest) for kind in kinds]
    return faults[:number]


def _targets(kind: str) -> tuple[object, ...]:
    if kind in (LEAVE, LEAVE_AT_ONCE):
        return ("run",)
    return ROLES if kind in (KILL, STOP) else PAIRS


def _decks(chance: random.Random, targets: tuple[object, ...]) -> Iterator[object]:
    while True:
        yield from chance.sample(targets, len(targets))


def _fault(chance: random.Random, kind: str, target: object, longest: float) -> Fault:
    assert isinstance(target, str | tuple)
    after, seconds = chance.uniform(0.0, 2.0), chance.uniform(1.0, longest)
    part, hasty = chance.choice((0.0, chance.random())), chance.random() < HASTY
    if kind in LASTING:
        return Fault(kind, target, after, seconds, hasty=hasty)
    whole = kind == KILL and target == "run"
    return Fault(kind, target, after, 0.0, 0.0 if whole else part, hasty)
