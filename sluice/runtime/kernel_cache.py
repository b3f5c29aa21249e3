"""Directories in which compilers keep the kernels that they have made.

Engines' plugins contain this file too, so it imports the standard library only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping

# Names the directory that contains all others.
VARIABLE = "SLUICE_KERNEL_CACHE"


def caches(directory: str) -> dict[str, str]:
    """Return variables of Triton, torch.compile, FlashAttention 4 and CUDA.

    Each cache names its entries by a hash of the source and of the compiler's release, so processes
    may share it.
    """
    return {
        VARIABLE: directory,
        "TRITON_CACHE_DIR": f"{directory}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{directory}/flash-attention",
        "CUDA_CACHE_PATH": f"{directory}/cuda",
    }


def leave_unwritable(environ: MutableMapping[str, str] = os.environ) -> str:
    """Remove variables whose directories cannot be written, and return a warning about them.

    A compiler would end the process there; without the variable, kernels are only compiled again.
    Empty if all can be written.
    """
    root, refusals = environ.get(VARIABLE), list[str]()
    for name, directory in list(environ.items()) if root else []:
        if name == VARIABLE or not f"{directory}/".startswith(f"{root}/"):
            continue
        try:
            os.makedirs(directory, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=directory) as file:
                file.write(b"0" * 4096)
        except OSError as error:
            refusals.append(str(error))
            del environ[name]
    if not refusals:
        return ""
    return (
        f"kernelCache: this pod compiles its kernels again, because user {os.getuid()} cannot "
        f"write to the volume ({refusals[0]}). The directory of a hostPath or an NFS export has to "
        "belong to that user or be writable by everyone (chmod 1777); other volumes get the right "
        "group"
    )
