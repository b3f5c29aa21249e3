"""Serves a LoRA adapter whose tensors come with weight updates, and applies it to all requests.

SGLang's own calls load an adapter from files, or from tensors that one process of an engine can
open, and only under a new name. Here an update brings the adapter's tensors in buckets, as it
brings all weights of a model otherwise, and they replace those of the update before in place. So
pauses, versions, chains and replaced trainers work as with all weights. The engine reads the model
itself from its checkpoint.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from .. import tell_once
from .adapter_copies import Copies

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
REQUEST = "sglang.srt.managers.schedule_batch.Req"
# The adapter's name inside SGLang. No request names it: the scheduler gives it to all. Several
# versions are called sluice@3, sluice@4.
NAME = "sluice"
# PEFT's prefix of the names of an adapter's tensors.
PREFIX = "base_model.model."
# Layers whose adapters SGLang joins. If one of the first has an adapter, so must the second.
_JOINED = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj"))
log = logging.getLogger(__name__)
Named = Iterable[tuple[str, torch.Tensor]]


def register() -> None:
    settings = os.environ.get("SLUICE_LORA")
    if not settings:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    adapter = Adapter(**json.loads(settings))
    HookRegistry.register(f"{MANAGER}.init_lora_shapes", linear_layers_only, HookType.AFTER)
    HookRegistry.register(f"{RUNNER}.init_lora_manager", adapter.attach, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.handle_generate_request", adapter.use, HookType.BEFORE)
    if adapter.versions:
        HookRegistry.register(f"{UPDATER}.update_weights_from_distributed", adapter.updated)
        HookRegistry.register(f"{SCHEDULER}.pause_generation", go_on, HookType.AROUND)
        HookRegistry.register(f"{REQUEST}.__init__", pin_version)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        allow_unpinned_memory()


def linear_layers_only(_: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Make no room for adapters that a trainer does not have, which SGLang's `all` includes.

    They are those of the embedding, of the output layer and, in a mixture, of the experts.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    manager.target_modules -= {"embed_tokens", "lm_head"}
    if any(isinstance(module, FusedMoE) for module in manager.base_model.modules()):
        manager.target_modules -= {"gate_up_proj", "down_proj"}


def go_on(original: Any, scheduler: Any, request: Any) -> None:
    """Let running requests go on in the pause of an update, which adds a version.

    The HTTP process, which gets the request first, holds back new requests until the update ends.
    """
    if request.mode != "in_place":
        original(scheduler, request)


def pin_version(_: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Note that all tokens of a request come from the version of its adapter.

    SGLang notes how many tokens a request had when the version changed. Before 0.5.21 it does not:
    see versions.py.
    """
    version = version_of(request)
    if version is None or not hasattr(request, "weight_version_events"):
        return
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    whole = WeightVersionEvent(old_version=version, num_output_tokens=sys.maxsize)
    request.weight_version_events = [whole]


def version_of(request: Any) -> str | None:
    """Return the weight version of a request that keeps it; None for other requests."""
    _, _, version = (request.lora_id or "").partition("@")
    return version or None


