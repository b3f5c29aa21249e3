"""Weight updates of the engines, between two steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from sluice.api.groups.weight_sync import WeightSync
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import tracing
from sluice_trainer.backend import Weights
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.clients import Clients
from sluice_trainer.loop.gpu_sharing import GpuSharing
from sluice_trainer.telemetry import metrics
from sluice_trainer.telemetry.profiling import region
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.update import update_engines

_LONGEST_BACK_OFF = 30.0
# A healthy engine refuses a broken session or connection once, and accepts the next update.
_REFUSALS = 3


class Refusals:
    """The refusals of engines, as long as no engine has accepted any weights.

    An engine that does not know the tensors of a model refuses every update with the same message.
    A failure of the network or of one engine does not repeat like that.
    """

    def __init__(self) -> None:
        self._answers: frozenset[str] = frozenset()
        self._times = 0
        self._any_served = False

    def permanent(self, outcomes: Sequence[UpdateOutcome]) -> str:
        """Return the engines' message if they have sent it three times in a row; else empty."""
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


def refusal_text(answer: str, *, adapter: bool) -> str:
    """Say that engines refuse the weights or the adapter of this model."""
    what = "the weights of this model"
    if adapter:
        what = "an adapter of this model (weightSync.lora: merged sends all weights)"
    return f"no engine takes {what}; after {_REFUSALS} tries the engine says: {answer}"


@dataclass(slots=True)
class WeightUpdates:
    """Updates all engines, or those that join, to the policy's weights.

    `times` receives the seconds of the phases of an update, and how many engines the busiest rank
    sent to one after another, under names of metrics.
    """

    spec: WeightSync
    policy: Weights
    clients: Clients
    ranks: Ranks
    gpus: GpuSharing
    times: dict[str, float]
    _joiners_after: float = 0.0
    _failed_joins: int = 0
    _refusals: Refusals = field(default_factory=Refusals)

    def joiners(self) -> bool:
        """Return whether an engine waits for weights and may have them now. Only on rank 0."""
        return time.monotonic() >= self._joiners_after and self.clients.engines.joiners()

    @tracing.traced("weight update", root=True)
    @region("weight update")
    def update(self, version: int, *, joiners_only: bool = False) -> bool:
        """Update the engines to `version`. Collective.

        Parameters
        ----------
        version
            Version of the weights.
        joiners_only
            Update only engines that wait for their first weights. With colocated engines all are
            updated, because there is memory for weights only while all engines rest.

        Returns
        -------
        Whether there was an engine to update.

        Raises
        ------
        ConfigurationError
            The engines refuse the weights of this model permanently.

        """
        tracing.set_attributes(version=version, joiners_only=joiners_only)
        colocated = self.gpus.colocated
        # Colocated engines can receive weights only once the trainer has offloaded all else.
        self.gpus.acquire_for_weights()
        if self.ranks.rank == 0:
            self.clients.member.set_state("publishing")
        started = time.perf_counter()
        outcomes = update_engines(
            partial(self.policy.engine_tensors, self.clients.engines.stack_name),
            version,
            self.clients.engines,
            self.ranks,
            bucket_bytes=self.spec.bucket_mi_b << 20,
            joiners_only=joiners_only and not colocated,
            hand_over=self.gpus.release if colocated else None,
        )
        if not outcomes:
            return False
        if answer := self._refusals.permanent(outcomes):
            raise ConfigurationError(refusal_text(answer, adapter=self.spec.lora == "adapter"))
        # An update is as slow as its slowest rank.
        for phase in outcomes[0].seconds:
            self.times[f"perf/update_weights/{phase}_time"] = max(
                outcome.seconds[phase] for outcome in outcomes
            )
        in_turn = max(outcome.in_turn for outcome in outcomes)
        self.times["perf/update_weights/engines_in_turn"] = float(in_turn)
        if full := outcomes[0].full_bytes:
            self.times["perf/update_weights/published_bytes"] = float(outcomes[0].bytes)
            self.times["perf/update_weights/delta_share"] = outcomes[0].delta_bytes / full
        self._back_off(sum(len(outcome.failed) for outcome in outcomes) if joiners_only else 0)
        seconds = self.times["perf/update_weights_time"] = time.perf_counter() - started
        metrics.record_update(outcomes, seconds, version)
        return True

    def _back_off(self, failures: int) -> None:
        # Training must not spin on an engine that fails every update.
        self._failed_joins = self._failed_joins + 1 if failures else 0
        seconds = min(2.0**self._failed_joins, _LONGEST_BACK_OFF) if failures else 0.0
        self._joiners_after = time.monotonic() + seconds
