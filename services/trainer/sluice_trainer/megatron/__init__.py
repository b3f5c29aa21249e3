"""Megatron-core, through its public layer spec."""

import importlib
import sys
import warnings

import torch

from sluice_trainer.kernels.compiled import COMPILED

# At each import Megatron says that TransformerEngine and apex are not there. They are not needed
# here.
warnings.filterwarnings("ignore", module=r"megatron\.core")
# Megatron calls collectives by names that newer torch has renamed.
warnings.filterwarnings("ignore", message=r".*is deprecated. Please use", category=FutureWarning)


def _import_plainly() -> None:
    """Import Megatron without what its import alone costs two seconds for: a compiler for functions
    that we never compile on this device, and wandb, whose timers are not ours.
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
