"""Translates trackers of experiments: verl's `trainer.logger`, slime's `--use-wandb`."""

from __future__ import annotations

from typing import Any

from sluice_migrate.draft import Draft
from sluice_migrate.translation import Setting, Settings, how_to_supply

# What verl may log to besides: sluice always does.
_ALWAYS = ("console", "file", "tensorboard")
_TYPES = ("wandb", "mlflow", "swanlab", "trackio")
_KEY = "a manifest has no keys: set WANDB_API_KEY by secrets.wandb, or where `sluice run` runs"


def trackers_of_verl(draft: Draft, settings: Settings) -> None:
    """Write `telemetry.trackers` from the loggers of verl, and mark their keys as translated."""
    logger = settings.take("trainer.logger")
    project, name = settings.take("trainer.project_name"), settings.get("trainer.experiment_name")
    if logger is None or logger.value is None:
        return
    if logger.missing:
        why = f"the value is not in the script: {how_to_supply(logger.missing)}"
        draft.note("not translated", logger.shown, why, logger.line)
        return
    named = logger.value if isinstance(logger.value, list | tuple) else [logger.value]
    trackers = []
    for kind in map(str, named):
        if kind in _TYPES:
            trackers.append({"type": kind} | _texts(draft, project=project, name=name))
        elif kind not in _ALWAYS:
            why = f"telemetry.trackers has {', '.join(_TYPES)}, or a class of your own"
            draft.note("not translated", f"trainer.logger: {kind}", why, logger.line)
    if trackers:
        draft.set("telemetry.trackers", trackers, "trainer.logger")


def trackers_of_slime(draft: Draft, settings: Settings) -> None:
    """Write `telemetry.trackers` from slime's arguments of W&B, and mark them as translated."""
    used = settings.on("--use-wandb")
    project, name = settings.take("--wandb-project"), settings.take("--wandb-group")
    entity, run = settings.take("--wandb-team"), settings.take("--wandb-run-id")
    mode, host = settings.take("--wandb-mode"), settings.take("--wandb-host")
    if key := settings.take("--wandb-key"):
        draft.note("not translated", key.shown, _KEY, key.line)
    # Files are in the run directory, and metrics over sluice's own steps.
    settings.used |= {
        "--wandb-dir",
        "--wandb-always-use-train-step",
        "--disable-wandb-random-suffix",
    }
    if not used:
        return
    tracker: dict[str, Any] = {"type": "wandb"} | _texts(draft, project=project)
    arguments = _texts(draft, entity=entity, group=name, id=run, mode=mode)
    if arguments:
        tracker["args"] = arguments
    draft.set("telemetry.trackers", [tracker], "--use-wandb")
    if host and host.value:
        why = "set the variable WANDB_BASE_URL of the trainer, for example by secretRef"
        draft.note("not translated", host.shown, why, host.line)
    if key is None:
        draft.note("check", "telemetry.trackers", _KEY)


def _texts(draft: Draft, **settings: Setting | None) -> dict[str, str]:
    """Return the settings that have a text, by field, with a note for unknown variables."""
    found = {}
    for field, setting in settings.items():
        if setting is None or setting.value in (None, "", True, False):
            continue
        found[field] = str(setting.value)
        if setting.missing:
            why = f"part of the value is not in the script: {how_to_supply(setting.missing)}"
            draft.note("check", f"telemetry.trackers[0].{field}", why, setting.line)
    return found
