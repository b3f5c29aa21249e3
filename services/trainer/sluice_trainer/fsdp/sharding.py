"""Sharding of a model's parameters over all ranks, layer by layer, with FSDP2."""

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
from sluice_trainer.fsdp import mtp
from sluice_trainer.fsdp.families import decoder_layers
from sluice_trainer.fsdp.loading import Recipe
from sluice_trainer.fsdp.lora import adapter_part, adapter_scaling
from sluice_trainer.fsdp.net import Net
from sluice_trainer.fsdp.row_share import RowShare
from sluice_trainer.fsdp.vision import tower_blocks, trained_in_tower
from sluice_trainer.kernels.compiled import compiled


def build(recipe: Recipe, ranks: Ranks, share: RowShare, trainer: Trainer, *, learns: bool) -> Net:
    """Return the model with its initial weights, sharded over all ranks. Collective.

    Only rank 0 reads a checkpoint. With `cpuOffload: all` the shards stay in host memory and are
    copied to the GPU layer by layer. Dropout is off, so log-probs are those of the model that
    generates.

    Parameters
    ----------
    recipe
        Configuration and initial weights.
    ranks
        All ranks of the trainer.
    share
        This rank's position among those that share rows.
    trainer
        Settings of memory and recomputation.
    learns
        A model that learns keeps float32 weights and computes in `recipe.compute`. Another one
        keeps its weights in that precision.

    """
    # Shard a model without memory, so that each rank allocates only its shards.
    model = recipe.blank().eval()
    if not learns:
        model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and adapter_part(name) is None:
            parameter.data = parameter.data.to(recipe.compute)
    net = Net(model, share)
    host = trainer.cpu_offload == "all"
    policy = CPUOffloadPolicy(pin_memory=DEVICE.type == "cuda") if host else OffloadPolicy()
    spread = partial(_apply_fsdp, compute=recipe.compute if learns else None, offload=policy)
    _shard(net, spread, learns=learns, recompute=learns and trainer.recompute == "full")
    net.to_empty(device="cpu" if host else DEVICE)
    model.tie_weights()
    if host:
        _buffers_to_device(net)
    source = recipe.source() if ranks.rank == 0 else None
    _load_from_first_rank(model, source, ranks)
    return net


def _shard(net: Net, spread: Callable[..., None], *, learns: bool, recompute: bool) -> None:
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    # With no other rank to gather from, the copies of float32 weights in `compute` can stay. Those
    # of frozen weights would be a second model in memory, and cost little to make again.
    stay = mesh.size() == 1 and learns and adapter_scaling(net.model) is None
    if recompute and trained_in_tower(net.model):
        for block in tower_blocks(net.model):
            _recompute(block)
    for block in decoder_layers(net.model):
        if recompute:
            _recompute(block)
        if net.packs and not _has_experts(block):
            # Compiled around the checkpoint, so that recomputation is a part of one compiled
            # backward pass.
            block.forward = compiled(block.forward)
        spread(block, mesh, reshard=not stay)
    spread(net, mesh, reshard=False, inputs=False)


def _recompute(block: nn.Module) -> None:
    again = partial(checkpoint, block.forward, use_reentrant=False)
    block.forward = partial(again, preserve_rng_state=False)


def _buffers_to_device(net: nn.Module) -> None:
    """Move buffers to the device: they are not sharded, and a layer expects them there."""
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(DEVICE))


def _has_experts(block: nn.Module) -> bool:
    """Return True for a mixture of experts, or a layer with a recurrent state.

    Experts are one tensor whose token counts differ, and recurrent layers loop over a sequence.
    Neither can be compiled once for all inputs.
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
    """Shard a module.

    compute: precision of forward passes, None for that of its weights. inputs: cast the inputs too;
    those of a loss must not be cast.
    """
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
    # Sum, not mean: the loss weights hold the denominators. gloo has no other reduction.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(net: nn.Module) -> None:
    """Free gathered parameters, which otherwise stay after a pass without a backward pass.

    A later optimizer step would not update them.
    """
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Return parameters and persistent buffers; tied ones once, under their first name."""
    seen_ids: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen_ids:
            tensors[name] = tensor
        seen_ids.add(id(tensor))
    return tensors


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that is spread, or the tensor itself. Collective."""
    if isinstance(tensor, DTensor):
        share = tensor.detach().to(DEVICE)  # NCCL does not reach host memory
        assert isinstance(share, DTensor)
        return share.full_tensor()
    return tensor.detach()


def set_share(tensor: Tensor, value: Tensor) -> None:
    """Copy this rank's share of `value`, which every rank has, into a tensor that is spread."""
    if isinstance(tensor, DTensor):
        full = value.to(DEVICE, tensor.dtype)
        share = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(share.to_local())
    else:
        tensor.copy_(value)


@torch.no_grad()
def _load_from_first_rank(model: Any, source: Any, ranks: Ranks) -> None:
    """Copy rank 0's weights and buffers to the shards of all ranks.

    Source is None on the others.
    """
    values = {} if source is None else dict(_all_tensors(source))
    for name, tensor in {**named_tensors(model), **dict(model.named_buffers())}.items():
        set_share(tensor, _from_first(values.get(name), tensor, ranks))
    # `export` needs it to restore the names in the checkpoint.
    model._weight_conversions = ranks.broadcast(getattr(source, "_weight_conversions", None))
    if layer := mtp.layer_of(model):
        first = source and source.mtp.decoder._weight_conversions
        layer.decoder._weight_conversions = ranks.broadcast(first)


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
