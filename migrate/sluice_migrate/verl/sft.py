"""Translates verl's supervised fine-tuning.

Its trainers are `fsdp_sft_trainer` (up to verl 0.5) and `sft_trainer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice_migrate.bash.script import Argument
from sluice_migrate.draft import Draft
from sluice_migrate.lora import lora, take_lora
from sluice_migrate.translation import (
    ALWAYS,
    PACKED,
    Covered,
    Field,
    Setting,
    Settings,
    Table,
    Translation,
    Unsupported,
    as_boolean,
    as_integer,
    as_number,
    as_path,
    set_field,
)
from sluice_migrate.verl.table import VERL, schedule

ENTRY = re.compile(r"(^|[./])(fsdp_sft_trainer|sft_trainer|sft_trainer_ray)(\.py)?$")
# Options of torchrun, in both spellings.
_PROCESSES = re.compile(r"^--(nproc[_-]per[_-]node|nnodes)(?:=(.*))?$")
_WARMUP = Unsupported("set a number of steps in trainer.optimizer.warmupSteps", unless=(0,))
_NESTED = Unsupported(
    "sluice reads whole columns; rewrite the rows with the text in a column",
    unless=(None, []),
)
_CHOICE = Covered("trainer.backend selects the backend")
_STATE = Unsupported("the optimizer's state is fp32", unless=(None, "fp32", "float32", True))
_OPTIMIZER = Unsupported(
    "sluice has the options of trainer.optimizer only; its state stays on the GPU",
    unless=(None, False, 0, 0.0),
)
_MTP = Unsupported(
    "trainer.mtp trains the layer for a further token, with backend: fsdp", unless=(None, False, 0)
)
_SHARDING = Covered("trainer.parallelism shards weights and optimizer")


_ENTRIES: dict[str, Translation] = {
    **{
        name: entry
        for name, entry in VERL.entries.items()
        if name.startswith(("trainer.", "data.shuffle", "data.seed"))
    },
    "trainer.seed": Field("data.seed", as_integer),
    "trainer.max_ckpt_to_keep": Field("checkpoint.keep", as_integer),
    "model.path": Field("model.path", as_path),
    "model.partial_pretrain": Field("model.path", as_path),
    "model.trust_remote_code": Field("model.trustRemoteCode", as_boolean),
    "model.use_liger": Covered("sluice computes log-probs without the logits of a whole row"),
    "model.use_remove_padding": ALWAYS,
    "use_remove_padding": ALWAYS,
    "data.train_batch_size": Field("rollout.batchSize", as_integer),
    "data.max_length": Field("data.maxPromptTokens", as_integer),
    "data.micro_batch_size": PACKED,
    "data.micro_batch_size_per_gpu": PACKED,
    "data.use_dynamic_bsz": PACKED,
    "data.pad_mode": PACKED,
    "data.balance_dp_token": ALWAYS,
    "data.max_token_len_per_gpu": Field("trainer.maxTokensPerGpu", as_integer),
    "data.prompt_dict_keys": _NESTED,
    "data.response_dict_keys": _NESTED,
    "data.custom_cls.path": Unsupported(
        "write a function that yields rows: data.prompts[].source", unless=(None,)
    ),
    "data.val_files": Unsupported(
        "sluice evaluates by generation: set evaluation.datasets, each with a reward",
        unless=(None,),
    ),
    "data.val_max_samples": Covered("it belongs to data.val_files"),
    "trainer.test_freq": Covered("it belongs to data.val_files"),
    "data.ignore_input_ids_mismatch": Covered(
        "sluice skips and counts rows if the template drops a part of an answer"
    ),
    "model": _CHOICE,
    "model_engine": _CHOICE,
    "optim.min_lr_ratio": Unsupported(
        "set a learning rate in trainer.optimizer.minLr", unless=(None, 0, 0.0)
    ),
    "optim.init_lr_ratio": _WARMUP,
    "optim.lr_warmup_init": Unsupported("the warmup starts at 0", unless=(None, 0, 0.0)),
    "optim.warmup_style": Field("trainer.optimizer.schedule", schedule),
    "optim.optimizer": Unsupported("sluice trains with AdamW", unless=("adam", "AdamW", None)),
    "optim.optimizer_impl": Covered("the backend chooses its AdamW"),
    **dict.fromkeys(
        (
            "optim.exp_avg_dtype",
            "optim.exp_avg_sq_dtype",
            "optim.master_weights",
            "optim.store_param_remainders",
        ),
        _STATE,
    ),
    "optim.lr": Field("trainer.optimizer.lr", as_number),
    "optim.weight_decay": Field("trainer.optimizer.weightDecay", as_number),
    "optim.clip_grad": Field("trainer.optimizer.clipGrad", as_number),
    "optim.lr_scheduler": Field("trainer.optimizer.schedule", schedule),
    "optim.lr_scheduler_type": Field("trainer.optimizer.schedule", schedule),
    "optim.lr_decay_style": Field("trainer.optimizer.schedule", schedule),
    "optim.min_lr": Field("trainer.optimizer.minLr", as_number),
    "optim.lr_warmup_steps": Field(
        "trainer.optimizer.warmupSteps", lambda value: max(0, as_integer(value))
    ),
    "optim.warmup_steps_ratio": _WARMUP,
    "optim.lr_warmup_steps_ratio": _WARMUP,
    "ulysses_sequence_parallel_size": Field("trainer.parallelism.context", as_integer),
    "engine.ulysses_sequence_parallel_size": Field("trainer.parallelism.context", as_integer),
    "engine.tensor_model_parallel_size": Field("trainer.parallelism.tensor", as_integer),
    "engine.pipeline_model_parallel_size": Field("trainer.parallelism.pipeline", as_integer),
    "engine.context_parallel_size": Field("trainer.parallelism.context", as_integer),
    "engine.expert_model_parallel_size": Field("trainer.parallelism.expert", as_integer),
    "engine.virtual_pipeline_model_parallel_size": Field(
        "trainer.parallelism.virtualPipeline", as_integer
    ),
    "engine": _SHARDING,
    "engine.strategy": _SHARDING,
    "optim": _SHARDING,
}
_DEFAULTS = (
    ("rollout.batchSize", 256, "data.train_batch_size"),
    ("data.maxPromptTokens", 1024, "data.max_length"),
    ("trainer.optimizer.lr", 1e-5, "optim.lr"),
    ("trainer.optimizer.weightDecay", 0.01, "optim.weight_decay"),
)


_SFT = Table(
    "verl",
    _ENTRIES,
    prefixes=(
        *(
            (prefix, _SHARDING)
            for prefix in ("model.fsdp_config.", "engine.", "checkpoint.", "profiler.")
        ),
        ("optim.override_optimizer_config.", _OPTIMIZER),
        ("model.mtp.", _MTP),
        ("hydra.", Covered("it belongs to Hydra")),
    ),
    defaults=_DEFAULTS,
)
# Default of the older trainer, `fsdp_sft_trainer`.
_COSINE = ("trainer.optimizer.schedule", "cosine", "optim.lr_scheduler")


def launcher_settings(words: tuple[Argument, ...]) -> dict[str, Setting]:
    """Return the nodes and processes that torchrun starts, from its words."""
    settings = {}
    for word, after in zip(words, (*words[1:], None), strict=True):
        if match := _PROCESSES.match(word.text):
            name = "trainer.nnodes" if match[1] == "nnodes" else "trainer.n_gpus_per_node"
            value = match[2] if match[2] is not None else after.text if after else ""
            settings[name] = Setting(word.text, (value,), word.line, word.missing, word.conditional)
    return settings


def is_sft(settings: Mapping[str, Setting], entry: str) -> bool:
    """Tell whether a command, or a configuration without one, is for an SFT trainer."""
    return bool(ENTRY.search(entry)) or (
        not entry and any(name.startswith("optim.") for name in settings)
    )


def import_sft(draft: Draft, settings: Settings, prompts: list[str]) -> Draft:
    """Translate all settings. `prompts` has data.train_files with their slices."""
    draft.set("algorithm.loss.type", "sft", "verl's SFT trainer")
    set_field(
        draft,
        "data.prompts",
        settings.take("data.train_files"),
        lambda _: _sources(settings, prompts),
        keep_variables=True,
    )
    steps, epochs = (
        settings.take("trainer.total_training_steps"),
        settings.take("trainer.total_epochs"),
    )
    if not (
        steps and steps.value is not None and set_field(draft, "trainer.steps", steps, as_integer)
    ):
        set_field(
            draft,
            "trainer.epochs",
            epochs or Setting("default of trainer.total_epochs", (4,)),
            as_integer,
        )
    _truncation(draft, settings)
    betas = settings.take("optim.betas")
    set_field(draft, "trainer.optimizer.beta1", betas, lambda value: as_number(value[0]))
    set_field(draft, "trainer.optimizer.beta2", betas, lambda value: as_number(value[1]))
    if settings.on("model.enable_gradient_checkpointing"):
        draft.set("trainer.recompute", "full", "model.enable_gradient_checkpointing")
    older = "model.partial_pretrain" in settings
    table = replace(_SFT, defaults=(*_DEFAULTS, _COSINE)) if older else _SFT
    adapter = take_lora(settings, "model")
    table.translate(draft, settings)
    table.write_defaults(draft)
    lora(draft, adapter, backend="fsdp")
    return draft


def _truncation(draft: Draft, settings: Settings) -> None:
    side = settings.take("data.truncation")
    if side is None or side.value in ("error", None):
        return  # verl fails; sluice skips the row and counts it
    if side.value in ("left", "right"):
        draft.set("data.truncation", side.value, side.name)
    else:
        why = "data.truncation is left or right; without it sluice skips longer rows"
        draft.note("not translated", side.shown, why, side.line)


def _sources(settings: Settings, prompts: list[str]) -> list[dict[str, Any]]:
    """Return sources of conversations, or of questions and answers in the older trainer."""
    multiturn = settings.take("data.multiturn.enable")
    single = "model.partial_pretrain" in settings and not (multiturn and multiturn.value is True)
    names = {
        "promptKey": ("data.prompt_key", "question"),
        "labelKey": ("data.response_key", "answer"),
    }
    if not single:
        old = settings.take("data.multiturn.messages_key")
        names = {"promptKey": ("data.messages_key", str(old.value) if old else "messages")}
    columns: dict[str, Any] = {}
    for field, (key, default) in names.items():
        setting = settings.take(key)
        columns[field] = str(setting.value) if setting and setting.value else default
    tools = settings.take("data.tools_key")
    columns |= {"toolsKey": str(tools.value)} if tools and tools.value else {}
    columns |= {"applyChatTemplate": True} if single else {}
    return [{"path": path, **columns} for path in prompts]
