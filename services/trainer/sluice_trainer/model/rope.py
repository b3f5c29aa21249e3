"""Rotary position embedding: the frequencies of channel pairs under the scalings of checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading a config.json must not import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary position embedding.

    `kind` is `default`, `linear`, `llama3` or `yarn`. The other fields are the parameters of the
    scaling, under the names of its paper.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # yarn multiplies queries and keys by it after the rotation.
    attention_factor: float = 1.0

    def inverse_frequencies(self, dim: int) -> Tensor:
        """Return the radians per position of each pair of channels.

        [dim / 2] float32, on the CPU, as transformers computes it.
        """
        import torch

        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        waves = self.theta**exponents
        match self.kind:
            case "linear":
                return 1.0 / waves / self.factor
            case "llama3":
                return self._llama3(1.0 / waves)
            case "yarn":
                return self._yarn(waves, dim)
            case _:
                return 1.0 / waves

    def _llama3(self, inverse: Tensor) -> Tensor:
        """Scale as Llama 3.1: stretch long waves, keep short ones, interpolate between."""
        import torch

        wavelength = 2 * math.pi / inverse
        longest = self.original_max_positions / self.low_freq_factor
        shortest = self.original_max_positions / self.high_freq_factor
        smooth = (self.original_max_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        stretched = torch.where(wavelength > longest, inverse / self.factor, inverse)
        between = (wavelength <= longest) & (wavelength >= shortest)
        return torch.where(
            between, (1 - smooth) * stretched / self.factor + smooth * stretched, stretched
        )

    def _yarn(self, waves: Tensor, dim: int) -> Tensor:
        """Scale as YaRN (Peng et al. 2023): stretch channels that turn rarely, keep the others."""
        import torch

        def channel(turns: float) -> float:
            """Return the channel that makes this many turns over the original context."""
            return (
                dim
                * math.log(self.original_max_positions / (turns * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001
        kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return 1.0 / (self.factor * waves) * (1 - kept) + 1.0 / waves * kept


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's correction of attention for a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
