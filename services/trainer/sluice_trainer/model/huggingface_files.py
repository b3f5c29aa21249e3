"""Hugging Face checkpoints as files: reading and writing tensors by name in safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.model import safetensors_file

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# The head of a critic, with the name of a reward model's in `...ForSequenceClassification`.
VALUE_HEAD = "score.weight"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Size above which a checkpoint is split into several files, as transformers does.
SHARD_BYTES = 5 * 10**9
WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
)

Reader = Callable[[str, tuple[int, ...]], Tensor]


class CheckpointFilesError(ConfigurationError):
    """A Hugging Face checkpoint whose files do not match its config.json."""


class ConversionError(ConfigurationError):
    """A checkpoint that cannot be converted. The message is for people."""


@contextmanager
def reader(directory: Path) -> Iterator[Reader]:
    """Yield a function read(name, shape) that returns a tensor of the checkpoint.

    Files are memory-mapped and read on demand.
    """
    files_by_name = _tensor_files(directory)
    with ExitStack() as close:
        files: dict[Path, Any] = {}

        def read(name: str, size: tuple[int, ...]) -> Tensor:
            if name == HEAD and name not in files_by_name:
                name = EMBEDDING  # stored once, although config.json does not call the weights tied
            if name == VALUE_HEAD and name not in files_by_name:
                # A language model has no value head, so its critic starts with the value 0.
                return torch.zeros(size)
            if name not in files_by_name:
                raise CheckpointFilesError(f"{directory} has no tensor {name}")
            path = files_by_name[name]
            if path not in files:
                files[path] = close.enter_context(_opened(path))
            tensor: Tensor = files[path].get_tensor(name)
            if tuple(tensor.shape) != size:
                raise CheckpointFilesError(
                    f"{path}: {name} has shape {tuple(tensor.shape)}, but config.json asks for "
                    f"{size}"
                )
            return tensor

        yield read


def stored_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all tensors of a checkpoint, one at a time, in the order of its index."""
    places = _tensor_files(directory)
    with ExitStack() as close:
        files = {path: close.enter_context(_opened(path)) for path in set(places.values())}
        for name, path in places.items():
            yield name, files[path].get_tensor(name)


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    if (directory / INDEX).is_file():
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    if not (directory / SINGLE).is_file():
        raise CheckpointFilesError(f"{directory} has neither {SINGLE} nor {INDEX}")
    with _opened(directory / SINGLE) as file:
        return dict.fromkeys(file.keys(), directory / SINGLE)


def _opened(path: Path) -> Any:
    """Open a file with safetensors.

    safetensors reports a file that may not be read as one that does not exist.

    Raises
    ------
    CheckpointFilesError
        The file does not exist or may not be read.

    """
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise CheckpointFilesError(f"{path}: there is no such file") from None
    except PermissionError:
        raise CheckpointFilesError(
            f"{path}: user {os.geteuid()}, who runs this process, may not read it: chmod a+r"
        ) from None
    return safe_open(path, framework="pt")


def save_hf(
    tensors: Iterable[tuple[str, Tensor]],
    directory: Path,
    source: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face checkpoint.

    The directory appears complete or not at all, because it is written under a temporary name and
    renamed. An older one of the same name is replaced.

    Parameters
    ----------
    tensors
        Names and tensors.
    directory
        Directory of the new checkpoint.
    source
        Checkpoint from which all other files are copied.
    shard_bytes
        Size of a file.

    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(
        source,
        temporary,
        ignore=shutil.ignore_patterns(*WEIGHT_FILES, ".*", "original", "checkpoints"),
    )
    dtype = _write_shards(tensors, temporary, shard_bytes)
    _describe(temporary / "config.json", dtype)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def _describe(path: Path, dtype: torch.dtype) -> None:
    """Write the dtype and the layers of the weights into config.json.

    Loaders convert to the dtype of config.json. Layers that predict further tokens (DeepSeek's and
    GLM's next-token layers) are neither trained nor written.
    """
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    # transformers 5 calls it dtype, version 4 torch_dtype.
    config[key] = str(dtype).removeprefix("torch.")
    if config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, shard_bytes: int
) -> torch.dtype:
    """Write safetensors files of at most `shard_bytes` (or one tensor), and return the dtype.

    Files are named and indexed as transformers does.
    """
    written: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        path = directory / f"shard-{len(written)}.safetensors"
        safetensors_file.save(shard, path)
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
