"""slime's launch scripts -> RLJob: what needs more than one argument.

The rest is slime_table.py.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any, get_args

from sluice.api.data import RewardType
from sluice_cli.importing.draft import (
    Draft,
    ImportFailedError,
    Setting,
    Settings,
    integer,
    job_name,
    put,
    real,
    text,
    translate,
)
from sluice_cli.importing.host_optimizer import host_optimizer
from sluice_cli.importing.launches import last_launch, report
from sluice_cli.importing.routing import replayed
from sluice_cli.importing.script import Argument, Script, ScriptCommand
from sluice_cli.importing.slime_sft import supervised, without_engines
from sluice_cli.importing.slime_table import DEFAULTS, TABLE, fallback

ENTRIES = ("train.py", "train_async.py")
_REWARDS = {"math": "math_prm800k"}
"""rm_type by another name; the rest is called the same."""
_NONZERO_STD = "check_reward_nonzero_std"
_OPD = "on_policy_distillation."
"""slime's module whose functions ask a teacher in the place of a reward."""
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
        _distillation(draft, settings)
        _reward(draft, settings)
    _algorithm(draft, settings)
    _engines(draft, settings)
    host_optimizer(draft, settings, *_HOST_OPTIMIZER, usual="1")
    _evaluation(draft, settings)
    settings.seen |= set(_LATER)
    translate(draft, settings, TABLE, fallback)
    _defaults(draft)
    _batches(draft, settings)
    replayed(draft)
    _placement(draft, settings)
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


def _distillation(draft: Draft, settings: Settings) -> None:
    """--use-opd. A teacher behind a URL is slime's remote reward, which then has no other."""
    kind, coef, load = (
        settings.take(name) for name in ("--opd-type", "--opd-kl-coef", "--opd-teacher-load")
    )
    if not settings.on("--use-opd"):
        return
    url = settings.get("--rm-url")
    if kind and kind.value == "sglang" and url:
        put(
            draft,
            "algorithm.distillation.teacher.url",
            url,
            lambda value: text(value).removesuffix("/generate"),
        )
    elif kind and kind.value == "megatron" and load:
        note = "slime's is a Megatron checkpoint; name the teacher's Hugging Face directory"
        put(draft, "algorithm.distillation.teacher.path", load, text, note)
    else:
        why = (
            "sluice distils from an SGLang server (--rm-url) or from a checkpoint "
            "(--opd-teacher-load)"
        )
        draft.note(
            "not translated", kind.shown if kind else "--use-opd", why, kind.line if kind else 0
        )
        return
    put(draft, "algorithm.distillation.coef", coef, real)


def _reward(draft: Draft, settings: Settings) -> None:
    kind, url, function = (
        settings.take(name) for name in ("--rm-type", "--rm-url", "--custom-rm-path")
    )
    after = settings.get("--custom-reward-post-process-path")
    if after and _OPD in str(after.value):
        settings.seen.add(after.name)
    if function and _OPD in str(function.value) and draft.get("algorithm.distillation"):
        return
    if put(draft, "reward.function", function, text):
        return
    name = str(kind.value) if kind else ""
    if name == "remote_rm" and put(draft, "reward.url", url, text):
        return
    known = _REWARDS.get(name, name)
    if known in get_args(RewardType):
        draft.set("reward.type", known, "--rm-type")
        if known != name:
            draft.note("check", "reward.type", f"slime's {name} is called {known}; docs/rewards.md")
        return
    draft.set("reward.type", "data_source", "--rm-type")
    what = f"--rm-type {name} has no counterpart" if name else "no --rm-type"
    line = kind.line if kind else 0
    draft.note(
        "check",
        "reward.type",
        f"{what}: a row's metadata.rm_type judges it, else its data_source",
        line,
    )


