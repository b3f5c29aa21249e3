"""An engine on a CPU keeps the experts of its tokens in ordinary memory.

SGLang registers that memory with CUDA, whatever device it runs on, and a CPU engine has no CUDA.
"""

import os
from typing import Any

REGISTER = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def register() -> None:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(REGISTER, leave, HookType.AROUND)


def leave(original: Any, *_: Any, **__: Any) -> None:
    """Replace SGLang's function, and register no memory."""
