"""Where compilers of kernels keep what they have made.

Engines' plugins have this file too: it imports the standard library alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping

VARIABLE = "SLUICE_KERNEL_CACHE"
"""Names the directory below which all others are."""


def caches(directory: str) -> dict[str, str]:
    """Variables of Triton, torch.compile, FlashAttention 4 and CUDA, which engines and trainers
    have in common. Each names what it keeps by a hash of the source and of its own release, so
    processes may share.
    """
    return {
        VARIABLE: directory,
        "TRITON_CACHE_DIR": f"{directory}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{directory}/flash-attention",
        "CUDA_CACHE_PATH": f"{directory}/cuda",
    }


def leave_unwritable(environ: MutableMapping[str, str] = os.environ) -> str:
    """Take variables back whose directories cannot be written: a compiler would end the process
    there, where without it kernels are only compiled once more. What to tell of it, or nothing.
    """
    root, refusals = environ.get(VARIABLE), list[str]()
    for name, place in list(environ.items()) if root else []:
        if name == VARIABLE or not f"{place}/".startswith(f"{root}/"):
            continue
        try:
            os.makedirs(place, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=place) as file:
                file.write(b"0" * 4096)
        except OSError as error:
            refusals.append(str(error))
            del environ[name]
    if not refusals:
        return ""
    return (
        f"kernelCache: kernels are compiled anew in this pod, user {os.getuid()} cannot write them "
        f"to its volume ({refusals[0]}). Of a hostPath or an NFS export the directory has to be "
        "that user's, or anybody's (chmod 1777); other volumes get its group by themselves"
    )
