"""Loads weights into vLLM's workers: from a communicator, the trainer's memory or a disk.

vLLM changes weights after loading: it packs them for the CPU's kernels, quantizes them, reorders
experts. So an update uses its layerwise reload: `begin` lets each layer take the tensors of a
checkpoint again. They are loaded and processed as soon as a layer is complete, and copied into the
layer's existing memory.
"""

import base64
import io
import pickle
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from .adapter_tensors import is_adapter
from .transfer import join, receive, release, unpack
from .worker_adapters import WorkerAdapters

# Index of the device among the arguments of `rebuild_cuda_tensor`. The trainer's handles have a
# uuid there.
_DEVICE = 6
# By name. There is at most one, as an engine has one sender at a time.
_groups: dict[str, Any] = {}
_adapters = WorkerAdapters()


class Weights:
    """Methods that `collective_rpc` calls on all ranks. vLLM adds them to its worker class."""

    vllm_config: Any
    model_runner: Any
    device: Any
    rank: int

    def sluice_state(self) -> dict[str, Any]:
        """Return facts about the engine that a trainer has to know."""
        return {
            "sleeps": bool(self.vllm_config.model_config.enable_sleep_mode),
            "adapters": self.vllm_config.lora_config is not None,
        }

    def sluice_join(
        self, group: str, host: str, port: int, world_size: int, backend: str, seconds: float
    ) -> None:
        """Join a communicator with a trainer, whose rank is 0, in place of any older one."""
        older = list(_groups)
        _groups[group] = join(group, host, port, 1 + self.rank, world_size, backend, seconds)
        for name in older:
            release(_groups.pop(name))

    def sluice_begin(self) -> None:
        """Open an update. Drop one that a dead trainer has left open."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            begin(self.model_runner.get_model())

    def sluice_receive(self, group: str, names: Any, dtypes: Any, shapes: Any) -> None:
        """Take part in the broadcast of one bucket, and load it."""
        if group not in _groups:
            raise ValueError(f"the engine is not in the communicator {group}")
        self.sluice_take(receive(names, dtypes, shapes, _groups[group], self.device))

    def sluice_open(self, handles: list[str]) -> None:
        """Load a bucket from the trainer's memory. `handles` has one for each rank."""
        bucket = _Unpickler(io.BytesIO(base64.b64decode(handles[self.rank]))).load()
        meta = bucket["metadata"]
        tensors = unpack(
            bucket["flattened_tensor"],
            [m.name for m in meta],
            [m.dtype for m in meta],
            [m.shape for m in meta],
        )
        # A layer that is not complete keeps its tensors until the next bucket, when this memory has
        # been reused.
        self.sluice_take([(name, tensor.clone()) for name, tensor in tensors])
        _wait(self.device)

    def sluice_take(self, tensors: Any) -> None:
        """Load tensors by their names in a checkpoint, or keep those of an adapter."""
        if isinstance(tensors, list) and is_adapter([name for name, _ in tensors]):
            _adapters.take(tensors)
            return
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(tensors)

    def sluice_end(self) -> None:
        """Close the update, and process the layers that did not get all of their tensors."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            end(self.model_runner.get_model(), self.vllm_config.model_config)
        _wait(self.device)

    def sluice_load(self, path: str) -> None:
        """Load a checkpoint. Every file is opened before any weight is changed."""
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

    def sluice_load_adapter(self, path: str) -> None:
        """Read the tensors of an adapter from a file."""
        from safetensors.torch import load_file

        tensors = load_file(path)
        _adapters.coming.clear()
        _adapters.take([(name, tensor.to(self.device)) for name, tensor in tensors.items()])

    def sluice_use_adapter(self, number: int, kept: list[int]) -> None:
        """Use the adapter whose tensors have come (adapters.py)."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            _adapters.use(self.model_runner, number, kept)
        _wait(self.device)


def begin(model: Any) -> None:
    """Let layers take the tensors of a checkpoint, from the first on."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # in the middle of an update that will not be ended
            info.loaded_weights.clear()
            info.load_numel = 0
    initialize_layerwise_reload(model)


def end(model: Any, model_config: Any) -> None:
    """Put the weights of layers into the form of their kernels.

    An output layer that shares the embedding's weights gets no tensor. vLLM then skips it and keeps
    what it has packed from the old weights for the CPU's kernels, so it is processed here.
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
    """Wait until the GPU has done all queued work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class _Unpickler(pickle.Unpickler):
    """Opens a handle of the trainer's, and refuses any other type. It names GPUs by uuid."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED_TYPES.get((module, name))
        if allowed is not None:
            return allowed
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"a bucket has no {module}.{name}")


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """Call torch's function for a device that is named by its uuid."""
    uuid = arguments[_DEVICE]
    devices = range(torch.cuda.device_count())
    device = next(i for i in devices if str(torch.cuda.get_device_properties(i).uuid) == uuid)
    rebuild: Any = reductions.rebuild_cuda_tensor
    tensor: torch.Tensor = rebuild(*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])
    return tensor


_ALLOWED_TYPES: dict[tuple[str, str], Any] = {
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
