"""`python -m sluice_trainer.convert`: the process that `sluice convert` runs, without GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from sluice.runtime.pod_env import ConfigurationError
from sluice.stores import StoreError, UriError
from sluice.uri import local_path
from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.checkpoint.checkpoint_directory import DamagedError
from sluice_trainer.checkpoint.checkpoint_store import CheckpointStore
from sluice_trainer.lora.checkpoint import is_adapter
from sluice_trainer.lora.merging import extract_adapter, merge_adapter
from sluice_trainer.model.dequantize import dequantize
from sluice_trainer.model.gguf_checkpoint import gguf_to_hf
from sluice_trainer.model.quantize import quantize

_FROM_CHECKPOINTS = ("dist-to-hf", "extract-adapter", "merge-adapter")


def main(arguments: list[str]) -> int:
    """Convert a checkpoint and print the path of the result.

    The arguments are hf-to-dist SOURCE TARGET, dist-to-hf CHECKPOINT LIKE TARGET, gguf-to-hf
    SOURCE TARGET, fp8-block SOURCE TARGET, fp8 SOURCE TARGET, int8 SOURCE TARGET, dequantize
    SOURCE TARGET, merge-adapter ADAPTER LIKE TARGET, or extract-adapter CHECKPOINT TARGET.
    `sluice convert` checks and documents them.
    """
    direction, *paths = arguments
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

    try:
        if direction in _FROM_CHECKPOINTS:
            with _on_disk(paths[0]) as checkpoint:
                _from_checkpoint(direction, checkpoint, *map(Path, paths[1:]))
            print(paths[-1])
        elif direction == "hf-to-dist":
            print(_to_megatron(*map(Path, paths)))
        elif direction == "gguf-to-hf":
            source, target = map(Path, paths)
            gguf_to_hf(source, target)
            print(target)
        elif direction in ("fp8-block", "fp8", "int8"):
            source, target = map(Path, paths)
            quantize(source, target, direction)
            print(target)
        elif direction == "dequantize":
            source, target = map(Path, paths)
            dequantize(source, target)
            print(target)
        else:
            raise ValueError(f"unknown direction: {direction}")
    except (ConfigurationError, StoreError, UriError, DamagedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _from_checkpoint(direction: str, checkpoint: Path, *paths: Path) -> None:
    if direction == "extract-adapter":
        extract_adapter(_adapter(checkpoint), *paths)
    elif direction == "merge-adapter":
        merge_adapter(_adapter(checkpoint), *paths)
    else:
        if is_adapter(checkpoint_directory.latest_checkpoint(checkpoint)):
            raise ConfigurationError(
                f"{checkpoint} holds an adapter: sluice convert merge-adapter adds it to its "
                "base, sluice convert extract-adapter copies it"
            )
        (_from_megatron if _is_megatrons(checkpoint) else _from_fsdp)(checkpoint, *paths)


@contextmanager
def _on_disk(checkpoint: str) -> Iterator[Path]:
    """Yield the directory of a checkpoint; of one in a store, with shards that stay there."""
    store = CheckpointStore.of(checkpoint)
    if store is None:
        yield Path(local_path(checkpoint))
        return
    prefix, step = store.and_step()
    with TemporaryDirectory() as directory:
        if step is None and (step := prefix.latest()) is None:
            raise ConfigurationError(f"{checkpoint} neither is nor holds a complete checkpoint")
        yield prefix.fetch(step, Path(directory))


def _adapter(path: Path) -> Path:
    """Return `path` if it is an adapter, else the newest checkpoint in it, which must hold one."""
    if is_adapter(path):
        return path
    final = checkpoint_directory.latest_checkpoint(path)
    if not is_adapter(final):
        raise ConfigurationError(f"{final} holds no adapter: there is no adapter_config.json")
    return final


def _is_megatrons(checkpoint: Path) -> bool:
    """Return whether this is Megatron's torch_dist format, or not a checkpoint at all."""
    final = checkpoint_directory.latest_checkpoint(checkpoint)
    return (final / "metadata.json").is_file() or not (final / ".metadata").is_file()


def _to_megatron(source: Path, target: Path) -> Path:
    with _megatron():
        from sluice_trainer.megatron.checkpoints import conversion

        return conversion.hf_to_dist(source, target)


def _from_megatron(checkpoint: Path, like: Path, target: Path) -> None:
    with _megatron():
        from sluice_trainer.megatron.checkpoints import conversion

        conversion.dist_to_hf(checkpoint, like, target)


def _from_fsdp(checkpoint: Path, like: Path, target: Path) -> None:
    from sluice_trainer.fsdp import conversion

    conversion.dist_to_hf(checkpoint, like, target)


@contextmanager
def _megatron() -> Iterator[None]:
    """Initialize Megatron with a process group of one process."""
    from sluice.api import Parallelism
    from sluice_trainer.megatron import parallel

    parallel.initialize(Parallelism(), seed=0, timeout=timedelta(minutes=5))
    try:
        yield
    finally:
        parallel.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
