"""Loading and exporting Hugging Face weights of a model that is sharded over ranks.

`entries` is the table of parameters; this module finds a rank's parameters in it, and exchanges
shares over tensor-, expert- and pipeline-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from sluice.engines.protocol import StackName
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.megatron.huggingface.entries import Entry, entries
from sluice_trainer.model.huggingface_config import ModelShape
from sluice_trainer.model.huggingface_files import EMBEDDING

T = TypeVar("T")
_EXPERT = re.compile(r"(\.local_experts\.)(\d+)(\.)")
_ONE_EXPERT = re.compile(r".*\.experts\.\d+")


def named_tensors(chunks: list[Any]) -> dict[str, list[Tensor]]:
    """Return parameters and persistent buffers of this rank's GPTModel chunks, by name.

    Layers are numbered over the whole model, not from the chunk's first. The number of an expert is
    `*`: that list holds this rank's experts in order. All other lists have one element. Adapters
    are no part of it.
    """
    result: dict[str, list[Tensor]] = {}
    for model in chunks:
        result |= _cached(model, "tensors", partial(_tensors_of, model))
    return result


def named_trained(chunks: list[Any]) -> dict[str, list[Tensor]]:
    """Return the parameters that learn in chunks with adapters, each alone in a list."""
    return {
        _numbered(model, name): [parameter]
        for model in chunks
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def named_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a GPTModel; layers are numbered over the whole model."""
    for name, module in list(model.named_modules()):
        yield _numbered(model, name), module


def _numbered(model: Any, name: str) -> str:
    """Return a name with the layer's number in the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


def _cached(model: Any, name: str, find: Callable[[], dict[str, T]]) -> dict[str, T]:
    """Return the result of `find` about a model, computed once and stored with the model.

    A large mixture has ten thousand modules to walk through, too many for each weight update.
    """
    cache: dict[str, dict[str, T]] = vars(model).setdefault("sluice", {})
    if name not in cache:
        cache[name] = find()
    return cache[name]


def _tensors_of(model: Any) -> dict[str, list[Tensor]]:
    numbered: dict[str, dict[int, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or ".adapter." in name:  # Megatron's extra states
            continue
        expert = _EXPERT.search(name)
        numbered.setdefault(without_expert_number(_numbered(model, name)), {})[
            int(expert[2]) if expert else 0
        ] = tensor
    # state_dict does not list experts in order.
    return {
        name: [by_expert[number] for number in sorted(by_expert)]
        for name, by_expert in numbered.items()
    }


def without_expert_number(name: str) -> str:
    """Return a parameter's name with `*` instead of the number of an expert."""
    return _EXPERT.sub(r"\1*\3", name)


def _group(entry: Entry) -> dist.ProcessGroup:
    """Return the ranks that share the entry's full tensor."""
    group: dist.ProcessGroup = (
        parallel_state.get_expert_model_parallel_group()
        if entry.group == "expert"
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


@torch.no_grad()
def load(
    chunks: list[Any], shape: ModelShape, read: Callable[[str, tuple[int, ...]], Tensor]
) -> None:
    """Fill this rank's parameters; reads only tensors that this rank holds.

    Parameters
    ----------
    chunks
        Chunks of the model.
    shape
        Shape of the model.
    read
        Returns a full Hugging Face tensor by name and shape, on any device, in any dtype.

    Raises
    ------
    KeyError
        If a parameter gets no value.

    """
    missing = named_tensors(chunks)
    table, _ = plan(shape, parallel_state.get_tensor_model_parallel_world_size())
    for entry in table:
        names = [entry.parameter]
        if shape.tied and entry.hf[0][0] == EMBEDDING:
            names.append("output_layer.weight")  # copy on the last pipeline stage
        for name in names:
            targets = missing.pop(name, None)
            if targets is not None:
                _load_entry(entry, targets, read)
    if missing:
        raise KeyError(f"no Hugging Face tensor is known for {', '.join(sorted(missing))}")


@torch.no_grad()
def fill(
    table: Iterable[Entry],
    held: Mapping[str, list[Tensor]],
    read: Callable[[str, tuple[int, ...]], Tensor],
) -> None:
    """Set those of this rank's tensors that the table names, from full ones, as `load` does."""
    for entry in table:
        if entry.parameter in held:
            _load_entry(entry, held[entry.parameter], read)


def _load_entry(
    entry: Entry, targets: list[Tensor], read: Callable[[str, tuple[int, ...]], Tensor]
) -> None:
    group = _group(entry)
    rank, size = group.rank(), group.size()
    share = entry.shard(
        [read(name, shape) for name, shape in entry.sources(rank, size)], rank, size
    )
    parts = share.unbind(0) if entry.group == "expert" else [share]
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.reshape(target.shape))


