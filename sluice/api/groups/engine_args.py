"""Arguments of an engine's server that a training job, or a pool of such jobs, refuses.

An update of the weights does not reach what they bring.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sluice.api.schema.rules import Rule, listed, written

Kind = Literal["boolean", "string", "array"]


@dataclass(frozen=True, slots=True)
class RefusedArgument:
    """An argument by its name on a command line.

    harmless: values that are accepted. only: the values that are refused, by default all that are
    not harmless. A boolean is refused if it is true.
    """

    name: str
    kind: Kind = "string"
    harmless: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def refuses(self, value: Any) -> bool:
        """True if the argument is refused with this value."""
        if value is False:
            return False
        return str(value) in self.only if self.only else str(value) not in self.harmless

    def spellings(self) -> tuple[str, ...]:
        """Return the names that a manifest may use: enable-lora, enable_lora, enableLora."""
        first, *rest = self.name.split("-")
        camel = first + "".join(part.capitalize() for part in rest)
        return tuple(dict.fromkeys((self.name, self.name.replace("-", "_"), camel)))

    def cel(self, holder: str, spelling: str) -> str:
        """Return CEL: `holder`, an object in CEL, has the argument with a value that is refused."""
        field = f"{holder}.{spelling.replace('-', '__dash__')}"
        present = f"has({field})"
        if self.kind == "boolean":
            return f"{present} && {field}"
        if self.only:
            return f"{present} && {field} in {listed(self.only)}"
        return f"{present} && !({field} in {listed(self.harmless)})" if self.harmless else present


SPECULATION = (
    RefusedArgument("speculative-algorithm"),
    RefusedArgument("speculative-config"),
    RefusedArgument("speculative-draft-model"),
    RefusedArgument("speculative-draft-model-path"),
    RefusedArgument("speculative-eagle-topk"),
    RefusedArgument("speculative-num-steps"),
)
# They accept proposed tokens more often than the policy would sample them.
LOSSY_SPECULATION = (
    RefusedArgument("speculative-accept-threshold-acc"),
    RefusedArgument("speculative-accept-threshold-single"),
)
ADAPTERS = (
    RefusedArgument("enable-lora", "boolean"),
    RefusedArgument("lora-modules", "array"),
    RefusedArgument("lora-paths", "array"),
    RefusedArgument("uno-lora-path"),
)
PRECISION = (RefusedArgument("quantization", harmless=("unquant",)),)
CACHE_DTYPE = (RefusedArgument("kv-cache-dtype", harmless=("auto", "bf16", "bfloat16")),)
QUANTIZATION = (
    RefusedArgument("quantize-and-serve", "boolean"),
    RefusedArgument("modelopt-quant"),
    RefusedArgument("rl-quant-profile"),
    RefusedArgument("torchao-config"),
    RefusedArgument("kt-weight-path"),
    RefusedArgument("load-format", only=("bitsandbytes", "expert_pack", "flash_rl", "gguf")),
)
OUTSIDE_CACHES = (
    RefusedArgument("enable-lmcache", "boolean"),
    RefusedArgument("hicache-storage-backend"),
)
PARTS_OF_ENGINES = (
    RefusedArgument("disaggregation-mode", harmless=("null",)),
    RefusedArgument("ec-transfer-config"),
    RefusedArgument("encoder-only", "boolean"),
    RefusedArgument("kv-transfer-config"),
    RefusedArgument("language-only", "boolean"),
)
REFUSED = (
    *SPECULATION,
    *LOSSY_SPECULATION,
    *ADAPTERS,
    *PRECISION,
    *CACHE_DTYPE,
    *QUANTIZATION,
    *OUTSIDE_CACHES,
    *PARTS_OF_ENGINES,
)


def kebab(name: str) -> str:
    """Return an argument's name on a command line: memFractionStatic -> mem-fraction-static."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name).replace("_", "-").lower().lstrip("-")


def schema() -> dict[str, Any]:
    """Return the JSON schema of engineArgs, which takes any field.

    An API server shows CEL only fields that the schema names, so each spelling of a refused
    argument is one.
    """
    description = "Refused in a job that trains, with the reason."
    properties: dict[str, dict[str, Any]] = {}
    for argument in REFUSED:
        items = {"items": {"type": "string"}, "maxItems": 64} if argument.kind == "array" else {}
        longest = {"maxLength": 4096} if argument.kind == "string" else {}
        for spelling in argument.spellings():
            properties[spelling] = {
                "type": argument.kind,
                "description": description,
                **items,
                **longest,
            }
    return {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": properties,
    }


