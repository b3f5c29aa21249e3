"""Translates verl's adapters: `model.lora_rank` and the keys around it."""

from __future__ import annotations

from typing import Any

from sluice_migrate.draft import Draft
from sluice_migrate.translation import Setting, Settings, as_integer, as_path, set_field

_KEYS = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
_ALPHA = 16  # verl's default of lora_alpha


LoraSettings = tuple[Setting | None, ...]


def take_lora(settings: Settings, model: str) -> LoraSettings:
    """Return the settings of adapters, and mark them as translated.

    model: group of their keys: `actor_rollout_ref.model`, or `model` in an SFT script.
    """
    return tuple(settings.take(f"{model}.{key}") for key in _KEYS)


def lora(draft: Draft, taken: LoraSettings) -> None:
    """Set `trainer.lora` if the rank is above 0."""
    rank, alpha, targets, excluded, path = taken
    if rank is None or rank.value in (0, None):
        return
    if draft.get("trainer.backend") is None:
        draft.set("trainer.backend", "fsdp", rank.name)  # verl's default too
    if not set_field(draft, "trainer.lora.rank", rank, as_integer):
        return
    if not set_field(draft, "trainer.lora.alpha", alpha, as_integer):
        draft.set("trainer.lora.alpha", _ALPHA, "default of lora_alpha")
    if targets and targets.value not in (None, "all-linear"):
        set_field(draft, "trainer.lora.targetModules", targets, _names)
    if excluded and excluded.value is not None:
        set_field(draft, "trainer.lora.excludeModules", excluded, _names)
    if path and path.value is not None:
        set_field(draft, "trainer.lora.from", path, as_path)


def _names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if any(not isinstance(name, str) or not name.replace("_", "").isalnum() for name in names):
        raise ValueError("trainer.lora names layers, such as q_proj; it takes no patterns")
    return names
