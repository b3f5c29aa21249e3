"""Samples of verl that ours are not: with pictures, or with turns played by an agent loop."""

from __future__ import annotations

import re

from sluice_cli.importing.draft import Draft, Setting, Settings

_ROLLOUT = "actor_rollout_ref.rollout"
_SEES = re.compile(r"(?i)(^|[-_./\d])(vl|vlm|omni|vision|llava|internvl)([-_./\d]|$)|geo3k")
_PLACES = (
    "actor_rollout_ref.model.path", "model.path", "model.partial_pretrain", "data.train_files",
)  # fmt: skip
_SINGLE = "single_turn_agent"


def unlike_text(draft: Draft, settings: Settings) -> None:
    """Say what is missing for a script whose rows are not text, or that plays several turns."""
    if reason := _pictures(settings):
        why = "sluice trains on text alone: rows with pictures, sound or video are refused"
        draft.note("not translated", reason.shown, why, reason.line)
    _agents(draft, settings)


def _pictures(settings: Settings) -> Setting | None:
    """The setting that says that rows have pictures; None where nothing does."""
    for name in ("data.image_key", "data.video_key", "data.audio_key"):
        setting = settings.get(name)
        if setting and setting.explicit and setting.value:
            return setting
    for name in _PLACES:
        setting = settings.get(name)
        if setting and _SEES.search(str(setting.value)):
            return setting
    return None


def _agents(draft: Draft, settings: Settings) -> None:
    prefix = f"{_ROLLOUT}.agent."
    for name in [name for name in settings if name.startswith(prefix)]:
        setting = settings.take(name)
        if setting is None or not setting.value or setting.value == _SINGLE:
            continue
        if name.removeprefix(prefix) in ("agent_loop_config_path", "default_agent_loop"):
            why = (
                "an agent loop of verl's is a function of yours here: rollout.function, "
                "async def play(episode)"
            )
            draft.note("not translated", setting.shown, why, setting.line)
