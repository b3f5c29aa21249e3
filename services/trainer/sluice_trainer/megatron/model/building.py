"""Building the model and setting its initial weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.fused_operations import separate_weight_gradients, use_fused_swiglu
from sluice_trainer.megatron.huggingface import mapping
from sluice_trainer.megatron.model.spec import block_spec, join_head_norms, set_latent_rotary
from sluice_trainer.model import deterministic
from sluice_trainer.model.huggingface_config import ModelShape
from sluice_trainer.model.huggingface_files import VALUE_HEAD, Reader, reader


class ValueHead(torch.nn.Linear):
    """Last layer of a critic: hidden states [n, 1, h] -> values [n, 1, 1].

    Each tensor-parallel rank holds all of it.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False)
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        # The head is float32 beside adapters, in a model of any precision.
        return torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype))


@megatron_device()
def build(
    config: TransformerConfig, shape: ModelShape, device: torch.device = DEVICE
) -> list[GPTModel]:
    """Build this rank's part of the model, in one chunk or `virtualPipeline` chunks.

    Weights are not set: load them. On the device `meta` the model has no memory, only names and
    shapes.
    """
    use_fused_swiglu()
    stages = config.virtual_pipeline_model_parallel_size
    with device if device.type == "meta" else nullcontext():
        return [
            _chunk(config, shape, stage, device) for stage in (range(stages) if stages else [None])
        ]


def _chunk(
    config: TransformerConfig, shape: ModelShape, stage: int | None, device: torch.device
) -> GPTModel:
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, shape, device, stage),
        vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        # "none": `PackedAttention` rotates queries and keys.
        position_embedding_type="rope" if shape.latent else "none",
        vp_stage=stage,
    )
    if shape.value_head and model.post_process:
        model.output_layer = ValueHead(config)
    if shape.latent:
        set_latent_rotary(model, shape, device)
    join_head_norms(model)
    if config.deterministic_mode:
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module._forward_impl = deterministic.linear
    model.to(device=device, dtype=config.params_dtype)
    for layer in model.decoder.layers:
        if router := getattr(layer.mlp, "router", None):
            # The selection bias of the checkpoint stays as it is: Megatron must not balance it.
            router.frozen_expert_bias = True
            router._maintain_float32_expert_bias()
            separate_weight_gradients(
                layer.mlp.experts
            )  # Except for an empty row, `GroupedExperts` multiplies these weights together.
    return model


@megatron_device()
def distribute(chunks: list[GPTModel], config: TransformerConfig) -> list[DistributedDataParallel]:
    """Wrap the chunks in Megatron's DDP.

    Gradients are summed in float32, and each data-parallel rank keeps its share of the sums.
    """
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=False,
    )
    return [DistributedDataParallel(config, options, chunk) for chunk in chunks]


def load_initial(chunks: list[Any], shape: ModelShape, weights: Path | None, seed: int) -> None:
    """Load the initial weights from a Hugging Face checkpoint, or draw them if there is none."""
    with initial_weights(shape, weights, seed) as read:
        mapping.load(chunks, shape, read)


@contextmanager
def initial_weights(shape: ModelShape, weights: Path | None, seed: int) -> Iterator[Reader]:
    """Yield a function that returns the initial weights by their names in transformers."""
    if weights is None:
        yield partial(_drawn, shape, seed)
    else:
        with reader(weights) as read:
            yield read


def load_random(chunks: list[Any], shape: ModelShape, seed: int) -> None:
    """Draw initial weights: normal with the config's `initializer_range`, norms 1, biases 0.

    Each Hugging Face tensor has a generator seeded by seed and name, so the weights do not depend
    on the parallel layout.
    """
    mapping.load(chunks, shape, partial(_drawn, shape, seed))


def _drawn(shape: ModelShape, seed: int, name: str, size: tuple[int, ...]) -> Tensor:
    if name == VALUE_HEAD:
        return torch.zeros(size)
    if len(size) == 1:
        return torch.zeros(size) if name.endswith("bias") else torch.ones(size)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(size).normal_(0.0, shape.init_range, generator=generator)


def load_hf(chunks: list[Any], shape: ModelShape, directory: Path) -> None:
    """Load weights from the safetensors files in a directory; reads only what this rank holds."""
    with reader(directory) as read:
        mapping.load(chunks, shape, read)
