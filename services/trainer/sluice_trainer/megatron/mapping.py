"""Hugging Face weights <-> Megatron parameters, declared once and read in both directions.

Every Megatron parameter is one `Entry`: which Hugging Face tensors it is made of, how they are arranged into one full
tensor, and along which dimension of that arrangement tensor-parallel ranks split it. Loading arranges and takes this
rank's share; exporting gathers the shares and takes the arrangement apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from sluice_trainer.megatron.hf_config import ModelShape

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter.

    parameter: its name, layers numbered over the whole model. hf: names and shapes of its Hugging Face tensors.
    arrange: those tensors -> one full tensor of shape `full`; take_apart: back again. split: the dimension of `full`
    that ranks share; None: every rank holds all of it.
    """

    parameter: str
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    full: tuple[int, ...]
    split: int | None
    arrange: Callable[[list[Tensor]], Tensor]
    take_apart: Callable[[Tensor], list[Tensor]]

    def shard(self, tensors: list[Tensor], rank: int, size: int) -> Tensor:
        """This rank's part of the full tensor; its layout still has to be viewed as the parameter's shape."""
        full = self.arrange(tensors)
        return full if self.split is None else full.chunk(size, self.split)[rank]

    def gather(self, shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """The Hugging Face tensors, from the shards of all ranks of the tensor-parallel group. Collective."""
        size = group.size()
        if self.split is None or size == 1:
            return self.take_apart(shard.reshape(self.full))
        local = list(self.full)
        local[self.split] //= size
        shard = shard.reshape(local).contiguous()
        shards = [torch.empty_like(shard) for _ in range(size)]
        dist.all_gather(shards, shard, group=group)
        return self.take_apart(torch.cat(shards, self.split))


def _plain(parameter: str, name: str, shape: tuple[int, ...], split: int | None = None) -> Entry:
    return Entry(parameter, ((name, shape),), shape, split, lambda tensors: tensors[0], lambda full: [full])


def _vocabulary(parameter: str, name: str, shape: ModelShape, tensor: int) -> Entry:
    """Embedding or output layer. Rows beyond the vocabulary are 0 and masked out of every softmax."""
    padded = shape.padded_vocab(tensor)

    def arrange(tensors: list[Tensor]) -> Tensor:
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, padded - shape.vocab))

    return Entry(
        parameter,
        ((name, (shape.vocab, shape.hidden)),),
        (padded, shape.hidden),
        0,
        arrange,
        lambda full: [full[: shape.vocab]],
    )


def _qkv(parameter: str, prefix: str, kind: str, shape: ModelShape) -> Entry:
    """Queries, keys and values, interleaved by key/value group: [groups, (queries a group + 2) * head_dim, ...]."""
    groups, dim = shape.kv_heads, shape.head_dim
    rows = [shape.heads // groups * dim, dim, dim]
    rest: tuple[int, ...] = (shape.hidden,) if kind == "weight" else ()

    def arrange(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.view(groups, n, *rest) for t, n in zip(tensors, rows, strict=True)], dim=1)

    def take_apart(full: Tensor) -> list[Tensor]:
        return [part.reshape(groups * n, *rest) for part, n in zip(torch.split(full, rows, dim=1), rows, strict=True)]

    hf = tuple((f"{prefix}.{x}_proj.{kind}", (groups * n, *rest)) for x, n in zip("qkv", rows, strict=True))
    return Entry(parameter, hf, (groups, sum(rows), *rest), 0, arrange, take_apart)


def _gate_up(parameter: str, prefix: str, shape: ModelShape) -> Entry:
    """Gate and up projection, stacked: every rank holds its share of both."""
    one = (shape.ffn, shape.hidden)
    return Entry(
        parameter,
        ((f"{prefix}.gate_proj.weight", one), (f"{prefix}.up_proj.weight", one)),
        (2, *one),
        1,
        torch.stack,
        lambda full: list(full.unbind(0)),
    )


