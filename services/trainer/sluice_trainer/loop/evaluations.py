"""The evaluations of a job: which ones engines still run, their results, and the last one."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from sluice.samples.sample import SampleError, SampleGroup
from sluice.telemetry import logs
from sluice.wire import rpc
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.clients.background import Stopped
from sluice_trainer.clients.buffer_client import BufferClient
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.action import Action
from sluice_trainer.loop.clients import Clients
from sluice_trainer.loop.gpu_sharing import GpuSharing
from sluice_trainer.loop.weight_update import WeightUpdates
from sluice_trainer.telemetry.recorder import Recorder

# Seconds without a finished group or a generated token after which the last evaluation is given up.
STALL_SECONDS = 1800.0


@dataclass(slots=True)
class Evaluations:
    """The evaluations of a job, whose results rank 0 records.

    `recorder` is None on other ranks; `recorded` is the newest recorded version.
    """

    buffer: BufferClient
    recorder: Recorder | None
    enabled: bool
    recorded: int = -1

    def pending(self, version: int) -> bool:
        """Return whether engines still evaluate a version, after waiting briefly for the end."""
        if not self.enabled:
            return False
        running = self.buffer.evaluations(self.recorded, wait_for=version).pending_versions
        return version in running

    def record(self) -> None:
        """Record the results that have arrived."""
        if self.recorder is None or not self.enabled:
            return
        while evaluations := self.buffer.evaluations(self.recorded).evaluations:
            for evaluation in evaluations:
                self.recorder.evaluation(evaluation, self._examples(evaluation))
                self.recorded = max(self.recorded, evaluation.version)

    def _examples(self, evaluation: pb.Evaluation) -> list[SampleGroup]:
        # Training must not end because examples, which only people read, cannot be fetched.
        try:
            return self.buffer.examples(evaluation.version, evaluation.dataset)
        except (rpc.RefusedError, rpc.DeadlineError, SampleError) as error:
            logs.get().warning(
                "an evaluation is recorded without examples",
                version=evaluation.version,
                dataset=evaluation.dataset,
                error=str(error),
            )
            return []


@dataclass(slots=True)
class Stall:
    """A deadline in seconds that counts from the last progress, not from the start."""

    patience: float
    _progress: object = None
    _since: float = 0.0

    def over(self, progress: object, now: float) -> bool:
        """Return whether `progress` has not changed for longer than `patience`.

        Parameters
        ----------
        progress
            Any value that changes with progress.
        now
            Seconds of a monotonic clock.

        """
        if progress != self._progress:
            self._progress, self._since = progress, now
        return now - self._since > self.patience


@dataclass(slots=True)
class LastEvaluation:
    """The evaluation of a run's last weights, which the end of the job waits for."""

    evaluations: Evaluations
    clients: Clients
    ranks: Ranks
    gpus: GpuSharing
    weights: WeightUpdates
    stop: threading.Event

    def wait(self, step: int) -> None:
        """Wait for the evaluation of `step` as long as it makes progress, and record it.

        An evaluation that cannot be finished does not fail the job. Collective, because an engine
        that was lost and returns needs all ranks for its weights.

        Raises
        ------
        Stopped
            The trainer was told to stop.

        """
        # Colocated engines evaluate only while they hold the GPUs, which an update gives them.
        if self.gpus.colocated and self.gpus.trainer_holds_gpus:
            self.weights.update(step)
        if self.ranks.rank == 0:
            self.clients.member.set_state("evaluating")
        stall = Stall(STALL_SECONDS)
        while (action := self.ranks.broadcast(self._decide(step, stall))) is not Action.END:
            if action is Action.UPDATE_JOINERS:
                logs.get().warning("an engine was lost during the last evaluation")
                self.weights.update(step, joiners_only=True)
            elif action is Action.STOP:
                raise Stopped
        self.evaluations.record()

    def _decide(self, step: int, stall: Stall) -> Action:
        if self.ranks.rank != 0 or not self.evaluations.pending(step):
            return Action.END
        if self.stop.is_set():
            return Action.STOP
        # Long responses generate tokens for a while before their group is finished.
        finished = self.clients.buffer.counters().get("evaluation_groups", 0)
        tokens = self.clients.engines.generated_tokens()
        if stall.over((finished, tokens), time.monotonic()):
            logs.get().warning(
                f"the evaluation of version {step} was given up: for {stall.patience:g} s no group "
                "was finished and no engine generated a token; the job ends without its result",
                finished_evaluation_groups=finished,
            )
            return Action.END
        return Action.UPDATE_JOINERS if self.clients.engines.joiners() else Action.WAIT
