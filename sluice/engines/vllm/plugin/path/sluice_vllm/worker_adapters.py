"""The LoRA adapters of one rank of the engine, whose tensors updates have brought.

vLLM reads an adapter from files when a request needs it. Here it gets the tensors.
"""

from collections.abc import Collection
from typing import Any

import torch

from .adapter_tensors import EMPTY, SCALING, check_fits, matrix_of

Tensors = dict[str, torch.Tensor]


class WorkerAdapters:
    """The adapters of a worker by their numbers, and the tensors of an update that is coming."""

    def __init__(self) -> None:
        self.coming: Tensors = {}
        self.held: dict[int, Tensors] = {}
        # vLLM's WorkerLoRAManager, once it asks here for adapters.
        self._manager: Any = None

    def take(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Take the tensors of a bucket. Those of an update that has not ended are replaced."""
        self.coming |= tensors

    def use(self, runner: Any, number: int, kept: Collection[int]) -> None:
        """Hold the adapter whose tensors have come, and others with these numbers.

        Raises ValueError if the engine cannot serve it; then all stays as it is.
        """
        from vllm.lora.request import LoRARequest

        tensors, self.coming = self.coming, {}
        manager = self._attached(runner)
        check(manager, tensors)
        self.held[number] = tensors
        manager.remove_adapter(number)
        manager.add_adapter(LoRARequest("sluice", number, "sluice"))
        for unused in self.held.keys() - set(kept):
            del self.held[unused]
            manager.remove_adapter(unused)

    def _attached(self, runner: Any) -> Any:
        manager = getattr(runner, "lora_manager", None)
        if manager is None:
            raise ValueError("this engine was started without --enable-lora, so it has no adapters")
        if self._manager is not manager:
            manager._load_adapter = lambda request: model(
                manager, request.lora_int_id, self.held[request.lora_int_id]
            )
            self._manager = manager
        return manager


def check(manager: Any, tensors: Tensors) -> None:
    """Raise ValueError unless the engine has memory for such an adapter. vLLM ignores the rest."""
    if len(tensors) < 2 or SCALING not in tensors:
        raise ValueError(EMPTY)
    vllm_manager = manager._adapter_manager
    adapted = {
        part
        for layer in vllm_manager.supported_lora_modules
        for part in vllm_manager.packed_modules_mapping.get(layer, [layer])
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_fits(shapes, manager.lora_config.max_lora_rank, adapted, adapted.__contains__)


def model(manager: Any, number: int, tensors: Tensors) -> Any:
    """Return an adapter as vLLM has it. vLLM multiplies its matrices B by the scaling, in place."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    matrices = {name: tensor.clone() for name, tensor in tensors.items() if name != SCALING}
    rank = max(matrix_of(name, tensor.shape).rank for name, tensor in matrices.items())
    layers = sorted({name.split(".")[-3] for name in matrices})
    scaling: Any = float(tensors[SCALING])
    served = manager._adapter_manager.model
    mapper = getattr(served, "hf_to_vllm_mapper", None)
    return LoRAModel.from_lora_tensors(
        number,
        matrices,
        PEFTHelper(r=rank, lora_alpha=scaling * rank, target_modules=layers),
        device=manager.device,
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        skip_prefixes=getattr(served, "lora_skip_prefixes", None),
    )
