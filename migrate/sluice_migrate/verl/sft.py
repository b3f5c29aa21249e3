"""verl's supervised fine-tuning: `fsdp_sft_trainer` (verl to 0.5) and `sft_trainer` with its
engines (later).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sluice_migrate.bash.script import Argument
from sluice_migrate.draft import (
    Draft,
    Lost,
    Same,
    Setting,
    Settings,
    To,
    Translation,
    flag,
    integer,
    location,
    put,
    real,
)
from sluice_migrate.draft import translate as translate_all
from sluice_migrate.verl.table import TABLE

ENTRY = re.compile(r"(^|[./])(fsdp_sft_trainer|sft_trainer|sft_trainer_ray)(\.py)?$")
_PROCESSES = re.compile(r"^--(nproc[_-]per[_-]node|nnodes)(?:=(.*))?$")
_WARMUP = Lost("set trainer.optimizer.warmupSteps to a number of steps", unless=(0,))
_PACKED = Same("micro-batches are packed by tokens")
_NESTED = Lost(
    "a column is read as it is; write the rows anew with the text in a column of its own",
    unless=(None, []),
)
_CHOICE = Same("trainer.backend says what trains")
_STATE = Lost("the optimizer keeps fp32", unless=(None, "fp32", "float32", True))
_OPTIMIZER = Lost(
    "trainer.optimizer has all that can be set; its state stays on the GPU",
    unless=(None, False, 0, 0.0),
)
_MTP = Lost("layers that predict several tokens are not trained", unless=(None, False, 0))
_PLACES = Same("weights and optimizer are laid out by trainer.parallelism")


def _schedule(value: Any) -> str:
    if value not in ("constant", "linear", "cosine"):
        raise ValueError("trainer.optimizer.schedule is constant, linear or cosine")
    return str(value)


_TABLE: dict[str, Translation] = {
    **{
        name: entry
        for name, entry in TABLE.items()
        if name.startswith(("trainer.", "data.shuffle", "data.seed"))
    },
    "trainer.seed": To("data.seed", integer),
    "trainer.max_ckpt_to_keep": To("checkpoint.keep", integer),
    "model.path": To("model.path", location),
    "model.partial_pretrain": To("model.path", location),
    "model.trust_remote_code": To("model.trustRemoteCode", flag),
    "model.lora_rank": Lost("sluice trains all weights", unless=(0,)),
    "model.lora_alpha": Same("of LoRA"),
    "model.target_modules": Same("of LoRA"),
    "model.use_liger": Same("log-probs are computed without the logits of a whole row"),
    "model.use_remove_padding": Same("sluice does it always"),
    "use_remove_padding": Same("sluice does it always"),
    "data.train_batch_size": To("rollout.batchSize", integer),
    "data.max_length": To("data.maxPromptTokens", integer),
    "data.micro_batch_size": _PACKED,
    "data.micro_batch_size_per_gpu": _PACKED,
    "data.use_dynamic_bsz": _PACKED,
    "data.pad_mode": _PACKED,
    "data.balance_dp_token": Same("sluice does it always"),
    "data.max_token_len_per_gpu": To("trainer.maxTokensPerGpu", integer),
    "data.prompt_dict_keys": _NESTED,
    "data.response_dict_keys": _NESTED,
    "data.custom_cls.path": Lost(
        "data.prompts[].source takes a function that yields rows", unless=(None,)
    ),
    "data.val_files": Lost(
        "evaluation generates and judges: evaluation.datasets, each with a reward", unless=(None,)
    ),
    "data.val_max_samples": Same("of data.val_files"),
    "trainer.test_freq": Same("of data.val_files"),
    "data.ignore_input_ids_mismatch": Same(
        "rows of whose answers the template drops a part are left out, and counted"
    ),
    "model": _CHOICE,
    "model_engine": _CHOICE,
    "optim.min_lr_ratio": Lost("set trainer.optimizer.minLr to a rate", unless=(None, 0, 0.0)),
    "optim.init_lr_ratio": _WARMUP,
    "optim.lr_warmup_init": Lost("the warmup begins at 0", unless=(None, 0, 0.0)),
    "optim.warmup_style": To("trainer.optimizer.schedule", _schedule),
    "optim.optimizer": Lost("sluice has AdamW", unless=("adam", "AdamW", None)),
    "optim.optimizer_impl": Same("the backend's own AdamW"),
    **dict.fromkeys(
        (
            "optim.exp_avg_dtype",
            "optim.exp_avg_sq_dtype",
            "optim.master_weights",
            "optim.store_param_remainders",
        ),
        _STATE,
    ),
    "optim.lr": To("trainer.optimizer.lr", real),
    "optim.weight_decay": To("trainer.optimizer.weightDecay", real),
    "optim.clip_grad": To("trainer.optimizer.clipGrad", real),
    "optim.lr_scheduler": To("trainer.optimizer.schedule", _schedule),
    "optim.lr_scheduler_type": To("trainer.optimizer.schedule", _schedule),
    "optim.lr_decay_style": To("trainer.optimizer.schedule", _schedule),
    "optim.min_lr": To("trainer.optimizer.minLr", real),
    "optim.lr_warmup_steps": To(
        "trainer.optimizer.warmupSteps", lambda value: max(0, integer(value))
    ),
    "optim.warmup_steps_ratio": _WARMUP,
    "optim.lr_warmup_steps_ratio": _WARMUP,
    "ulysses_sequence_parallel_size": To("trainer.parallelism.context", integer),
    "engine.ulysses_sequence_parallel_size": To("trainer.parallelism.context", integer),
    "engine.tensor_model_parallel_size": To("trainer.parallelism.tensor", integer),
    "engine.pipeline_model_parallel_size": To("trainer.parallelism.pipeline", integer),
    "engine.context_parallel_size": To("trainer.parallelism.context", integer),
    "engine.expert_model_parallel_size": To("trainer.parallelism.expert", integer),
    "engine.virtual_pipeline_model_parallel_size": To(
        "trainer.parallelism.virtualPipeline", integer
    ),
    "engine": _PLACES,
    "engine.strategy": _PLACES,
    "optim": _PLACES,
}
_DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("rollout.batchSize", 256, "data.train_batch_size"),
    ("data.maxPromptTokens", 1024, "data.max_length"),
    ("trainer.optimizer.lr", 1e-5, "optim.lr"),
    ("trainer.optimizer.weightDecay", 0.01, "optim.weight_decay"),
)


def launched(words: tuple[Argument, ...]) -> dict[str, Setting]:
    """How many processes torchrun was told to start, of the words before the entry point."""
    settings = {}
    for word, after in zip(words, (*words[1:], None), strict=True):
        if match := _PROCESSES.match(word.text):
            name = "trainer.nnodes" if match[1] == "nnodes" else "trainer.n_gpus_per_node"
            value = match[2] if match[2] is not None else after.text if after else ""
            settings[name] = Setting(word.text, (value,), word.line, word.missing, word.doubtful)
    return settings


def is_sft(settings: Mapping[str, Setting], entry: str) -> bool:
    """True for a command, or a configuration without one, of an SFT trainer."""
    return bool(ENTRY.search(entry)) or (
        not entry and any(name.startswith("optim.") for name in settings)
    )


def import_sft(draft: Draft, settings: Settings, prompts: list[str]) -> Draft:
    """The rest of the job. prompts: data.train_files, with their slices."""
    draft.set("algorithm.lossFunction", "sft", "verl's SFT trainer")
    put(
        draft,
        "data.prompts",
        settings.take("data.train_files"),
        lambda _: _sources(settings, prompts),
        literal=True,
    )
    steps, epochs = (
        settings.take("trainer.total_training_steps"),
        settings.take("trainer.total_epochs"),
    )
    if not (steps and steps.value is not None and put(draft, "trainer.steps", steps, integer)):
        put(
            draft,
            "trainer.epochs",
            epochs or Setting("default of trainer.total_epochs", (4,)),
            integer,
        )
    _truncation(draft, settings)
    betas = settings.take("optim.betas")
    put(draft, "trainer.optimizer.beta1", betas, lambda value: real(value[0]))
    put(draft, "trainer.optimizer.beta2", betas, lambda value: real(value[1]))
    if settings.on("model.enable_gradient_checkpointing"):
        draft.set("trainer.recompute", "full", "model.enable_gradient_checkpointing")
    translate_all(draft, settings, _TABLE, _fallback)
    cosine = ("trainer.optimizer.schedule", "cosine", "optim.lr_scheduler")
    for path, value, name in (
        *_DEFAULTS,
        *([cosine] if "model.partial_pretrain" in settings else []),
    ):
        if draft.get(path) is None:
            draft.set(path, value, f"default of {name}")
            draft.note("other default", path, f"{value} (verl, {name})")
    return draft


def _truncation(draft: Draft, settings: Settings) -> None:
    side = settings.take("data.truncation")
    if side is None or side.value in ("error", None):
        return  # verl ends, sluice leaves the row out and counts it
    if side.value in ("left", "right"):
        draft.set("data.truncation", side.value, side.name)
    else:
        why = "data.truncation is left or right; without it longer rows are left out"
        draft.note("not translated", side.shown, why, side.line)


def _sources(settings: Settings, prompts: list[str]) -> list[dict[str, Any]]:
    """Conversations, or, in the older trainer's single-turn mode, a question and an answer."""
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
    for field, (key, usual) in names.items():
        setting = settings.take(key)
        columns[field] = str(setting.value) if setting and setting.value else usual
    tools = settings.take("data.tools_key")
    columns |= {"toolsKey": str(tools.value)} if tools and tools.value else {}
    columns |= {"applyChatTemplate": True} if single else {}
    return [{"path": path, **columns} for path in prompts]


def _fallback(name: str) -> Translation:
    if name.startswith(("model.fsdp_config.", "engine.", "checkpoint.", "profiler.")):
        return _PLACES
    if name.startswith("optim.override_optimizer_config."):
        return _OPTIMIZER
    if name.startswith("model.mtp."):
        return _MTP
    return Same("of Hydra") if name.startswith("hydra.") else Lost("sluice knows no such key")
