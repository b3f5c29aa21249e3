"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from sluice.api import Optimizer
from sluice.api.groups.algorithm import Critic


def learning_rate(step: int, spec: Optimizer, total_steps: int | None) -> float:
    """Return the learning rate of an optimizer step.

    Warm-up is linear and reaches `lr` in its last step. Then `linear` and `cosine` fall to `minLr`
    at step `decaySteps` (default: `total_steps`) and stay there.

    Parameters
    ----------
    step
        Step of this optimizer (not of the run), from 0.
    spec
        Optimizer settings.
    total_steps
        Steps of this optimizer in the run; None: not known.

    Raises
    ------
    ValueError
        The schedule needs the length of the run, which is not known.

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
    # Fraction of the decay in [0, 1].
    done = min((step - spec.warmup_steps) / max(end - spec.warmup_steps, 1), 1.0)
    left = 1 - done if spec.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return spec.min_lr + (spec.lr - spec.min_lr) * left


def steps_of_policy(total_steps: int | None, critic: Critic | None) -> int | None:
    """Return how many of a run's training steps train the policy; None: not known."""
    # In `warmupSteps` only the critic learns. slime and verl also count only the policy's steps,
    # but end its schedule as if the run were longer by the warm-up, so it never reaches `minLr`.
    return total_steps and total_steps - (critic.warmup_steps if critic else 0)


def set_learning_rate(optimizer: object, value: float) -> None:
    for group in optimizer.param_groups:  # type: ignore[attr-defined]
        group["lr"] = value
