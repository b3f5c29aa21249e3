"""Weights on their way to the engines, between two steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from sluice.api.groups.weight_sync import WeightSync
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import tracing
from sluice_trainer.backend import Weights
from sluice_trainer.clients.clients import Peers
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.gpu_sharing import Turns
from sluice_trainer.telemetry import metrics
from sluice_trainer.telemetry.profiling import region
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.update import update_engines

_LONGEST_BACK_OFF = 30.0
# An engine that is well refuses a broken session or connection once, and takes the next update.
_REFUSALS = 3


class Refusals:
    """The answers of engines that take no weights, while none has taken any.

    A model whose tensors an engine does not know is refused in the same words in every update. A
    failure of the network or of one engine is not.
    """

    def __init__(self) -> None:
        self._answers: frozenset[str] = frozenset()
        self._times = 0
        self._any_served = False

    def permanent(self, outcomes: Sequence[UpdateOutcome]) -> str:
        """Return the engines' answer if they have given it three times in a row; else empty."""
        refused = [answer for outcome in outcomes for answer in outcome.refused.values()]
        failed = sum(len(outcome.failed) for outcome in outcomes)
        self._any_served |= any(outcome.engines for outcome in outcomes)
        if self._any_served or not refused or len(refused) < failed:
            self._times = 0
            return ""
        answers = frozenset(refused)
        self._times = self._times + 1 if answers == self._answers else 1
        self._answers = answers
        return min(answers) if self._times >= _REFUSALS else ""


@dataclass(slots=True)
class Publishing:
    """times: seconds of the parts of an update, and engines that the fullest rank
    sent to one after another, under the names of metrics.
    """

    spec: WeightSync
    policy: Weights
    peers: Peers
    ranks: Ranks
    turns: Turns
    times: dict[str, float]
    _joiners_after: float = 0.0
    _failed_joins: int = 0
    _refusals: Refusals = field(default_factory=Refusals)

    def joiners(self) -> bool:
        """True where an engine waits for weights and may have them now. Rank 0's question."""
        return time.monotonic() >= self._joiners_after and self.peers.engines.joiners()

    @tracing.traced("weight update", root=True)
    @region("weight update")
    def publish(self, version: int, *, joiners_only: bool = False) -> bool:
        """Bring the weights to the engines; False: there was none. Collective. Raises
        ConfigurationError if the engines refuse the model's weights for good.

        Colocated, an engine that joins is no special case: there is room for the weights only
        while all engines rest.
        """
        tracing.note(version=version, joiners_only=joiners_only)
        colocated = self.turns.colocated
        self.turns.make_room_for_weights()
        if self.ranks.rank == 0:
            self.peers.member.state("publishing")
        started = time.perf_counter()
        outcomes = update_engines(
            partial(self.policy.hf_tensors, self.peers.engines.stack_name),
            version,
            self.peers.engines,
            self.ranks,
            bucket_bytes=self.spec.bucket_mi_b << 20,
            joiners_only=joiners_only and not colocated,
            hand_over=self.turns.hand_over if colocated else None,
        )
        if not outcomes:
            return False
        if answer := self._refusals.permanent(outcomes):
            raise ConfigurationError(
                f"no engine takes the weights of this model; after {_REFUSALS} tries the engine "
                f"says: {answer}"
            )
        for phase in outcomes[0].seconds:
            self.times[f"perf/update_weights/{phase}_time"] = max(
                outcome.seconds[phase] for outcome in outcomes
            )
        in_turn = max(outcome.in_turn for outcome in outcomes)
        self.times["perf/update_weights/engines_in_turn"] = float(in_turn)
        self._back_off(sum(len(outcome.failed) for outcome in outcomes) if joiners_only else 0)
        seconds = self.times["perf/update_weights_time"] = time.perf_counter() - started
        metrics.observe_update(outcomes, seconds, version)
        return True

    def _back_off(self, failures: int) -> None:
        """Try an engine that cannot be brought up to date later and later: training must not spin
        on it.
        """
        self._failed_joins = self._failed_joins + 1 if failures else 0
        seconds = min(2.0**self._failed_joins, _LONGEST_BACK_OFF) if failures else 0.0
        self._joiners_after = time.monotonic() + seconds