def _rule(arguments: Sequence[RefusedArgument], message: str, *, trained: bool = True) -> Rule:
    """Rule of a spec that refuses arguments. trained: only in jobs that train."""
    excused = "self.debug.rolloutOnly || " if trained else ""
    return Rule(
        written(
            f"{excused}{_accepted(arguments, 'self.rollout.engineArgs')}",
            lambda spec: (
                (trained and spec.debug.rollout_only)
                or not _refused(arguments, spec.rollout.engine_args)
            ),
        ),
        message,
        "rollout.engineArgs",
        shows=lambda spec: ", ".join(_refused(arguments, spec.rollout.engine_args)),
        reason="FieldValueForbidden",
    )


def _pool_rule(arguments: Sequence[RefusedArgument], message: str) -> Rule:
    """Rule of a pool's spec that refuses arguments."""
    return Rule(
        written(
            _accepted(arguments, "self.engineArgs"),
            lambda spec: not _refused(arguments, spec.engine_args),
        ),
        message,
        "engineArgs",
        shows=lambda spec: ", ".join(_refused(arguments, spec.engine_args)),
        reason="FieldValueForbidden",
    )


def _accepted(arguments: Sequence[RefusedArgument], holder: str) -> str:
    """Return CEL that is true if none of the arguments in `holder` is refused."""
    conditions = [a.cel(holder, name) for a in arguments for name in a.spellings()]
    return f"!has({holder}) || ![{', '.join(conditions)}].exists(refused, refused)"


def _refused(arguments: Sequence[RefusedArgument], engine_args: Mapping[str, Any]) -> list[str]:
    by_name = {argument.name: argument for argument in arguments}
    return [
        name
        for name, value in engine_args.items()
        if (argument := by_name.get(kebab(name))) and argument.refuses(value)
    ]


# Rules of a job's spec.
ENGINE_ARGS = (
    _rule(
        SPECULATION,
        "speculative decoding {} also concerns updates, which must not change a draft model: set "
        "rollout.speculative",
    ),
    _rule(
        LOSSY_SPECULATION,
        "proposed tokens that are accepted by a threshold {} are no samples of the policy: leave "
        "it out",
    ),
    _rule(
        ADAPTERS,
        "LoRA adapters {} are not supported, because an engine serves the model that is trained: "
        "leave them out",
    ),
    _rule(
        PRECISION,
        "quantized weights {} also concern updates and the loss: set rollout.precision",
    ),
    _rule(
        CACHE_DTYPE, "a KV cache in few bits {} also concerns the loss: set rollout.kvCacheDtype"
    ),
    _rule(
        QUANTIZATION,
        "quantized weights {} are not supported, because updates come in the trainer's precision: "
        "leave them out",
    ),
    _rule(
        OUTSIDE_CACHES,
        "a cache outside of the engine {} is not supported, because it would outlive the weights "
        "that it was computed with: leave it out",
    ),
    _rule(
        PARTS_OF_ENGINES,
        "an engine that is only a part of one {} is not supported, because each engine of a job "
        "prefills and decodes by itself: leave it out",
        trained=False,
    ),
)
# Rules of a pool's spec.
POOL_ENGINE_ARGS = (
    _pool_rule(
        (*SPECULATION, *LOSSY_SPECULATION),
        "speculative decoding {} is not supported, because adapters do not reach a draft model: "
        "leave it out",
    ),
    _pool_rule(
        ADAPTERS,
        "LoRA adapters {} are not supported, because those of a pool come from its jobs: leave "
        "them out and set maxAdapters, maxRank and targetModules",
    ),
    _pool_rule(
        (*PRECISION, *QUANTIZATION),
        "quantized weights {} are not supported, because trainers compute with those of the "
        "checkpoint: leave it out",
    ),
    _pool_rule(
        OUTSIDE_CACHES,
        "a cache outside of the engine {} is not supported, because it would outlive the adapters "
        "that it was computed with: leave it out",
    ),
    _pool_rule(
        PARTS_OF_ENGINES,
        "an engine that is only a part of one {} is not supported, because each engine of a pool "
        "prefills and decodes by itself: leave it out",
    ),
)
