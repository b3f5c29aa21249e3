"""The trained tensors of a model with adapters, and Adam's moments of them, whole."""

from __future__ import annotations

from typing import Any

from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.lora.checkpoint import MOMENTS, AdapterState
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.checkpoints.checkpoint import (
    adam_step,
    allocate_optimizer_state,
    optimizers_with_state,
    set_adam_step,
)
from sluice_trainer.megatron.checkpoints.optimizer_state import set_whole_state, whole_state
from sluice_trainer.megatron.lora import Adapters


@megatron_device()
def adapter_state(adapters: Adapters, optimizer: Any, ranks: Ranks) -> AdapterState:
    """Gather what is trained, and Adam's moments of it. Collective."""
    allocate_optimizer_state(optimizer)
    states = {
        parameter: state
        for part in optimizers_with_state(optimizer)
        for parameter, state in whole_state(part).items()
    }
    moments = {
        key: adapters.gathered({parameter: state[key] for parameter, state in states.items()})
        for key in MOMENTS
    }
    step = max(ranks.gather(adam_step(optimizer)))
    return AdapterState(adapters.tensors(), moments, step, adapters.initial())


@megatron_device()
def set_adapter_state(adapters: Adapters, optimizer: Any, state: AdapterState) -> None:
    """Restore what is trained, and Adam's moments of it, each rank its share."""
    allocate_optimizer_state(optimizer)
    # The optimizer's float32 weights are views of the parameters.
    adapters.set(state.tensors)
    adapters.set_initial(state.initial)
    moments = {key: adapters.shares(state.moments[key]) for key in MOMENTS}
    by_parameter = {
        parameter: {key: moments[key][name] for key in MOMENTS}
        for name, (parameter,) in adapters.trained.items()
    }
    for part in optimizers_with_state(optimizer):
        set_whole_state(part, by_parameter)
    set_adam_step(optimizer, state.adam_step)