def _algorithm(draft: Draft, settings: Settings) -> None:
    coef = settings.take("--kl-loss-coef")
    if settings.on("--use-kl-loss"):
        put(
            draft,
            "algorithm.kl.lossCoef",
            coef or Setting("default of --kl-loss-coef", ("0",)),
            real,
        )
        if draft.get("algorithm.kl.lossCoef") == 0:
            why = "0: slime loads the reference only to log the KL; sluice leaves it out"
            draft.note("check", "algorithm.kl.lossCoef", why, coef.line if coef else 0)
    for name, path, value in (
        ("--use-unbiased-kl", "algorithm.kl.unbiased", True),
        ("--disable-grpo-std-normalization", "algorithm.normalizeStd", False),
        ("--calculate-per-token-loss", "algorithm.aggregation", "token_mean"),
        ("--use-tis", "algorithm.offPolicy.method", "tis"),
        ("--use-rollout-logprobs", "algorithm.offPolicy.oldLogProbs", "rollout"),
        ("--use-routing-replay", "trainer.routingReplay", "trainer"),
        ("--use-rollout-routing-replay", "trainer.routingReplay", "rollout"),  # implies the other
    ):
        if settings.on(name):
            draft.set(path, value, name)
    delta = settings.take("--opsm-delta")
    if settings.on("--use-opsm"):
        put(
            draft,
            "algorithm.offPolicy.opsmDelta",
            delta or Setting("default of --opsm-delta", ("1e-4",)),
            real,
        )
    if not settings.on("--use-tis"):  # then they mean nothing
        settings.seen |= {"--tis-clip", "--tis-clip-low"}


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
    if interval is None or data is None:  # then they mean nothing
        settings.seen |= {
            name for name in settings if name.startswith(("--eval-", "--n-samples-per-eval"))
        }
        settings.seen -= {"--eval-config"}
        return
    put(draft, "evaluation.everySteps", interval, integer)
    words = [str(value) for value in data.values]
    if draft.get("reward") is None:
        why = (
            "slime judges it with the teacher's function; sluice wants a reward: "
            "evaluation.datasets[].reward"
        )
        draft.note("not translated", data.shown, why, data.line)
        draft.drop("evaluation.everySteps")
        settings.seen |= {
            name for name in settings if name.startswith(("--eval-", "--n-samples-per-eval"))
        }
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
            "no --max-tokens-per-gpu: sluice packs micro-batches of 8192 tokens",
        ),
    ):
        if draft.get(path) is None:
            draft.note("check", path, what)


def _batches(draft: Draft, settings: Settings) -> None:
    """slime: rollout-batch-size x n-samples = global-batch-size x num-steps-per-rollout."""
    batch = draft.get("rollout.batchSize", 0)
    samples = batch * draft.get("rollout.samplesPerPrompt", 1)
    if not put(draft, "trainer.stepsPerBatch", settings.take("--num-steps-per-rollout"), integer):
        size = settings.take("--global-batch-size")
        put(
            draft,
            "trainer.stepsPerBatch",
            size,
            lambda value: steps_per_batch(samples, integer(value)),
        )
    if batch:
        over = settings.take("--over-sampling-batch-size")
        put(draft, "rollout.overSampling", over, lambda value: integer(value) / batch)


def steps_per_batch(samples: int, size: int) -> int:
    """Optimizer steps of a batch. ValueError where it cannot be split evenly."""
    if size < 1 or samples % size:
        raise ValueError(
            f"{samples} samples of a batch cannot be split into optimizer steps of {size}"
        )
    return samples // size


def _placement(draft: Draft, settings: Settings) -> None:
    """GPUs of the engines. slime counts GPUs, sluice engines."""
    trainer = draft.get("trainer.nodes", 1) * draft.get("trainer.gpusPerNode", 8)
    machine = _number(settings, "--num-gpus-per-node", 8)
    engine = _number(settings, "--rollout-num-gpus-per-engine", 1)
    colocated = settings.on("--colocate")
    total = trainer if colocated else _number(settings, "--rollout-num-gpus", trainer)
    draft.set("rollout.gpusPerReplica", min(engine, machine), "--rollout-num-gpus-per-engine")
    if engine > machine:
        draft.set("rollout.nodesPerReplica", -(-engine // machine), "--rollout-num-gpus-per-engine")
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
    if colocated:
        why = f"with sluice an engine of {engine} GPUs cannot share those of the trainer's machines"
        draft.note(
            "check",
            "rollout.replicas",
            f"{why}: trainer and engines take {trainer + total} GPUs in all",
        )


def _number(settings: Settings, name: str, default: int) -> int:
    setting = settings.take(name)
    return (
        int(setting.value)
        if setting and str(setting.value).isdigit() and int(setting.value)
        else default
    )
