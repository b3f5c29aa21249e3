"""AdamW with Megatron's distributed optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sluice.api import Optimizer
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.fused_operations import use_fused_clipping
from sluice_trainer.megatron.step.adamw import CompactAdamW
from sluice_trainer.megatron.step.host_optimizer import HostOptimizer
from sluice_trainer.memory.offload import OffloadableMemory


@megatron_device()
def build_optimizer(
    chunks: list[DistributedDataParallel],
    config: TransformerConfig,
    spec: Optimizer,
    *,
    on_host: float = 0.0,
) -> Any:
    """Return Megatron's optimizer over the wrapped chunks, its state sharded over ranks.

    Norms and biases get no weight decay (Megatron's rule). The gradient norm is computed even if
    `clipGrad` is 0, which means no limit.

    Parameters
    ----------
    chunks
        Wrapped chunks of the model.
    config
        Configuration of the model.
    spec
        Settings of the optimizer.
    on_host
        Fraction of the state in host memory.

    """
    use_fused_clipping()
    options = OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.beta1,
        adam_beta2=spec.beta2,
        adam_eps=spec.eps,
        clip_grad=spec.clip_grad or math.inf,
        bf16=config.params_dtype == torch.bfloat16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )
    # Megatron creates the whole state on the device. If most of it cannot stay there, the gradients
    # make room for it.
    room = OffloadableMemory(lambda: gradients(chunks) if on_host else (), preserve=False)
    room.offload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = get_megatron_optimizer(options, chunks)
    _set_adamw_options(optimizer, spec)
    if on_host:
        _move(optimizer, on_host)
    room.restore()
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = _sum_gradients
    return optimizer


def parts(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers: experts that are spread over ranks have a separate one.

    A rank without any of its parameters has a stub, which is left out.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not part.is_stub_optimizer]


def gradients(chunks: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the gradient buffers of the wrapped chunks."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _set_adamw_options(optimizer: Any, spec: Optimizer) -> None:
    """Use torch's fused AdamW, or `CompactAdamW` for moments in bf16.

    torch's default runs one operation of the step at a time for all parameters, with memory for the
    results. Megatron does not pass the option on.
    """
    kinds = {"exp_avg_dtype": spec.exp_avg_dtype, "exp_avg_sq_dtype": spec.exp_avg_sq_dtype}
    chosen: dict[str, Any] = {"fused": True}
    if "bf16" in kinds.values():
        types = {"bf16": torch.bfloat16, "fp32": torch.float32}
        chosen = {name: types[kind] for name, kind in kinds.items()}
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            group.update(chosen)
        if "fused" not in chosen:
            part.optimizer.__class__ = CompactAdamW


def _move(optimizer: Any, fraction: float) -> None:
    for part in parts(optimizer):
        part.__class__ = HostOptimizer  # Megatron's factory creates only its own class
        part.move(fraction)


def _sum_gradients(
    models: list[Any], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Sum gradients over ranks, without Megatron's division by a token count.

    The loss weights hold the denominators.
    """
    finalize_model_grads(models, None, **options)
