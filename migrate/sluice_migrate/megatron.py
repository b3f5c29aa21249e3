"""Options of Megatron that slime and verl pass on: recomputation, routing replay, optimizer."""

from __future__ import annotations

from typing import Any, get_args

from sluice.api.groups.trainer import Recompute, RecomputeModule
from sluice_migrate.draft import Draft
from sluice_migrate.translation import (
    Covered,
    Field,
    Setting,
    Settings,
    Translation,
    Unsupported,
    as_number,
    how_to_supply,
)

_HANDLED = Covered("copies overlap with the step, and the fp32 weights are stored once")
_FP32 = Unsupported(
    "gradients and the optimizer's copy of the weights are always fp32",
    unless=("fp32", "float32", "torch.float32", None),
)
_MOMENT_TYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32"}


def _moment_type(value: Any) -> str:
    """Convert the type of Adam's moments. Raises ValueError."""
    kind = str(value).removeprefix("torch.")
    if kind not in _MOMENT_TYPES:
        raise ValueError("Adam's moments are fp32 or bf16; other types need TransformerEngine")
    return _MOMENT_TYPES[kind]


# Further settings of the optimizer, by Megatron's names.
OPTIMIZER_ENTRIES: dict[str, Translation] = {
    **dict.fromkeys(
        (
            "overlap_cpu_optimizer_d2h_h2d",
            "use_precision_aware_optimizer",
            "use_torch_optimizer_for_cpu_offload",
            "pin_cpu_grads",
            "pin_cpu_params",
        ),
        _HANDLED,
    ),
    **dict.fromkeys(("main_params_dtype", "main_grads_dtype"), _FP32),
    "exp_avg_dtype": Field("trainer.optimizer.expAvgDtype", _moment_type),
    "exp_avg_sq_dtype": Field("trainer.optimizer.expAvgSqDtype", _moment_type),
}


def host_optimizer(
    draft: Draft, settings: Settings, switch: str, fraction: str, default: str
) -> None:
    """Translate the optimizer on the CPU to `trainer.cpuOffload` and `cpuOffloadFraction`.

    switch, fraction: names of both settings. default: the fraction if it is not given.
    """
    share = settings.take(fraction)
    if not settings.on(switch):
        return
    part = _fraction(draft, share or Setting(fraction, (default,)))
    if part is None:
        return
    if part == 0:
        why = f"{fraction} is 0, so the optimizer stays on the GPU"
        draft.note("check", switch, why, settings[switch].line)
        return
    draft.set("trainer.cpuOffload", "optimizer", switch)
    if part < 1:
        draft.set("trainer.cpuOffloadFraction", part, fraction)


def _fraction(draft: Draft, setting: Setting) -> float | None:
    """Return the fraction; None with a note if it is not known."""
    why = f"the value is not in the script: {how_to_supply(setting.missing)}"
    try:
        if not setting.missing:
            return as_number(setting.value)
    except ValueError as error:
        why = str(error)
    draft.note("not translated", setting.shown, why, setting.line)
    return None


def recompute(granularity: Any) -> str:
    """Convert to `trainer.recompute`. Raises ValueError."""
    kind = str(granularity or "none")
    if kind not in get_args(Recompute):
        raise ValueError(f"trainer.recompute is one of {', '.join(get_args(Recompute))}")
    return kind


def recompute_modules(words: Any) -> list[str]:
    """Convert to `trainer.recomputeModules`. Raises ValueError if one needs TransformerEngine."""
    names = [words] if isinstance(words, str) else [*words]
    unsupported = [name for name in names if name not in get_args(RecomputeModule)]
    if unsupported or not names:
        raise ValueError(
            f"{', '.join(map(str, unsupported))}: trainer.recomputeModules may be "
            f"{', '.join(get_args(RecomputeModule))}"
        )
    return names


_REPLAY = "trainer.routingReplay"


def drop_needless_replay(draft: Draft) -> None:
    """Remove `trainer.routingReplay` if the job would be refused for it.

    Call it when trainer.backend and trainer.stepsPerBatch are set.
    """
    replay, origin = draft.get(_REPLAY, "none"), draft.origins.get(_REPLAY, _REPLAY)
    if replay != "none" and draft.get("trainer.backend") == "fsdp":
        draft.drop(_REPLAY)
        draft.note(
            "not translated", origin, "trainer.backend: fsdp cannot replay routing; megatron can"
        )
    elif replay == "trainer" and draft.get("trainer.stepsPerBatch", 1) == 1:
        draft.drop(_REPLAY)
        why = (
            "with one optimizer step per batch the old log-probs come from the same forward pass, "
            "so there is no other routing to replay"
        )
        draft.note("check", origin, why)
