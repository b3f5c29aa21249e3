"""verl's options of its engine -> rollout.engineArgs, by the engine that `rollout.name` says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sluice_migrate.draft import (
    Draft,
    Lost,
    Same,
    Settings,
    To,
    Translation,
    flag,
    integer,
    put,
    real,
)

_ROLLOUT = "actor_rollout_ref.rollout"
_ARGS = "rollout.engineArgs"
_UNKNOWN = "???"
"""The value in verl's configurations where a command has to give one."""


def _several(value: Any) -> bool:
    """VLLM spreads experts over all ranks of an engine, or over none."""
    return integer(value) > 1


def _argument(value: Any) -> Any:
    if value == "ascend":
        raise ValueError("of Huawei's NPUs; sluice runs on NVIDIA's GPUs")
    if isinstance(value, list):
        return [str(entry) for entry in value]
    return json.dumps(value) if isinstance(value, dict) else value


SGLANG: dict[str, Translation] = {
    f"{_ROLLOUT}.gpu_memory_utilization": To(
        f"{_ARGS}.mem-fraction-static",
        real,
        "SGLang's fraction has no activations in it, vLLM's has",
    ),
    f"{_ROLLOUT}.max_model_len": To(f"{_ARGS}.context-length", integer),
    f"{_ROLLOUT}.max_num_seqs": To(f"{_ARGS}.max-running-requests", integer),
    f"{_ROLLOUT}.max_num_batched_tokens": Same("SGLang chooses it"),
    f"{_ROLLOUT}.enforce_eager": To(f"{_ARGS}.disable-cuda-graph", flag),
    f"{_ROLLOUT}.expert_parallel_size": To(f"{_ARGS}.ep-size", integer),
    f"{_ROLLOUT}.engine_kwargs.sglang.enable_fp32_lm_head": To(
        "model.fp32LmHead", flag, "the trainer's head too"
    ),
    f"{_ROLLOUT}.enable_chunked_prefill": Same("sluice does it always"),
    f"{_ROLLOUT}.enable_prefix_caching": Same("sluice does it always"),
}
VLLM: dict[str, Translation] = {
    f"{_ROLLOUT}.gpu_memory_utilization": To(f"{_ARGS}.gpu-memory-utilization", real),
    f"{_ROLLOUT}.max_model_len": To(f"{_ARGS}.max-model-len", integer),
    f"{_ROLLOUT}.max_num_seqs": To(f"{_ARGS}.max-num-seqs", integer),
    f"{_ROLLOUT}.max_num_batched_tokens": To(f"{_ARGS}.max-num-batched-tokens", integer),
    f"{_ROLLOUT}.enforce_eager": To(f"{_ARGS}.enforce-eager", flag),
    f"{_ROLLOUT}.expert_parallel_size": To(f"{_ARGS}.enable-expert-parallel", _several),
    f"{_ROLLOUT}.enable_chunked_prefill": To(f"{_ARGS}.enable-chunked-prefill", flag),
    f"{_ROLLOUT}.enable_prefix_caching": To(f"{_ARGS}.enable-prefix-caching", flag),
}
_OTHERS = {"sglang": SGLANG, "vllm": VLLM}


def engine(draft: Draft, settings: Settings) -> Mapping[str, Translation]:
    """The table of the engine's options. Writes `rollout.engine` where it is not the default."""
    setting = settings.take(f"{_ROLLOUT}.name")
    name = _UNKNOWN if setting is None else str(setting.value)
    if name == "vllm":
        put(draft, "rollout.engine", setting, str)
    elif name not in ("sglang", _UNKNOWN) and setting:
        draft.note("not translated", setting.shown, "the engine is SGLang or vLLM", setting.line)
    return _OTHERS.get(name, SGLANG)


def engine_argument(name: str, table: Mapping[str, Translation]) -> Translation | None:
    """The entry of an option in verl's words for one engine; None: it is no such option."""
    if not name.startswith(f"{_ROLLOUT}.engine_kwargs."):
        return None
    word = "vllm" if table is VLLM else "sglang"
    if name.startswith(f"{_ROLLOUT}.engine_kwargs.{word}."):
        return To(f"{_ARGS}.{name.rpartition('.')[2].replace('_', '-')}", _argument)
    return Lost(f"the engine is {word}: rollout.engineArgs has its arguments")
