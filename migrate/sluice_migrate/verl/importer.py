"""Converts commands and configurations of verl.

This module translates what depends on several keys: length, evaluation, batches, FSDP. `table` has
the keys that are translated one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from sluice_migrate.bash.script import Argument, Script, ScriptCommand
from sluice_migrate.draft import Draft, drop_unused_clip, job_name
from sluice_migrate.launches import last_launch, report
from sluice_migrate.lora import lora, take_lora
from sluice_migrate.megatron import drop_needless_replay, host_optimizer
from sluice_migrate.trackers import trackers_of_verl
from sluice_migrate.translation import (
    Setting,
    Settings,
    as_boolean,
    as_integer,
    as_number,
    set_field,
)
from sluice_migrate.verl.algorithm import corrections, critic, distillation, kl, policy
from sluice_migrate.verl.async_training import (
    asynchronous,
    is_fully_async,
    trainer_of,
    with_defaults,
)
from sluice_migrate.verl.data import (
    as_list,
    check_media_and_agents,
    columns_of,
    images,
    set_prompts,
    train_files,
    with_image_engine,
    with_names,
)
from sluice_migrate.verl.engines import with_engine
from sluice_migrate.verl.hydra import overrides, resolved
from sluice_migrate.verl.placement import PLACEMENT_KEYS, placement
from sluice_migrate.verl.reward import overlong, reward
from sluice_migrate.verl.sft import ENTRY, import_sft, is_sft, launcher_settings
from sluice_migrate.verl.table import FSDP, VERL

_ENTRY = re.compile(r"(^|[./])(main_ppo|main_dapo|main_ppo_sync|fully_async_main)(\.py)?$")
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_VALIDATION = ("temperature", "top_p", "top_k", "do_sample", "n")


def launch(script: Script, source: str) -> tuple[ScriptCommand, int]:
    """Return the command that starts verl, and the position of its entry point.

    Raises ImportFailedError.
    """
    expected = f"{source}: no command that runs verl.trainer.main_ppo or another trainer of verl"
    return last_launch(script, _is_entry, expected)


def _is_entry(word: Argument) -> bool:
    return bool(_ENTRY.search(word.text) or ENTRY.search(word.text))


def import_command(script: Script, source: str, base: Mapping[str, Setting] | None = None) -> Draft:
    """Convert a script or a command line.

    Parameters
    ----------
    script
        Its commands.
    source
        Its name.
    base
        Settings of the file of --config.

    Raises
    ------
    ImportFailedError
        If it starts no training.

    """
    command, at = launch(script, source)
    entry, words = command.words[at].text, command.words[at + 1 :]
    started = launcher_settings(command.words[:at]) if ENTRY.search(entry) else {}
    # The file of --config takes the place of --config-name.
    options = {} if base else _options(words)
    settings = {setting.name: setting for setting in overrides(words)} | options | started
    draft = import_verl({**(base or {}), **settings}, source, entry)
    report(draft, script, command, at)
    for name in dict.fromkeys(script.unknown_arrays):
        draft.note(
            "check", f"${{{name}[@]}}", "not set in the script, so it is left out, as bash does"
        )
    return draft


def _options(words: tuple[Argument, ...]) -> dict[str, Setting]:
    """Return Hydra's options, written as `--name=value` or as two words."""
    options = {}
    for word, after in zip(words, (*words[1:], None), strict=True):
        name, separator, value = word.text.partition("=")
        if name in ("--config-name", "--config-path", "-cn", "-cp"):
            value = value if separator or after is None else after.text
            options[name] = Setting(name, (value.strip("'\""),), word.line)
    return options


def import_verl(unresolved: Mapping[str, Setting], source: str, entry: str = "") -> Draft:
    """Convert the settings of a file, of a command, or of both.

    Raises ImportFailedError if they name no prompts.
    """
    entry = trainer_of(entry, unresolved)
    settings = with_defaults(Settings(resolved(unresolved)), entry)
    draft = Draft(job_name(_name(settings, source)))
    trackers_of_verl(draft, settings)
    check_media_and_agents(draft, settings)
    if is_sft(settings, entry):
        settings.used |= {"--config-name", "--config-path", "-cn", "-cp", *_OF_IMAGES}
        import_sft(draft, settings, train_files(draft, settings))
        images(draft, settings)
        return draft
    _config(draft, settings)
    # Configuration files list the options of multi-turn rollouts even if they are off.
    turns = settings.get(f"{_ROLLOUT}.multi_turn.enable")
    if turns is None or turns.value is not True:  # its group has no effect
        settings.used |= {name for name in settings if name.startswith(f"{_ROLLOUT}.multi_turn.")}
    set_prompts(draft, settings)
    _length(draft, settings)
    reward(draft, settings)
    policy(draft, settings)
    kl(draft, settings)
    corrections(draft, settings)
    _evaluation(draft, settings)
    distillation(draft, settings)
    _fsdp(draft, settings)
    host_optimizer(draft, settings, *_HOST_OPTIMIZER, default="0")
    # Taken before the table, which has no entry for them.
    settings.used |= _OF_IMAGES
    # These set fields on which batches and placement below depend.
    separate = asynchronous(draft, settings, entry)
    later = {name: settings.take(name) for name in _LATER}
    adapter = take_lora(settings, "actor_rollout_ref.model")
    with_engine(VERL, draft, with_image_engine(draft, settings)).translate(draft, settings)
    _defaults(draft)
    overlong(draft, settings)
    critic(draft, settings)
    lora(draft, adapter, backend="fsdp")
    images(draft, settings)
    if not is_fully_async(entry):
        _batches(draft, later)
    drop_unused_clip(draft)
    drop_needless_replay(draft)
    placement(draft, later, separate=separate)
    return draft


