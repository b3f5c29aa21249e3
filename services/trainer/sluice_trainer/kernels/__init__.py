"""Triton kernels for the memory passes that cost a training step most.

torch.compile can generate each of them, but with sizes that are known only at run time its kernels
took three to five times as long as reading and writing their tensors. They are optional: without
Triton the same functions run one operation at a time.
"""

from types import ModuleType


def in_triton() -> ModuleType:
    """Return the module of kernels, imported on first use: a CPU trainer may not have Triton."""
    from sluice_trainer.kernels import triton_kernels

    return triton_kernels
