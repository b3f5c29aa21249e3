"""An update on its way, and what it came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice_trainer.weights.transport import Peer


@dataclass(slots=True)
class RunningUpdate:
    """One update on its way: the engines that are still in it, and the time that each
    phase took.

    refused: what engines answered that do not take what was sent, by their names. verified,
    resumed: when the last of the engines that stay was.
    """

    version: int
    peers: dict[str, Peer]
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    paused_since: float = 0.0
    verified: float = 0.0
    resumed: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The outcome of an update: engines that serve it, why others do not, the seconds of each
    phase, and the bytes sent to all of them.

    relayed: those of them that got the weights from another engine. rerouted: those that should
    have, and why they did not. in_turn: engines to which this rank sent one after another. `paused`
    spans the phases from the first engine's pause to the last one's resume. refused: those of
    `failed` that answered themselves that they do not take what was sent.
    """

    engines: tuple[str, ...]
    failed: dict[str, str]
    seconds: dict[str, float]
    bytes: int
    relayed: tuple[str, ...] = ()
    rerouted: Mapping[str, str] = field(default_factory=dict)
    in_turn: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
