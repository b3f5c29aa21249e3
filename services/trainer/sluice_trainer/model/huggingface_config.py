"""The shape of a model from its Hugging Face config.json, without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.model_files import gguf_problem
from sluice_trainer.model.rope import Rope, yarn_magnitude
from sluice_trainer.model.unsupported import UnsupportedModelError, check_not_quantized

Config = dict[str, Any]
_OTHER_BACKEND = (
    "set trainer.backend: fsdp, which trains any causal language model that transformers computes"
)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts.

    Attributes
    ----------
    count
        Number of experts.
    per_token
        Experts that a token passes.
    ffn
        Width of an expert.
    layers
        For each layer, whether its MLP is a mixture.
    shared_ffn
        Width of all experts together that every token passes; 0: none.
    score
        `softmax` or `sigmoid` of the router's logits.
    normalised
        The weights of a token sum to 1 before `scaling`.
    scaling
        Factor of the weights.
    groups, group_limit
        Only experts of `group_limit` of `groups` groups may be chosen; 1: no such rule.
    choice_bias
        A learned bias per expert is added for the choice, not for the weight (DeepSeek-V3).
        Training does not change it: reinforcement learning has no balance to enforce, so it has no
        auxiliary loss either.

    """

    count: int
    per_token: int
    ffn: int
    layers: tuple[bool, ...]
    shared_ffn: int = 0
    score: str = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    groups: int = 1
    group_limit: int = 1
    choice_bias: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2).

    Attributes
    ----------
    query_rank
        Channels of the compressed queries; None: queries are projected directly.
    kv_rank
        Channels of the compressed keys and values.
    nope_dim, rope_dim
        Channels of a head's queries and keys without and with rotary position.
    value_dim
        Channels of a head's values.
    magnitude
        YaRN's magnitude, whose square scales the softmax.

    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder, as config.json describes it.

    Attributes
    ----------
    rope_dim
        Channels of a head with rotary position.
    rope_interleaved
        Rotary position rotates pairs of neighbours instead of the halves of a head.
    post_norms
        There are norms also after attention and MLP (GLM-4).
    fused_gate_up
        The checkpoint has one tensor for gate and up projection.
    value_head
        The head of a critic, one number for each token instead of logits.

    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    init_range: float
    tied: bool
    rope: Rope
    rope_dim: int
    rope_interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    fused_gate_up: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    value_head: bool = False

    def padded_vocab(self, tensor: int) -> int:
        """Return the rows of the embedding, padded so that `tensor` ranks share it evenly."""
        return -(-self.vocab // tensor) * tensor

    def is_mixture(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


# --- families: how each model_type differs from a Llama


def _qwen3_moe(config: Config) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    experts = Experts(
        count=config.get("num_experts") or config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=tuple(
            i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])
        ),
        normalised=bool(config.get("norm_topk_prob", False)),
    )
    return {"qk_norm": True, "experts": experts}


def _sigmoid_experts(config: Config) -> Experts:
    """The mixture that DeepSeek-V3 introduced and GLM-4.5 adopted."""
    return Experts(
        count=config["n_routed_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=tuple(
            i >= config.get("first_k_dense_replace", 0) for i in range(config["num_hidden_layers"])
        ),
        shared_ffn=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
        score="sigmoid",
        normalised=bool(config.get("norm_topk_prob", True)),
        scaling=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group") or 1,
        group_limit=config.get("topk_group") or 1,
        choice_bias=True,
    )


def _glm4(config: Config) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.get("attention_bias", False)),
        "post_norms": True,
        "fused_gate_up": True,
        "rope_interleaved": True,
        "rope_dim": _partial(config, 0.5),
    }


def _glm4_moe(config: Config) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
        "rope_dim": _partial(config, 0.5),
        "experts": _sigmoid_experts(config),
    }


def _deepseek_v3(config: Config) -> dict[str, Any]:
    scaling = _rope_values(config)
    magnitude = 1.0
    if scaling.get("mscale_all_dim") and scaling.get("factor"):
        magnitude = yarn_magnitude(scaling["factor"], scaling["mscale_all_dim"])
    latent = LatentAttention(
        query_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        magnitude=magnitude,
    )
    return {
        "kv_heads": config["num_attention_heads"],
        "head_dim": latent.nope_dim + latent.rope_dim,
        "rope_dim": latent.rope_dim,
        "rope_interleaved": config.get("rope_interleave", True),
        "latent": latent,
        "experts": _sigmoid_experts(config),
    }


FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": lambda config: {},
    "qwen2": lambda config: {"qkv_bias": True},
    "qwen3": lambda config: {"qk_norm": True},
    "qwen3_moe": _qwen3_moe,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
}


def read_shape(directory: Path) -> ModelShape:
    """Read the shape of the checkpoint in `directory`.

    Raises
    ------
    UnsupportedModelError
        Megatron cannot train it.

    """
    path = directory / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(
            gguf_problem(directory)
            or f"{directory} is not a Hugging Face checkpoint: it has no config.json"
        )
    try:
        return _shape(json.loads(path.read_text()), path)
    except KeyError as error:
        raise UnsupportedModelError(
            f"{path}: {error} is missing; expected the config.json of a Hugging Face checkpoint"
        ) from error


def _shape(config: Config, path: Path) -> ModelShape:
    check_not_quantized(config, path.parent)
    model_type = config.get("model_type", "")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: model_type {model_type!r} cannot be trained with trainer.backend: megatron, "
            f"which supports {', '.join(FAMILIES)}; {_OTHER_BACKEND}"
        )
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    common = {
        "model_type": model_type,
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "init_range": config.get("initializer_range", 0.02),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "rope": _rope(config, path),
        "rope_dim": head_dim,
    }
    shape = ModelShape(**{**common, **FAMILIES[model_type](config)})
    for problem in _problems(config, shape):
        raise UnsupportedModelError(f"{path}: {problem}; {_OTHER_BACKEND}")
    return shape


def _problems(config: Config, shape: ModelShape) -> list[str]:
    """Return why Megatron cannot train this checkpoint."""
    experts, latent = shape.experts, shape.latent
    present_problems = {
        "sliding-window attention, MLP biases and activations other than silu are not supported": (
            config.get("use_sliding_window")
            or config.get("mlp_bias")
            or config.get("hidden_act", "silu") != "silu"
        ),
        f"attention_bias with model_type {shape.model_type!r}"
        " (a bias on o_proj) is not supported": (
            config.get("attention_bias") and not shape.qkv_bias
        ),
        "latent attention without rope_interleave is not supported": latent
        and not shape.rope_interleaved,
        "yarn with mscale other than mscale_all_dim is not supported with latent attention": (
            latent and abs(shape.rope.attention_factor - 1) > 1e-6
        ),
        "yarn is not supported with rotary position on only a part of each head": (
            not latent and shape.rope.attention_factor != 1 and shape.rope_dim != shape.head_dim
        ),
        "norm_topk_prob: false is not supported with sigmoid routing": (
            experts and experts.score == "sigmoid" and not experts.normalised
        ),
        "num_experts_per_tok / topk_group must be 2: groups are ranked by their two best experts": (
            experts and experts.groups > 1 and experts.per_token // experts.group_limit != 2
        ),
    }
    return [problem for problem, present in present_problems.items() if present]


# --- rotary embedding


def _rope_values(config: Config) -> Config:
    """Return `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _partial(config: Config, default: float) -> int:
    """Return the channels of a head with rotary position."""
    factor = _rope_values(config).get("partial_rotary_factor") or config.get(
        "partial_rotary_factor", default
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * factor)


def _rope(config: Config, path: Path) -> Rope:
    values = _rope_values(config)
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10000.0)
    match kind:
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, kind, values["factor"])
        case "llama3":
            return Rope(
                theta,
                kind,
                values["factor"],
                values["low_freq_factor"],
                values["high_freq_factor"],
                values["original_max_position_embeddings"],
            )
        case "yarn":
            return _yarn(theta, values)
        case _:
            raise UnsupportedModelError(
                f"{path}: rope_type {kind!r}; supported are default, linear, llama3 and yarn; "
                f"{_OTHER_BACKEND}"
            )


def _yarn(theta: float, values: Config) -> Rope:
    factor = values["factor"]
    magnitude = values.get("attention_factor")
    if magnitude is None:
        magnitude = yarn_magnitude(factor)
        if values.get("mscale") and values.get("mscale_all_dim"):
            magnitude = yarn_magnitude(factor, values["mscale"]) / yarn_magnitude(
                factor, values["mscale_all_dim"]
            )
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_positions=values["original_max_position_embeddings"],
        beta_fast=values.get("beta_fast") or 32,
        beta_slow=values.get("beta_slow") or 1,
        truncate=values.get("truncate", True),
        attention_factor=magnitude,
    )
