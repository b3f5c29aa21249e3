"""AdamW for verl's actor, told to it by `optim.optimizer_impl`: torch's, with the learning rate of
each step and without decay of norms and biases, as in the systems that it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class AdamW(torch.optim.AdamW):
    """rates: of the steps, in their order; the last one stays."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        rates: list[float],
        weight_decay: float,
        **options: Any,
    ) -> None:
        weights = list(params)
        groups = [
            {
                "params": [weight for weight in weights if weight.ndim > 1],
                "weight_decay": weight_decay,
            },
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ]
        super().__init__([group for group in groups if group["params"]], **options)
        self._rates, self._steps = rates, 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = self._rates[min(self._steps, len(self._rates) - 1)]
        self._steps += 1
        return super().step(closure)
