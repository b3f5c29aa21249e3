"""PiSSA (Meng et al. 2024): an adapter that starts as the principal part of each weight.

The paper takes that part out of the weight: W - s B0 A0 + s B A, with s = alpha / rank. Here W
stays as it is and the part is taken off in a second branch, W + s (B A - B0 A0), which computes the
same. The base of the policy, the reference and the engines is thus the checkpoint, unchanged. Files
and engines hold the difference as one adapter of twice the rank, [A; A0] and [B, -B0], as PEFT
converts it (`path_initial_model_for_weight_conversion`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sluice.api.groups.lora import Lora
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.lora.initial import seed_of

if TYPE_CHECKING:
    from peft import LoraConfig

_A = ".lora_A.weight"


@torch.no_grad()
def principal_part(weight: Tensor, module: str, settings: Lora, seed: int) -> tuple[Tensor, Tensor]:
    """Return A0 and B0, of which s B0 A0 is the best approximation of a weight by its rank.

    Each has the square roots of the largest singular values, as in PEFT.

    Parameters
    ----------
    weight
        [out, in].
    module
        Name of the adapted layer in the transformers model.
    settings
        `trainer.lora`, with `initialise: pissa` or `pissa_niter_N`.
    seed
        Seed of the run, from which the approximate decomposition draws.

    Returns
    -------
    [rank, in] and [out, rank] float32 on the CPU.

    """
    matrix, rank = weight.detach().to(DEVICE, torch.float32), settings.rank
    if settings.pissa_iterations is None:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        with torch.random.fork_rng([matrix.device] if matrix.is_cuda else []):
            torch.manual_seed(seed_of(module, seed))
            left, values, columns = torch.svd_lowrank(
                matrix, min(rank, *matrix.shape), niter=settings.pissa_iterations
            )
        right = columns.T
    roots = (values[:rank] / settings.scaling).sqrt()
    # A rank above that of the weight leaves rows and columns of zeros.
    a, b = torch.zeros(rank, matrix.shape[1]), torch.zeros(matrix.shape[0], rank)
    a[: len(roots)] = (roots[:, None] * right[:rank]).cpu()
    b[:, : len(roots)] = (left[:, :rank] * roots).cpu()
    return a, b


def joined(trained: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one adapter that computes what both compute together.

    initial: A0 and -B0 by the names of the trained tensors that they belong to.
    """
    return {
        name: torch.cat((tensor, initial[name]), _dim(name)) if name in initial else tensor
        for name, tensor in trained.items()
    }


def separated(
    tensors: Mapping[str, Tensor], initial: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what `joined` has joined: the trained tensors and the initial ones."""
    halves = {name: tensors[name].chunk(2, _dim(name)) for name in initial}
    trained = {name: halves[name][0] if name in halves else t for name, t in tensors.items()}
    return trained, {name: half for name, (_, half) in halves.items()}


def joined_shapes(
    trained: Mapping[str, tuple[int, ...]], initial: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `joined` returns."""
    return {
        name: tuple(
            size * (1 + (name in initial and dim == _dim(name))) for dim, size in enumerate(shape)
        )
        for name, shape in trained.items()
    }


def joined_config(config: LoraConfig) -> LoraConfig:
    """Return PEFT's configuration of an adapter of twice the rank that has the same factor."""
    factor = math.sqrt(2) if config.use_rslora else 2
    alpha = config.lora_alpha * factor
    return replace(config, r=2 * config.r, lora_alpha=alpha)  # type: ignore[arg-type]


def _dim(name: str) -> int:
    """Return the dimension of a tensor that counts the rank."""
    return 0 if name.endswith(_A) else 1