_HOST_OPTIMIZER = (
    f"{_ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload",
    f"{_ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction",
)
# Keys that are translated after the table, because they depend on fields that it sets.
_LATER = (
    f"{_ACTOR}.ppo_mini_batch_size",
    "data.gen_batch_size",
    "trainer.critic_warmup",
    *PLACEMENT_KEYS,
)


# Keys that `images` translates once the table has set the backend.
_OF_IMAGES = {
    "data.image_key",
    "data.mm_processor_kwargs.max_pixels",
    f"{_ACTOR}.freeze_vision_tower",
    f"{_ROLLOUT}.limit_images",
}


def _name(settings: Settings, source: str) -> str:
    named = settings.take("trainer.experiment_name")
    return (
        str(named.value)
        if named and named.value and not named.missing
        else PurePosixPath(source).stem
    )


def _config(draft: Draft, settings: Settings) -> None:
    settings.used |= {"--config-path", "-cp"}
    for setting in (settings.take("--config-name"), settings.take("-cn")):
        if setting and not re.fullmatch(
            r"((fully_async|one_step_off)_)?(ppo|dapo)(_megatron)?_trainer(\.yaml)?",
            str(setting.value),
        ):
            draft.note(
                "check",
                setting.name,
                f"{setting.value} is not read; pass its file with --config",
                setting.line,
            )


def _fsdp(draft: Draft, settings: Settings) -> None:
    """Translate the option of FSDP that keeps weights on the CPU."""
    groups = (_ACTOR, f"{_ACTOR}.fsdp_config")
    offload = settings.take(f"{_ACTOR}.fsdp_config.offload_policy")
    strategies = [settings.get(f"{group}.strategy") for group in groups]
    if not any(strategy and strategy.value in FSDP for strategy in strategies):
        return
    if offload and offload.value is True:
        draft.set("trainer.cpuOffload", "all", offload.name)


def _length(draft: Draft, settings: Settings) -> None:
    steps, epochs = (
        settings.take("trainer.total_training_steps"),
        settings.take("trainer.total_epochs"),
    )
    if steps and steps.value is not None and set_field(draft, "trainer.steps", steps, as_integer):
        return
    if not set_field(draft, "trainer.epochs", epochs, as_integer):
        draft.set("trainer.epochs", 30, "default of trainer.total_epochs")
        draft.note("other default", "trainer.epochs", "30 (verl, trainer.total_epochs)")


def _evaluation(draft: Draft, settings: Settings) -> None:
    every, files = settings.take("trainer.test_freq"), settings.take("data.val_files")
    before, most = settings.take("trainer.val_before_train"), settings.take("data.val_max_samples")
    sampling = {name: settings.take(f"{_ROLLOUT}.val_kwargs.{name}") for name in _VALIDATION}
    if files is None or every is None or not isinstance(every.value, int) or every.value < 1:
        if files:
            why = (
                "trainer.test_freq is not set, so there is no evaluation; verl would evaluate once "
                "before training"
            )
            draft.note("not translated", files.shown, why, files.line)
        return
    set_field(draft, "evaluation.everySteps", every, as_integer)
    part = f"@[0:{most.value}]" if most and isinstance(most.value, int) and most.value > 0 else ""
    datasets = with_names(
        [{"path": f"{path}{part}", **columns_of(settings)} for path in as_list(files.value)]
    )
    set_field(draft, "evaluation.datasets", files, lambda _: datasets, keep_variables=True)
    set_field(draft, "evaluation.beforeTrain", before, as_boolean)
    set_field(draft, "evaluation.samplesPerPrompt", sampling["n"], as_integer)
    set_field(draft, "evaluation.sampling.topP", sampling["top_p"], as_number)
    set_field(draft, "evaluation.sampling.topK", sampling["top_k"], as_integer)
    samples = sampling["do_sample"]
    if samples and samples.value is True and sampling["temperature"]:
        set_field(draft, "evaluation.sampling.temperature", sampling["temperature"], as_number)
    else:
        draft.set("evaluation.sampling.temperature", 0.0, "val_kwargs.do_sample=False")
        if samples is None:
            draft.note(
                "other default",
                "evaluation.sampling.temperature",
                "0 (verl, rollout.val_kwargs: greedy)",
            )


def _defaults(draft: Draft) -> None:
    VERL.write_defaults(draft)
    if draft.get("trainer.maxTokensPerGpu") is None:
        why = "no ppo_max_token_len_per_gpu: sluice starts with 8192 and raises it if memory allows"
        draft.note("check", "trainer.maxTokensPerGpu", why)
    if "/" in str(draft.get("model.path", "")) and not str(draft.get("model.path")).startswith(
        ("/", "~", ".", "$")
    ):
        draft.note(
            "check",
            "model.path",
            "sluice needs a directory: download a model of the hub first",
        )


def _batches(draft: Draft, later: Mapping[str, Setting | None]) -> None:
    """Translate batch sizes.

    Verl counts prompts: a batch has train_batch_size / ppo_mini_batch_size optimizer steps.
    """
    batch = draft.get("rollout.batchSize")
    size = later[f"{_ACTOR}.ppo_mini_batch_size"] or Setting(
        "default of ppo_mini_batch_size", (256,)
    )
    set_field(draft, "trainer.stepsPerBatch", size, lambda value: _steps(batch, as_integer(value)))
    drawn = later["data.gen_batch_size"]
    if drawn and drawn.value == 1 and draft.get("rollout.mode") == "async":
        return  # single prompts, as sluice generates them
    set_field(draft, "rollout.overSampling", drawn, lambda value: as_integer(value) / batch)


def _steps(batch: int, size: int) -> int:
    if size < 1 or batch % size:
        raise ValueError(
            f"a batch of {batch} prompts cannot be split into optimizer steps of {size}"
        )
    return batch // size
