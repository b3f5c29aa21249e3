"""The evaluation of a run's last weights, which nothing but its own end waits for."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from sluice.telemetry import logs
from sluice_trainer.clients.background import Stopped
from sluice_trainer.clients.clients import Peers
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.action import Action
from sluice_trainer.loop.evaluations import Evaluations
from sluice_trainer.loop.gpu_sharing import Turns
from sluice_trainer.loop.stall import Stall
from sluice_trainer.loop.weight_update import Publishing

STALL_SECONDS = 1800.0
"""It is given up when for so long no group was finished and no token generated."""


@dataclass(slots=True)
class LastEvaluation:
    """stop: the trainer is to end."""

    evaluations: Evaluations
    peers: Peers
    ranks: Ranks
    turns: Turns
    publishing: Publishing
    stop: threading.Event

    def wait(self, step: int) -> None:
        """Wait for the evaluation of `step` for as long as it goes on, and write it down.
        Collective. Raises Stopped.

        An engine that was lost and comes back needs all ranks for its weights. What has been
        trained is trained: an evaluation that cannot be finished does not fail the job.
        """
        if self.turns.colocated and self.turns.ours:
            self.publishing.publish(step)
        if self.ranks.rank == 0:
            self.peers.member.state("evaluating")
        stall = Stall(STALL_SECONDS)
        while (action := self.ranks.broadcast(self._look(step, stall))) is not Action.END:
            if action is Action.SYNC:
                logs.get().warning("an engine was lost during the last evaluation")
                self.publishing.publish(step, joiners_only=True)
            elif action is Action.STOP:
                raise Stopped
        self.evaluations.record()

    def _look(self, step: int, stall: Stall) -> Action:
        if self.ranks.rank != 0 or not self.evaluations.pending(step):
            return Action.END
        if self.stop.is_set():
            return Action.STOP
        finished = self.peers.buffer.counters().get("evaluation_groups", 0)
        tokens = self.peers.engines.generated_tokens()
        if stall.over((finished, tokens), time.monotonic()):
            logs.get().warning(
                f"the evaluation of version {step} was given up: for {stall.patience:g} s no group "
                "of it was finished "
                "and no engine has generated a token; the job ends without its result",
                finished_evaluation_groups=finished,
            )
            return Action.END
        return Action.SYNC if self.peers.engines.joiners() else Action.WAIT
