"""Kernels for the passes over memory that cost a training step most, in Triton.

torch.compile makes each of them too, but with sizes that are known at run time alone they took
three to five times what reading and writing their tensors takes. Nothing here is needed: where
there is no Triton, the same functions run one operation at a time.
"""

from types import ModuleType


def in_triton() -> ModuleType:
    """The kernels, imported when they are first needed: a trainer on a CPU may have no Triton."""
    from sluice_trainer.kernels import triton_kernels

    return triton_kernels
