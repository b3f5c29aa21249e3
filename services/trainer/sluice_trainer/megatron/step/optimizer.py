"""AdamW with Megatron's distributed optimizer."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from sluice.api import Optimizer
from sluice_trainer.megatron.adaptations import megatron_device


@megatron_device()
def build_optimizer(
    chunks: list[DistributedDataParallel], config: TransformerConfig, spec: Optimizer
) -> Any:
    """Megatron's optimizer over the wrapped chunks of the model: states in fp32, shared out over
    data-parallel ranks.

    Norms and biases get no weight decay (Megatron's rule). `clipGrad` 0 means no limit; the norm is
    computed anyway.
    """
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = get_megatron_optimizer(options, chunks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = _sum_gradients
    return optimizer


def _sum_gradients(
    models: list[Any], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Sum gradients over ranks. Megatron would then divide by a token count; our loss weights have
    done that.
    """
    finalize_model_grads(models, None, **options)
