"""A model's parameters spread over all ranks: layer by layer, and what is outside of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from sluice.api import Trainer
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.fsdp.families import decoder_layers
from sluice_trainer.fsdp.loading import Recipe
from sluice_trainer.fsdp.net import Net
from sluice_trainer.kernels.compiled import compiled


def build(recipe: Recipe, ranks: Ranks, trainer: Trainer, *, learns: bool) -> Net:
    """The model at its first weights, each rank with its share of every parameter. Collective.

    Only rank 0 reads a checkpoint. A model that learns keeps float32 weights and computes in
    `recipe.compute`; another keeps its weights in that. With `cpuOffload: all` the shares stay in
    host memory, and are copied to the GPU layer by layer. Drop-out is off: log-probs are those of
    the model that generates.
    """
    model = recipe.blank().eval()
    if not learns:
        model.requires_grad_(False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(recipe.compute)
    net = Net(model)
    host = trainer.cpu_offload == "all"
    policy = CPUOffloadPolicy(pin_memory=DEVICE.type == "cuda") if host else OffloadPolicy()
    spread = partial(_apply_fsdp, compute=recipe.compute if learns else None, offload=policy)
    _shard(net, spread, recompute=learns and trainer.recompute == "full")
    net.to_empty(device="cpu" if host else DEVICE)
    model.tie_weights()
    if host:
        _buffers_to_device(net)
    source = recipe.source() if ranks.rank == 0 else None
    _load_from_first_rank(model, source, ranks)
    return net


def _shard(net: Net, spread: Callable[..., None], *, recompute: bool) -> None:
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    alone = mesh.size() == 1  # nobody has anything to gather: weights in `compute` can stay
    for block in decoder_layers(net.model):
        if recompute:
            again = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = partial(again, preserve_rng_state=False)
        if net.packs and not _has_experts(block):
            # Around the checkpoint: what is recomputed is then part of one compiled backward pass.
            block.forward = compiled(block.forward)
        spread(block, mesh, reshard=not alone)
    spread(net, mesh, reshard=False, inputs=False)


def _buffers_to_device(net: nn.Module) -> None:
    """Buffers are nobody's share: a layer expects them where it computes."""
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(DEVICE))


def _has_experts(block: nn.Module) -> bool:
    """True for a mixture, whose experts are one tensor: how many tokens each gets differs.

    Layers with a state of their own loop over a sequence. Neither would be compiled once for all.
    """
    return any(parameter.dim() > 2 for parameter in block.parameters())


def _apply_fsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None,
    offload: OffloadPolicy,
    reshard: bool,
    inputs: bool = True,
) -> None:
    """inputs: whether they are cast as well; what a loss is given must not be."""
    precision = MixedPrecisionPolicy()
    if compute not in (None, torch.float32):
        precision = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=inputs
        )
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=reshard,
    )
    assert isinstance(module, FSDPModule)
    # A sum, not a mean: the loss' weights hold the denominators. gloo has no other way to add up.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor; all of one that is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(net: nn.Module) -> None:
    """Give up what was gathered: after a pass without a backward pass it stays otherwise.

    A later optimizer step would not reach it.
    """
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers; tied ones once, under their first name."""
    known: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            tensors[name] = tensor
        known.add(id(tensor))
    return tensors


@torch.no_grad()
def _load_from_first_rank(model: Any, source: Any, ranks: Ranks) -> None:
    """Copy rank 0's weights and buffers to all ranks' shares. source: None on the others."""
    values = {} if source is None else dict(_all_tensors(source))
    for name, tensor in (*named_tensors(model).items(), *model.named_buffers()):
        whole = _from_first(values.get(name), tensor, ranks)
        if isinstance(tensor, DTensor):
            share = distribute_tensor(
                whole, tensor.device_mesh, tensor.placements, src_data_rank=None
            )
            tensor.to_local().copy_(share.to_local())
        else:
            tensor.copy_(whole)
    # Kept for the way back: names that the checkpoint had.
    model._weight_conversions = ranks.broadcast(getattr(source, "_weight_conversions", None))


def _all_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.state_dict().items()
    yield from model.named_buffers()


def _from_first(value: Tensor | None, like: Tensor, ranks: Ranks) -> Tensor:
    if value is None:
        whole = torch.empty(like.shape, dtype=like.dtype, device=DEVICE)
    else:
        whole = value.detach().to(DEVICE, like.dtype, copy=True).contiguous()
    if ranks.world_size > 1:
        dist.broadcast(whole, src=0)
    return whole
