"""Losses that learn from rows of a data set: sft and the losses of preferences.

Such a job learns from given answers. It does not generate or judge samples.

Fields without an effect are refused. An API server fills defaults in, so a field counts as set if
it has another value than its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.api.groups.losses import OFFLINE, PREFERENCE_LOSSES, WITH_REFERENCE
from sluice.api.schema.rules import any_set, field, only_with, requires

# On a job's spec.
IS_OFFLINE = field("algorithm.loss.type").is_in(OFFLINE)
# On spec.algorithm.
_IS_OFFLINE = field("loss.type").is_in(OFFLINE)
_IS_PREFERENCE = field("loss.type").is_in(PREFERENCE_LOSSES)

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
# Fields of spec.algorithm about the losses of tokens.
_OF_TOKENS = ("entropyCoef", "aggregation", "kl.lossCoef")
# Fields of spec.rollout that are about generated samples.
OF_SAMPLES = ("dynamicFilter", "mode", "maxStaleness", "overSampling", "partial")


def _set_fields(instance: Any, paths: Sequence[str]) -> str:
    """The fields that an instance sets, for a message."""
    names = [path for path in paths if field(path).is_set.holds(instance)]
    return ", ".join(names)


# Rules of spec.algorithm.
WITHOUT_ADVANTAGES = (
    requires(
        _IS_OFFLINE,
        ~any_set(*OF_ADVANTAGES),
        "this loss learns from given answers, without rewards and advantages: leave out what "
        f"belongs to these {{}} ({', '.join(OF_ADVANTAGES)})",
        "loss.type",
        shows=lambda algorithm: _set_fields(algorithm, OF_ADVANTAGES),
    ),
    requires(
        _IS_OFFLINE,
        ~field("kl.coef").is_set,
        "kl.coef is a penalty inside the reward, and given answers have none; with sft kl.lossCoef "
        "adds it to the loss",
        "kl.coef",
    ),
    requires(
        _IS_PREFERENCE,
        ~any_set(*_OF_TOKENS),
        "a loss of preferences compares whole answers, and has no terms of tokens: leave out {} "
        f"({', '.join(_OF_TOKENS)})",
        "loss.type",
        shows=lambda algorithm: _set_fields(algorithm, _OF_TOKENS),
    ),
)
# Rules of a job's spec.
OFFLINE_ACROSS_GROUPS = (
    only_with(
        "evaluation.heldOut",
        IS_OFFLINE,
        "heldOut has rows with given answers, which this job does not learn from: give held-out "
        "prompts in evaluation.datasets, or set algorithm.loss.type to sft or a loss of "
        "preferences",
    ),
    requires(
        field("evaluation.heldOut").is_set,
        ~field("data.images").is_set,
        "held-out rows cannot have images yet: with data.images leave heldOut out",
        "evaluation.heldOut",
    ),
    only_with(
        "data.truncation",
        IS_OFFLINE,
        "only rows with given answers are cut; a prompt that is too long is left out, because what "
        "is cut off may be the question",
    ),
    requires(
        IS_OFFLINE,
        ~any_set(*(f"rollout.{name}" for name in OF_SAMPLES)),
        "this loss trains on no generated samples: leave out what is about generated samples {} "
        f"(of rollout: {', '.join(OF_SAMPLES)})",
        "algorithm.loss.type",
        shows=lambda spec: _set_fields(spec.rollout, OF_SAMPLES),
    ),
    requires(
        IS_OFFLINE,
        # 1 says the same as the default, which an API server writes out.
        (field("rollout.samplesPerPrompt") == 1) | ~field("rollout.samplesPerPrompt").is_set,
        "with given answers each row is one sample: leave samplesPerPrompt out",
        "rollout.samplesPerPrompt",
    ),
    requires(
        IS_OFFLINE,
        ~any_set("debug.replay", "debug.rolloutOnly"),
        "replay and rolloutOnly are about generated samples, and this loss has none",
        "debug",
    ),
    requires(
        IS_OFFLINE,
        field("trainer.routingReplay") == "none",
        "given answers were sent to no experts before, and have no ratio that experts could "
        "move: leave routingReplay out",
        "trainer.routingReplay",
    ),
    requires(
        IS_OFFLINE,
        field("trainer.colocate").is_false,
        "with given answers no engine takes turns with the trainer: those of an evaluation have "
        "GPUs of their own",
        "trainer.colocate",
    ),
    requires(
        field("algorithm.loss.type").is_in(PREFERENCE_LOSSES),
        field("algorithm.loss.type").is_in(WITH_REFERENCE) | ~field("model.referencePath").is_set,
        f"only {', '.join(WITH_REFERENCE)} compare the policy with a reference: leave "
        "referencePath out",
        "model.referencePath",
    ),
    requires(
        field("algorithm.loss.type") == "reward_model",
        ~field("evaluation.datasets").is_set,
        "a reward model generates nothing that an evaluation could judge: give held-out pairs in "
        "evaluation.heldOut, and leave datasets out",
        "evaluation.datasets",
    ),
    requires(
        field("algorithm.loss.type") == "reward_model",
        ~field("trainer.lora.from").is_set,
        "a reward model starts a new adapter, because that of a language model has no score: merge "
        "it into the model (sluice convert merge-adapter), and leave from out",
        "trainer.lora.from",
    ),
)
