"""A job's evaluations as its trainer sees them: which go on, and what they came to."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.samples.sample import SampleError, SampleGroup
from sluice.telemetry import logs
from sluice.wire import rpc
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.clients.buffer_client import BufferClient
from sluice_trainer.telemetry.recorder import Recorder


@dataclass(slots=True)
class Evaluations:
    """recorder: rank 0's, None elsewhere. recorded: the newest version that is written down."""

    buffer: BufferClient
    recorder: Recorder | None
    wanted: bool
    recorded: int = -1

    def pending(self, version: int) -> bool:
        """True while engines still evaluate this version. Waits a moment for the end of it."""
        if not self.wanted:
            return False
        running = self.buffer.evaluations(self.recorded, wait_for=version).pending_versions
        return version in running

    def record(self) -> None:
        """Write down what evaluations came to. One that cannot be read never ends the training."""
        if self.recorder is None or not self.wanted:
            return
        while evaluations := self.buffer.evaluations(self.recorded).evaluations:
            for evaluation in evaluations:
                self.recorder.evaluation(evaluation, self._examples(evaluation))
                self.recorded = max(self.recorded, evaluation.version)

    def _examples(self, evaluation: pb.Evaluation) -> list[SampleGroup]:
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
