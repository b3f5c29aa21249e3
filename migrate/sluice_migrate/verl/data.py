"""Translates verl's prompts, and the agent loop that plays them.

Rows with images make the job one of a vision-language model; sound and video are reported as not
supported.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml.error import YAMLError

from sluice.api.schema import yaml_text
from sluice_migrate.draft import Draft, ImportFailedError
from sluice_migrate.images import COLUMN, OTHER_MEDIA, set_images
from sluice_migrate.translation import Setting, Settings, as_integer, set_field

_ROLLOUT = "actor_rollout_ref.rollout"
# Names of models and data sets with images.
_MULTIMODAL = re.compile(r"(?i)(^|[-_./\d])(vl|vlm|omni|vision|llava|internvl)([-_./\d]|$)|geo3k")
_MODEL_AND_DATA = (
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
    """Return the paths of training rows, with a slice if not all rows are used."""
    files, most = settings.take("data.train_files"), settings.take("data.train_max_samples")
    if files is None:
        raise ImportFailedError(
            "no data.train_files: the configuration names no prompts to train on"
        )
    part = ""
    if most and isinstance(most.value, int) and most.value > 0:
        part = f"@[0:{most.value}]"
        draft.note(
            "check",
            "data.prompts",
            "the first rows; verl takes random rows with data.shuffle",
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
    """Name the sources if their files have the same name.

    gsm8k/train.parquet and math/train.parquet become gsm8k-train and math-train.
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


def check_media_and_agents(draft: Draft, settings: Settings) -> None:
    """Report rows with sound or video; translate the agent loop."""
    for name in ("data.video_key", "data.audio_key"):
        setting = settings.take(name)
        if setting and setting.explicit and setting.value:
            draft.note("not translated", setting.shown, OTHER_MEDIA, setting.line)
    _agents(draft, settings)


def with_image_engine(draft: Draft, settings: Settings) -> Settings:
    """Return settings with the engine that takes images, if rows have some."""
    name = f"{_ROLLOUT}.name"
    engine = settings.get(name)
    if engine is None or engine.value != "vllm" or image_setting(settings) is None:
        return settings
    why = "vLLM gets no images from sluice, so the engine is SGLang"
    draft.note("not translated", engine.shown, why, engine.line)
    settings[name] = replace(engine, values=("sglang",))
    return settings


def images(draft: Draft, settings: Settings) -> None:
    """Set data.images and what is trained of the model, if rows have images.

    Call it when trainer.backend is set.
    """
    key, most = settings.take("data.image_key"), settings.take(f"{_ROLLOUT}.limit_images")
    pixels = settings.take("data.mm_processor_kwargs.max_pixels")
    frozen = settings.on("actor_rollout_ref.actor.freeze_vision_tower")
    reason = image_setting(settings)
    column = str(key.value) if key and key.value else COLUMN
    if reason is None:
        return
    set_images(draft, reason, column=column)
    if reason is not key:
        draft.note(
            "check",
            "data.images",
            "a name of the model or the data says that rows have images; leave it out if they are "
            "text",
            reason.line,
        )
    for setting, field in ((most, "maxPerPrompt"), (pixels, "maxPixels")):
        set_field(draft, f"data.images.{field}", setting, as_integer)
    if not frozen and draft.get("trainer.lora") is None:
        draft.set("trainer.freeze", [], "freeze_vision_tower=False")
        draft.note(
            "other default",
            "trainer.freeze",
            "[]: verl trains the vision tower unless freeze_vision_tower is set",
        )


def image_setting(settings: Settings) -> Setting | None:
    """Return the setting that shows that rows have images, if any."""
    setting = settings.get("data.image_key")
    if setting and setting.explicit and setting.value:
        return setting
    for name in _MODEL_AND_DATA:
        setting = settings.get(name)
        if setting and _MULTIMODAL.search(str(setting.value)):
            return setting
    return None


def _agents(draft: Draft, settings: Settings) -> None:
    """Set rollout.function to the agent loop's class if its file can be read."""
    prefix = f"{_ROLLOUT}.agent."
    for key in [key for key in settings if key.startswith(prefix)]:
        settings.take(key)
    default, path = (settings.get(prefix + n) for n in ("default_agent_loop", _LOOPS))
    loops = _loops(path)
    name: Any = default.value if default else None
    if name in (None, _SINGLE) and len(loops) == 1:
        (name,) = loops
    if path and name in loops:
        draft.set("rollout.function", loops[name].pop("_target_"), path.shown)
        if loops[name]:
            draft.set("rollout.functionArgs", loops[name], path.shown)
        return
    for setting in (default, path):
        if setting and setting.value and setting.value != _SINGLE:
            draft.note("not translated", setting.shown, _why(setting), setting.line)


def _why(setting: Setting) -> str:
    if setting.value == _TOOLS:
        return "sluice's loop over tools is sluice_rollout.tools.ToolLoop: rollout.function"
    return (
        "an agent loop runs unchanged if rollout.function names its class (package.module.Class), "
        "with its arguments in rollout.functionArgs"
    )


def _loops(path: Setting | None) -> dict[str, dict[str, Any]]:
    """Read the agent loops of a configuration file by name; empty if it cannot be read."""
    try:
        entries = yaml_text.load(Path(str(path.value)).read_text()) if path else []
    except (OSError, ValueError, YAMLError):
        return {}
    loops = [dict(e) for e in entries or [] if isinstance(e, dict) and "_target_" in e]
    return {str(loop.pop("name", "")): loop for loop in loops}
