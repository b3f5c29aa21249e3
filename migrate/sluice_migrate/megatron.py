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

_ONCE = Covered("copies overlap with the step, and the weights in fp32 are held once")
_FP32 = Unsupported(
    "gradients and the optimizer's weights are fp32",
    unless=("fp32", "float32", "torch.float32", None),
)
_STORED = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32"}


def stored(value: Any) -> str:
    """The type of Adam's moments. Raises ValueError."""
    kind = str(value).removeprefix("torch.")
    if kind not in _STORED:
        raise ValueError("Adam's moments are fp32 or bf16; others need TransformerEngine")
    return _STORED[kind]


OPTIMIZER_ENTRIES: dict[str, Translation] = {
    **dict.fromkeys(
        (
            "overlap_cpu_optimizer_d2h_h2d",
            "use_precision_aware_optimizer",
            "use_torch_optimizer_for_cpu_offload",
            "pin_cpu_grads",
            "pin_cpu_params",
        ),
        _ONCE,
    ),
    **dict.fromkeys(("main_params_dtype", "main_grads_dtype"), _FP32),
    "exp_avg_dtype": Field("trainer.optimizer.expAvgDtype", stored),
    "exp_avg_sq_dtype": Field("trainer.optimizer.expAvgSqDtype", stored),
}
"""Further settings of the optimizer, by Megatron's names."""


def host_optimizer(
    draft: Draft, settings: Settings, switch: str, fraction: str, usual: str
) -> None:
    """`trainer.cpuOffload: optimizer` and its fraction.

    switch, fraction: names of both settings. usual: the fraction where it is not given.
    """
    share = settings.take(fraction)
    if not settings.on(switch):
        return
    part = _fraction(draft, share or Setting(fraction, (usual,)))
    if part is None:
        return
    if part == 0:
        why = f"{fraction} is 0 with it: nothing is on the CPU"
        draft.note("check", switch, why, settings[switch].line)
        return
    draft.set("trainer.cpuOffload", "optimizer", switch)
    if part < 1:
        draft.set("trainer.cpuOffloadFraction", part, fraction)


def _fraction(draft: Draft, setting: Setting) -> float | None:
    """None where it is not known: that is noted."""
    why = f"the value is not in the script: {how_to_supply(setting.missing)}"
    try:
        if not setting.missing:
            return as_number(setting.value)
    except ValueError as error:
        why = str(error)
    draft.note("not translated", setting.shown, why, setting.line)
    return None


def recompute(granularity: Any) -> str:
    """`trainer.recompute`. Raises ValueError."""
    kind = str(granularity or "none")
    if kind not in get_args(Recompute):
        raise ValueError(f"trainer.recompute is one of {', '.join(get_args(Recompute))}")
    return kind


def recompute_modules(words: Any) -> list[str]:
    """`trainer.recomputeModules`. Raises ValueError where a part needs TransformerEngine."""
    names = [words] if isinstance(words, str) else [*words]
    strange = [name for name in names if name not in get_args(RecomputeModule)]
    if strange or not names:
        raise ValueError(
            f"{', '.join(map(str, strange))}: trainer.recomputeModules are of "
            f"{', '.join(get_args(RecomputeModule))}"
        )
    return names


_FIELD = "trainer.routingReplay"


def drop_needless_replay(draft: Draft) -> None:
    """Take `trainer.routingReplay` out where such a job is refused. Needs backend and batches."""
    by, origin = draft.get(_FIELD, "none"), draft.origins.get(_FIELD, _FIELD)
    if by != "none" and draft.get("trainer.backend") == "fsdp":
        draft.drop(_FIELD)
        draft.note("not translated", origin, "trainer.backend: megatron replays routing, not fsdp")
    elif by == "trainer" and draft.get("trainer.stepsPerBatch", 1) == 1:
        draft.drop(_FIELD)
        why = (
            "one optimizer step a batch takes old log-probs from its own pass: there is no other "
            "routing to replay"
        )
        draft.note("check", origin, why)
