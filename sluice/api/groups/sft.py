"""algorithm.loss.type: sft.

Such a job learns from given answers; nothing is generated, nothing judged.

What has no effect then is refused. An API server fills defaults in, so a field counts as set where
it has another value than its default.
"""

from __future__ import annotations

from typing import Any

from sluice.api.groups.losses import SFT
from sluice.api.groups.off_policy import OffPolicy
from sluice.api.groups.rollout import Partial
from sluice.api.schema.base import Rule
from sluice.api.schema.cel import differs, escaped

IS_SFT = f"(self.algorithm.loss.?type.orValue('') == '{SFT}')"
"""CEL, on the job's spec."""
_IS_NO_SFT = f"self.loss.?type.orValue('') != '{SFT}'"
"""Its opposite, on spec.algorithm."""

OF_ADVANTAGES: dict[str, Any] = {
    "estimator": "grpo",
    "function": None,
    "normalizeStd": True,
    "normalizeAdvantages": None,
    "gamma": 1.0,
    "lambda": 1.0,
    "offPolicy": OffPolicy(),
    "critic": None,
    "distillation": None,
    "overlong": None,
    "rewardParts": [],
    "turnAdvantage": None,
}
"""Fields of spec.algorithm -> what they are if left out; None: nothing."""
OF_SAMPLES: dict[str, Any] = {
    "dynamicFilter": None,
    "mode": "sync",
    "maxStaleness": 0,
    "overSampling": 1.0,
    "partial": Partial(),
}
"""The same of spec.rollout."""


def _any_set(group: str, fields: dict[str, Any]) -> str:
    """CEL: one of the group's fields has another value than its default."""
    return " || ".join(
        differs(f"{group}.{escaped(name)}", default) for name, default in fields.items()
    )


def _set(group: Any, fields: dict[str, Any]) -> list[str]:
    """Names of the fields to which a group gives another value."""
    known = {info.alias: name for name, info in type(group).model_fields.items()}
    return [name for name, default in fields.items() if getattr(group, known[name]) != default]


WITHOUT_ADVANTAGES = (
    Rule(
        f"{_IS_NO_SFT} || !({_any_set('self', OF_ADVANTAGES)})",
        lambda a: not a.sft or not _set(a, OF_ADVANTAGES),
        "sft learns from given answers, without rewards and advantages: leave out what belongs to "
        "these {} "
        f"({', '.join(OF_ADVANTAGES)})",
        "loss.type",
        lambda a: ", ".join(_set(a, OF_ADVANTAGES)),
    ),
    Rule(
        f"{_IS_NO_SFT} || self.kl.coef == 0.0",
        lambda a: not a.sft or a.kl.coef == 0,
        "kl.coef is a penalty inside the reward, and sft has none; kl.lossCoef adds it to the loss",
        "kl.coef",
    ),
)
"""Rules of spec.algorithm."""

SFT_ACROSS_GROUPS = (
    Rule(
        f"!has(self.data.truncation) || {IS_SFT}",
        lambda s: s.data.truncation is None or s.algorithm.sft,
        "only the rows of sft are cut; a prompt that is too long is left out, for what is cut off "
        "may be the question",
        "data.truncation",
        reason="FieldValueForbidden",
    ),
    Rule(
        f"!{IS_SFT} || !({_any_set('self.rollout', OF_SAMPLES)})",
        lambda s: not s.algorithm.sft or not _set(s.rollout, OF_SAMPLES),
        "sft generates nothing to train on: leave out what is about generated samples {} "
        f"(of rollout: {', '.join(OF_SAMPLES)})",
        "algorithm.loss.type",
        lambda s: ", ".join(_set(s.rollout, OF_SAMPLES)),
    ),
    Rule(
        f"!{IS_SFT} || self.rollout.samplesPerPrompt in [1, 8]",
        lambda s: not s.algorithm.sft or s.rollout.samples_per_prompt in (1, 8),
        "with sft each row is one sample: leave samplesPerPrompt out",
        "rollout.samplesPerPrompt",
    ),
    Rule(
        f"!{IS_SFT} || !(has(self.debug.replay) || self.debug.rolloutOnly)",
        lambda s: not s.algorithm.sft or (s.debug.replay is None and not s.debug.rollout_only),
        "replay and rolloutOnly are about generated samples, and sft generates none",
        "debug",
    ),
    Rule(
        f"!{IS_SFT} || self.trainer.routingReplay == 'none'",
        lambda s: not s.algorithm.sft or s.trainer.routing_replay == "none",
        "given answers were sent to no experts before, and sft has no ratio that experts could "
        "move: leave routingReplay out",
        "trainer.routingReplay",
    ),
    Rule(
        f"!{IS_SFT} || !self.trainer.colocate",
        lambda s: not s.algorithm.sft or not s.trainer.colocate,
        "with sft no engine takes turns with the trainer: those of an evaluation have GPUs of "
        "their own",
        "trainer.colocate",
    ),
)
"""Rules of the job's spec."""
