"""The memory from the disk, at every start and after a failed write; and what the disk says of the guarantee."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sluice_buffer.memory import PROGRESS, Memory, Progress, Result, Round, unpack_ids
from sluice_buffer.state import TRAINING, Group, GroupState, Key
from sluice_buffer.storage import Storage, footprint, numbers


def load(storage: Storage, deadline: float) -> Memory:
    """The memory as the disk has it. Leases go on; all end at `deadline`, unless their workers send a heartbeat."""
    memory = Memory()
    _load_progress(memory, storage)
    for raw, data in storage.scan("groups"):
        (group_id,) = numbers(raw)
        group = Group.unpack(data)
        memory.index(group_id, group)
        _account(memory, Key(TRAINING, group_id), group, deadline)
    for raw, data in storage.scan("batches"):
        (step,) = numbers(raw)
        ids = unpack_ids(data)
        if step <= memory.progress.checkpoint_step:
            memory.forgotten += len(ids)
        else:
            memory.batches[step] = ids
    _load_rounds(memory, storage, deadline)
    found = audit(storage, memory.progress)
    memory.twice, memory.missing = found.twice, found.missing
    return memory


def _load_progress(memory: Memory, storage: Storage) -> None:
    stored = storage.get("meta", PROGRESS)
    if stored is not None:
        values: dict[str, Any] = json.loads(stored)
        values["counters"] = Counter(values["counters"])
        memory.progress = Progress(**values)


def _load_rounds(memory: Memory, storage: Storage, deadline: float) -> None:
    for raw, data in storage.scan("rounds"):
        (version,) = numbers(raw)
        values = json.loads(data)
        memory.rounds[version] = Round(version, values["serial"], values["opened"], unfinished=values["groups"])
    for raw, data in storage.scan("round_groups"):
        version, group_id = numbers(raw)
        group = Group.unpack(data)
        found = memory.rounds[version]
        found.groups[group_id] = group
        found.unfinished -= not group.state.in_work
        if group.state is GroupState.WAITING:
            heapq.heappush(found.waiting, group_id)
        _account(memory, Key(version, group_id), group, deadline)
    for _, data in storage.scan("results"):
        result = Result(**json.loads(data))
        memory.results.setdefault(result.version, []).append(result)
        memory.stored += sum(footprint(size) for _, size in result.examples)


def _account(memory: Memory, key: Key, group: Group, deadline: float) -> None:
    if group.state is GroupState.LEASED:
        memory.deadlines[key] = deadline
    if group.size:
        memory.stored += footprint(group.size)
        memory.largest = max(memory.largest, footprint(group.size))


@dataclass(frozen=True, slots=True)
class Audit:
    """What the disk says about the guarantee, whatever the memory believes. Both numbers are 0, or there is a bug."""

    twice: int
    missing: int


def audit(storage: Storage, progress: Progress) -> Audit:
    """Look for groups in two committed batches, and for groups without the samples that they should have."""
    seen = bytearray(progress.next_group)
    twice = missing = 0
    for raw, data in storage.scan("batches"):
        (step,) = numbers(raw)
        for group_id in unpack_ids(data) if step <= progress.step else ():
            twice += seen[group_id]
            seen[group_id] = 1
    for raw, data in storage.scan("groups"):
        group = Group.unpack(data)
        if group.state in (GroupState.FINISHED, GroupState.BATCHED):
            missing += storage.get("samples", raw + bytes(4)) is None
    return Audit(twice, missing)
