"""slime's launch scripts -> RLJob: data, engines and evaluation, which need more than one argument
each.

Arguments that stand for themselves are in slime_table.py.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from sluice_migrate.bash.script import Argument, Script, ScriptCommand
from sluice_migrate.draft import (
    Draft,
    ImportFailedError,
    Setting,
    Settings,
    idle,
    integer,
    job_name,
    put,
    text,
    translate,
)
from sluice_migrate.host_optimizer import host_optimizer
from sluice_migrate.launches import last_launch, report
from sluice_migrate.routing import replayed
from sluice_migrate.slime.learning import algorithm, distillation, reward
from sluice_migrate.slime.sft import supervised, without_engines
from sluice_migrate.slime.sizes import batches, placement
from sluice_migrate.slime.table import DEFAULTS, TABLE, fallback

ENTRIES = ("train.py", "train_async.py")
_NONZERO_STD = "check_reward_nonzero_std"
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
"""Arguments that are translated after the table, because they need what it writes."""
_OF_EVALUATION = ("--eval-", "--n-samples-per-eval", "--skip-eval-before-train")
_HOST_OPTIMIZER = ("--optimizer-cpu-offload", "--optimizer-offload-fraction")


def launch(script: Script, source: str) -> tuple[ScriptCommand, int]:
    """The command that starts slime, and where its entry point stands in it.

    Raises ImportFailedError.
    """
    wanted = f"{source}: no command that runs {' or '.join(ENTRIES)}"
    return last_launch(script, _is_entry, wanted)


def import_slime(script: Script, source: str) -> Draft:
    """The job of a launch script. source: its name.

    Raises ImportFailedError where it starts no training.
    """
    command, at = launch(script, source)
    draft = Draft(job_name(PurePosixPath(source).stem))
    report(draft, script, command, at)
    for name in dict.fromkeys(script.unknown_arrays):
        why = (
            "not set in the script, perhaps in a file that it sources; a model's shape needs no "
            "translation"
        )
        draft.note("check", f"${{{name}[@]}}", why)
    settings = Settings(_flags(command, at + 1, draft))
    if PurePosixPath(command.words[at].text).name == "train_async.py":
        draft.set("rollout.mode", "async", "train_async.py")
        draft.set("rollout.maxStaleness", 1, "train_async.py")
    _data(draft, settings)
    _length(draft, settings)
    sft = supervised(draft, settings)
    if not sft:
        distillation(draft, settings)
        reward(draft, settings)
    algorithm(draft, settings)
    _engines(draft, settings)
    host_optimizer(draft, settings, *_HOST_OPTIMIZER, usual="1")
    _evaluation(draft, settings)
    settings.seen |= set(_LATER)
    translate(draft, settings, TABLE, fallback)
    _defaults(draft)
    batches(draft, settings)
    replayed(draft)
    placement(draft, settings)
    if sft:
        without_engines(draft)
    return draft


def _is_entry(word: Argument) -> bool:
    return PurePosixPath(word.text).name in ENTRIES


def _flags(command: ScriptCommand, start: int, draft: Draft) -> dict[str, Setting]:
    """The arguments behind train.py, as argparse reads them: the last of a name counts."""
    flags: dict[str, Setting] = {}
    name = ""
    for word in command.words[start:]:
        if word.text.startswith("--"):
            name, separator, value = word.text.partition("=")
            flags[name] = Setting(
                name, (value,) if separator else (), word.line, word.missing, word.doubtful
            )
        elif name:
            old = flags[name]
            flags[name] = Setting(
                name,
                (*old.values, word.text),
                old.line,
                old.missing + word.missing,
                old.doubtful + word.doubtful,
            )
        else:
            draft.note("not translated", word.text, "a word that belongs to no argument", word.line)
    return flags


def _data(draft: Draft, settings: Settings) -> None:
    paths = settings.take("--prompt-data")
    if paths is None:
        raise ImportFailedError("no --prompt-data: there is nothing to train on")
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
    put(draft, "data.prompts", paths, lambda _: prompts, literal=True)


def _length(draft: Draft, settings: Settings) -> None:
    steps, epochs = settings.take("--num-rollout"), settings.take("--num-epoch")
    if not put(draft, "trainer.steps", steps, integer):
        put(draft, "trainer.epochs", epochs, integer)


def _engines(draft: Draft, settings: Settings) -> None:
    if stop := settings.take("--rollout-stop"):
        draft.set("rollout.sampling.stop", list(stop.values), stop.name)
    chosen = settings.take("--dynamic-sampling-filter-path")
    if chosen and str(chosen.value).endswith(_NONZERO_STD):
        draft.set("rollout.dynamicFilter", "nonzero_std", chosen.name)
    else:
        note = "the function gets a SampleGroup, and returns True, or why it drops the group"
        put(draft, "rollout.dynamicFilter", chosen, text, note)
    function = settings.take("--rollout-function-path")
    if function and "fully_async" in str(function.value):
        draft.set("rollout.mode", "async", function.name)
        draft.set("rollout.maxStaleness", 1, function.name)
        why = "slime's fully async rollout knows no limit; sluice wants one"
        draft.note("check", "rollout.maxStaleness", why, function.line)
    elif function and "sglang_rollout" not in str(function.value):
        draft.note(
            "not translated",
            function.shown,
            "own code plays one sample: rollout.function",
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
    names = [name for name in settings if name.startswith(_OF_EVALUATION)]
    if interval is None:
        why = "slime evaluates nothing without --eval-interval; here it is evaluation.everySteps"
        idle(draft, settings, names, why)
        return
    if data is None:
        rest = [name for name in names if name != "--eval-config"]
        why = "there is no --eval-prompt-data to evaluate; here it is evaluation.datasets"
        idle(draft, settings, rest, why)
        return
    put(draft, "evaluation.everySteps", interval, integer)
    words = [str(value) for value in data.values]
    if draft.get("reward") is None:
        why = (
            "slime judges it with the teacher's function; sluice wants a reward: "
            "evaluation.datasets[].reward"
        )
        idle(draft, settings, names, why)
        draft.drop("evaluation.everySteps")
        return
    pairs = [("", words[0])] if len(words) == 1 else zip(words[::2], words[1::2], strict=False)
    like = {
        key: value for key, value in draft.get("data.prompts")[0].items() if key != "path"
    } | columns
    datasets = [{"path": path} | ({"name": name} if name else {}) | like for name, path in pairs]
    put(draft, "evaluation.datasets", data, lambda _: datasets, literal=True)
    if skips:
        draft.set("evaluation.beforeTrain", False, "--skip-eval-before-train")


def _defaults(draft: Draft) -> None:
    for path, value, name in DEFAULTS:
        if draft.get(path) is None:
            draft.set(path, value, f"default of {name}")
            draft.note("other default", path, f"{value} (slime, {name})")
    if draft.get("algorithm.estimator") == "ppo" and draft.get("algorithm.critic.lr") is None:
        draft.set("algorithm.critic.lr", draft.get("trainer.optimizer.lr", 1e-6), "--lr")
        draft.note(
            "other default", "algorithm.critic.lr", "slime trains the critic at the policy's rate"
        )
    for path, what in (
        (
            "checkpoint.everySteps",
            "slime saves nothing without --save-interval; sluice does every 20 steps",
        ),
        (
            "rollout.sampling.maxResponseTokens",
            "no --rollout-max-response-len: sluice's default of 1024 holds",
        ),
        (
            "trainer.maxTokensPerGpu",
            "no --max-tokens-per-gpu: sluice begins with 8192 tokens and grows",
        ),
    ):
        if draft.get(path) is None:
            draft.note("check", path, what)
