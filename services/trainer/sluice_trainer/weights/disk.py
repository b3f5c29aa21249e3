"""Transports without a connection: a shared directory, and one that sends no weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from sluice_trainer.model import safetensors_file
from sluice_trainer.model.complete_checkpoint import Completion
from sluice_trainer.model.huggingface_files import has_tensors, shards, stored, write_index
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.transport import Peer, Transport


class Disk(Transport):
    """A Hugging Face checkpoint in a directory that trainer and engines share; engines load it.

    It has all tensors of the checkpoint that the job started from; those that are not trained are
    copied from there.
    """

    in_session = False

    def __init__(self, directory: Path, model_dir: Path, attempt: int, *, drawn: bool) -> None:
        """Write versions below `directory`, with configuration and tokenizer from `model_dir`.

        attempt: the trainer's attempt. An older attempt that still runs writes into other
        directories. drawn: the first weights were not those of `model_dir`.
        """
        self._directory = directory
        self._model_dir = model_dir
        self._attempt = attempt
        self._completes = has_tensors(model_dir) and not drawn
        self._completion = Completion(())
        # Names of the files of a version, by tensor; empty between two versions.
        self._files: dict[str, str] = {}
        self._bytes = 0

    def _path(self, version: int) -> Path:
        return self._directory / f"version_{version:07d}.attempt{self._attempt}"

    async def prepare(self, peer: Peer) -> None:
        return

    async def stage(self, bucket: Bucket, version: int) -> None:
        await asyncio.to_thread(self._write, bucket, self._path(version))

    def _write(self, bucket: Bucket, path: Path) -> None:
        if not self._files:
            self._begin(path)
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
            self._files, self._bytes = {}, 0
            self._remove_older(path)

    def _begin(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
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

    def _save(self, tensors: dict[str, Tensor], path: Path) -> None:
        file = f"model-{len({*self._files.values()}) + 1:05d}.safetensors"
        safetensors_file.save(tensors, path / file)
        self._files |= dict.fromkeys(tensors, file)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _remove_older(self, path: Path) -> None:
        """Remove other versions, except those that a newer attempt has written."""
        for older in self._directory.glob("version_*"):
            attempt = older.suffix.removeprefix(".attempt")
            if older != path and (not attempt.isdigit() or int(attempt) <= self._attempt):
                shutil.rmtree(older, ignore_errors=True)

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
