"""Transports without a connection: a shared directory, and one that sends no weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sluice.api.groups.rollout import Precision
from sluice.engines.plugin_common.precision import quantization_config
from sluice_trainer.lora import files as adapter_files
from sluice_trainer.model import safetensors_file
from sluice_trainer.model.complete_checkpoint import Completion
from sluice_trainer.model.huggingface_files import (
    has_tensors,
    read_config,
    shards,
    stored,
    write_index,
)
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.transport import Peer, Transport


@dataclass(frozen=True, slots=True)
class VersionDirectories:
    """Directories of versions of weights.

    The attempt of the trainer is part of their names: an older attempt that still runs writes into
    other directories.
    """

    parent: Path
    attempt: int

    def path(self, version: int) -> Path:
        return self.parent / f"version_{version:07d}.attempt{self.attempt}"

    def new(self, version: int) -> Path:
        """Return an empty directory for a version."""
        path = self.path(version)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def remove_others(self, version: int) -> None:
        """Remove other versions, except those that a newer attempt has written."""
        for other in self.parent.glob("version_*"):
            attempt = other.suffix.removeprefix(".attempt")
            if other != self.path(version) and (
                not attempt.isdigit() or int(attempt) <= self.attempt
            ):
                shutil.rmtree(other, ignore_errors=True)


class Disk(Transport):
    """A Hugging Face checkpoint in a directory that trainer and engines share; engines load it.

    It has all tensors of the checkpoint that the job started from; those that are not trained are
    copied from there.
    """

    in_session = False

    def __init__(
        self,
        versions: VersionDirectories,
        model_dir: Path,
        *,
        drawn: bool,
        precision: Precision = "bf16",
    ) -> None:
        """Write versions with configuration and tokenizer from `model_dir`.

        drawn: the first weights were not those of `model_dir`. precision: that of buckets.
        """
        self._precision = precision
        self._versions = versions
        self._model_dir = model_dir
        self._completes = has_tensors(model_dir) and not drawn
        self._completion = Completion(())
        # Names of the files of a version, by tensor; empty between two versions.
        self._files: dict[str, str] = {}
        self._bytes = 0

    async def prepare(self, peer: Peer) -> None:
        return

    async def stage(self, bucket: Bucket, version: int) -> None:
        await asyncio.to_thread(self._write, bucket, version)

    def _write(self, bucket: Bucket, version: int) -> None:
        path = self._versions.path(version)
        if not self._files:
            self._begin(version)
        tensors = {name: tensor.contiguous() for name, tensor in bucket.tensors()}
        for name, tensor in tensors.items():
            self._completion.add(name, tensor)
        self._save(tensors, path)
        if bucket.last:
            if self._completes:
                with stored(self._model_dir) as source:
                    for shard in shards(self._completion.rest(source)):
                        self._save(shard, path)
            write_index(path, self._files, self._bytes)
            if self._precision != "bf16":
                self._describe(path)
            self._files, self._bytes = {}, 0
            self._versions.remove_others(version)

    def _begin(self, version: int) -> None:
        path = self._versions.new(version)
        for source in self._model_dir.iterdir():
            if (
                source.suffix in (".json", ".txt", ".model", ".jinja")
                and "index" not in source.name
            ):
                shutil.copy(source, path)
        names: Collection[str] = ()
        if self._completes:
            with stored(self._model_dir) as tensors:
                names = tensors.names
        self._completion = Completion(names)

    def _describe(self, path: Path) -> None:
        """Say in config.json which weights are quantized, so that any engine can load them."""
        modules = {n.removesuffix(".weight") for n in self._files if n.endswith(".weight")}
        scaled = {n.rpartition(".weight_scale")[0] for n in self._files}
        kept = sorted(module for module in modules - scaled if "norm" not in module)
        config = read_config(path)
        config["quantization_config"] = quantization_config(self._precision, kept)
        (path / "config.json").write_text(json.dumps(config, indent=2))

    def _save(self, tensors: dict[str, Tensor], path: Path) -> None:
        file = f"model-{len({*self._files.values()}) + 1:05d}.safetensors"
        safetensors_file.save(tensors, path / file)
        self._files |= dict.fromkeys(tensors, file)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        if bucket.last:
            path = self._versions.path(version)
            await peer.control.load_from_disk(str(path), version, flush=flush)

    def abandon(self, name: str) -> None:
        return


class AdapterFile(Transport):
    """An adapter in a file of a directory that trainer and engines share; engines load it."""

    in_session = False

    def __init__(self, versions: VersionDirectories) -> None:
        self._versions = versions
        self._tensors: dict[str, Tensor] = {}

    def _path(self, version: int) -> Path:
        return self._versions.path(version) / adapter_files.WEIGHTS

    async def prepare(self, peer: Peer) -> None:
        return

    async def stage(self, bucket: Bucket, version: int) -> None:
        await asyncio.to_thread(self._keep, bucket, version)

    def _keep(self, bucket: Bucket, version: int) -> None:
        """Keep the tensors of a bucket on the CPU, and write the file once all have come."""
        if bucket.number == 0:
            self._tensors = {}
        # Copies, because the trainer fills the bucket's memory again.
        self._tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket.tensors()}
        if bucket.last:
            path = self._versions.new(version) / adapter_files.WEIGHTS
            unfinished = path.with_name(f".{path.name}.tmp")
            safetensors_file.save(self._tensors, unfinished)
            os.replace(unfinished, path)
            self._versions.remove_others(version)

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        if bucket.last:
            await peer.control.load_from_disk(str(self._path(version)), version, flush=flush)

    def abandon(self, name: str) -> None:
        return


class VersionOnly(Transport):
    """Sends no weights: the engine keeps its own under the new version (`debug.rolloutOnly`)."""

    in_session = False

    async def prepare(self, peer: Peer) -> None:
        return

    async def stage(self, bucket: Bucket, version: int) -> None:
        return

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        if bucket.last:
            await peer.control.name_version(version)

    def abandon(self, name: str) -> None:
        return