class Adapter:
    """The adapter of one rank of the engine.

    Parameters
    ----------
    rank
        Rows of every A.
    scaling
        Factor of B A. SGLang itself computes it as alpha / rank, without rsLoRA.
    versions
        Number of versions to hold at least; 0: an update changes the only one in place.

    """

    def __init__(self, rank: int, scaling: float, versions: int = 0) -> None:
        self.rank, self.scaling, self.versions = rank, scaling, versions
        self.manager: Any = None
        # All tensors that have come, by PEFT's names.
        self.tensors: dict[str, torch.Tensor] = {}
        # Their places in SGLang's memory, once these are known.
        self.copies: Copies | None = None
        # Names of the adapters that SGLang holds, the newest last.
        self.held = [NAME]

    def attach(self, _: Any, runner: Any) -> None:
        """Make an adapter that changes nothing yet, and take later ones from `load_weights`."""
        self.manager = runner.lora_manager
        # Otherwise SGLang leaves out layers that it does not adapt, with a line in the log.
        self.manager.memory_pool.strict_loading = True
        self.add(NAME)
        if not self.versions:
            # Otherwise the first request would wait until the adapter is loaded.
            self.manager.fetch_new_loras({NAME})
        runner.model.load_weights = self.loader(runner.model.load_weights)

    def add(self, name: str) -> None:
        """Give SGLang an adapter without tensors, which changes nothing."""
        from sglang.srt.lora.lora_registry import LoRARef

        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.scaling * self.rank,
            "target_modules": "all-linear",
        }
        reference = LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=False)
        result = self.manager.load_lora_adapter_from_tensors(reference, {}, config)
        if not result.success:
            raise RuntimeError(f"SGLang cannot serve an adapter: {result.error_message}")

    def use(self, scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
        """Let a request use the newest adapter, whoever sends it."""
        request.lora_id = self.held[-1]

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
        """Take a bucket of tensors, which holds whole layers."""
        bucket = dict(named)
        if self._copied(bucket):
            return
        for name, tensor in bucket.items():
            # The bucket's memory is used again. All ranks get whole tensors and cut their part.
            self.tensors[name] = tensor.to(
                device=self.manager.device, dtype=self.manager.dtype, copy=True
            )
        check_joined(self.tensors)
        if not self.versions:
            self.replace()

    def _copied(self, bucket: dict[str, torch.Tensor]) -> bool:
        """Copy a bucket to its places in SGLang's memory; return False if they are not known."""
        copies = self.copies
        if copies is None or self.slot != copies.slot or not bucket.keys() <= self.tensors.keys():
            return False
        kept = {name: self.tensors[name] for name in bucket}
        torch._foreach_copy_(list(kept.values()), list(bucket.values()))
        copies.copy(kept)
        self._notify()
        return True

    @property
    def slot(self) -> int | None:
        """Number of the adapter's slot in SGLang's memory; None if SGLang has given it away."""
        slot: int | None = self.manager.memory_pool.uid_to_buffer_id.get(NAME)
        return slot

    def replace(self) -> None:
        """Compute with the tensors that have come from now on."""
        adapter = self.manager.loras[NAME] = self.assembled(NAME)
        slot = self.slot
        if slot is None:  # the next request takes one, and loads the adapter into it
            return
        self.manager.memory_pool.load_lora_weight_to_buffer(
            NAME,
            slot,
            adapter,
            self.manager.lora_modules,
            self.manager.embed_tokens_module,
            self.manager.lm_head_module,
        )
        self._notify()
        self.copies = self._checked_copies(slot)
        how = "at once" if self.copies else "one by one"
        tell_once(f"an adapter's tensors are loaded in place, {how}")

    def _notify(self) -> None:
        # SGLang before 0.5.21 keeps nothing that is derived from a slot.
        if hasattr(self.manager, "_notify_lora_slots_updated"):
            self.manager._notify_lora_slots_updated({self.slot})

    def _checked_copies(self, slot: int) -> Copies | None:
        """Return the places of the tensors that have come; None unless SGLang uses the same."""
        if self.manager.memory_pool.max_loras_per_batch < 2:  # SGLang may fill the slot itself
            return None
        try:
            copies = Copies(self.manager, self.tensors, slot)
        except (AttributeError, IndexError, KeyError, RuntimeError) as error:
            log.warning("this SGLang has adapters in unknown places: %r", error)
            return None
        return copies if copies.agree(self.tensors) else None

    def updated(self, result: Any, updater: Any, request: Any) -> None:
        """Make an adapter of the tensors that have come, if this was an update's last bucket."""
        version = request.weight_version
        if not result.success or version is None:
            return
        tell_once("each version of the adapter is held until no request uses it")
        name = f"{NAME}@{version}"
        if name in self.held:  # a trainer that was replaced had sent it
            self.held.remove(name)
            self.remove(name)
        self.add(name)
        self.manager.loras[name] = self.assembled(name)
        self.held.append(name)
        used = names_in_use(updater.scheduler)
        for old in self.held[: -self.versions]:
            if old not in used:
                self.held.remove(old)
                self.remove(old)

    def remove(self, name: str) -> None:
        self.manager.unload_lora_adapter(self.manager.lora_refs[name])

    def assembled(self, name: str) -> Any:
        """Return the tensors that have come as SGLang has them: those of joined layers joined."""
        from sglang.srt.layers.utils import get_layer_id

        old = self.manager.loras[name]
        adapter = type(old)(
            name,
            old.config,
            old.base_hf_config,
            old.load_config,
            old.lora_backend,
            base_model=self.manager.base_model,
        )
        for tensor_name, tensor in self.tensors.items():
            adapter.layers[get_layer_id(tensor_name)].weights[tensor_name] = tensor
        adapter._normalize_weights()
        adapter.scaling = self.scaling
        return adapter


def names_in_use(scheduler: Any) -> set[str | None]:
    """Return the adapters of all requests that the scheduler has."""
    batches = [scheduler.running_batch, scheduler.last_batch]
    requests = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    requests += [request for batch in batches if batch is not None for request in batch.reqs]
    if scheduler.chunked_req is not None:
        requests.append(scheduler.chunked_req)
    return {request.lora_id for request in requests}


def check_joined(names: Iterable[str]) -> None:
    """Raise ValueError if an adapter lacks layers that SGLang needs with others."""
    layers = {name.split(".")[-3] for name in names}
    for layer, companion in _JOINED:
        if layer in layers and companion not in layers:
            raise ValueError(
                f"SGLang joins q_proj, k_proj and v_proj: an adapter of {layer} needs one of "
                f"{companion}: add it to trainer.lora.targetModules"
            )


class Unpinned:
    """torch for a module that asks for pinned memory, which a CPU without a GPU does not have."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return attribute

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = attribute(*args, **kwargs)
            return tensor

        return unpinned


def allow_unpinned_memory() -> None:
    """Let SGLang's LoRA run on a CPU, where torch refuses to pin memory."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = Unpinned()
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
