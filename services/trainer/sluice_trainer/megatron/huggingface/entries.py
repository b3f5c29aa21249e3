"""Table of the Hugging Face tensors that make up each Megatron parameter, for all families.

An `Entry` is read in both directions. Loading arranges Hugging Face tensors into one full tensor
and takes this rank's share; exporting gathers the shares and takes the arrangement apart. The
arrangement of a weight moves rows only, and works for any number of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sluice_trainer.model.huggingface_config import Experts, LatentAttention, ModelShape
from sluice_trainer.model.huggingface_files import EMBEDDING, HEAD, VALUE_HEAD

# Name and shape of a Hugging Face tensor.
Source = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A Megatron parameter, or the same parameter of all experts of a layer.

    Attributes
    ----------
    parameter
        Name of the parameter; layers are numbered over the whole model, and `*` is the number of an
        expert.
    hf
        Its Hugging Face tensors; those of experts expert by expert.
    full
        Shape of their arrangement.
    split
        Dimension of the arrangement that the ranks of `group` share; None: every rank holds all.
    arrange
        Tensors -> `full`; for experts any number of them.
    take_apart
        The inverse of `arrange`.
    group
        Parallel group over which the parameter is split.
    dtype
        Type of the parameter if it differs from the model's.
    experts
        Hugging Face name of the module that holds the experts.

    """

    parameter: str
    hf: tuple[Source, ...]
    full: tuple[int, ...]
    split: int | None
    arrange: Callable[[list[Tensor]], Tensor]
    take_apart: Callable[[Tensor], list[Tensor]]
    group: Literal["tensor", "expert"] = "tensor"
    dtype: torch.dtype | None = None
    experts: str | None = None

    def sources(self, rank: int, size: int) -> tuple[Source, ...]:
        """Return the tensors that one rank must read: those of its experts, otherwise all."""
        if self.group == "tensor":
            return self.hf
        share = len(self.hf) // size
        return self.hf[rank * share : (rank + 1) * share]

    def shard(self, tensors: list[Tensor], rank: int, size: int) -> Tensor:
        """Return this rank's part of the full tensor, from its `sources`."""
        arranged = self.arrange(tensors)
        if self.split is None or self.group == "expert":
            return arranged
        return arranged.chunk(size, self.split)[rank]

    def local(self, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        shape = list(self.full)
        if self.split is not None:
            shape[self.split] //= size
        return tuple(shape)


def entries(shape: ModelShape, tensor: int) -> Iterator[Entry]:
    """Yield all parameters of a model in the order of a Hugging Face checkpoint.

    A tied output layer has no entry.

    Parameters
    ----------
    shape
        Shape of the model.
    tensor
        Number of tensor-parallel ranks, which determines the padding of the vocabulary.

    """
    yield _vocabulary("embedding.word_embeddings.weight", EMBEDDING, shape, tensor)
    for number in range(shape.layers):
        mcore, hf = f"decoder.layers.{number}", f"model.layers.{number}"
        yield from _attention(shape, f"{mcore}.self_attention", f"{hf}.self_attn")
        if shape.experts and shape.is_mixture(number):
            yield from _mixture(shape, shape.experts, f"{mcore}.mlp", f"{hf}.mlp")
        else:
            yield from _mlp(
                f"{mcore}.mlp", f"{hf}.mlp", shape.hidden, shape.ffn, fused=shape.fused_gate_up
            )
        yield from _norms(shape, mcore, hf)
    yield _plain("decoder.final_layernorm.weight", "model.norm.weight", (shape.hidden,))
    if shape.value_head:
        yield _plain("output_layer.weight", VALUE_HEAD, (1, shape.hidden))
    elif not shape.tied:
        yield _vocabulary("output_layer.weight", HEAD, shape, tensor)


# --- layers


def _attention(shape: ModelShape, mcore: str, hf: str) -> Iterator[Entry]:
    if shape.latent:
        yield from _latent_attention(shape, shape.latent, mcore, hf)
        return
    yield _qkv(f"{mcore}.linear_qkv.weight", hf, "weight", shape)
    if shape.qkv_bias:
        yield _qkv(f"{mcore}.linear_qkv.bias", hf, "bias", shape)
    width = shape.heads * shape.head_dim
    yield _plain(f"{mcore}.linear_proj.weight", f"{hf}.o_proj.weight", (shape.hidden, width), 1)
    if shape.qk_norm:
        for x in "qk":
            yield _plain(
                f"{mcore}.{x}_layernorm.weight", f"{hf}.{x}_norm.weight", (shape.head_dim,)
            )


def _latent_attention(
    shape: ModelShape, latent: LatentAttention, mcore: str, hf: str
) -> Iterator[Entry]:
    """Latent attention: Megatron has DeepSeek's matrices under other names."""
    queries = shape.heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank is None:
        yield _plain(
            f"{mcore}.linear_q_proj.weight", f"{hf}.q_proj.weight", (queries, shape.hidden), 0
        )
    else:
        rank = latent.query_rank
        yield _plain(
            f"{mcore}.linear_q_down_proj.weight",
            f"{hf}.q_a_proj.weight",
            (rank, shape.hidden),
            0,
        )
        yield _plain(f"{mcore}.q_layernorm.weight", f"{hf}.q_a_layernorm.weight", (rank,))
        yield _plain(
            f"{mcore}.linear_q_up_proj.weight", f"{hf}.q_b_proj.weight", (queries, rank), 0
        )
    down = (latent.kv_rank + latent.rope_dim, shape.hidden)
    yield _plain(f"{mcore}.linear_kv_down_proj.weight", f"{hf}.kv_a_proj_with_mqa.weight", down, 0)
    yield _plain(f"{mcore}.kv_layernorm.weight", f"{hf}.kv_a_layernorm.weight", (latent.kv_rank,))
    up = (shape.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    yield _plain(f"{mcore}.linear_kv_up_proj.weight", f"{hf}.kv_b_proj.weight", up, 0)
    out = (shape.hidden, shape.heads * latent.value_dim)
    yield _plain(f"{mcore}.linear_proj.weight", f"{hf}.o_proj.weight", out, 1)


def _mlp(mcore: str, hf: str, hidden: int, ffn: int, *, fused: bool = False) -> Iterator[Entry]:
    yield (_fused_gate_up if fused else _gate_up)(f"{mcore}.linear_fc1.weight", hf, hidden, ffn)
    yield _plain(f"{mcore}.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, ffn), 1)


def _mixture(shape: ModelShape, experts: Experts, mcore: str, hf: str) -> Iterator[Entry]:
    """Router, experts and shared experts.

    The router's selection bias stays in float32, because it is added to float32 scores.
    """
    yield _plain(f"{mcore}.router.weight", f"{hf}.gate.weight", (experts.count, shape.hidden))
    if experts.choice_bias:
        bias, name = f"{mcore}.router.expert_bias", f"{hf}.gate.e_score_correction_bias"
        yield _plain(bias, name, (experts.count,), dtype=torch.float32)
    expert = f"{mcore}.experts.local_experts.*"
    up, down = (experts.ffn, shape.hidden), (shape.hidden, experts.ffn)
    yield _all_experts(
        f"{expert}.linear_fc1.weight",
        f"{hf}.experts",
        ("gate_proj", "up_proj"),
        up,
        experts.count,
    )
    yield _all_experts(
        f"{expert}.linear_fc2.weight", f"{hf}.experts", ("down_proj",), down, experts.count
    )
    if experts.shared_ffn:
        yield from _mlp(
            f"{mcore}.shared_experts", f"{hf}.shared_experts", shape.hidden, experts.shared_ffn
        )


def _norms(shape: ModelShape, mcore: str, hf: str) -> Iterator[Entry]:
    names = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    if shape.post_norms:
        names |= {
            "self_attention.post_layernorm": "post_self_attn_layernorm",
            "mlp.post_layernorm": "post_mlp_layernorm",
        }
    for mcore_norm, hf_norm in names.items():
        yield _plain(f"{mcore}.{mcore_norm}.weight", f"{hf}.{hf_norm}.weight", (shape.hidden,))


# --- arrangements


def _plain(
    parameter: str,
    name: str,
    shape: tuple[int, ...],
    split: int | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Entry:
    return Entry(
        parameter,
        ((name, shape),),
        shape,
        split,
        lambda tensors: tensors[0],
        lambda full: [full],
        dtype=dtype,
    )


def _vocabulary(parameter: str, name: str, shape: ModelShape, tensor: int) -> Entry:
    """Embedding or output layer. Rows beyond the vocabulary are 0 and masked in every softmax."""
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
    """Queries, keys and values, interleaved by key/value group.

    [groups, (queries per group + 2) * head_dim, ...].
    """
    groups, dim = shape.kv_heads, shape.head_dim
    rows = [shape.heads // groups * dim, dim, dim]
    rest: tuple[int, ...] = (shape.hidden,) if kind == "weight" else ()

    def arrange(tensors: list[Tensor]) -> Tensor:
        return torch.cat(
            [t.view(groups, n, *t.shape[1:]) for t, n in zip(tensors, rows, strict=True)], dim=1
        )

    def take_apart(full: Tensor) -> list[Tensor]:
        return [
            part.reshape(groups * n, *full.shape[2:])
            for part, n in zip(torch.split(full, rows, dim=1), rows, strict=True)
        ]

    hf = tuple(
        (f"{prefix}.{x}_proj.{kind}", (groups * n, *rest)) for x, n in zip("qkv", rows, strict=True)
    )
    return Entry(parameter, hf, (groups, sum(rows), *rest), 0, arrange, take_apart)


def _gate_up(parameter: str, prefix: str, hidden: int, ffn: int) -> Entry:
    """Gate and up projection, stacked, so that every rank holds its share of both."""
    size = (ffn, hidden)
    hf = ((f"{prefix}.gate_proj.weight", size), (f"{prefix}.up_proj.weight", size))
    return Entry(parameter, hf, (2, *size), 1, torch.stack, lambda full: list(full.unbind(0)))


def _fused_gate_up(parameter: str, prefix: str, hidden: int, ffn: int) -> Entry:
    """Gate and up projection of a checkpoint that stores both in one tensor."""
    hf = ((f"{prefix}.gate_up_proj.weight", (2 * ffn, hidden)),)
    full = (2, ffn, hidden)
    return Entry(
        parameter,
        hf,
        full,
        1,
        lambda tensors: tensors[0].view(2, ffn, -1),
        lambda both: [both.flatten(0, 1)],
    )


def _all_experts(
    parameter: str, prefix: str, kinds: tuple[str, ...], size: tuple[int, ...], count: int
) -> Entry:
    """A parameter of all experts, [experts, kinds, *size]; each rank holds consecutive experts."""
    hf = tuple(
        (f"{prefix}.{expert}.{kind}.weight", size) for expert in range(count) for kind in kinds
    )

    def arrange(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).view(-1, len(kinds), *size)

    return Entry(
        parameter,
        hf,
        (count, len(kinds), *size),
        0,
        arrange,
        lambda full: list(full.flatten(0, 1).unbind(0)),
        "expert",
        experts=prefix,
    )
