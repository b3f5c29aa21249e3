"""The device of this process's model, and the precision that it computes in."""

from __future__ import annotations

import torch

# The current GPU, or the CPU if there is no GPU.
DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype(precision: str | None) -> torch.dtype:
    """Return the dtype of `trainer.precision`; None: bf16 on a GPU, float32 on the CPU."""
    precision = precision or ("bf16" if DEVICE.type == "cuda" else "fp32")
    return torch.bfloat16 if precision == "bf16" else torch.float32
