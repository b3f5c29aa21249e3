"""Where compilers of kernels keep what they have made."""

from __future__ import annotations


def caches(directory: str) -> dict[str, str]:
    """Variables of Triton, torch.compile, FlashAttention 4 and CUDA, which engines and trainers
    have in common. Each names what it keeps by a hash of the source and of its own release, so
    processes may share.
    """
    return {
        "TRITON_CACHE_DIR": f"{directory}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{directory}/flash-attention",
        "CUDA_CACHE_PATH": f"{directory}/cuda",
    }
