"""State of a running update, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice_trainer.weights.transport import Peer


@dataclass(slots=True)
class RunningUpdate:
    """A running update: its remaining engines, and the seconds of each phase.

    Attributes
    ----------
    version
        Weight version that the update brings.
    peers
        Engines that are still in the update, by name.
    seconds
        Seconds of each phase.
    failed
        Reasons of the engines that have left the update, by name.
    refused
        Answers of engines that did not accept what was sent, by name.
    paused_since
        Monotonic time of the first pause.
    verified, resumed
        Monotonic time at which the last remaining engine was verified or resumed.
    bytes
        Bytes sent to all engines together.

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
    """The outcome of one rank's share of an update.

    Attributes
    ----------
    engines
        Engines that serve the new weights.
    failed
        Reasons of the engines that do not, by name.
    seconds
        Seconds of each phase. `paused` spans from the first engine's pause to the last one's
        resume.
    bytes
        Bytes sent to all engines together.
    relayed
        Engines that got the weights from another engine.
    rerouted
        Engines that should have, and the reason why they did not.
    in_turn
        Number of engines to which this rank sent one after another.
    refused
        Entries of `failed` that the engines themselves answered.
    full_bytes, delta_bytes
        With a store: bytes of all weights, and of what engines with the version before fetch;
        `delta_bytes` is 0 if they need all weights.

    """

    engines: tuple[str, ...]
    failed: dict[str, str]
    seconds: dict[str, float]
    bytes: int
    relayed: tuple[str, ...] = ()
    rerouted: Mapping[str, str] = field(default_factory=dict)
    in_turn: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    full_bytes: int = 0
    delta_bytes: int = 0
