"""`debug.rolloutOnly`: the loop without training. Batches are taken, recorded and committed.

The engines keep the weights that they loaded from `model.path`. After each step they only receive
its number, so that leases, staleness and evaluations work as in training.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sluice.api import RLJob
from sluice.engines.protocol import StackName
from sluice.runtime.pod_env import Environment
from sluice.samples.sample import SampleGroup
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.clients import Clients
from sluice_trainer.loop.loop import Loop
from sluice_trainer.loop.run_records import RunRecords
from sluice_trainer.telemetry.recorder import Recorder

ALONE = Ranks(rank=0, world_size=1, data_parallel_rank=0, data_parallel_size=1, _control=None)


@dataclass(slots=True)
class UnchangedWeights:
    """The `Weights` of a loop that does not train; a checkpoint is only a step number."""

    step: int
    _durable: int | None = None

    def engine_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        # An update needs a tensor to carry the version; the transport drops it (disk.Nothing).
        yield "unchanged", torch.zeros(1)

    def reserve_copies(self) -> None:
        return

    def begin_save(self, directory: Path, step: int, *, background: bool = False) -> None:
        self._durable = step

    def finish_save(self, directory: Path, *, wait: bool) -> int | None:
        durable, self._durable = self._durable, None
        return durable

    def export_hf(self, directory: Path) -> None:
        return

    def export_adapter(self, directory: Path) -> None:
        return

    def offload(self, *, weights: bool) -> None:
        return

    def restore(self, *, weights_only: bool = False) -> None:
        return

    def memory_used(self) -> int:
        return 0


def _learn_nothing(batch: Sequence[pb.Sequence], groups: Sequence[SampleGroup]) -> dict[str, float]:
    return {}


def run(
    env: Environment, job: RLJob, clients: Clients, total_steps: int, stop: threading.Event
) -> None:
    """Take batches until the last step; a restart continues after the last committed step."""
    recorder = Recorder.for_job(env, job)
    Loop(
        job.spec,
        UnchangedWeights(clients.buffer.committed_step()),
        _learn_nothing,
        clients,
        ALONE,
        RunRecords(job.spec, ALONE, clients.buffer, recorder),
        checkpoints=env.directory("checkpoint_dir"),
        total_steps=total_steps,
        stop=stop,
    ).run()
    recorder.close()
