"""Translates verl's rewards to `reward` and `algorithm.overlong`."""

from __future__ import annotations

import functools

from sluice_migrate.draft import Draft
from sluice_migrate.translation import Setting, Settings, as_integer, as_number, set_field

_MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
# The penalty for long responses in the releases of verl.
_BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
_LONGEST = "reward_kwargs.max_resp_len"


def reward(draft: Draft, settings: Settings) -> None:
    """Translate the reward function, and report reward managers and reward models."""
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        path, name = settings.take(f"{prefix}.path"), settings.take(f"{prefix}.name")
        if path and path.value is not None:
            function = str(name.value) if name and name.value else "compute_score"
            set_field(
                draft,
                "reward.function",
                path,
                functools.partial("{1}:{0}".format, function),
                keep_variables=True,
            )
    if draft.get("reward.function") is None:
        draft.set("reward.type", "data_source", "verl's default_compute_score")
    for key in _MANAGERS:
        manager = settings.take(key)
        if manager and manager.value not in ("naive", "dapo", "gdpo", None):
            why = "write a function of a sample, or of a prompt's samples (reward.group)"
            draft.note("not translated", manager.shown, why, manager.line)
    enabled = settings.take("reward_model.enable")
    if enabled and enabled.value is True:
        why = "start the reward model as an SGLang server: reward.model.url"
        draft.note("not translated", enabled.shown, why, enabled.line)
    else:
        settings.used |= {name for name in settings if name.startswith("reward_model.model.")}
    _sandbox(draft, settings)
    settings.used |= {name for name in settings if "overlong_buffer" in name}
    settings.used |= {name for name in settings if name.endswith(_LONGEST)}


def _sandbox(draft: Draft, settings: Settings) -> None:
    sandbox = settings.take("reward_model.sandbox_fusion.url")
    if sandbox and sandbox.value:
        draft.note(
            "not translated",
            sandbox.shown,
            "reward.type: code has its own sandbox",
            sandbox.line,
        )
    settings.used |= {name for name in settings if ".sandbox_fusion." in name}


def overlong(draft: Draft, settings: Settings) -> None:
    """Translate the soft overlong punishment of the reward manager `dapo`.

    Call it when rollout.sampling.maxResponseTokens is set, from which the buffer counts.
    """
    group = next((name for name in _BUFFERS if settings.on(f"{name}.enable")), None)
    managers = [settings[name].value for name in _MANAGERS if name in settings]
    longest = next((settings[n] for n in settings if n.endswith(_LONGEST)), None)
    if group is None:
        return
    if "dapo" not in managers:
        why = "it has no effect in verl without the reward manager dapo"
        draft.note("check", f"{group}.enable", why)
        return
    buffer, penalty = settings.get(f"{group}.len"), settings.get(f"{group}.penalty_factor")
    if not set_field(draft, "algorithm.overlong.buffer", buffer, as_integer):
        return
    set_field(draft, "algorithm.overlong.penalty", penalty, as_number)
    _counted_from(draft, longest)


def _counted_from(draft: Draft, longest: Setting | None) -> None:
    limit = draft.get("rollout.sampling.maxResponseTokens")
    if longest is not None and longest.value != limit:
        draft.note(
            "check",
            "algorithm.overlong.buffer",
            f"sluice counts back from rollout.sampling.maxResponseTokens ({limit}), verl from "
            f"max_resp_len ({longest.value})",
            longest.line,
        )
