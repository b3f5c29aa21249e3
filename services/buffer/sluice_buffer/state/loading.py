"""Loads the memory from the disk, at every start and after a failed write.

It also counts what the disk shows of broken promises: lost groups, and groups trained twice.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice_buffer.group import TRAINING, Group, GroupKey, GroupState
from sluice_buffer.state.images import ImageIndex
from sluice_buffer.state.memory import PROGRESS, Memory, Result, Round, StoredProgress, unpack_ids
from sluice_buffer.state.storage import Storage, footprint, numbers


def load(storage: Storage, deadline: float) -> Memory:
    """Return the memory as it is on the disk.

    Leases continue; all end at `deadline`, unless their workers send a heartbeat. It reads only the
    storage, so it may run off the event loop.
    """
    memory = Memory()
    _load_progress(memory, storage)
    _load_groups(memory, storage, deadline)
    committed = []
    for raw, data in storage.scan("batches"):
        (step,) = numbers(raw)
        if step <= memory.progress.checkpoint_step:
            memory.forgotten += len(data) // 8
        else:
            memory.batches[step] = unpack_ids(data)
        if step <= memory.progress.step:
            committed.append(np.frombuffer(data, dtype="<i8"))
    memory.twice = _twice(committed)
    _load_rounds(memory, storage, deadline)
    memory.images = ImageIndex.load(storage.scan("images"), storage.scan("group_images"))
    return memory


def _load_groups(memory: Memory, storage: Storage, deadline: float) -> None:
    """Load training groups.

    Most groups of a long job are over: only their state is read.
    """
    over = memory.over = bytearray(memory.progress.next_group)
    first_over = int(GroupState.TRAINED)
    for raw, data in storage.scan("groups"):
        group_id = int.from_bytes(raw, "big")
        if data[0] >= first_over and group_id < len(over):
            over[group_id] = data[0]
            continue
        group = Group.unpack(data)
        memory.index(group_id, group)
        _account(memory, GroupKey(TRAINING, group_id), group, deadline)
        if group.state in (GroupState.FINISHED, GroupState.BATCHED):
            memory.missing += storage.get("samples", raw + bytes(4)) is None
    for state in GroupState:
        memory.counts[state] += over.count(state) if state.over else 0


def _twice(committed: list[npt.NDArray[np.int64]]) -> int:
    """Count groups in two committed batches. Any number but 0 is a bug."""
    ids = np.sort(np.concatenate(committed)) if committed else np.empty(0, np.int64)
    return int(np.count_nonzero(ids[1:] == ids[:-1]))


def _load_progress(memory: Memory, storage: Storage) -> None:
    stored = storage.get("meta", PROGRESS)
    if stored is not None:
        values: dict[str, Any] = json.loads(stored)
        for name in ("counters", "failed"):
            values[name] = Counter(values.get(name, {}))
        memory.progress = StoredProgress(**values)


def _load_rounds(memory: Memory, storage: Storage, deadline: float) -> None:
    for raw, data in storage.scan("rounds"):
        (version,) = numbers(raw)
        values = json.loads(data)
        memory.rounds[version] = Round(
            version, values["serial"], values["opened"], unfinished=values["groups"]
        )
    for raw, data in storage.scan("round_groups"):
        version, group_id = numbers(raw)
        group = Group.unpack(data)
        round_ = memory.rounds[version]
        round_.groups[group_id] = group
        round_.unfinished -= not group.state.in_work
        _account(memory, GroupKey(version, group_id), group, deadline)
    for _, data in storage.scan("results"):
        result = Result(**json.loads(data))
        memory.results.setdefault(result.version, []).append(result)
        memory.stored += sum(footprint(size) for _, size in result.examples)


def _account(memory: Memory, key: GroupKey, group: Group, deadline: float) -> None:
    if group.state is GroupState.LEASED:
        memory.lease_to(key, group, group.worker, group.worker_attempt, deadline)
    elif group.state is GroupState.WAITING:
        memory.queue(key, group)
    if group.size:
        memory.stored += footprint(group.size)
        memory.largest = max(memory.largest, footprint(group.size))
