"""`debug.rolloutOnly`: the loop without a trainer. Batches are taken, recorded, dumped and
committed; nobody learns.

The engines keep the weights that they loaded from model.path. After each step they are only told
its number, so that leases, staleness and evaluations go on as in training.
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
from sluice_trainer.clients.clients import Peers
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.loop.loop import Loop
from sluice_trainer.telemetry.recorder import Recorder

ALONE = Ranks(rank=0, world_size=1, data_parallel_rank=0, data_parallel_size=1, _control=None)


@dataclass(slots=True)
class Unchanged:
    """The Weights of a loop that trains none. A checkpoint of it is a number that the buffer is
    told.
    """

    step: int
    _durable: int | None = None

    def hf_tensors(
        self, stack_name: StackName | None = None, receivers: frozenset[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Something to carry the version's number (transport.Nothing); its contents go nowhere."""
        yield "unchanged", torch.zeros(1)

    def reserve_copies(self) -> None:
        return

    def begin_save(self, directory: Path, step: int, *, beside: bool = False) -> None:
        self._durable = step

    def finish_save(self, directory: Path, *, wait: bool) -> int | None:
        durable, self._durable = self._durable, None
        return durable

    def export_hf(self, directory: Path) -> None:
        return

    def make_room(self, *, weights: bool) -> None:
        return

    def come_back(self, *, weights_only: bool = False) -> None:
        return

    def memory_used(self) -> int:
        return 0


def _learn_nothing(batch: Sequence[pb.Sequence], groups: Sequence[SampleGroup]) -> dict[str, float]:
    return {}


def run(
    env: Environment, job: RLJob, peers: Peers, total_steps: int, stop: threading.Event
) -> None:
    """Take batches until the last one. A restart goes on behind the last step that
    was committed.
    """
    recorder = Recorder.of(env, job)
    weights = Unchanged(peers.buffer.committed_step())
    checkpoints = env.directory("checkpoint_dir")
    Loop(
        job.spec, weights, _learn_nothing, peers, ALONE, checkpoints, total_steps, recorder, stop
    ).run()
    recorder.close()
