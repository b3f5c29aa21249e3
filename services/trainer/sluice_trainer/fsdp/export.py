"""Export of a sharded model's full tensors under their names in a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from sluice.engines.protocol import StackName
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.fsdp import lora, mtp
from sluice_trainer.fsdp.families import kept_parameters
from sluice_trainer.fsdp.nf4 import dequantized, packed_weights
from sluice_trainer.fsdp.sharding import named_tensors
from sluice_trainer.model.huggingface_files import HEAD, VALUE_HEAD, Config, read_config

_LAYER = re.compile(r"(.*\.layers\.\d+\.)")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<kind>gate|up|down)_proj\.weight")


@torch.no_grad()
def hf_tensors(
    model: Any,
    dtype: torch.dtype,
    stack_name: StackName | None = None,
    *,
    whole: bool = False,
    further: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full tensor of every trained weight, parameters in `dtype`. Collective.

    All ranks must iterate to the end, and all get every tensor. One layer at a time is gathered and
    in memory. transformers stores some weights differently from checkpoints (for example all
    experts of a layer as one tensor); `revert_weight_conversion` undoes that. Tied weights come
    once, under the name of the embedding.

    Parameters
    ----------
    model
        transformers' model, sharded.
    dtype
        Precision of the result.
    stack_name
        If given, separate experts come as one tensor, under this name.
    whole
        Also yield the parts of a multimodal model that no job trains.
    further
        Yield the layer that predicts a further token, if it is trained.

    """
    factor, experts = lora.adapter_scaling(model), lora.expert_tensors(model)
    kept = set() if whole else kept_parameters(model)
    trained = {
        name: tensor
        for name, tensor in named_tensors(model).items()
        if name not in kept and (further or not mtp.is_of_layer(name))
    }
    for layer in _layers(trained):
        full = {
            name: _gathered(tensor, dtype, adapter=lora.adapter_part(name) is not None)
            for name, tensor in layer.items()
        }
        if factor is not None:
            full = lora.merge(full, factor, experts)
        tensors = _stored(model, full)
        if (head := tensors.get(HEAD)) is not None and head.shape[0] == 1:
            tensors = {VALUE_HEAD: head}
        yield from _stacked(tensors, stack_name) if stack_name else tensors.items()


def own_config(model: Any, source: Path) -> Config:
    """Return the config.json of what the model holds.

    It is that of `source`, unless that describes a multimodal model and this is its language model.
    """
    config = read_config(source)
    if config.get("model_type") == model.config.model_type:
        return config
    text: Config = json.loads(model.config.to_json_string())
    return {**text, "architectures": [type(model).__name__]}


def exported_names(model: Any) -> set[str]:
    """Return the names of the parameters that `hf_tensors` yields, packed ones included."""
    kept = kept_parameters(model)
    named = {**dict(model.named_parameters()), **packed_weights(model)}
    shapes = {
        name: torch.empty(parameter.shape, device="meta")
        for name, parameter in named.items()
        if name not in kept and lora.adapter_part(name) is None
    }
    return {
        name
        for layer in _layers({lora.base_name(name): shape for name, shape in shapes.items()})
        for name in _stored(model, layer)
    }


def _stored(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that `_layers` has put together under their names in the checkpoint."""
    layer = mtp.layer_of(model)
    if layer is not None and mtp.is_of_layer(next(iter(tensors))):
        return mtp.restored(layer, tensors)
    result: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return result


def _layers(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each layer together and every other tensor alone, in order."""
    layer: dict[str, Tensor] = {}
    previous = ""
    for name, tensor in tensors.items():
        match = _LAYER.match(name)
        prefix = match[1] if match else name
        if layer and prefix != previous:
            yield layer
            layer = {}
        previous = prefix
        layer[name] = tensor
    if layer:
        yield layer


def _gathered(tensor: Tensor, dtype: torch.dtype, *, adapter: bool) -> Tensor:
    """Return the full tensor.

    Parameters are cast before they are gathered; buffers keep their type, unless they are packed.
    """
    if tensor.dtype == torch.uint8:
        return dequantized(tensor, dtype)
    if isinstance(tensor, DTensor):
        # An adapter is rounded once, with the weight that it is added to.
        share = tensor.detach().to(DEVICE, torch.float32 if adapter else dtype)
        assert isinstance(share, DTensor)
        return share.full_tensor()
    return tensor.detach()


def _stacked(tensors: dict[str, Tensor], name: StackName) -> Iterator[tuple[str, Tensor]]:
    """Stack the experts of each layer.

    [experts, 2 * width, hidden] and [experts, hidden, width].
    """
    experts: dict[str, dict[str, list[Tensor]]] = {}
    for key, tensor in tensors.items():
        if match := _EXPERT.fullmatch(key):
            kinds = experts.setdefault(match["experts"], {"gate": [], "up": [], "down": []})
            kinds[match["kind"]].append(tensor)
        else:
            yield key, tensor
    for module, kinds in experts.items():
        pairs = zip(kinds["gate"], kinds["up"], strict=True)
        yield name(module, gated=True), torch.stack([torch.cat(pair) for pair in pairs])
        yield name(module, gated=False), torch.stack(kinds["down"])
