"""Building the model, and its way in and out of Hugging Face checkpoints."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sluice.environment import ConfigurationError
from sluice_trainer.megatron import mapping
from sluice_trainer.megatron.adaptations import DEVICE, megatron_device
from sluice_trainer.megatron.attention import PackedRotary, block_spec
from sluice_trainer.megatron.hf_config import ModelShape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Size from which a checkpoint is split into several files, as transformers does."""
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")

Reader = Callable[[str, tuple[int, ...]], Tensor]


class CheckpointFilesError(ConfigurationError):
    """A Hugging Face checkpoint whose files do not hold what its config.json promises."""


@megatron_device()
def build(config: TransformerConfig, shape: ModelShape) -> GPTModel:
    """This rank's part of the model on `DEVICE`. Weights are not set: load them."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = PackedRotary(shape.rope, shape.head_dim, DEVICE)
    return model.to(device=DEVICE, dtype=config.params_dtype)


@megatron_device()
def distribute(model: GPTModel, config: TransformerConfig) -> DistributedDataParallel:
    """The model in Megatron's DDP: gradients are summed in fp32, each data-parallel rank keeps its share of the sum."""
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            check_for_nan_in_grad=False,
        ),
        model,
    )


def load_random(model: Any, shape: ModelShape, seed: int) -> None:
    """Initial weights: normal with the checkpoint's `initializer_range`, norms 1, biases 0.

    Each Hugging Face tensor is drawn from a generator of its own (seed and name), so that the weights are the same
    whatever the parallel layout.
    """

    def draw(name: str, size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        return torch.empty(size).normal_(0.0, shape.init_range, generator=generator)

    mapping.load(model, shape, draw)


def load_hf(model: Any, shape: ModelShape, directory: Path) -> None:
    """Weights from the safetensors files in `directory`, in one file or several. Reads only what this rank holds."""
    files = _tensor_files(directory)

    def read(name: str, size: tuple[int, ...]) -> Tensor:
        if name == mapping.HEAD and name not in files:
            name = mapping.EMBEDDING  # stored once, although config.json does not call the weights tied
        if name not in files:
            raise CheckpointFilesError(f"{directory} has no tensor {name}")
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != size:
            raise CheckpointFilesError(
                f"{files[name]}: {name} has shape {tuple(tensor.shape)}, but config.json asks for {size}"
            )
        return tensor

    mapping.load(model, shape, read)


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which file each tensor is in."""
    if (directory / INDEX).is_file():
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    if not (directory / SINGLE).is_file():
        raise CheckpointFilesError(f"{directory} has neither {SINGLE} nor {INDEX}")
    with safe_open(directory / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), directory / SINGLE)


def save_hf(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, source: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a Hugging Face checkpoint: `tensors` as safetensors, everything else copied from the checkpoint `source`.

    The directory appears complete or not at all: it is written under a temporary name and renamed. An older one of the
    same name is replaced.
    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(*WEIGHT_FILES, ".*", "original", "checkpoints"))
    dtype = _write_shards(tensors, temporary, shard_bytes)
    _set_dtype(temporary / "config.json", dtype)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """config.json must name the dtype of the weights: loaders convert to it."""
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path, shard_bytes: int) -> torch.dtype:
    """Write safetensors files of at most `shard_bytes` (or one tensor), named and indexed as transformers does.

    Returns the tensors' dtype.
    """
    written: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        path = directory / f"shard-{len(written)}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        written.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    dtype = tensor.dtype
    flush()
    if len(written) == 1:
        written[0][0].rename(directory / SINGLE)
        return dtype
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(written, 1):
        file = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
    return dtype
