"""Low-rank adapters (LoRA, Hu et al. 2021) in a model of transformers, as PEFT computes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sluice.api.groups.lora import EXPERTS, Lora, scaling
from sluice_trainer.fsdp.families import decoder_layers, indexers, kept_modules
from sluice_trainer.lora.files import (
    added,
    first_adapter,
    of_base,
    peft_config,
    shapes,
)
from sluice_trainer.lora.initial import initial_a
from sluice_trainer.lora.pissa import joined_config, principal_part
from sluice_trainer.lora.targets import target_modules
from sluice_trainer.model.huggingface_files import VALUE_HEAD
from sluice_trainer.model.unsupported import UnsupportedModelError

# peft is imported by the functions that need it: most jobs train no adapter.
if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"  # PEFT's name of the adapter that is trained
# The adapter that takes the first weights of the other one off the base, with `initialise: pissa`.
INITIAL = "initial"
_BASE = re.compile(r"\.base_layer(?=\.)")
_PART = re.compile(rf"(?P<module>.*)\.lora_(?P<side>[AB])\.(?:{ADAPTER}|{INITIAL})\.weight")


def inject(model: Any, settings: Lora) -> None:
    """Give the targeted layers of `model` an adapter that changes nothing yet, and freeze the rest.

    Raises
    ------
    UnsupportedModelError
        A target is no linear layer of the decoder.

    """
    from peft import inject_adapter_in_model

    targets = target_modules(
        settings,
        _linear_layers(model),
        model.config.model_type,
        mixture=bool(expert_counts(model)),
    )
    config = peft_config(settings, targets, _expert_tensors(model) if settings.experts else ())
    if frozen := [*kept_modules(model), *indexers(model)]:
        # Their layers may have the names of the decoder's.
        config.exclude_modules = rf"({'|'.join(map(re.escape, frozen))})\..*"
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    if settings.pissa:
        without_dropout = replace(config, lora_dropout=0.0)
        inject_adapter_in_model(without_dropout, model, adapter_name=INITIAL)
        for layer in adapter_layers(model):
            # The smaller sum first: it is rounded less.
            layer.set_adapter([INITIAL, ADAPTER])
        for parameter in initial_parameters(model).values():
            parameter.requires_grad_(False)


def adapter_config(model: Any, base: Path) -> LoraConfig:
    """Return PEFT's configuration of the adapter of `model`, trained from the checkpoint `base`."""
    config: LoraConfig = model.peft_config[ADAPTER]
    return of_base(joined_config(config) if INITIAL in model.peft_config else config, base)


@torch.no_grad()
def initialise(model: Any, settings: Lora, seed: int) -> None:
    """Set the first weights: those of `lora.from`, of PiSSA, or A drawn from `seed` and B = 0."""
    parameters = trained_parameters(model)
    if settings.pissa:
        _set_principal_parts(model, settings, seed)
        return
    if settings.from_ is None:
        for name, parameter in parameters.items():
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                rank, inputs = parameter.shape
                parameter.copy_(initial_a(module, rank, inputs, seed))
        return
    directory = Path(settings.from_)
    tensors = first_adapter(directory, adapter_config(model, directory), shapes(parameters))
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _set_principal_parts(model: Any, settings: Lora, seed: int) -> None:
    """Set the first weights of PiSSA, and the same ones with the opposite sign."""
    trained, initial = trained_parameters(model), initial_parameters(model)
    for name in initial:
        module = name.removesuffix(".lora_A.weight")
        if module != name:
            weight = model.get_submodule(module).get_base_layer().weight
            a, b = principal_part(weight, module, settings, seed)
            for parameters, sign in ((trained, 1), (initial, -1)):
                parameters[name].copy_(a)
                parameters[f"{module}.lora_B.weight"].copy_(sign * b)


def _linear_layers(model: Any) -> set[str]:
    """Return the names of the decoder's linear layers, without routers and indexers.

    A router is an `nn.Linear` in a few families only; its output is one number per expert.
    """
    experts = expert_counts(model)
    frozen = {id(part) for name in indexers(model) for part in model.get_submodule(name).modules()}
    return {
        name.rpartition(".")[2]
        for block in decoder_layers(model)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features not in experts
        and id(module) not in frozen
    }


