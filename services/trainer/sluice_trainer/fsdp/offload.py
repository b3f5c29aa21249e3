"""Which memory models and optimizers hold, for `trainer.offload`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn

from sluice_trainer.fsdp.learner import ShardedLearner
from sluice_trainer.fsdp.net import Net
from sluice_trainer.fsdp.sharding import local, reshard
from sluice_trainer.memory.offload import Offload


def offload(
    what: Literal["none", "optimizer", "all"],
    learners: Sequence[ShardedLearner],
    frozen: Sequence[Net],
) -> Offload:
    """frozen: models that are only asked (reference, teacher)."""

    def let_go() -> None:
        for learner in learners:
            learner.optimizer.zero_grad()
        for net in (*(learner.net for learner in learners), *frozen):
            reshard(net)

    return Offload(
        what,
        weights=partial(_tensors_of, [learner.net for learner in learners]),
        frozen=partial(_tensors_of, frozen),
        gradients=tuple,  # they are gone already
        optimizer=partial(_optimizer_state, learners),
        before=let_go,
    )


def _tensors_of(nets: Iterable[nn.Module]) -> Iterator[Tensor]:
    for net in nets:
        yield from (local(tensor) for tensor in net.parameters())
        yield from (local(tensor) for tensor in net.buffers())


def _optimizer_state(learners: Iterable[ShardedLearner]) -> Iterator[Tensor]:
    for learner in learners:
        for state in learner.optimizer.state.values():
            yield from (local(value) for value in state.values() if isinstance(value, Tensor))
