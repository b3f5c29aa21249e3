"""Weights come into vLLM's workers: over a communicator, out of the trainer's memory, from a disk.

vLLM changes weights once they are loaded: it packs them for the CPU's kernels, quantizes them, puts
experts in another order. So an update goes through its layerwise reload: `begin` gives each layer
the tensors of a checkpoint again, which are loaded and processed as soon as they are complete, and
copied to where the layer had its own.
"""

import base64
import io
import pickle
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)
from torch.multiprocessing import reductions

from .transfer import receive, release, unpack, without_watchdog

_DEVICE = 6
"""Index of the device among the arguments of `rebuild_cuda_tensor`: from our trainer a uuid."""
_groups: dict[str, Any] = {}
"""By their names: at most one, as an engine has one sender at a time."""


class Weights:
    """Methods of vLLM's worker, which `collective_rpc` calls on all ranks; `self` is the worker."""

    vllm_config: Any
    model_runner: Any
    device: Any
    rank: int

    def sluice_state(self) -> dict[str, Any]:
        """Facts of the engine that a trainer has to know."""
        return {"sleeps": bool(self.vllm_config.model_config.enable_sleep_mode)}

    def sluice_join(
        self, group: str, host: str, port: int, world_size: int, backend: str, seconds: float
    ) -> None:
        """Join a communicator with a trainer, whose rank is 0, in place of any older one."""
        older = list(_groups)
        _groups[group] = join(group, host, port, 1 + self.rank, world_size, backend, seconds)
        for name in older:
            release(_groups.pop(name))

    def sluice_begin(self) -> None:
        """Open an update. An open one was left by a trainer that has died, and is forgotten."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            begin(self.model_runner.get_model())

    def sluice_receive(self, group: str, names: Any, dtypes: Any, shapes: Any) -> None:
        """Take part in the broadcast of one bucket, and load it."""
        if group not in _groups:
            raise ValueError(f"the engine is not in the communicator {group}")
        self.sluice_take(receive(names, dtypes, shapes, _groups[group], self.device))

    def sluice_open(self, handles: list[str]) -> None:
        """Load a bucket out of the trainer's memory. handles: one for each rank."""
        bucket = _Unpickler(io.BytesIO(base64.b64decode(handles[self.rank]))).load()
        meta = bucket["metadata"]
        tensors = unpack(
            bucket["flattened_tensor"],
            [m.name for m in meta],
            [m.dtype for m in meta],
            [m.shape for m in meta],
        )
        # A layer that is not complete keeps what it has until the next bucket: this is gone then.
        self.sluice_take([(name, tensor.clone()) for name, tensor in tensors])
        _wait(self.device)

    def sluice_take(self, tensors: Any) -> None:
        """Load tensors by their names in a checkpoint."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(tensors)

    def sluice_end(self) -> None:
        """Close the update: what layers have not had all of their tensors for is processed now."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            end(self.model_runner.get_model(), self.vllm_config.model_config)
        _wait(self.device)

    def sluice_load(self, path: str) -> None:
        """Load a checkpoint. Every file is opened before any weight is touched."""
        from safetensors import safe_open

        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            raise ValueError(f"{path}: expected a directory with *.safetensors")
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
            self.sluice_begin()
            names = [(name, file) for file in opened for name in [*file.keys()]]
            self.sluice_take((name, file.get_tensor(name)) for name, file in names)
            self.sluice_end()


def join(
    group: str, host: str, port: int, rank: int, world_size: int, backend: str, seconds: float
) -> Any:
    """A process group outside of torch's default one, as the trainer makes its side of it."""
    timeout = timedelta(seconds=seconds)
    store = PrefixStore(group, TCPStore(host, port, world_size, False, timeout))
    name: Any = group  # a type of its own in newer torch, a string for all that it does
    with without_watchdog():
        process_group, _ = _new_process_group_helper(
            world_size, rank, [], Backend(backend), store, group_name=name, timeout=timeout
        )
    _world.pg_group_ranks[process_group] = {r: r for r in range(world_size)}
    return process_group


def begin(model: Any) -> None:
    """Layers take the tensors of a checkpoint, from the first on."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # in the middle of an update that nobody ends
            info.loaded_weights.clear()
            info.load_numel = 0
    initialize_layerwise_reload(model)


def end(model: Any, model_config: Any) -> None:
    """Layers have their weights as their kernels want them.

    An output layer that shares the embedding's weights gets none of its own. vLLM leaves it alone
    then, with what it has packed of the old ones for the CPU's kernels.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = [(layer, get_layerwise_info(layer)) for layer in model.modules()]
    sharing = [
        layer
        for layer, info in infos
        if hasattr(layer, "cpu_linear") and info.can_load() and not info.load_numel
    ]
    finalize_layerwise_reload(model, model_config)
    for layer in sharing:
        layer.quant_method.process_weights_after_loading(layer)


def _wait(device: Any) -> None:
    """Until the GPU has done what it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class _Unpickler(pickle.Unpickler):
    """Opens a handle of the trainer's, and nothing else. A GPU is named by its uuid there."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"a bucket has no {module}.{name}")


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """torch's, for a device that is named by its uuid."""
    uuid = arguments[_DEVICE]
    devices = range(torch.cuda.device_count())
    device = next(i for i in devices if str(torch.cuda.get_device_properties(i).uuid) == uuid)
    rebuild: Any = reductions.rebuild_cuda_tensor
    tensor: torch.Tensor = rebuild(*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])
    return tensor


_KNOWN: dict[tuple[str, str], Any] = {
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("torch", "Size"): torch.Size,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    ("torch.storage", "TypedStorage"): torch.TypedStorage,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): (
        reductions.rebuild_storage_filename
    ),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _rebuild_cuda_tensor,
}
