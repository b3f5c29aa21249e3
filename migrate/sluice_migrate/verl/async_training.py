"""Translates verl's asynchronous trainers to rollout.mode async.

These are `fully_async_main`, the one-step-off `main_ppo`, and `trainer.v1`. Defaults are those of
their configurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sluice_migrate.draft import Draft
from sluice_migrate.translation import Setting, Settings, as_integer, as_number, set_field

_ACTOR, _ASYNC = "actor_rollout_ref.actor", "async_training"
_V1 = "trainer.v1"
# Defaults of one_step_off_ppo_trainer.yaml.
_SEPARATE = {
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "algorithm.rollout_correction.bypass_mode": True,
}
# Defaults of fully_async_ppo_trainer.yaml.
_FULLY_ASYNC = _SEPARATE | {
    f"{_ASYNC}.staleness_threshold": 0.1,
    f"{_ASYNC}.trigger_parameter_sync_step": 4,
    f"{_ASYNC}.require_batches": 1,
    f"{_ASYNC}.partial_rollout": True,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
}


def trainer_of(entry: str, names: Iterable[str]) -> str:
    """Return the entry point, guessed from the keys of a configuration without one."""
    if not entry and any(name.startswith(f"{_ASYNC}.") for name in names):
        return "fully_async_main"
    return entry


def is_fully_async(entry: str) -> bool:
    """Tell whether this is the entry point of the fully asynchronous trainer."""
    return "fully_async" in entry


def is_one_step_off(entry: str) -> bool:
    """Tell whether this is the entry point of the one-step-off trainer."""
    return "one_step_off" in entry


def with_defaults(settings: Settings, entry: str) -> Settings:
    """Add the defaults of the asynchronous trainer's configuration."""
    added = _FULLY_ASYNC if is_fully_async(entry) else _SEPARATE if is_one_step_off(entry) else {}
    defaults = {
        name: Setting(name, (value,), explicit=False)
        for name, value in added.items()
        if name not in settings
    }
    return Settings(settings | defaults)


def asynchronous(draft: Draft, settings: Settings, entry: str) -> bool:
    """Translate the staleness of samples; returns whether engines have separate GPUs."""
    if is_fully_async(entry):
        _fully_async(draft, settings, entry)
        return True
    if is_one_step_off(entry):  # the next batch is generated while one is trained
        draft.set("rollout.mode", "async", entry)
        draft.set("rollout.maxStaleness", 1, entry)
        return True
    return _v1_trainer(draft, settings)


def _v1_trainer(draft: Draft, settings: Settings) -> bool:
    """Translate `trainer.v1`.

    It trains a batch between two weight updates. A sample may span `max_off_policy_threshold`
    versions, including the one it was started with.
    """
    mode = settings.take(f"{_V1}.trainer_mode")
    if mode is None or mode.value in ("sync", None):
        return False
    if mode.value != "separate_async":
        why = "engines on the trainer's GPUs take turns with it, so the job is synchronous"
        draft.note("not translated", mode.shown, why, mode.line)
        return False
    for name in ("sampler.max_off_policy_strategy", "separate_async.parameter_sync_step"):
        settings.used.add(f"{_V1}.{name}")  # follows from batch and mini-batch
    spans = settings.take(f"{_V1}.sampler.max_off_policy_threshold")
    default = Setting("default of trainer.v1.sampler.max_off_policy_threshold", (8,))
    draft.set("rollout.mode", "async", mode.name)
    set_field(
        draft, "rollout.maxStaleness", spans or default, lambda value: max(1, as_integer(value) - 1)
    )
    if draft.get("rollout.maxStaleness") is None:
        draft.set("rollout.maxStaleness", 7, default.name)
    return True


def _fully_async(draft: Draft, settings: Settings, entry: str) -> None:
    """Translate batch sizes of the fully asynchronous trainer.

    A step of sluice is what verl trains between two weight updates: `ppo_mini_batch_size` x
    `require_batches` x `trigger_parameter_sync_step` prompts, `ppo_mini_batch_size` at a time.
    """
    _staleness(draft, settings, entry)
    numbers = [
        _positive_integer(draft, settings.take(name))
        for name in (
            f"{_ACTOR}.ppo_mini_batch_size",
            f"{_ASYNC}.require_batches",
            f"{_ASYNC}.trigger_parameter_sync_step",
        )
    ]
    for name in ("data.train_batch_size", "data.gen_batch_size"):
        settings.used.add(name)  # no effect in this trainer
    total = settings.take("rollout.total_rollout_steps")
    mini, batches, updates = numbers
    if mini is None or batches is None or updates is None:
        return
    size = mini * batches * updates
    origin = "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step"
    draft.set("rollout.batchSize", size, origin)
    draft.set("trainer.stepsPerBatch", batches * updates, origin)
    draft.note("check", "rollout.batchSize", f"prompts between two weight updates: {origin}")
    _length(draft, total, size)


def _staleness(draft: Draft, settings: Settings, entry: str) -> None:
    threshold = settings.take(f"{_ASYNC}.staleness_threshold")
    if threshold is None or threshold.missing:
        set_field(draft, "rollout.maxStaleness", threshold, as_number)
        return
    # Any share of a batch means that samples may be a step old.
    steps = math.ceil(as_number(threshold.value))
    if steps < 1:
        settings.used.add(f"{_ASYNC}.partial_rollout")  # no effect in this trainer
        return
    draft.set("rollout.mode", "async", entry)
    draft.set("rollout.maxStaleness", steps, threshold.name)
    if steps != as_number(threshold.value):
        why = (
            f"sluice counts whole steps: {steps} in place of {threshold.value}, verl's share of a "
            "batch"
        )
        draft.note("check", "rollout.maxStaleness", why, threshold.line)


def _positive_integer(draft: Draft, setting: Setting | None) -> int | None:
    """Return a positive number; None with a note if it is not known."""
    if not set_field(draft, "rollout.batchSize", setting, _positive) or setting is None:
        return None
    return as_integer(setting.value)


def _positive(value: object) -> int:
    number = as_integer(value)
    if number < 1:
        raise ValueError(f"expected a positive number, found {value!r}")
    return number


def _length(draft: Draft, total: Setting | None, size: int) -> None:
    """Translate the number of prompts to a number of steps."""
    if total is None or total.value is None:
        why = "verl ends after rollout.total_rollout_steps prompts, by default 100"
        draft.note("check", "trainer.epochs", why)
        return
    epochs = draft.get("trainer.epochs")
    why = f"total_rollout_steps / batchSize; verl ends after {epochs} epochs if that is earlier"
    if set_field(draft, "trainer.steps", total, lambda value: _steps(as_integer(value), size), why):
        draft.drop("trainer.epochs")
        draft.notes = [note for note in draft.notes if note.subject != "trainer.epochs"]


def _steps(prompts: int, size: int) -> int:
    if prompts < size:
        raise ValueError(f"{prompts} prompts are fewer than one batch of {size}")
    return prompts // size
