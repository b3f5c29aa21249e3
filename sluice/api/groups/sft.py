"""algorithm.loss.type: sft.

Such a job learns from given answers. It does not generate or judge samples.

Fields without an effect are refused. An API server fills defaults in, so a field counts as set if
it has another value than its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.api.groups.losses import SFT
from sluice.api.schema.rules import any_set, field, only_with, requires

# On a job's spec.
IS_SFT = field("algorithm.loss.type") == SFT
# On spec.algorithm.
_IS_SFT = field("loss.type") == SFT

# Fields of spec.algorithm that are about advantages.
OF_ADVANTAGES = (
    "estimator",
    "function",
    "normalizeStd",
    "normalizeAdvantages",
    "gamma",
    "lambda",
    "offPolicy",
    "critic",
    "distillation",
    "overlong",
    "rewardParts",
    "turnAdvantage",
)
# Fields of spec.rollout that are about generated samples.
OF_SAMPLES = ("dynamicFilter", "mode", "maxStaleness", "overSampling", "partial")


def _set_fields(instance: Any, paths: Sequence[str]) -> str:
    """The fields that an instance sets, for a message."""
    names = [path for path in paths if field(path).is_set.holds(instance)]
    return ", ".join(names)


# Rules of spec.algorithm.
WITHOUT_ADVANTAGES = (
    requires(
        _IS_SFT,
        ~any_set(*OF_ADVANTAGES),
        "sft learns from given answers, without rewards and advantages: leave out what belongs to "
        f"these {{}} ({', '.join(OF_ADVANTAGES)})",
        "loss.type",
        shows=lambda algorithm: _set_fields(algorithm, OF_ADVANTAGES),
    ),
    requires(
        _IS_SFT,
        ~field("kl.coef").is_set,
        "kl.coef is a penalty inside the reward, and sft has none; kl.lossCoef adds it to the loss",
        "kl.coef",
    ),
)
# Rules of a job's spec.
SFT_ACROSS_GROUPS = (
    only_with(
        "data.truncation",
        IS_SFT,
        "only rows of sft are cut; a prompt that is too long is left out, because what is cut off "
        "may be the question",
    ),
    requires(
        IS_SFT,
        ~any_set(*(f"rollout.{name}" for name in OF_SAMPLES)),
        "sft generates no samples to train on: leave out what is about generated samples {} "
        f"(of rollout: {', '.join(OF_SAMPLES)})",
        "algorithm.loss.type",
        shows=lambda spec: _set_fields(spec.rollout, OF_SAMPLES),
    ),
    requires(
        IS_SFT,
        # 1 says the same as the default, which an API server writes out.
        (field("rollout.samplesPerPrompt") == 1) | ~field("rollout.samplesPerPrompt").is_set,
        "with sft each row is one sample: leave samplesPerPrompt out",
        "rollout.samplesPerPrompt",
    ),
    requires(
        IS_SFT,
        ~any_set("debug.replay", "debug.rolloutOnly"),
        "replay and rolloutOnly are about generated samples, and sft generates none",
        "debug",
    ),
    requires(
        IS_SFT,
        field("trainer.routingReplay") == "none",
        "given answers were sent to no experts before, and sft has no ratio that experts could "
        "move: leave routingReplay out",
        "trainer.routingReplay",
    ),
    requires(
        IS_SFT,
        field("trainer.colocate").is_false,
        "with sft no engine takes turns with the trainer: those of an evaluation have GPUs of "
        "their own",
        "trainer.colocate",
    ),
)
