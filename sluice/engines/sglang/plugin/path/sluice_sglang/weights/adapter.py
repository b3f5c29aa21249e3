"""Serves one LoRA adapter whose tensors come with weight updates, and applies it to all requests.

SGLang's own calls load an adapter from files, or from tensors that one process of an engine can
open, and only under a new name. Here an update brings the adapter's tensors in buckets, as it
brings all weights of a model otherwise, and they replace those of the update before in place. So
pauses, versions, chains and replaced trainers work as with all weights. The engine reads the model
itself from its checkpoint.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from .. import tell_once

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# The adapter's name inside SGLang. No request names it: the scheduler gives it to all.
NAME = "sluice"
# PEFT's prefix of the names of an adapter's tensors.
PREFIX = "base_model.model."
# Layers whose adapters SGLang joins. If one of the first has an adapter, so must the second.
_JOINED = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj"))
Named = Iterable[tuple[str, torch.Tensor]]


def register() -> None:
    settings = os.environ.get("SLUICE_LORA")
    if not settings:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    adapter = Adapter(**json.loads(settings))
    HookRegistry.register(f"{MANAGER}.init_lora_shapes", linear_layers_only, HookType.AFTER)
    HookRegistry.register(f"{RUNNER}.init_lora_manager", adapter.attach, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.handle_generate_request", use_adapter, HookType.BEFORE)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        allow_unpinned_memory()


def linear_layers_only(_: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Give embedding and output layer no adapter, which SGLang's `all` includes."""
    manager.target_modules -= {"embed_tokens", "lm_head"}


def use_adapter(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """Let a request use the adapter, whoever sends it."""
    request.lora_id = NAME


class Adapter:
    """The adapter of one rank of the engine.

    Parameters
    ----------
    rank
        Rows of every A.
    scaling
        Factor of B A. SGLang itself computes it as alpha / rank, without rsLoRA.

    """

    def __init__(self, rank: int, scaling: float) -> None:
        self.rank, self.scaling = rank, scaling
        self.manager: Any = None
        # All tensors that have come, by PEFT's names.
        self.tensors: dict[str, torch.Tensor] = {}

    def attach(self, _: Any, runner: Any) -> None:
        """Make an adapter that changes nothing yet, and take later ones from `load_weights`."""
        from sglang.srt.lora.lora_registry import LoRARef

        self.manager = runner.lora_manager
        # Otherwise SGLang leaves out layers that it does not adapt, with a line in the log.
        self.manager.memory_pool.strict_loading = True
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.scaling * self.rank,
            "target_modules": "all-linear",
        }
        reference = LoRARef(lora_id=NAME, lora_name=NAME, lora_path=NAME, pinned=False)
        result = self.manager.load_lora_adapter_from_tensors(reference, {}, config)
        if not result.success:
            raise RuntimeError(f"SGLang cannot serve an adapter: {result.error_message}")
        runner.model.load_weights = self.loader(runner.model.load_weights)

    def loader(self, original: Callable[[Named], Any]) -> Callable[[Named], Any]:
        """Wrap a model's `load_weights`: an update brings the adapter or the model's weights."""

        def load_weights(named: Named) -> Any:
            tensors = iter(named)
            first = next(tensors, None)
            if first is None:
                return None
            if first[0].startswith(PREFIX):
                return self.load(chain([first], tensors))
            return original(chain([first], tensors))

        return load_weights

    def load(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take a bucket of tensors, which holds whole layers, and compute with them from now on."""
        tell_once("an adapter's tensors are loaded in place")
        for name, tensor in named:
            # The bucket's memory is used again. All ranks get whole tensors and cut their part.
            self.tensors[name] = tensor.to(
                device=self.manager.device, dtype=self.manager.dtype, copy=True
            )
        check_joined(self.tensors)
        adapter = self.manager.loras[NAME] = self.assembled()
        pool = self.manager.memory_pool
        slot = pool.uid_to_buffer_id.get(NAME)
        if slot is None:  # SGLang fills a slot when the first request comes
            return
        pool.load_lora_weight_to_buffer(
            NAME,
            slot,
            adapter,
            self.manager.lora_modules,
            self.manager.embed_tokens_module,
            self.manager.lm_head_module,
        )
        # SGLang before 0.5.21 keeps nothing that is derived from a slot.
        if hasattr(self.manager, "_notify_lora_slots_updated"):
            self.manager._notify_lora_slots_updated({slot})

    def assembled(self) -> Any:
        """Return the tensors that have come as SGLang has them: those of joined layers joined."""
        from sglang.srt.layers.utils import get_layer_id

        old = self.manager.loras[NAME]
        adapter = type(old)(
            NAME,
            old.config,
            old.base_hf_config,
            old.load_config,
            old.lora_backend,
            base_model=self.manager.base_model,
        )
        for name, tensor in self.tensors.items():
            adapter.layers[get_layer_id(name)].weights[name] = tensor
        adapter._normalize_weights()
        adapter.scaling = self.scaling
        return adapter


def check_joined(names: Iterable[str]) -> None:
    """Raise ValueError if an adapter lacks layers that SGLang needs with others."""
    layers = {name.split(".")[-3] for name in names}
    for layer, companion in _JOINED:
        if layer in layers and companion not in layers:
            raise ValueError(
                f"SGLang joins q_proj, k_proj and v_proj: an adapter of {layer} needs one of "
                f"{companion}. Add it to trainer.lora.targetModules, or set weightSync.lora: merged"
            )


class Unpinned:
    """torch for a module that asks for pinned memory, which a CPU without a GPU does not have."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return found

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = found(*args, **kwargs)
            return tensor

        return unpinned


def allow_unpinned_memory() -> None:
    """Let SGLang's LoRA run on a CPU, where torch refuses to pin memory."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = Unpinned()
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
