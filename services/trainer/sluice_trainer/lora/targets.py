"""The layers that get an adapter, by the names that a manifest gives them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from sluice.api.groups.lora import ALL_LINEAR, EXPERTS, Lora
from sluice_trainer.model.unsupported import UnsupportedModelError

# PEFT takes these names for those of a mixture's experts, which transformers keeps in one tensor.
# It could not load adapters of dense layers or shared experts of these names.
_EXPERTS = {"gate_proj", "up_proj", "down_proj"}


def target_modules(
    settings: Lora, linear: AbstractSet[str], model_type: str, *, mixture: bool
) -> set[str]:
    """Return the names of the layers that get an adapter, without their places in the model.

    Experts are no layers: see `Lora.experts`. Engines know layers by these names; they understand
    neither PEFT's words nor its patterns.

    Parameters
    ----------
    settings
        `trainer.lora`.
    linear
        Names of the decoder's linear layers in transformers, without routers.
    model_type
        Type of the model, for messages.
    mixture
        The model has experts.

    Raises
    ------
    UnsupportedModelError
        A target is no linear layer of the decoder, or none is left.

    """
    excluded, linear = set(settings.exclude_modules), linear - (_EXPERTS if mixture else set())
    named = set(settings.target_modules) - ({EXPERTS} if mixture else set())
    if unknown := sorted((named | excluded) - linear - {ALL_LINEAR}):
        raise UnsupportedModelError(
            f"trainer.lora: {', '.join(unknown)} is no linear layer of model_type "
            f"{model_type!r} that could get an adapter; it has {', '.join(sorted(linear))}"
        )
    targets = set(linear) if ALL_LINEAR in named else named
    if not (targets - excluded or settings.experts):
        raise UnsupportedModelError(
            "trainer.lora.excludeModules leaves no layer that could get an adapter"
        )
    return targets - excluded
