"""Translates slime's arguments for reward, teacher and loss."""

from __future__ import annotations

from typing import get_args

from sluice.api.groups.data import RewardType
from sluice_migrate.draft import Draft
from sluice_migrate.translation import Setting, Settings, as_number, as_text, note_unused, set_field

# --rm-type that has another name in sluice; the others have the same.
_REWARDS = {"math": "math_prm800k"}
# slime's module with functions that ask a teacher in place of a reward.
_OPD = "on_policy_distillation."
_CUSTOM = (
    "the file is not read. Put settings of a generate function into rollout.functionArgs, and "
    "thresholds of TIS and MIS into algorithm.offPolicy"
)
_CORRECTIONS = (
    "the file is not read. Put its thresholds of TIS and MIS into algorithm.offPolicy: method, "
    "low, high, reject, veto"
)


def distillation(draft: Draft, settings: Settings) -> None:
    """Translate --use-opd.

    slime asks a teacher behind a URL as a remote reward; the job then has no other reward.
    """
    kind, coef, load = (
        settings.take(name) for name in ("--opd-type", "--opd-kl-coef", "--opd-teacher-load")
    )
    if not settings.on("--use-opd"):
        names = ("--opd-type", "--opd-kl-coef", "--opd-teacher-load")
        note_unused(draft, settings, names, "slime distills only with --use-opd")
        return
    url = settings.get("--rm-url")
    if kind and kind.value == "sglang" and url:
        set_field(
            draft,
            "algorithm.distillation.teacher.url",
            url,
            lambda value: as_text(value).removesuffix("/generate"),
        )
    elif kind and kind.value == "megatron" and load:
        note = "slime's teacher is a Megatron checkpoint; name its Hugging Face directory"
        set_field(draft, "algorithm.distillation.teacher.path", load, as_text, note)
    else:
        why = (
            "sluice distills from an SGLang server (--rm-url, algorithm.distillation.teacher.url) "
            "or a checkpoint (--opd-teacher-load, algorithm.distillation.teacher.path)"
        )
        draft.note(
            "not translated", kind.shown if kind else "--use-opd", why, kind.line if kind else 0
        )
        return
    set_field(draft, "algorithm.distillation.coef", coef, as_number)


def reward(draft: Draft, settings: Settings) -> None:
    """Translate --rm-type, --rm-url and --custom-rm-path."""
    kind, url, function = (
        settings.take(name) for name in ("--rm-type", "--rm-url", "--custom-rm-path")
    )
    after = settings.get("--custom-reward-post-process-path")
    if after and _OPD in str(after.value):
        settings.used.add(after.name)
    # The teacher is translated already; slime's function only asks it.
    if function and _OPD in str(function.value) and draft.get("algorithm.distillation"):
        return
    if set_field(draft, "reward.function", function, as_text):
        return
    name = str(kind.value) if kind else ""
    # The URL of --rm-url is a reward only with this type: it may be a teacher.
    if name == "remote_rm" and set_field(draft, "reward.url", url, as_text):
        return
    reward_type = _REWARDS.get(name, name)
    if reward_type in get_args(RewardType):
        draft.set("reward.type", reward_type, "--rm-type")
        if reward_type != name:
            why = f"slime's {name} is {reward_type} in sluice; see docs/rewards.md"
            draft.note("check", "reward.type", why)
        return
    draft.set("reward.type", "data_source", "--rm-type")
    what = f"--rm-type {name} has no counterpart" if name else "no --rm-type"
    line = kind.line if kind else 0
    draft.note(
        "check",
        "reward.type",
        f"{what}: each row is scored by its metadata.rm_type, or else by its data_source",
        line,
    )


def algorithm(draft: Draft, settings: Settings) -> None:
    """Translate the arguments of the loss that depend on a switch."""
    coef = settings.take("--kl-loss-coef")
    if not settings.on("--use-kl-loss"):
        why = "slime adds the KL to the loss only with --use-kl-loss"
        note_unused(draft, settings, ["--kl-loss-coef"], why)
    else:
        set_field(
            draft,
            "algorithm.kl.lossCoef",
            coef or Setting("default of --kl-loss-coef", ("0",)),
            as_number,
        )
        if draft.get("algorithm.kl.lossCoef") == 0:
            why = "with 0 slime loads the reference to log the KL; sluice does not load it"
            draft.note("check", "algorithm.kl.lossCoef", why, coef.line if coef else 0)
    for name, path, value in (
        ("--use-unbiased-kl", "algorithm.kl.unbiased", True),
        ("--disable-grpo-std-normalization", "algorithm.normalizeStd", False),
        ("--calculate-per-token-loss", "algorithm.aggregation", "token_mean"),
        ("--use-tis", "algorithm.offPolicy.method", "tis"),
        ("--use-rollout-logprobs", "algorithm.offPolicy.oldLogProbs", "rollout"),
        ("--use-routing-replay", "trainer.routingReplay", "trainer"),
        (
            "--use-rollout-routing-replay",
            "trainer.routingReplay",
            "rollout",
        ),  # implies --use-routing-replay
    ):
        if settings.on(name):
            draft.set(path, value, name)
    delta = settings.take("--opsm-delta")
    if not settings.on("--use-opsm"):
        note_unused(
            draft,
            settings,
            ["--opsm-delta"],
            "slime masks off-policy sequences only with --use-opsm",
        )
    else:
        set_field(
            draft,
            "algorithm.offPolicy.opsmDelta",
            delta or Setting("default of --opsm-delta", ("1e-4",)),
            as_number,
        )
    if not settings.on("--use-tis"):
        names = ("--tis-clip", "--tis-clip-low", "--custom-tis-function-path")
        note_unused(draft, settings, names, "slime uses importance sampling only with --use-tis")
    config = settings.take("--custom-config-path")
    if config:
        why = _CORRECTIONS if settings.get("--custom-tis-function-path") else _CUSTOM
        draft.note("not translated", config.shown, why, config.line)