def _module(name: str) -> str:
    """Return the module that a tensor belongs to: an expert, or a projection."""
    expert = _ONE_EXPERT.match(name)
    return expert[0] if expert else name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Receivers:
    """The ranks for which full tensors are gathered: those that send them to engines.

    Most ranks of a large trainer send to no engine. They only contribute their parts: gathering
    full tensors on them would cost their links as much as the engines', and memory.

    flags: for each rank, True if it or another stage of its pipeline needs full tensors, because
    one stage's tensors reach the others through their pipeline.
    """

    flags: tuple[bool, ...]

    @property
    def includes_this_rank(self) -> bool:
        """True if this rank handles full tensors."""
        return self.flags[dist.get_rank()]

    def gathering_ranks(self, group: dist.ProcessGroup) -> list[int]:
        """Return the global ranks of a group that gather its tensors."""
        return [rank for rank in dist.get_process_group_ranks(group) if self.flags[rank]]


def find_receivers(receivers: Collection[int] | None) -> Receivers:
    """Return the ranks that gather if `receivers` need all tensors (None: all do).

    Collective unless all do.
    """
    size = dist.get_world_size()
    if receivers is None:
        return Receivers((True,) * size)
    pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    flags: list[bool] = [False] * size
    dist.all_gather_object(flags, any(rank in receivers for rank in pipeline))
    return Receivers(tuple(flags))


