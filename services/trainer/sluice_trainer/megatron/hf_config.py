"""From a Hugging Face config.json to Megatron's configuration. Reads the file only: no transformers needed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sluice.api import Parallelism
from sluice.environment import ConfigurationError
from sluice_trainer.megatron.adaptations import DEVICE

SUPPORTED = ("llama", "qwen2", "qwen3")


class UnsupportedModelError(ConfigurationError):
    """A checkpoint whose architecture the trainer cannot build. No restart cures it."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. kind: `default`, `linear` or `llama3`; the rest are llama3's (and linear's factor)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def inverse_frequencies(self, dim: int) -> Tensor:
        """Radians per position of each pair of channels: [dim / 2] float32, on the CPU, as transformers computes it."""
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        inverse = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            return self._llama3(inverse)
        return inverse

    def _llama3(self, inverse: Tensor) -> Tensor:
        """Llama 3.1's scaling: long waves are stretched, short ones kept, those between interpolated."""
        wavelength = 2 * math.pi / inverse
        longest = self.original_max_positions / self.low_freq_factor
        shortest = self.original_max_positions / self.high_freq_factor
        smooth = (self.original_max_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        stretched = torch.where(wavelength > longest, inverse / self.factor, inverse)
        between = (wavelength <= longest) & (wavelength >= shortest)
        return torch.where(between, (1 - smooth) * stretched / self.factor + smooth * stretched, stretched)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder: what config.json says about it."""

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
    qkv_bias: bool
    qk_norm: bool
    rope: Rope

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding: the vocabulary, filled up so that it splits evenly over `tensor` ranks."""
        return -(-self.vocab // tensor) * tensor


def read_shape(directory: Path) -> ModelShape:
    """The shape of the checkpoint in `directory`. Raises UnsupportedModelError where we cannot train it."""
    path = directory / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{directory} is not a Hugging Face checkpoint: it has no config.json")
    config = json.loads(path.read_text())
    model_type = config.get("model_type", "")
    if model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"{path}: model_type {model_type!r} cannot be trained; supported are {', '.join(SUPPORTED)}"
        )
    if config.get("use_sliding_window") or config.get("mlp_bias") or config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{path}: sliding-window attention, MLP biases and activations other than silu")
    heads = config["num_attention_heads"]
    bias = model_type == "qwen2" or bool(config.get("attention_bias"))
    if bias and model_type != "qwen2":
        raise UnsupportedModelError(f"{path}: attention_bias with model_type {model_type!r} (a bias on o_proj)")
    return ModelShape(
        model_type=model_type,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        init_range=config.get("initializer_range", 0.02),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        qk_norm=model_type == "qwen3",
        rope=_rope(config, path),
    )


def _rope(config: dict[str, Any], path: Path) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    values = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
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
        case _:
            raise UnsupportedModelError(f"{path}: rope_type {kind!r}; supported are default, linear and llama3")


def transformer_config(
    shape: ModelShape, parallelism: Parallelism, *, dtype: torch.dtype, recompute: bool = False
) -> TransformerConfig:
    """Megatron's configuration: local layers, no fusions that need TransformerEngine or Apex, no dropout."""
    if shape.kv_heads % parallelism.tensor or shape.ffn % parallelism.tensor:
        raise UnsupportedModelError(
            f"parallelism.tensor {parallelism.tensor} must divide the {shape.kv_heads} key/value heads and "
            f"the feed-forward size {shape.ffn}"
        )
    if parallelism.context > 1 or parallelism.expert > 1 or parallelism.virtual_pipeline:
        raise UnsupportedModelError(
            "parallelism.context, expert and virtualPipeline are not supported yet: leave them out"
        )
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are always loaded (also random ones), so none are drawn twice.
        perform_initialization=False,
        use_cpu_initialization=DEVICE.type == "cpu",
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        context_parallel_size=parallelism.context,
        sequence_parallel=parallelism.tensor > 1,
        # Packed micro-batches differ in length; pipeline stages must tell each other.
        variable_seq_lengths=parallelism.pipeline > 1,
        # Megatron asks for this one with it, also where there are no experts.
        moe_token_dispatcher_type="alltoall",  # noqa: S106
        # The weights of `aggregation` hold the denominators: gradients of micro-batches and ranks are plain sums.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **(full if recompute else {}),
    )
