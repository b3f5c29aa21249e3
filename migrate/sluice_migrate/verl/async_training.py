"""verl's asynchronous trainers -> rollout.mode async: `fully_async_main`, and the `main_ppo` of its
one-step-off policy. Names and defaults of their own configurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sluice_migrate.draft import Draft
from sluice_migrate.translation import Setting, Settings, as_integer, as_number, set_field

_ACTOR, _ASYNC = "actor_rollout_ref.actor", "async_training"
_V1 = "trainer.v1"
_APART = {
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "algorithm.rollout_correction.bypass_mode": True,
}
_FULLY = _APART | {
    f"{_ASYNC}.staleness_threshold": 0.1,
    f"{_ASYNC}.trigger_parameter_sync_step": 4,
    f"{_ASYNC}.require_batches": 1,
    f"{_ASYNC}.partial_rollout": True,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
}


def trainer_of(entry: str, names: Iterable[str]) -> str:
    """The entry point; of a configuration without one, what its keys say."""
    if not entry and any(name.startswith(f"{_ASYNC}.") for name in names):
        return "fully_async_main"
    return entry


def is_fully_async(entry: str) -> bool:
    return "fully_async" in entry


def is_one_step_off(entry: str) -> bool:
    return "one_step_off" in entry


def with_defaults(settings: Settings, entry: str) -> Settings:
    """The settings, and what the trainer's own configuration adds to verl's usual one."""
    added = _FULLY if is_fully_async(entry) else _APART if is_one_step_off(entry) else {}
    defaults = {
        name: Setting(name, (value,), explicit=False)
        for name, value in added.items()
        if name not in settings
    }
    return Settings(settings | defaults)


def asynchronous(draft: Draft, settings: Settings, entry: str) -> bool:
    """Translate how samples may be older than the weights. True where engines have GPUs of their
    own.
    """
    if is_fully_async(entry):
        _fully_async(draft, settings, entry)
        return True
    if is_one_step_off(entry):  # the next batch is generated while one is trained
        draft.set("rollout.mode", "async", entry)
        draft.set("rollout.maxStaleness", 1, entry)
        return True
    return _of_new_trainer(draft, settings)


def _of_new_trainer(draft: Draft, settings: Settings) -> bool:
    """`trainer.v1`: a batch is trained between two updates of the weights, and a sample may span
    `max_off_policy_threshold` versions, its own included.
    """
    mode = settings.take(f"{_V1}.trainer_mode")
    if mode is None or mode.value in ("sync", None):
        return False
    if mode.value != "separate_async":
        why = "engines on the trainer's GPUs take turns with it: this becomes synchronous"
        draft.note("not translated", mode.shown, why, mode.line)
        return False
    for name in ("sampler.max_off_policy_strategy", "separate_async.parameter_sync_step"):
        settings.used.add(f"{_V1}.{name}")  # batch / mini-batch says the same
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
    """A step of ours is what verl trains between two updates of the weights: `ppo_mini_batch_size`
    x `require_batches` x `trigger_parameter_sync_step` prompts, in optimizer steps of the first.
    """
    _staleness(draft, settings, entry)
    numbers = [
        _whole(draft, settings.take(name))
        for name in (
            f"{_ACTOR}.ppo_mini_batch_size",
            f"{_ASYNC}.require_batches",
            f"{_ASYNC}.trigger_parameter_sync_step",
        )
    ]
    for name in ("data.train_batch_size", "data.gen_batch_size"):
        settings.used.add(name)  # without an effect there
    total = settings.take("rollout.total_rollout_steps")
    mini, batches, updates = numbers
    if mini is None or batches is None or updates is None:
        return
    size = mini * batches * updates
    origin = "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step"
    draft.set("rollout.batchSize", size, origin)
    draft.set("trainer.stepsPerBatch", batches * updates, origin)
    draft.note("check", "rollout.batchSize", f"prompts between two updates of weights: {origin}")
    _length(draft, total, size)


def _staleness(draft: Draft, settings: Settings, entry: str) -> None:
    threshold = settings.take(f"{_ASYNC}.staleness_threshold")
    if threshold is None or threshold.missing:
        set_field(draft, "rollout.maxStaleness", threshold, as_number)
        return
    steps = math.ceil(as_number(threshold.value))
    if steps < 1:
        settings.used.add(f"{_ASYNC}.partial_rollout")  # without an effect there
        return
    draft.set("rollout.mode", "async", entry)
    draft.set("rollout.maxStaleness", steps, threshold.name)
    if steps != as_number(threshold.value):
        why = (
            f"whole steps: up to {steps} batch of samples may be a step behind, where verl's "
            f"{threshold.value} is a share of one"
        )
        draft.note("check", "rollout.maxStaleness", why, threshold.line)


def _whole(draft: Draft, setting: Setting | None) -> int | None:
    """A positive number; None with a note where the script does not say it."""
    if not set_field(draft, "rollout.batchSize", setting, _positive) or setting is None:
        return None
    return as_integer(setting.value)


def _positive(value: object) -> int:
    number = as_integer(value)
    if number < 1:
        raise ValueError(f"expected a number from 1 on, found {value!r}")
    return number


def _length(draft: Draft, total: Setting | None, size: int) -> None:
    """From prompts to steps; verl ends earlier where `trainer.total_epochs` are through."""
    if total is None or total.value is None:
        why = "verl ends after rollout.total_rollout_steps prompts, 100 where nothing is said"
        draft.note("check", "trainer.epochs", why)
        return
    epochs = draft.get("trainer.epochs")
    why = f"total_rollout_steps / batchSize; verl ends after {epochs} epochs if that is earlier"
    if set_field(draft, "trainer.steps", total, lambda value: _steps(as_integer(value), size), why):
        draft.drop("trainer.epochs")
        draft.notes = [note for note in draft.notes if note.subject != "trainer.epochs"]


def _steps(prompts: int, size: int) -> int:
    if prompts < size:
        raise ValueError(f"{prompts} prompts are less than one batch of {size}")
    return prompts // size
