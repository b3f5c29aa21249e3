"""Where Megatron's optimizer lies, and its types, which slime and verl pass on."""

from __future__ import annotations

from typing import Any

from sluice_migrate.draft import (
    Draft,
    Lost,
    Same,
    Setting,
    Settings,
    To,
    Translation,
    needs,
    real,
)

_ONCE = Same("copies overlap with the step, and the weights in fp32 are held once")
_FP32 = Lost(
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


OTHERS: dict[str, Translation] = {
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
    "exp_avg_dtype": To("trainer.optimizer.expAvgDtype", stored),
    "exp_avg_sq_dtype": To("trainer.optimizer.expAvgSqDtype", stored),
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
    why = f"the script does not say it: {needs(setting.missing)}"
    try:
        if not setting.missing:
            return real(setting.value)
    except ValueError as error:
        why = str(error)
    draft.note("not translated", setting.shown, why, setting.line)
    return None