def _layer(shape: ModelShape, number: int) -> list[Entry]:
    ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
    attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
    entries = [_qkv(f"{attention}.linear_qkv.weight", f"{theirs}.self_attn", "weight", shape)]
    if shape.qkv_bias:
        entries.append(_qkv(f"{attention}.linear_qkv.bias", f"{theirs}.self_attn", "bias", shape))
    wide = (shape.hidden, shape.heads * shape.head_dim)
    entries.append(_plain(f"{attention}.linear_proj.weight", f"{theirs}.self_attn.o_proj.weight", wide, 1))
    if shape.qk_norm:
        for x in "qk":
            name = f"{theirs}.self_attn.{x}_norm.weight"
            entries.append(_plain(f"{attention}.{x}_layernorm.weight", name, (shape.head_dim,)))
    down = (shape.hidden, shape.ffn)
    return [
        *entries,
        _gate_up(f"{mlp}.linear_fc1.weight", f"{theirs}.mlp", shape),
        _plain(f"{mlp}.linear_fc2.weight", f"{theirs}.mlp.down_proj.weight", down, 1),
        _plain(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", (shape.hidden,)),
        _plain(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", (shape.hidden,)),
    ]


def entries(shape: ModelShape, tensor: int) -> list[Entry]:
    """All parameters of the model in the order of a Hugging Face checkpoint. A tied output layer is none of its own."""
    result = [_vocabulary("embedding.word_embeddings.weight", EMBEDDING, shape, tensor)]
    for number in range(shape.layers):
        result += _layer(shape, number)
    result.append(_plain("decoder.final_layernorm.weight", "model.norm.weight", (shape.hidden,)))
    if not shape.tied:
        result.append(_vocabulary("output_layer.weight", HEAD, shape, tensor))
    return result


def named_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters of this rank's GPTModel; layers numbered over the whole model, not from the stage's first."""
    number = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(model.decoder.layers)}
    result = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = number[parts[2]]
        result[".".join(parts)] = parameter
    return result


@torch.no_grad()
def load(model: Any, shape: ModelShape, read: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Fill this rank's parameters. read(name, shape): a full Hugging Face tensor, on any device, in any dtype.

    Only tensors that this rank holds are read. Raises KeyError where a parameter is left without a value.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    missing = named_parameters(model)
    for entry in entries(shape, size):
        names = [entry.parameter]
        if shape.tied and entry.hf[0][0] == EMBEDDING:
            names.append("output_layer.weight")  # the last pipeline stage's copy
        for name in names:
            parameter = missing.pop(name, None)
            if parameter is not None:
                tensors = [read(hf, hf_shape) for hf, hf_shape in entry.hf]
                parameter.copy_(entry.shard(tensors, rank, size).reshape(parameter.shape))
    if missing:
        raise KeyError(f"no Hugging Face tensor is known for {', '.join(sorted(missing))}")


@torch.no_grad()
def hf_tensors(model: Any, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every Hugging Face weight, in the order of a checkpoint, in the parameters' dtype.

    Collective over tensor- and pipeline-parallel ranks: all must iterate to the end, and all get all tensors. They may
    share memory with the parameters: copy what must outlive the next optimizer step. Tied weights come once, under the
    embedding's name.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    own = named_parameters(model)
    owners = _owners(own)
    pending: dict[str, Tensor] = {}
    order = iter(_hf_order(shape))
    following = next(order)
    for entry in entries(shape, group.size()):
        parameter = own.get(entry.parameter)
        tensors = entry.gather(parameter.detach(), group) if parameter is not None else None
        tensors = _over_pipeline(entry, tensors, owners, next(iter(own.values())))
        pending |= {name: tensor for (name, _), tensor in zip(entry.hf, tensors, strict=True)}
        while following in pending:
            yield following, pending.pop(following)
            following = next(order, "")


def _hf_order(shape: ModelShape) -> list[str]:
    """Names as transformers writes them: each projection's bias right after its weight."""
    names = [name for entry in entries(shape, 1) for name, _ in entry.hf]
    for bias in [name for name in names if name.endswith(".bias")]:
        names.remove(bias)
        names.insert(names.index(bias.removesuffix("bias") + "weight") + 1, bias)
    return names


def _owners(own: dict[str, torch.nn.Parameter]) -> dict[str, int]:
    """Global rank of the pipeline stage that holds each parameter. Empty without pipeline parallelism."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return {}
    names: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(names, sorted(own), group=group)
    return {name: dist.get_global_rank(group, stage) for stage, held in enumerate(names) for name in held}


def _over_pipeline(entry: Entry, tensors: list[Tensor] | None, owners: dict[str, int], like: Tensor) -> list[Tensor]:
    """The entry's tensors on every pipeline stage, from the one that holds them."""
    if not owners:
        assert tensors is not None
        return tensors
    group = parallel_state.get_pipeline_model_parallel_group()
    received = tensors or [torch.empty(shape, dtype=like.dtype, device=like.device) for _, shape in entry.hf]
    for i, tensor in enumerate(received):
        received[i] = tensor.contiguous()
        dist.broadcast(received[i], owners[entry.parameter], group=group)
    return received
