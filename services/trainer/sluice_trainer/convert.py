"""`python -m sluice_trainer.convert`: the process that `sluice convert` runs, without GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.lora.checkpoint import is_adapter
from sluice_trainer.lora.merging import extract_adapter, merge_adapter
from sluice_trainer.model.dequantize import dequantize
from sluice_trainer.model.gguf_checkpoint import gguf_to_hf
from sluice_trainer.model.quantize import quantize


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
        if direction == "hf-to-dist":
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
        elif direction == "extract-adapter":
            checkpoint, target = map(Path, paths)
            extract_adapter(_adapter(checkpoint), target)
            print(target)
        elif direction == "merge-adapter":
            adapter, like, target = map(Path, paths)
            merge_adapter(_adapter(adapter), like, target)
            print(target)
        else:
            checkpoint, like, target = map(Path, paths)
            if is_adapter(checkpoint_directory.latest_checkpoint(checkpoint)):
                raise ConfigurationError(
                    f"{checkpoint} holds an adapter: sluice convert merge-adapter adds it to its "
                    "base, sluice convert extract-adapter copies it"
                )
            (_from_megatron if _is_megatrons(checkpoint) else _from_fsdp)(checkpoint, like, target)
            print(target)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


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
