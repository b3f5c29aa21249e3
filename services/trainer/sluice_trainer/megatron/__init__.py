"""Megatron-core backend, through Megatron's public layer spec."""

import importlib
import sys
import warnings

import torch

from sluice_trainer.kernels.compiled import COMPILED

# Megatron warns at import that TransformerEngine and Apex are missing; this backend does not need
# them.
warnings.filterwarnings("ignore", module=r"megatron\.core")
# Megatron calls collectives by names that newer torch has deprecated.
warnings.filterwarnings("ignore", message=r".*is deprecated. Please use", category=FutureWarning)


def _import_plainly() -> None:
    """Import Megatron without torch.compile and wandb, which would cost its import two seconds.

    On this device functions are never compiled, and Megatron's timers for wandb are not used.
    """
    compile_function, wandb = torch.compile, sys.modules.get("wandb")
    torch.compile = lambda function: function  # type: ignore[assignment]
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compile_function
        del sys.modules["wandb"]
        if wandb is not None:
            sys.modules["wandb"] = wandb


if not COMPILED and "megatron.core" not in sys.modules:
    _import_plainly()
