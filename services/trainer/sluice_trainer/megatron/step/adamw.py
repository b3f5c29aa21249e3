"""AdamW with moments in bf16 or float32, and torch's float32 arithmetic.

bf16 resolves differences of 0.4 %. A mean of squares that falls by 0.1 % a step would never fall:
the nearest number is always the old one. So a moment is rounded to one of its two neighbours, to
the nearer one more often, and is correct on average (stochastic rounding; Zamirai et al.,
"Revisiting BFloat16 Training", 2020). DeepSeek-V3 was trained with both moments in bf16 (its
report, 3.3.2). Megatron's implementation needs TransformerEngine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from sluice_trainer.kernels import compact_adamw
from sluice_trainer.kernels.compiled import COMPILED

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements that are updated at once: 64 MiB in float32.
PIECE = 2**24
# 2^32 divided by the golden ratio, and an odd number: multiples of both, modulo 2^32, are evenly
# distributed.
_GOLDEN, _STEP = -1640531535, 40503


def pieces(elements: int) -> Iterator[slice]:
    """Yield the slices of the pieces of so many elements."""
    return (slice(*cut) for cut in pairwise([*range(0, elements, PIECE), elements]))


def first_state(share: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Return Adam's state before the first step, on the device of the weights.

    group: the parameter group, whose `exp_avg_dtype` and `exp_avg_sq_dtype` are the types of the
    moments.
    """
    kinds = {name: group.get(f"{name}_dtype", torch.float32) for name in MOMENTS}
    moments = {name: torch.zeros_like(share, dtype=kind) for name, kind in kinds.items()}
    return {"step": torch.tensor(0.0), **moments}


def update(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    group: dict[str, Any],
) -> None:
    """Take one step of some elements, [n] each, in place. step: number of steps taken before."""
    stored = (exp_avg, exp_avg_sq)
    first, second = (moment.float() for moment in stored)  # a copy if stored in bf16
    beta1, beta2 = group["betas"]
    adamw(
        [weights],
        [gradient],
        [first],
        [second],
        [],
        [torch.full((), step, device=weights.device)],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for moment, exact in zip(stored, (first, second), strict=True):
        if exact is not moment:
            moment.copy_(rounded(exact, int(step)))


def rounded(exact: Tensor, step: int) -> Tensor:
    """Round [n] float32 values to bf16 values, each to one of its two neighbours.

    The 16 lower bits are compared with a threshold that differs by position and step and takes all
    values equally often. That needs no random generator, and a resume reproduces it.
    """
    # The sum carries into the upper 16 bits with the probability that the lower bits, as a
    # fraction, state; the mask then cuts the lower bits off.
    thresholds = ((_places(exact.device)[: len(exact)] + _offset(step)) >> 16) & 0xFFFF
    return ((exact.view(torch.int32) + thresholds) & -0x10000).view(torch.float32)


def _offset(step: int) -> int:
    return (((step * _STEP) << 16) + 2**31) % 2**32 - 2**31


@functools.cache
def _places(device: torch.device) -> Tensor:
    return torch.arange(PIECE, dtype=torch.int32, device=device) * _GOLDEN


class CompactAdamW(torch.optim.AdamW):
    """torch's AdamW with moments as `first_state` creates them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient, [n] each."""
        assert closure is None
        for group in self.param_groups:
            for share in group["params"]:
                if share.grad is None:
                    continue
                state = self.state[share] or first_state(share, group)
                self.state[share] = state
                self._update(share, share.grad, state, group)
                state["step"] += 1

    def _update(
        self, share: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        first, second, step = *(state[name] for name in MOMENTS), state["step"].item()
        if COMPILED and share.is_cuda:
            numbers = {"piece": PIECE, "golden": _GOLDEN, "offset": _offset(int(step))}
            compact_adamw.update(share, gradient, (first, second), int(step), group, **numbers)
            return
        for place in pieces(len(share)):
            tensors = share[place], gradient[place], first[place], second[place]
            update(*tensors, step, group)
