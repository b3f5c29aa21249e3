"""A model's tensors, whole, under the names that its checkpoint has for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from sluice.engines.protocol import StackName
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.fsdp.sharding import named_tensors

_LAYER = re.compile(r"(.*\.layers\.\d+\.)")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<kind>gate|up|down)_proj\.weight")


@torch.no_grad()
def hf_tensors(
    model: Any, dtype: torch.dtype, stack_name: StackName | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight, parameters in `dtype`. Collective over all ranks.

    All must iterate to the end, and all get all tensors. A layer at a time is gathered and in
    memory. transformers holds some weights otherwise than checkpoints do (all experts of a layer as
    one): it says itself how to undo that. stack_name: single experts come as one tensor, under this
    name. Tied weights come once, under the embedding's name.
    """
    for layer in _layers(named_tensors(model)):
        whole = {name: _gathered(tensor, dtype) for name, tensor in layer.items()}
        tensors = revert_weight_conversion(model, whole)
        yield from _stacked(tensors, stack_name) if stack_name else tensors.items()


def _layers(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each layer together, all others each by itself, in their order."""
    layer: dict[str, Tensor] = {}
    of = ""
    for name, tensor in tensors.items():
        match = _LAYER.match(name)
        here = match[1] if match else name
        if layer and here != of:
            yield layer
            layer = {}
        of = here
        layer[name] = tensor
    if layer:
        yield layer


def _gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole of a tensor. Parameters are cast before they travel; buffers stay as they are."""
    if isinstance(tensor, DTensor):
        share = tensor.detach().to(DEVICE, dtype)
        assert isinstance(share, DTensor)
        return share.full_tensor()
    return tensor.detach()


def _stacked(tensors: dict[str, Tensor], name: StackName) -> Iterator[tuple[str, Tensor]]:
    """The same, but experts in stacks: [experts, 2 * width, hidden], [experts, hidden, width]."""
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
