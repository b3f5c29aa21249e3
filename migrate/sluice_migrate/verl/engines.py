"""Translates options of verl's engine to rollout.engineArgs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from sluice_migrate.draft import Draft
from sluice_migrate.translation import (
    Covered,
    Field,
    Settings,
    Table,
    Translation,
    Unsupported,
    as_boolean,
    as_integer,
    as_number,
    set_field,
)

_ROLLOUT = "actor_rollout_ref.rollout"
_ARGS, _KWARGS = "rollout.engineArgs", f"{_ROLLOUT}.engine_kwargs"
# Value in verl's configurations that a command must override.
_MANDATORY = "???"


def _several(value: Any) -> bool:
    """Convert to vLLM's switch: it spreads experts over all ranks of an engine, or not at all."""
    return as_integer(value) > 1


def _argument(value: Any) -> Any:
    if value == "ascend":
        raise ValueError("it selects Huawei NPUs; sluice runs on NVIDIA GPUs")
    if isinstance(value, list):
        return [str(entry) for entry in value]
    return json.dumps(value) if isinstance(value, dict) else value


SGLANG: dict[str, Translation] = {
    f"{_ROLLOUT}.gpu_memory_utilization": Field(
        f"{_ARGS}.mem-fraction-static",
        as_number,
        "SGLang's fraction excludes activations, vLLM's includes them",
    ),
    f"{_ROLLOUT}.max_model_len": Field(f"{_ARGS}.context-length", as_integer),
    f"{_ROLLOUT}.max_num_seqs": Field(f"{_ARGS}.max-running-requests", as_integer),
    f"{_ROLLOUT}.max_num_batched_tokens": Covered("SGLang chooses it"),
    f"{_ROLLOUT}.enforce_eager": Field(f"{_ARGS}.disable-cuda-graph", as_boolean),
    f"{_ROLLOUT}.expert_parallel_size": Field(f"{_ARGS}.ep-size", as_integer),
    f"{_ROLLOUT}.engine_kwargs.sglang.enable_fp32_lm_head": Field(
        "model.fp32LmHead", as_boolean, "in sluice it also sets the trainer's head"
    ),
    f"{_ROLLOUT}.enable_chunked_prefill": Covered("sluice does it always"),
    f"{_ROLLOUT}.enable_prefix_caching": Covered("sluice does it always"),
}
VLLM: dict[str, Translation] = {
    f"{_ROLLOUT}.gpu_memory_utilization": Field(f"{_ARGS}.gpu-memory-utilization", as_number),
    f"{_ROLLOUT}.max_model_len": Field(f"{_ARGS}.max-model-len", as_integer),
    f"{_ROLLOUT}.max_num_seqs": Field(f"{_ARGS}.max-num-seqs", as_integer),
    f"{_ROLLOUT}.max_num_batched_tokens": Field(f"{_ARGS}.max-num-batched-tokens", as_integer),
    f"{_ROLLOUT}.enforce_eager": Field(f"{_ARGS}.enforce-eager", as_boolean),
    f"{_ROLLOUT}.expert_parallel_size": Field(f"{_ARGS}.enable-expert-parallel", _several),
    f"{_ROLLOUT}.enable_chunked_prefill": Field(f"{_ARGS}.enable-chunked-prefill", as_boolean),
    f"{_ROLLOUT}.enable_prefix_caching": Field(f"{_ARGS}.enable-prefix-caching", as_boolean),
}
_NO_CACHE = Covered("the engine transformers has nothing to reserve or to compile")
TRANSFORMERS: dict[str, Translation] = {
    f"{_ROLLOUT}.gpu_memory_utilization": _NO_CACHE,
    f"{_ROLLOUT}.max_model_len": _NO_CACHE,
    f"{_ROLLOUT}.max_num_seqs": Field(f"{_ARGS}.max-running-requests", as_integer),
    f"{_ROLLOUT}.max_num_batched_tokens": _NO_CACHE,
    f"{_ROLLOUT}.enforce_eager": _NO_CACHE,
    f"{_ROLLOUT}.expert_parallel_size": _NO_CACHE,
    f"{_ROLLOUT}.enable_chunked_prefill": _NO_CACHE,
    f"{_ROLLOUT}.enable_prefix_caching": _NO_CACHE,
}
_ENGINES = {"sglang": SGLANG, "vllm": VLLM, "transformers": TRANSFORMERS}
# Values of `rollout.engine`, by verl's names.
_NAMES = {"vllm": "vllm", "hf": "transformers"}


def with_engine(table: Table, draft: Draft, settings: Settings) -> Table:
    """Add the options of the engine in `rollout.name` to the table, and set `rollout.engine`."""
    setting = settings.take(f"{_ROLLOUT}.name")
    name = _MANDATORY if setting is None else str(setting.value)
    if name == "vllm":
        set_field(draft, "rollout.engine", setting, str)
    elif name == "hf":
        set_field(draft, "rollout.engine", setting, lambda _: "transformers")
    elif name not in ("sglang", _MANDATORY) and setting:
        draft.note(
            "not translated",
            setting.shown,
            "sluice has the engines sglang, vllm and transformers: rollout.engine",
            setting.line,
        )
    chosen = _NAMES.get(name, "sglang")
    options = _ENGINES[chosen]
    # Arguments of the other engine would be refused, so they are reported.
    prefixes = (
        (f"{_KWARGS}.{chosen}.", _engine_argument),
        (
            f"{_KWARGS}.",
            Unsupported(f"the engine is {chosen}: pass its arguments in rollout.engineArgs"),
        ),
    )
    return replace(table, entries={**table.entries, **options}, prefixes=prefixes + table.prefixes)


def _engine_argument(name: str) -> Translation:
    return Field(f"{_ARGS}.{name.rpartition('.')[2].replace('_', '-')}", _argument)
