"""AdamW with Megatron's distributed optimizer, and the learning rate as a function of the step."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from sluice.api import Optimizer
from sluice.api.algorithm import Critic
from sluice_trainer.megatron.adaptations import megatron_device


def learning_rate(step: int, spec: Optimizer, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step`, counted from 0: of this optimizer, not of the run.

    Warm-up is linear and reaches `lr` in its last step. After it `linear` and `cosine` fall to
    `minLr` at step `decaySteps` (default: `total_steps`, all that this optimizer takes in the run)
    and stay there.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    end = spec.decay_steps or total_steps
    if end is None:
        raise ValueError(
            f"trainer.optimizer.schedule {spec.schedule} needs decaySteps: the run's length is not "
            "known"
        )
    done = min((step - spec.warmup_steps) / max(end - spec.warmup_steps, 1), 1.0)
    left = 1 - done if spec.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return spec.min_lr + (spec.lr - spec.min_lr) * left


def steps_of_policy(total_steps: int | None, critic: Critic | None) -> int | None:
    """Training steps in which the policy learns, of a run of `total_steps`; None: not known.

    In its `warmupSteps` only the critic does. slime and verl count the policy's own steps too, but
    let its schedule end where the run is longer by the warm-up: there it never gets to `minLr`.
    """
    return total_steps and total_steps - (critic.warmup_steps if critic else 0)


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


def set_learning_rate(optimizer: Any, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
