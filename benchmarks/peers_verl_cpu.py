"""A CPU as one of verl's platforms, which verl finds by VERL_USE_EXTERNAL_MODULES and
VERL_PLATFORM. verl has CUDA, ROCm and NPU ones itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.multiprocessing import reductions
from verl.plugin.platform import PlatformBase, PlatformRegistry

# Weights go to the engine as handles; those of other strategies need a parent in common.
torch.multiprocessing.set_sharing_strategy("file_system")
# SGLang would put the device of a tensor into its handle, once for each process: that of a CPU's
# tensor has no place for one.
vars(reductions)["_reduce_tensor_original"] = reductions.reduce_tensor


def _each_device_once(init: Callable[..., None]) -> Callable[..., None]:
    """verl names the CPU's backend and the device's: torch refuses the same device twice."""

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        init(backend and ",".join(dict.fromkeys(backend.split(","))), **options)

    return init_process_group


torch.distributed.init_process_group = _each_device_once(torch.distributed.init_process_group)


class Device(ModuleType):
    """torch.cpu, with what verl asks of torch.cuda beside it: a memory without figures, and the
    random numbers' state.
    """

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False  # one whose caches could be emptied

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def memory_allocated(self, *_: Any) -> int:
        return 0

    def empty_cache(self) -> None:
        pass

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        return Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # a made-up one: ray counts what it is told that there is

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
