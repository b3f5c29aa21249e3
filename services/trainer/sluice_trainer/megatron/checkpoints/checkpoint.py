"""Checkpoints that survive a kill at any moment, written in training's way or beside it.

The promise is that of `checkpoint_directory`. A `Writing` keeps it in three parts: what is to be
written is collected (all ranks together; with `beside` it is also copied, so that training may
change the original), then each rank writes its files (with `beside` in a thread), then all ranks
together complete and commit it. Until then nobody sees it.

The format is Megatron's torch_dist with fully reshardable optimizer state: it loads under any
parallel layout. A critic is a second one inside, in `critic/`: both are there or none is.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint.api import (
    CheckpointException,
)  # a BaseException: `except Exception` misses it
from torch.distributed.checkpoint.filesystem import FileSystemReader

from sluice_trainer.checkpoint_directory import (
    Author,
    DamagedError,
    Record,
    SupersededError,
    check,
    commit,
    files,
    path_of,
    record,
    temporary_of,
    verify,
)
from sluice_trainer.megatron.adaptations import (
    DEVICE,
    checkpoint_writer_in_process,
    megatron_device,
)
from sluice_trainer.megatron.step.optimizer import set_learning_rate

Parts = Mapping[str, tuple[list[Any], Any]]
"""Directory in the checkpoint -> (the model's chunks, optimizer). `.` is the checkpoint itself, and
comes first."""
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message is for people."""


class Writing:
    """Checkpoint `step` on its way to the disk. Made and completed by all ranks together; one at a
    time.
    """

    @megatron_device()
    def __init__(
        self,
        directory: Path,
        step: int,
        parts: Parts,
        user_state: dict[str, Any],
        *,
        author: Author,
        beside: bool = False,
    ) -> None:
        """Collect weights, optimizer state, RNG states and `user_state` (picklable, equal on all
        ranks).

        beside: copy all of it, and write it in a thread from now on; else write it here.
        `directory` must be shared by all nodes, and claimed by `author`. A step that is saved
        already is left as it is: version n is version n.
        """
        self.step = step
        self._author = author
        self._final = path_of(directory, step)
        self._temporary = temporary_of(self._final, author)
        self._records: dict[str, Record] = {}
        self._completions: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._cleanup = ExitStack()
        self.needed = not agreed(self._final.exists())
        if not self.needed:
            return
        self._messages = self._cleanup.enter_context(checkpoint_writer_in_process())
        with self._failing():
            self._begin(directory, parts, user_state, beside)

    def _begin(
        self, directory: Path, parts: Parts, user_state: dict[str, Any], beside: bool
    ) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)
            for name in parts:
                (self._temporary / name).mkdir()
        dist.barrier()
        writes = []
        for name, part in parts.items():
            request = dist_checkpointing.save(
                _state(*part, user_state),
                self._temporary / name,
                content_metadata=dict(METADATA),
                async_sharded_save=True,
                async_strategy="mcore",
            )
            self._completions += request.finalize_fns
            writes.append(_write(request, copy=beside))
            writes.append(partial(self._record, request))
        if beside:
            self._thread = threading.Thread(
                target=_in_order, args=(writes,), name=f"checkpoint-{self.step}"
            )
            self._thread.start()
        else:
            _in_order(writes)

    @megatron_device()
    def ready(self) -> bool:
        """True once all ranks have written their files. Collective."""
        writing = torch.tensor(
            float(self._thread is not None and self._thread.is_alive()), device=DEVICE
        )
        dist.all_reduce(writing, op=dist.ReduceOp.MAX)
        return not writing.item()

    @megatron_device()
    def complete(self) -> None:
        """Wait for the files and make them a checkpoint. Collective.

        Raises CheckpointError where it could not be written, for instance because the disk is full;
        older checkpoints stay intact.
        """
        if not self.needed:
            return
        if self._thread is not None:
            self._thread.join()
        with self._failing(), self._cleanup:
            for completion in self._completions:
                completion()
            records: dict[str, Record] = {}
            for of_rank in gathered(self._records):
                records |= of_rank
            if dist.get_rank() == 0:
                commit(self._temporary, self._final, self._author, records)
            dist.barrier()

    def _superseded(self) -> str:
        """That a newer attempt has the directory, which explains whatever else went wrong; empty:
        it has not.
        """
        try:
            check(self._final.parent, self._author)
        except SupersededError as error:
            return str(error)
        return ""

    def _record(self, request: Any) -> None:
        """Note what this rank's files hold, while they are in memory. One that could not be written
        fails later.
        """
        if request.async_fn is None:
            return
        for path, _, _ in request.async_fn_args[1]:
            if Path(path).exists():
                self._records[Path(path).relative_to(self._temporary).as_posix()] = record(
                    Path(path)
                )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn what goes wrong into one message, and leave nothing behind."""
        try:
            yield
        except (Exception, CheckpointException) as error:
            self._cleanup.close()
            if dist.get_rank() == 0:
                shutil.rmtree(self._temporary, ignore_errors=True)
            reason = self._superseded() or _reason(
                [repr(error), *self._messages], self._final.parent
            )
            raise CheckpointError(
                f"checkpoint {self._final} could not be written: {reason}"
            ) from error


def _write(request: Any, *, copy: bool) -> Callable[[], None]:
    """A function that writes this rank's files. copy: of their content, made now."""
    if request.async_fn is None:  # this rank has nothing to write
        return lambda: None
    rank, buckets, results = request.async_fn_args
    staged = [
        (
            path,
            key,
            (objects, [(item, tensor.detach().to("cpu", copy=copy)) for item, tensor in tensors]),
        )
        for path, key, (objects, tensors) in buckets
    ]
    return partial(request.async_fn, rank, staged, results)