def _expert_tensors(model: Any) -> set[str]:
    """Return the names of tensors that hold all experts of a layer, such as experts.down_proj.

    Raises
    ------
    UnsupportedModelError
        The experts of this family are in other tensors.

    """
    names = {
        ".".join(name.split(".")[-2:])
        for block in decoder_layers(model)
        for name, parameter in block.named_parameters()
        if parameter.dim() == 3 and name.split(".")[-2:-1] == [EXPERTS]
    }
    if not names:
        raise UnsupportedModelError(
            "trainer.lora.targetModules: the experts of model_type "
            f"{model.config.model_type!r} are not in tensors of all experts of a layer: leave "
            "experts out"
        )
    return names


def expert_counts(model: Any) -> frozenset[int]:
    """Return the numbers of experts that the model's config names; empty if it is no mixture."""
    text = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return frozenset(count for name in names if (count := getattr(text, name, None)))


def trained_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the trained parameters by PEFT's names; the head of a critic is `score.weight`."""
    head = model.get_output_embeddings()
    return {
        VALUE_HEAD if parameter is head.weight else name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def initial_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the frozen parameters of PiSSA by the names of the trained ones; else none."""
    return {
        name.replace(f".{INITIAL}.", "."): parameter
        for name, parameter in model.named_parameters()
        if f".{INITIAL}." in name
    }


def adapter_layers(model: Any) -> list[LoraLayer]:
    """Return the layers of a transformers model that have an adapter."""
    if adapter_scaling(model) is None:
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def adapter_scaling(model: Any) -> float | None:
    """Return the factor of B A; None if the model has no adapter."""
    configs: dict[str, LoraConfig] = getattr(model, "peft_config", {})
    if ADAPTER not in configs:
        return None
    config = configs[ADAPTER]
    return scaling(config.r, config.lora_alpha, rank_stabilized=config.use_rslora)


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Compute as the base model does.

    PEFT's own switch also turns off the adapters' gradients. FSDP keeps the parameters that it
    gathers first, and would never compute a gradient if that was while they were off.
    """
    layers = adapter_layers(model)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def dropping(model: Any) -> Iterator[None]:
    """Apply the adapters' dropout, which only the pass of an optimizer step has."""
    layers = [layer.lora_dropout for layer in adapter_layers(model)]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


def base_name(name: str) -> str:
    """Return the name that a tensor has in the model without adapters."""
    return _BASE.sub("", name)


def adapter_part(name: str) -> tuple[str, str] | None:
    """Return module and side (A or B) of an adapter's tensor; None for any other tensor."""
    match = _PART.fullmatch(name)
    return (match["module"], match["side"]) if match else None


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of all experts of a layer that has adapters.

    name: its name in the model without adapters. transposed: it is [experts, in, out] instead of
    [experts, out, in].
    """

    name: str
    transposed: bool


def expert_tensors(model: Any) -> dict[str, ExpertTensor]:
    """Return the tensors of experts that have adapters, by the modules of their A and B."""
    if adapter_scaling(model) is None:
        return {}
    from peft.tuners.lora import ParamWrapper

    return {
        name: ExpertTensor(
            f"{base_name(name + '.')}{module.parameter_name}",
            transposed=not module._did_swap_in_out_features,
        )
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }


@torch.no_grad()
def merge(
    tensors: dict[str, Tensor], factor: float, experts: Mapping[str, ExpertTensor]
) -> dict[str, Tensor]:
    """Return whole tensors as the base model has them, with adapters added in.

    W + factor B A is summed in float32 and rounded to the precision of W. experts: as
    `expert_tensors` returns them.
    """
    sides: dict[str, dict[str, list[Tensor]]] = {}
    weights = {}
    for name, tensor in tensors.items():
        if part := adapter_part(name):
            sides.setdefault(part[0], {"A": [], "B": []})[part[1]].append(tensor)
        else:
            weights[base_name(name)] = tensor
    for module, side in sides.items():
        a, b = torch.cat(side["A"]), torch.cat(side["B"], 1)
        if expert := experts.get(module):
            weights[expert.name] = _added_to_experts(weights[expert.name], a, b, factor, expert)
        else:
            weight = weights[f"{module}.weight"]
            weights[f"{module}.weight"] = added(weight, a, b, factor)
    return weights


def _added_to_experts(
    weight: Tensor, a: Tensor, b: Tensor, factor: float, tensor: ExpertTensor
) -> Tensor:
    """Return W + factor B A of each expert.

    a: [experts x rank, in], expert by expert. b: [out, rank x experts], rank by rank: PEFT's order.
    """
    count = len(weight)
    a = a.view(count, -1, a.shape[1])
    b = b.view(len(b), -1, count).permute(2, 0, 1)
    if tensor.transposed:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return added(weight, a, b, factor)
