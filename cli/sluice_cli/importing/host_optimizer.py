"""Megatron's optimizer on the CPU, which slime and verl pass on."""

from __future__ import annotations

from sluice_cli.importing.draft import (
    Draft,
    Lost,
    Same,
    Setting,
    Settings,
    Translation,
    needs,
    real,
)

_ONCE = Same("copies overlap with the step, and the weights in fp32 are held once")
_FP32 = Lost(
    "gradients, and the optimizer's weights and moments, are fp32; other moments need "
    "TransformerEngine's AdamW",
    unless=("fp32", "float32", "torch.float32", None),
)
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
    **dict.fromkeys(
        ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), _FP32
    ),
}
"""What belongs to it, by Megatron's names."""


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
