"""Hugging Face checkpoints as files: reading and writing tensors by name in safetensors."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
_CLASSIFIER = "ForSequenceClassification"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_INDEXES = (INDEX, "pytorch_model.bin.index.json")
_SINGLES = (SINGLE, "pytorch_model.bin")
# Fields of config.json that count the layers that predict further tokens: those of DeepSeek and
# GLM, and of Qwen.
NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
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

Config = dict[str, Any]
Reader = Callable[[str, tuple[int, ...]], Tensor]


class CheckpointFilesError(ConfigurationError):
    """A Hugging Face checkpoint whose files do not match its config.json."""


class ConversionError(ConfigurationError):
    """A checkpoint that cannot be converted. The message is for people."""


class StoredTensors:
    """The tensors of a checkpoint in files, which are memory-mapped and read on demand."""

    def __init__(self, directory: Path, close: ExitStack) -> None:
        self.directory = directory
        self._places = _tensor_files(directory)
        self._close = close
        self._files: dict[Path, Any] = {}

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors, in the order of the index."""
        return self._places.keys()

    def place(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._places[name]

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointFilesError if there is none of this name."""
        tensor: Tensor = self._file_of(name).get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read if the file is one of safetensors.

        Raises CheckpointFilesError if there is none of this name.
        """
        file = self._file_of(name)
        if isinstance(file, _PickledFile):
            return tuple(file.get_tensor(name).shape)
        return tuple(file.get_slice(name).get_shape())

    def _file_of(self, name: str) -> Any:
        if name not in self._places:
            raise CheckpointFilesError(f"{self.directory} has no tensor {name}")
        path = self._places[name]
        if path not in self._files:
            self._files[path] = self._close.enter_context(_opened(path))
        return self._files[path]


@contextmanager
def stored(directory: Path) -> Iterator[StoredTensors]:
    """Yield the tensors of a checkpoint; its files are closed at the end."""
    with ExitStack() as close:
        yield StoredTensors(directory, close)


@contextmanager
def reader(directory: Path) -> Iterator[Reader]:
    """Yield a function read(name, shape) that returns a tensor of the checkpoint.

    Files are memory-mapped and read on demand.
    """
    with stored(directory) as tensors:

        def read(name: str, size: tuple[int, ...]) -> Tensor:
            if name == HEAD and name not in tensors.names:
                name = EMBEDDING  # stored once, although config.json does not call the weights tied
            if name == VALUE_HEAD and name not in tensors.names:
                # A language model has no value head, so its critic starts with the value 0.
                return torch.zeros(size)
            tensor = tensors.read(name)
            if tuple(tensor.shape) != size:
                raise CheckpointFilesError(
                    f"{tensors.place(name)}: {name} has shape {tuple(tensor.shape)}, but "
                    f"config.json asks for {size}"
                )
            return tensor

        yield read


def stored_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all tensors of a checkpoint, one at a time, in the order of its index."""
    with stored(directory) as tensors:
        for name in tensors.names:
            yield name, tensors.read(name)


def has_tensors(directory: Path) -> bool:
    """Return False if the directory holds only a configuration, as for `model.init: random`."""
    return any((directory / name).is_file() for name in (*_INDEXES, *_SINGLES))


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    for index in _INDEXES:
        if (directory / index).is_file():
            weight_map = json.loads((directory / index).read_text())["weight_map"]
            return {name: directory / file for name, file in weight_map.items()}
    for single in _SINGLES:
        if (directory / single).is_file():
            with _opened(directory / single) as file:
                return dict.fromkeys(file.keys(), directory / single)
    raise CheckpointFilesError(f"{directory} has neither {SINGLE} nor {INDEX}")


class _PickledFile:
    """A `.bin` file, memory-mapped, with the methods of a safetensors file."""

    def __init__(self, path: Path) -> None:
        try:
            self._tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointFilesError(
                f"{path} cannot be read tensor by tensor ({error}): save the checkpoint as "
                "safetensors"
            ) from error

    def keys(self) -> Iterable[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name]
        return tensor


def _opened(path: Path) -> AbstractContextManager[Any]:
    """Open a file with safetensors, or a `.bin` file.

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
    if path.suffix == ".bin":
        return nullcontext(_PickledFile(path))
    file: AbstractContextManager[Any] = safe_open(path, framework="pt")
    return file


def sequence_classifier(config: Config) -> Config:
    """Return the configuration of a model with a head of one output in place of its output layer.

    It is that of transformers' `...ForSequenceClassification`, which SGLang serves as a reward
    model.
    """
    named = {
        "architectures": [
            re.sub(r"(ForCausalLM|ForConditionalGeneration)$", _CLASSIFIER, name)
            for name in config.get("architectures") or []
        ],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    return {**config, **named}


def save_hf(
    tensors: Iterable[tuple[str, Tensor]],
    directory: Path,
    source: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    config: Config | None = None,
    whole: bool = False,
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
    config
        Configuration to write in place of the source's. It gets the dtype of the tensors, and no
        layers that predict further tokens, because the tensors have none.
    whole
        The tensors are all of the source's: `config` is written as it is.

    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(
        source,
        temporary,
        ignore=shutil.ignore_patterns(*WEIGHT_FILES, ".*", "original", "checkpoints"),
    )
    dtype = _write_shards(tensors, temporary, shard_bytes)
    if config is not None:
        text = json.dumps(config if whole else _described(config, dtype), indent=2)
        (temporary / "config.json").write_text(text + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def check_new(directory: Path) -> None:
    """Raise ConfigurationError if a directory to write has files already."""
    if directory.exists() and any(directory.iterdir()):
        raise ConfigurationError(f"{directory} is not empty; expected a new directory")


def read_config(directory: Path) -> Config:
    config: Config = json.loads((directory / "config.json").read_text())
    return config


def _described(config: Config, dtype: torch.dtype) -> Config:
    """Return a configuration with this dtype, and without layers that predict further tokens.

    Loaders convert to the dtype of config.json.
    """
    # transformers 5 calls it dtype, version 4 torch_dtype.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    absent = {name: 0 for name in NEXT_TOKEN_LAYERS if config.get(name)}
    return {**config, key: str(dtype).removeprefix("torch."), **absent}


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, shard_bytes: int
) -> torch.dtype:
    """Write safetensors files of at most `shard_bytes` (or one tensor), and return the dtype.

    Files are named and indexed as transformers does.
    """
    written: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in shards(tensors, shard_bytes):
        path = directory / f"shard-{len(written)}.safetensors"
        safetensors_file.save(shard, path)
        written.append((path, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = list(shard.values())[-1].dtype
    if len(written) == 1:
        written[0][0].rename(directory / SINGLE)
        return dtype
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(written, 1):
        file = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(directory, weight_map, total)
    return dtype


def shards(
    tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Yield copies of the tensors on the CPU, by name, at most `shard_bytes` (or one) together."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def write_index(directory: Path, files: Mapping[str, str], total_bytes: int) -> None:
    """Write the index that names the file of each tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