def _in_order(writes: list[Callable[[], None]]) -> None:
    for write in writes:
        write()


def agreed(value: Any) -> Any:
    """Rank 0's value on every rank: file systems may show other ranks a directory as it was a
    moment ago.
    """
    box = [value]
    dist.broadcast_object_list(box, src=0, device=DEVICE)
    return box[0]


def gathered(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _reason(messages: list[str], directory: Path) -> str:
    """Words about an error that has passed through several layers."""
    free = shutil.disk_usage(directory).free / 2**20 if directory.is_dir() else 0
    if any("No space left on device" in message or "Errno 28" in message for message in messages):
        return f"no space left on the disk of {directory} ({free:.0f} MiB free)"
    return f"{messages[-1]} ({free:.0f} MiB free)"


@megatron_device()
def load(directory: Path, step: int, parts: Parts) -> dict[str, Any]:
    """Restore checkpoint `step` into models and optimizers, and the RNG states; returns the user
    state. Collective.

    Raises CheckpointError, on all ranks, where a file is missing or not what was written.
    """
    _verify(path_of(directory, step))
    states = [_load(path_of(directory, step) / name, *part) for name, part in parts.items()]
    if "rng" in states[0]:
        _restore_rng(states[0]["rng"])
    user_state: dict[str, Any] = states[0]["user"]
    return user_state


def _verify(final: Path) -> None:
    """Compare all files with the manifest: every rank takes its share of them."""
    problem = ""
    try:
        verify(final, files(final)[dist.get_rank() :: dist.get_world_size()])
    except DamagedError as error:
        problem = str(error)
    if problem := next(filter(None, gathered(problem)), ""):
        raise CheckpointError(f"checkpoint {final} could not be read: {problem}")


def _load(final: Path, chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    if not final.is_dir():
        raise CheckpointError(f"there is no checkpoint {final}")
    wanted = _state(chunks, optimizer, {}, loading=True)
    try:
        if (
            wanted["rng"].unique_key
            not in FileSystemReader(final).read_metadata().state_dict_metadata
        ):
            del wanted["rng"]  # saved under another layout
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(final))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {final} could not be read: {error}") from error
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    _restore_optimizer(optimizer, state["optimizer"], state["adam_step"])
    return state


def weights_state(chunks: list[Any]) -> dict[str, Any]:
    """How the chunks' weights lie in a checkpoint, by chunk: `sharded_state_dict`s."""
    metadata = ensure_metadata_has_dp_cp_group(dict(METADATA))
    return {
        f"model{n}": chunk.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(chunks)
    }


def _state(
    chunks: list[Any], optimizer: Any, user_state: dict[str, Any], *, loading: bool = False
) -> dict[str, Any]:
    _allocate_optimizer_state(optimizer)
    weights = weights_state([chunk.module for chunk in chunks])
    return {
        **weights,
        "optimizer": _optimizer_state(optimizer, weights, loading=loading),
        "adam_step": _adam_step(optimizer),
        "rng": _rng(),
        "user": user_state,
    }


def _rng() -> ShardedObject:
    """Generator states of this rank's position in the model; data-parallel ranks share one, for
    nothing is drawn there.

    A resume under another tensor- or pipeline-parallel layout finds none of its own and goes on
    with those it has.
    """
    position = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    size = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    states = {"cpu": torch.get_rng_state()}
    if DEVICE.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng", states, size, position, replica_id=replica)


def _restore_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and DEVICE.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


# --- the optimizer: its tensors, and Adam's step. Everything else of it comes from the manifest,
# and how its parameters are grouped depends on the layout: Megatron's own state of those groups
# does not load under another.


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers: experts have one of their own where they are spread over ranks.

    On a pipeline stage without experts that one has nothing to do, and no state.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not part.is_stub_optimizer and part.buffers]


def _optimizer_state(optimizer: Any, weights: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    metadata = ensure_metadata_has_dp_cp_group(dict(METADATA))
    return {
        f"part{number}": part.sharded_state_dict(weights, is_loading=loading, metadata=metadata)[
            "param_state"
        ]
        for number, part in enumerate(_parts(optimizer))
    }


def _adam_step(optimizer: Any) -> int:
    steps = {int(group["step"] or 0) for part in _parts(optimizer) for group in _groups(part)}
    assert len(steps) == 1, steps
    return steps.pop()


def _groups(part: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = part.state_dict()["optimizer"]["param_groups"]
    return groups


def _restore_optimizer(optimizer: Any, tensors: dict[str, Any], step: int) -> None:
    for number, part in enumerate(_parts(optimizer)):
        own = part.state_dict()
        for group in own["optimizer"]["param_groups"]:
            group["step"] = step
        kind = METADATA["distrib_optim_sharding_type"]
        part.load_state_dict(
            {**own, "param_state": tensors[f"part{number}"], "param_state_sharding_type": kind}
        )
        # All parameters were given one step tensor, which torch's Adam would then count up once for
        # each.
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _allocate_optimizer_state(optimizer: Any) -> None:
    """Give an Adam that has taken no step its state, as its first step would: moments of 0, weights
    as they are.

    Megatron asserts that it is there: a loader overwrites it, and a policy is saved so in its
    critic's warm-up.
    """
    for part in _parts(optimizer):
        if part.optimizer.state:
            continue
        set_learning_rate(
            part.optimizer, 0.0
        )  # weight decay would change the weights; each step sets its own rate
        part._init_optimizer_states_with_dummy_values()
        for state in part.optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"])
