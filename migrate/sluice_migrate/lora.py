"""Translates adapters, in verl and in miles, which is a fork of slime: `lora_rank` and others."""

from __future__ import annotations

from functools import partial
from typing import Any

from sluice_migrate.draft import Draft
from sluice_migrate.translation import (
    Setting,
    Settings,
    as_integer,
    as_number,
    as_path,
    set_field,
)

_KEYS = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "lora_adapter_path",
)
_ALPHA = 16  # default of lora_alpha in verl and miles
# Megatron's layers, by which miles may name the targets, and transformers' layers that they join.
_MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}

LoraSettings = dict[str, Setting]


def take_lora(settings: Settings, model: str) -> LoraSettings:
    """Return the settings of adapters in verl, and mark them as translated.

    model: group of their keys: `actor_rollout_ref.model`, or `model` in an SFT script.
    """
    return _taken({key: settings.take(f"{model}.{key}") for key in _KEYS})


def take_lora_arguments(settings: Settings) -> LoraSettings:
    """Return the arguments of adapters in miles, and mark them as translated."""
    return _taken({key: settings.take(f"--{key.replace('_', '-')}") for key in _KEYS})


def _taken(settings: dict[str, Setting | None]) -> LoraSettings:
    return {key: setting for key, setting in settings.items() if setting is not None}


def lora(draft: Draft, taken: LoraSettings, *, backend: str | None = None) -> None:
    """Set `trainer.lora` if the rank is above 0.

    backend: `trainer.backend` of a script that names none.
    """
    rank = taken.get("lora_rank")
    if rank is None or rank.value in (0, "0", None):
        return
    if not set_field(draft, "trainer.lora.rank", rank, as_integer):
        return
    if backend and draft.get("trainer.backend") is None:
        draft.set("trainer.backend", backend, rank.name)
    if not set_field(draft, "trainer.lora.alpha", taken.get("lora_alpha"), as_integer):
        draft.set("trainer.lora.alpha", _ALPHA, "default of lora_alpha")
    set_field(draft, "trainer.lora.dropout", taken.get("lora_dropout"), as_number)
    targets = taken.get("target_modules")
    if targets and targets.value not in (None, "all-linear"):
        set_field(draft, "trainer.lora.targetModules", targets, _names)
    parameters = taken.get("target_parameters")
    if parameters and parameters.value is not None:
        set_field(draft, "trainer.lora.targetModules", parameters, partial(_with_experts, draft))
    excluded = taken.get("exclude_modules")
    if excluded and excluded.value is not None:
        set_field(draft, "trainer.lora.excludeModules", excluded, _names)
    path = taken.get("lora_adapter_path")
    if path and path.value is not None:
        set_field(draft, "trainer.lora.from", path, as_path)


def _with_experts(draft: Draft, value: Any) -> list[str]:
    """Return the targets with experts, which verl names by their tensors."""
    tensors = value if isinstance(value, list) else str(value).split(",")
    if any(str(name).split(".")[-2:-1] != ["experts"] for name in tensors):
        raise ValueError("trainer.lora adapts no other tensors than experts")
    return [*(draft.get("trainer.lora.targetModules") or ["all-linear"]), "experts"]


def _names(value: Any) -> list[str]:
    """Return names of transformers' layers. Raises ValueError for a pattern."""
    names = value if isinstance(value, list) else str(value).split(",")
    if any(not isinstance(name, str) or not name.replace("_", "").isalnum() for name in names):
        raise ValueError("trainer.lora names layers, such as q_proj; it takes no patterns")
    return [layer for name in names for layer in _MEGATRON_LAYERS.get(name, (name,))]
