"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from sluice.api import Optimizer
from sluice.api.groups.algorithm import Critic


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
            f"trainer.optimizer.schedule {spec.schedule} needs decaySteps: "
            "the run's length is not known"
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


def set_learning_rate(optimizer: object, value: float) -> None:
    for group in optimizer.param_groups:  # type: ignore[attr-defined]
        group["lr"] = value