def hf_tensors(
    chunks: list[Any],
    shape: ModelShape,
    stack_name: StackName | None = None,
    receivers: frozenset[int] | None = None,
    merged: Callable[[str, Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full tensor of every Hugging Face weight, in the parameters' dtype.

    Collective over tensor-, expert- and pipeline-parallel ranks: all must iterate to the end. Each
    entry takes one gather and one broadcast, so all experts of a layer travel together. Tensors may
    share memory with the parameters: copy those that must outlive the next optimizer step. Tied
    weights come once, under the embedding's name.

    Parameters
    ----------
    chunks
        Chunks of the model.
    shape
        Shape of the model.
    stack_name
        If given, all experts of a layer come as one tensor, under this name (`stack_experts`);
        otherwise tensors come in the order of a checkpoint.
    receivers
        Ranks that need the tensors; None: all. Other ranks may yield no tensors.
    merged
        Returns this rank's share of a parameter with an adapter added in, by the parameter's name.

    """
    held = named_tensors(chunks)
    owners = _cached(chunks[0], "owners", lambda: _owners(held))
    like = next(iter(held.values()))[0]
    gathering = _receivers(chunks[0], receivers)

    def whole(entry: Entry) -> Tensor | None:
        parts = [tensor.detach() for tensor in held.get(entry.parameter, ())]
        if merged is not None and entry.group == "tensor":
            parts = [merged(entry.parameter, part) for part in parts]
        full = _gather(entry, parts, gathering) if parts else None
        return (
            _broadcast_over_pipeline(entry, full, owners, like.dtype)
            if gathering.includes_this_rank
            else None
        )

    table, _ = plan(shape, parallel_state.get_tensor_model_parallel_world_size())
    arranged = ((entry, full) for entry in table if (full := whole(entry)) is not None)
    yield from (
        stack_experts(arranged, stack_name) if stack_name else in_checkpoint_order(shape, arranged)
    )


def whole_tensors(
    table: Iterable[Entry], held: Mapping[str, list[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full tensor of the table's Hugging Face tensors, on all ranks. Collective.

    held: this rank's tensors by the parameters' names; they are float32.
    """
    owners, everyone = _owners(held), find_receivers(None)
    for entry in table:
        parts = [tensor.detach() for tensor in held.get(entry.parameter, ())]
        full = _gather(entry, parts, everyone) if parts else None
        full = _broadcast_over_pipeline(entry, full, owners, torch.float32)
        yield from zip((name for name, _ in entry.hf), entry.take_apart(full), strict=True)


def stack_experts(
    arranged: Iterable[tuple[Entry, Tensor]], name: StackName
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face tensors with stacked experts.

    Stacks have the shapes [experts, 2 * width, hidden] and [experts, hidden, width].
    """
    for entry, full in arranged:
        if entry.experts:
            yield name(entry.experts, gated=entry.full[1] == 2), full.flatten(1, 2)
        else:
            yield from zip((name for name, _ in entry.hf), entry.take_apart(full), strict=True)


def in_checkpoint_order(
    shape: ModelShape, arranged: Iterable[tuple[Entry, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Take full tensors apart and yield them in the order of a Hugging Face checkpoint.

    It holds the tensors of one layer at most.
    """
    _, names = plan(shape, 1)
    order = iter(names)
    following = next(order)
    pending: dict[str, Tensor] = {}
    for entry, full in arranged:
        pending |= {
            name: tensor for (name, _), tensor in zip(entry.hf, entry.take_apart(full), strict=True)
        }
        while following in pending:
            yield following, pending.pop(following)
            following = next(order, "")


def _receivers(model: Any, receivers: frozenset[int] | None) -> Receivers:
    """Return the ranks that gather; negotiated again only if `receivers` has changed."""
    cache = vars(model).setdefault("sluice", {})
    if "receivers" not in cache or cache["receivers"] != receivers:
        cache |= {"receivers": receivers, "gathering": find_receivers(receivers)}
    gathering: Receivers = cache["gathering"]
    return gathering


def _gather(entry: Entry, tensors: list[Tensor], gathering: Receivers) -> Tensor | None:
    """Return the full tensor from the parts of all ranks of the entry's group. Collective.

    None if this rank does not gather.
    """
    group = _group(entry)
    gathering_ranks = gathering.gathering_ranks(group)
    if not gathering_ranks:
        return None
    part = torch.stack(tensors) if entry.group == "expert" else tensors[0]
    part = part.reshape(entry.local(group.size()))
    if entry.split is None or group.size() == 1:
        return part
    # A single receiver: gather to it. Several: all-gather, which all ranks then hold.
    if len(gathering_ranks) == 1 and not gathering.includes_this_rank:
        dist.gather(_bytes(part), dst=gathering_ranks[0], group=group)
        return None
    parts = torch.empty((group.size(), *part.shape), dtype=part.dtype, device=part.device)
    if len(gathering_ranks) == 1:
        targets = [_bytes(target) for target in parts]
        dist.gather(_bytes(part), targets, dst=gathering_ranks[0], group=group)
    else:
        dist.all_gather_into_tensor(parts.view(-1), part.reshape(-1), group=group)
    return parts.movedim(0, entry.split).reshape(entry.full)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of bytes, because gloo cannot gather every type."""
    return tensor.reshape(-1).view(torch.uint8)


@lru_cache(maxsize=4)
def plan(shape: ModelShape, tensor: int) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Return the entries, and all Hugging Face names in transformers' order.

    A projection's bias follows its weight, and an expert's tensors are consecutive. The result is
    cached: a large mixture has tens of thousands of names.
    """
    table = tuple(entries(shape, tensor))
    names = [name for entry in table for name, _ in entry.hf]
    first: dict[str, int] = {}
    place = [first.setdefault(_module(name), i) for i, name in enumerate(names)]
    return table, tuple(
        name for _, name in sorted(zip(place, names, strict=True), key=lambda pair: pair[0])
    )


def _owners(tensors: Mapping[str, list[Tensor]]) -> dict[str, int]:
    """Return the global rank of the pipeline stage that holds each parameter.

    Empty without pipeline parallelism.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return {}
    names: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(names, sorted(tensors), group=group)
    return {
        name: dist.get_global_rank(group, stage)
        for stage, held in enumerate(names)
        for name in held
    }


def _broadcast_over_pipeline(
    entry: Entry, full: Tensor | None, owners: dict[str, int], dtype: torch.dtype
) -> Tensor:
    """Return the entry's full tensor on every pipeline stage, from the stage that holds it.

    dtype: type of the model's parameters.
    """
    if not owners:
        assert full is not None
        return full
    if full is None:
        full = torch.empty(entry.full, dtype=entry.dtype or dtype, device=DEVICE)
    full = full.contiguous()
    dist.broadcast(
        full, owners[entry.parameter], group=parallel_state.get_pipeline_model_parallel_group()
    )
    return full
