"""Reader of torch's distributed checkpoints that never runs code from them.

torch unpickles a checkpoint's table of contents (`.metadata`) and its objects without limits, so
the author of a checkpoint could run code in the process that reads it. This reader looks up only
torch's own classes of a table of contents, and accepts only objects that
`torch.load(weights_only=True)` does. torch itself reads tensors that way.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from sluice_trainer.checkpoint.checkpoint_store import read_range, shard_source

# torch's own, which `adaptations` replaces in torch's reader.
_of_file = FileSystemReader._slice_file

_CLASSES = frozenset(
    {
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(  # Megatron stores the plans of its ranks
            ("torch.distributed.checkpoint.planner", name)
            for name in (
                "BytesIOWriteData",
                "SavePlan",
                "TensorWriteData",
                "WriteItem",
                "WriteItemType",
            )
        ),
    }
)


class UnsafeCheckpointError(Exception):
    """A checkpoint holds more than data, such as a function to call; users see the message."""


def reason(error: BaseException) -> str:
    """Return why a checkpoint could not be read.

    Torch's message has the tracebacks of all ranks.
    """
    if isinstance(error, CheckpointException) and error.failures:
        first, _ = next(iter(error.failures.values()))
        return str(first)
    return str(error)


class _Unpickler(pickle.Unpickler):
    """Unpickles a table of contents and refuses any other class."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise UnsafeCheckpointError(f"it names {module}.{name}, which may run code")


def read_table(file: io.IOBase, path: Path) -> Metadata:
    """Read a checkpoint's table of contents.

    Parameters
    ----------
    file
        The opened `.metadata`.
    path
        Its path, for messages.

    Raises
    ------
    UnsafeCheckpointError
        It holds anything but a table of contents, or names files outside of the checkpoint.

    """
    refused = "; checkpoints of sluice, Megatron and torch never do, so it is not read"
    try:
        table = _Unpickler(io.BytesIO(file.read())).load()
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{path}: {error}{refused}") from error
    if not isinstance(table, Metadata):
        raise UnsafeCheckpointError(f"{path}: it holds no table of contents{refused}")
    for place in (table.storage_data or {}).values():
        name = place.relative_path
        if "/" in name or name in ("", ".", ".."):
            raise UnsafeCheckpointError(f"{path}: it names the file {name}{refused}")
    return table


class CheckpointReader(FileSystemReader):
    """torch's reader with a safe unpickler for the table of contents.

    It reads shards of a store in ranges.
    """

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        source = shard_source(Path(self.path))
        if source is None:
            return _of_file(self, file, sinfo)
        # Many small reads of the tensor's archive are one request.
        return io.BytesIO(read_range(source / sinfo.relative_path, sinfo.offset, sinfo.length))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the table of contents. Raises UnsafeCheckpointError."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            table = read_table(file, Path(path))
        storage = getattr(table, "storage_meta", None) or StorageMeta()  # absent in older torch
        storage.load_id = self.load_id
        table.storage_meta = storage
        return table


class CheckpointPlanner(DefaultLoadPlanner):
    """torch's planner with a safe loader for objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object into the state. Raises UnsafeCheckpointError."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:  # torch's message advises to trust the file
            raise UnsafeCheckpointError(
                f"the object {name} holds more than tensors, numbers and texts, and may run code; "
                "checkpoints of sluice, Megatron and torch never do, so it is not read"
            ) from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded
