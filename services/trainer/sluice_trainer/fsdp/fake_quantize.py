"""Quantization-aware training: a forward pass with weights as quantized engines have them.

Weights are quantized and dequantized on their way into each matrix product, as the trainer does for
an update (`rollout.precision`), and keep their precision in between. The gradient passes unchanged
(straight-through estimator, Bengio et al. 2013, arXiv:1308.3432).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, autograd, nn
from torch.nn import functional

from sluice.engines.plugin_common.precision import is_quantized
from sluice_trainer.fsdp.export import exported_names
from sluice_trainer.model.quantize import rounded
from sluice_trainer.model.unsupported import UnsupportedModelError


class _StraightThrough(autograd.Function):
    """Rounds in the forward pass, and nothing in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, precision: str) -> Tensor:
        return rounded(weight, precision)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def fake_quantized(weight: Tensor, precision: str) -> Tensor:
    """Return the weights that a quantized engine computes with; the gradient is that of `weight`.

    Parameters
    ----------
    weight
        [rows, columns], or [experts, rows, columns].
    precision
        `fp8`, `fp8_block` or `int8`.

    """
    result: Tensor = _StraightThrough.apply(weight, precision)  # type: ignore[no-untyped-call]
    return result


def fake_quantize(model: Any, precision: str) -> None:
    """Let each layer of `model` that engines have quantized compute with such weights.

    Raises
    ------
    UnsupportedModelError
        An update would quantize a tensor that no such layer has.

    """
    prefixes = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_quantized(f"{name}.weight"):
            module.forward = partial(_linear, module, precision)  # type: ignore[method-assign]
            prefixes.append(f"{name}.weight")
        elif stacks := list(_stacks(name, module)):
            module.forward = partial(_with_stacks, module, stacks, precision, module.forward)
            prefixes.append(f"{name}.")
    quantized = filter(is_quantized, exported_names(model))
    if left := sorted(name for name in quantized if not name.startswith(tuple(prefixes))):
        raise UnsupportedModelError(
            f"trainer.fakeQuantize does not reach {left[0]}, which transformers keeps in another "
            "form: leave trainer.fakeQuantize out"
        )


def _linear(module: nn.Linear, precision: str, x: Tensor) -> Tensor:
    return functional.linear(x, fake_quantized(module.weight, precision), module.bias)


def _stacks(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the parameters of a mixture that hold a matrix of all its experts."""
    for parameter, value in module.named_parameters(recurse=False):
        if value.dim() == 3 and is_quantized(f"{name}.{parameter}.weight"):
            yield parameter


def _with_stacks(
    module: nn.Module,
    names: list[str],
    precision: str,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute with attributes that hide the parameters of the same names."""
    own = vars(module)
    own.update({name: fake_quantized(getattr(module, name), precision) for name in names})
    try:
        return forward(*args, **kwargs)
    finally:
        for name in names:
            del own[name]
