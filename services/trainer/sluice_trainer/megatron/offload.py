"""Which memory Megatron's model and optimizer hold, for `trainer.offload`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

from torch import Tensor

from sluice_trainer.megatron.step.host_optimizer import HostOptimizer
from sluice_trainer.megatron.step.learner import MegatronLearner
from sluice_trainer.megatron.step.optimizer import gradients, parts
from sluice_trainer.memory.offload import Offload


def offload(
    what: Literal["none", "optimizer", "all"],
    learners: Sequence[MegatronLearner],
    frozen: list[Any],
) -> Offload:
    """frozen: models that are only asked (reference, teacher), as their chunks."""

    def let_go() -> None:
        for learner in learners:
            learner.optimizer.zero_grad()  # the gradients' copies that the optimizer has made

    return Offload(
        what,
        weights=partial(_weights, learners),
        frozen=partial(_tensors_of, frozen),
        gradients=partial(_gradients, learners),
        optimizer=partial(_optimizer_state, learners),
        before=let_go,
    )


def _weights(learners: Iterable[MegatronLearner]) -> Iterator[Tensor]:
    for learner in learners:
        yield from _tensors_of([chunk.module for chunk in learner.chunks])


def _tensors_of(models: Iterable[Any]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def _gradients(learners: Iterable[MegatronLearner]) -> Iterator[Tensor]:
    for learner in learners:
        yield from gradients(learner.chunks)


def _optimizer_state(learners: Iterable[MegatronLearner]) -> Iterator[Tensor]:
    """Moments and, in bf16, the weights in fp32, but not of what is in host memory already.

    In fp32 the optimizer's weights are views of the model's own.
    """
    learners = list(learners)
    weights = {tensor.untyped_storage()._cdata for tensor in _weights(learners)}
    for learner in learners:
        for part in parts(learner.optimizer):
            masters = [p for group in part.optimizer.param_groups for p in group["params"]]
            if isinstance(part, HostOptimizer):
                masters = [master for master in masters if not part.on_host(master)]
            states = [part.optimizer.state.get(master, {}).values() for master in masters]
            held = [tensor for tensor in (*chain(*states), *masters) if isinstance(tensor, Tensor)]
            # Adam's step is a number: it stays.
            large = [tensor for tensor in held if tensor.dim()]
            yield from (t for t in large if t.untyped_storage()._cdata not in weights)
