"""verl's prompts -> data.prompts, and what sluice cannot have of them.

Rows with pictures are refused; an agent loop becomes rollout.function.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml.error import YAMLError

from sluice.api.schema import yaml_text
from sluice_migrate.draft import Draft, ImportFailedError
from sluice_migrate.translation import Setting, Settings, set_field

_ROLLOUT = "actor_rollout_ref.rollout"
_SEES = re.compile(r"(?i)(^|[-_./\d])(vl|vlm|omni|vision|llava|internvl)([-_./\d]|$)|geo3k")
_PLACES = (
    "actor_rollout_ref.model.path", "model.path", "model.partial_pretrain", "data.train_files",
)  # fmt: skip
_SINGLE, _TOOLS = "single_turn_agent", "tool_agent"
_LOOPS = "agent_loop_config_path"


def set_prompts(draft: Draft, settings: Settings) -> None:
    source = columns_of(settings)
    prompts = [{"path": path, **source} for path in train_files(draft, settings)]
    set_field(
        draft,
        "data.prompts",
        settings.take("data.train_files"),
        lambda _: with_names(prompts),
        keep_variables=True,
    )


def train_files(draft: Draft, settings: Settings) -> list[str]:
    """Paths of the training rows, with a slice where they are not all taken."""
    files, most = settings.take("data.train_files"), settings.take("data.train_max_samples")
    if files is None:
        raise ImportFailedError("no data.train_files: there is nothing to train on")
    part = ""
    if most and isinstance(most.value, int) and most.value > 0:
        part = f"@[0:{most.value}]"
        draft.note(
            "check",
            "data.prompts",
            "the first rows, where verl with data.shuffle takes any",
            most.line,
        )
    return [f"{path}{part}" for path in as_list(files.value)]


def columns_of(settings: Settings) -> dict[str, Any]:
    key = settings.take("data.prompt_key")
    columns: dict[str, Any] = {"promptKey": str(key.value)} if key and key.value else {}
    prefix = "data.apply_chat_template_kwargs."
    arguments = {
        name.removeprefix(prefix): s.value
        for name, s in settings.items()
        if name.startswith(prefix)
    }
    whole = settings.take(prefix.rstrip("."))
    if whole and isinstance(whole.value, dict):
        arguments |= whole.value
    return columns | ({"chatTemplateArgs": arguments} if arguments else {})


def as_list(value: Any) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else [str(value)]


def with_names(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sources need names of their own:
    gsm8k/train.parquet and math/train.parquet are gsm8k and math.
    """
    stems = [PurePosixPath(str(source["path"]).partition("@")[0]) for source in sources]
    if len({stem.stem for stem in stems}) == len(stems):
        return sources
    return [
        {
            "path": source["path"],
            "name": re.sub(r"[^\w.-]", "-", f"{path.parent.name}-{path.stem}").strip("-."),
        }
        | source
        for source, path in zip(sources, stems, strict=True)
    ]


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
    """An agent loop runs as it is, where its class can be read from its file; else the reason."""
    prefix = f"{_ROLLOUT}.agent."
    for name in [name for name in settings if name.startswith(prefix)]:
        settings.take(name)
    default, path = (settings.get(prefix + n) for n in ("default_agent_loop", _LOOPS))
    loops = _loops(path)
    wanted = default.value if default else None
    if wanted in (None, _SINGLE) and len(loops) == 1:
        (wanted,) = loops
    if path and wanted in loops:
        draft.set("rollout.function", loops[wanted].pop("_target_"), path.shown)
        if loops[wanted]:
            draft.set("rollout.functionArgs", loops[wanted], path.shown)
        return
    for setting in (default, path):
        if setting and setting.value and setting.value != _SINGLE:
            draft.note("not translated", setting.shown, _why(setting), setting.line)


def _why(setting: Setting) -> str:
    if setting.value == _TOOLS:
        return "the loop over tools is sluice_rollout.tools.ToolLoop: rollout.function"
    return (
        "an agent loop runs as it is, but its class has to be named: rollout.function: "
        "package.module.Class, and its arguments in rollout.functionArgs"
    )


def _loops(path: Setting | None) -> dict[str, dict[str, Any]]:
    """The loops of a configuration file, by their names; none where it cannot be read."""
    try:
        entries = yaml_text.load(Path(str(path.value)).read_text()) if path else []
    except (OSError, ValueError, YAMLError):
        return {}
    loops = [dict(e) for e in entries or [] if isinstance(e, dict) and "_target_" in e]
    return {str(loop.pop("name", "")): loop for loop in loops}
