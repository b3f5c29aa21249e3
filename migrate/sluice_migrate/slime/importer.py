"""Converts launch scripts of slime.

This module translates what depends on several arguments: data, engines, evaluation, batches, GPUs.
`table` has the arguments that are translated one by one.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from sluice_migrate.bash.script import Argument, Script, ScriptCommand
from sluice_migrate.draft import Draft, ImportFailedError, drop_unused_clip, job_name
from sluice_migrate.images import OTHER_MEDIA, set_images
from sluice_migrate.launches import last_launch, report
from sluice_migrate.lora import lora, take_lora_arguments
from sluice_migrate.megatron import drop_needless_replay, host_optimizer
from sluice_migrate.slime.learning import algorithm, distillation, reward
from sluice_migrate.slime.sft import supervised, without_engines
from sluice_migrate.slime.table import SLIME
from sluice_migrate.trackers import trackers_of_slime
from sluice_migrate.translation import (
    Setting,
    Settings,
    as_integer,
    as_text,
    note_unused,
    set_field,
)

ENTRIES = ("train.py", "train_async.py")
_DELTA_DIRECTORY = "--update-weight-disk-dir"
_NONZERO_STD = "check_reward_nonzero_std"
# Arguments that are translated after the table, because they depend on fields that it sets.
_LATER = (
    "--global-batch-size",
    "--num-steps-per-rollout",
    "--over-sampling-batch-size",
    "--num-gpus-per-node",
    "--colocate",
    "--rollout-num-gpus-per-engine",
    "--rollout-num-gpus",
    "--offload",
    "--offload-train",
    "--offload-rollout",
    "--no-offload",
    "--no-offload-train",
    "--no-offload-rollout",
)
_EVALUATION_PREFIXES = ("--eval-", "--n-samples-per-eval", "--skip-eval-before-train")
_HOST_OPTIMIZER = ("--optimizer-cpu-offload", "--optimizer-offload-fraction")


def launch(script: Script, source: str) -> tuple[ScriptCommand, int]:
    """Return the command that starts slime, and the position of its entry point.

    Raises ImportFailedError.
    """
    expected = f"{source}: no command that runs {' or '.join(ENTRIES)}"
    return last_launch(script, _is_entry, expected)


def import_slime(script: Script, source: str) -> Draft:
    """Convert a launch script; `source` is its name.

    Raises ImportFailedError if it starts no training.
    """
    command, at = launch(script, source)
    draft = Draft(job_name(PurePosixPath(source).stem))
    report(draft, script, command, at)
    for name in dict.fromkeys(script.unknown_arrays):
        why = (
            "not set in the script, perhaps in a file that it sources. Arguments that describe the "
            "model's shape are not needed"
        )
        draft.note("check", f"${{{name}[@]}}", why)
    settings = Settings(_flags(command, at + 1, draft))
    if PurePosixPath(command.words[at].text).name == "train_async.py":
        draft.set("rollout.mode", "async", "train_async.py")
        # train_async.py generates one batch while it trains the one before.
        draft.set("rollout.maxStaleness", 1, "train_async.py")
    trackers_of_slime(draft, settings)
    _data(draft, settings)
    _length(draft, settings)
    sft = supervised(draft, settings)
    if not sft:
        distillation(draft, settings)
        reward(draft, settings)
    algorithm(draft, settings)
    _engines(draft, settings)
    host_optimizer(draft, settings, *_HOST_OPTIMIZER, default="1")
    _evaluation(draft, settings)
    lora(draft, take_lora_arguments(settings))
    _deltas(draft, settings)
    # The table would report these as unknown: they are translated below.
    settings.used |= set(_LATER)
    keys = settings.take("--multimodal-keys")
    SLIME.translate(draft, settings)
    _defaults(draft)
    _images(draft, keys)
    _batches(draft, settings)
    drop_unused_clip(draft)
    drop_needless_replay(draft)
    _placement(draft, settings)
    if sft:
        without_engines(draft)
    return draft


def _deltas(draft: Draft, settings: Settings) -> None:
    """Translate delta updates (`--update-weight-mode delta`), which slime sends over a directory.

    The encoding, the checksum and the engines' directories are the store's own here.
    """
    mode = settings.get("--update-weight-mode")
    if mode is None or mode.value != "delta":
        return
    settings.used.add(mode.name)
    directory = settings.take(_DELTA_DIRECTORY)
    settings.take("--update-weight-transport")
    draft.set("weightSync.transport", "store", mode.shown)
    if directory:
        set_field(draft, "weightSync.store.uri", directory, as_text)
    else:
        draft.note("check", "weightSync.store.uri", "set the place of the weights", mode.line)


def _is_entry(word: Argument) -> bool:
    return PurePosixPath(word.text).name in ENTRIES


def _flags(command: ScriptCommand, start: int, draft: Draft) -> dict[str, Setting]:
    """Parse the arguments after train.py as argparse does: the last one of a name counts."""
    flags: dict[str, Setting] = {}
    name = ""
    for word in command.words[start:]:
        if word.text.startswith("--"):
            name, separator, value = word.text.partition("=")
            flags[name] = Setting(
                name, (value,) if separator else (), word.line, word.missing, word.conditional
            )
        # argparse gives all words up to the next name to an argument.
        elif name:
            old = flags[name]
            flags[name] = Setting(
                name,
                (*old.values, word.text),
                old.line,
                old.missing + word.missing,
                old.conditional + word.conditional,
            )
        else:
            draft.note(
                "not translated", word.text, "the word does not belong to an argument", word.line
            )
    return flags


def _data(draft: Draft, settings: Settings) -> None:
    paths = settings.take("--prompt-data")
    if paths is None:
        raise ImportFailedError("no --prompt-data: the script names no prompts to train on")
    # slime's default column.
    source: dict[str, Any] = {"promptKey": "input"}
    for name, key in (
        ("--input-key", "promptKey"),
        ("--label-key", "labelKey"),
        ("--metadata-key", "metadataKey"),
        ("--tool-key", "toolsKey"),
    ):
        if setting := settings.take(name):
            source[key] = str(setting.value)
    if settings.on("--apply-chat-template"):
        source["applyChatTemplate"] = True
    if arguments := settings.take("--apply-chat-template-kwargs"):
        try:
            source["chatTemplateArgs"] = dict(json.loads(str(arguments.value)))
        except ValueError as error:
            draft.note(
                "not translated", arguments.shown, f"not valid JSON: {error}", arguments.line
            )
    prompts = [{"path": str(path), **source} for path in paths.values]
    set_field(draft, "data.prompts", paths, lambda _: prompts, keep_variables=True)


def _length(draft: Draft, settings: Settings) -> None:
    steps, epochs = settings.take("--num-rollout"), settings.take("--num-epoch")
    # --num-rollout wins over --num-epoch, as in slime.
    if not set_field(draft, "trainer.steps", steps, as_integer):
        set_field(draft, "trainer.epochs", epochs, as_integer)


def _engines(draft: Draft, settings: Settings) -> None:
    if stop := settings.take("--rollout-stop"):
        draft.set("rollout.sampling.stop", list(stop.values), stop.name)
    chosen = settings.take("--dynamic-sampling-filter-path")
    if chosen and str(chosen.value).endswith(_NONZERO_STD):
        draft.set("rollout.dynamicFilter", "nonzero_std", chosen.name)
    else:
        note = "the function gets a SampleGroup; it returns True, or the reason to drop the group"
        set_field(draft, "rollout.dynamicFilter", chosen, as_text, note)
    function = settings.take("--rollout-function-path")
    if function and "fully_async" in str(function.value):
        draft.set("rollout.mode", "async", function.name)
        draft.set("rollout.maxStaleness", 1, function.name)
        why = "slime's fully async rollout has no limit of staleness; sluice needs one"
        draft.note("check", "rollout.maxStaleness", why, function.line)
    elif function and "sglang_rollout" not in str(function.value):
        draft.note(
            "not translated",
            function.shown,
            "a function of yours generates one sample, not a batch: rollout.function",
            function.line,
        )


def _evaluation(draft: Draft, settings: Settings) -> None:
    interval, data = settings.take("--eval-interval"), settings.take("--eval-prompt-data")
    skips = settings.on("--skip-eval-before-train")
    keys = (
        ("promptKey", "--eval-input-key"),
        ("labelKey", "--eval-label-key"),
        ("toolsKey", "--eval-tool-key"),
    )
    columns = {
        field: str(setting.value) for field, name in keys if (setting := settings.take(name))
    }
    names = [name for name in settings if name.startswith(_EVALUATION_PREFIXES)]
    if interval is None:
        why = "slime does not evaluate without --eval-interval (evaluation.everySteps)"
        note_unused(draft, settings, names, why)
        return
    if data is None:
        rest = [name for name in names if name != "--eval-config"]
        why = "slime does not evaluate without --eval-prompt-data (evaluation.datasets)"
        note_unused(draft, settings, rest, why)
        return
    set_field(draft, "evaluation.everySteps", interval, as_integer)
    words = [str(value) for value in data.values]
    if draft.get("reward") is None:
        why = (
            "slime scores evaluations with the teacher's function; sluice needs a reward: "
            "evaluation.datasets[].reward"
        )
        note_unused(draft, settings, names, why)
        draft.drop("evaluation.everySteps")
        return
    # --eval-prompt-data has one path, or pairs of a name and a path.
    pairs = [("", words[0])] if len(words) == 1 else zip(words[::2], words[1::2], strict=False)
    like = {
        key: value for key, value in draft.get("data.prompts")[0].items() if key != "path"
    } | columns
    datasets = [{"path": path} | ({"name": name} if name else {}) | like for name, path in pairs]
    set_field(draft, "evaluation.datasets", data, lambda _: datasets, keep_variables=True)
    if skips:
        draft.set("evaluation.beforeTrain", False, "--skip-eval-before-train")


def _images(draft: Draft, keys: Setting | None) -> None:
    """Set data.images from --multimodal-keys, a JSON object of columns by medium."""
    if keys is None:
        return
    try:
        columns = json.loads(str(keys.value))
        column = columns.pop("image", None)
    except (ValueError, AttributeError, TypeError):
        why = 'expected a JSON object such as {"image": "images"}; see data.images'
        draft.note("not translated", keys.shown, why, keys.line)
        return
    if columns:
        draft.note("not translated", keys.shown, OTHER_MEDIA, keys.line)
    if column:
        set_images(draft, keys, column=str(column))


def _defaults(draft: Draft) -> None:
    SLIME.write_defaults(draft)
    if draft.get("algorithm.estimator") == "ppo" and draft.get("algorithm.critic.lr") is None:
        draft.set("algorithm.critic.lr", draft.get("trainer.optimizer.lr", 1e-6), "--lr")
        draft.note(
            "other default",
            "algorithm.critic.lr",
            "slime trains the critic with the policy's learning rate",
        )
    for path, what in (
        (
            "checkpoint.everySteps",
            "slime does not save without --save-interval; sluice saves every 20 steps",
        ),
        (
            "rollout.sampling.maxResponseTokens",
            "no --rollout-max-response-len: sluice's default is 1024",
        ),
        (
            "trainer.maxTokensPerGpu",
            "no --max-tokens-per-gpu: sluice starts with 8192 and raises it if memory allows",
        ),
    ):
        if draft.get(path) is None:
            draft.note("check", path, what)


def _batches(draft: Draft, settings: Settings) -> None:
    """Translate batch sizes.

    In slime rollout-batch-size x n-samples-per-prompt = global-batch-size x num-steps-per-rollout.
    """
    batch = draft.get("rollout.batchSize", 0)
    samples = batch * draft.get("rollout.samplesPerPrompt", 1)
    if not set_field(
        draft, "trainer.stepsPerBatch", settings.take("--num-steps-per-rollout"), as_integer
    ):
        size = settings.take("--global-batch-size")
        set_field(
            draft,
            "trainer.stepsPerBatch",
            size,
            lambda value: _steps_per_batch(samples, as_integer(value)),
        )
    if batch:
        over = settings.take("--over-sampling-batch-size")
        set_field(draft, "rollout.overSampling", over, lambda value: as_integer(value) / batch)


def _steps_per_batch(samples: int, size: int) -> int:
    """Return the optimizer steps of a batch. Raises ValueError if it cannot be split evenly."""
    if size < 1 or samples % size:
        raise ValueError(
            f"a batch of {samples} samples cannot be split into optimizer steps of {size}"
        )
    return samples // size


def _placement(draft: Draft, settings: Settings) -> None:
    """Translate the GPUs of engines: slime counts GPUs, sluice counts engines."""
    trainer = draft.get("trainer.nodes", 1) * draft.get("trainer.gpusPerNode", 8)
    machine = _number(settings, "--num-gpus-per-node", 8)
    engine = _number(settings, "--rollout-num-gpus-per-engine", 1)
    colocated = settings.on("--colocate")
    total = trainer if colocated else _number(settings, "--rollout-num-gpus", trainer)
    draft.set("rollout.gpusPerReplica", min(engine, machine), "--rollout-num-gpus-per-engine")
    # An engine that is wider than a machine spans several.
    if engine > machine:
        draft.set("rollout.nodesPerReplica", -(-engine // machine), "--rollout-num-gpus-per-engine")
    # Engines that share GPUs must divide a machine of the trainer evenly.
    if colocated and draft.get("trainer.gpusPerNode", 8) % engine == 0:
        draft.set("trainer.colocate", True, "--colocate")
        if settings.on("--no-offload") or settings.on("--no-offload-train"):
            draft.set("trainer.offload", "none", "--no-offload-train")
        return
    draft.set(
        "rollout.replicas",
        max(1, total // engine),
        "--colocate" if colocated else "--rollout-num-gpus",
    )
    # Otherwise they get as many GPUs as they shared in slime.
    if colocated:
        why = f"an engine of {engine} GPUs cannot share the trainer's GPUs in sluice"
        draft.note(
            "check",
            "rollout.replicas",
            f"{why}; trainer and engines take {trainer + total} GPUs together",
        )


def _number(settings: Settings, name: str, default: int) -> int:
    setting = settings.take(name)
    return (
        int(setting.value)
        if setting and str(setting.value).isdigit() and int(setting.value)
        else default
    )
