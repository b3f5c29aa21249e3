"""The plugin's receiving of weights in SGLang."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from sluice.engines.sglang.layout import Layout
from sluice.runtime.pod_env import free_port
from sluice_trainer.weights.buckets import buckets
from tests.unit.engines.conftest import Plugin

STORE = """
import sys, time, datetime, torch.distributed as dist
minute = datetime.timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, minute, wait_for_workers=False)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def receive(plugin: Plugin) -> ModuleType:
    return plugin("weights.receive")


@pytest.fixture
def transfer(receive: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import sluice_sglang.weights.transfer as module

    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    return module


def test_tensors_are_views_or_copies_if_bytes_are_not_aligned(
    transfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [
        ("a", torch.randn(3, 5)),
        ("b", torch.arange(7, dtype=torch.bfloat16)),
        ("c", torch.randn(2, 2, 3)),
    ]
    [bucket] = buckets(sent, 1 << 20, Layout())
    came = []

    def broadcast(data: torch.Tensor, **_: object) -> None:
        came.append(data.copy_(bucket.data))

    monkeypatch.setattr(transfer.dist, "broadcast", broadcast)
    pairs = transfer.receive(bucket.names, bucket.dtypes, bucket.shapes, None, torch.device("cpu"))
    assert [name for name, _ in pairs] == ["a", "b", "c"]
    for (_, tensor), (_, expected) in zip(pairs, sent, strict=True):
        assert torch.equal(tensor, expected)
        assert tensor.dtype == expected.dtype
    assert [t.untyped_storage().data_ptr() == came[0].data_ptr() for _, t in pairs] == [
        True,
        True,
        False,
    ]


class Group:
    """A communicator whose sender holds the store."""

    def __init__(self, port: int) -> None:
        self._store = TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=20))
        self.aborted = threading.Event()

    def get_group_store(self) -> TCPStore:
        return self._store

    def _get_backend(self, _: torch.device) -> SimpleNamespace:
        return SimpleNamespace(abort=self.aborted.set)


class Arrival:
    """A CUDA event that happens when it is told to."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()


@pytest.fixture
def sender() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", STORE, str(port)], stdout=subprocess.PIPE, cwd=Path("/")
    )
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    yield process, port
    process.kill()
    process.wait(10)


class Watch(NamedTuple):
    """A thread of the engine that looks after a sender, a process, while weights are
    on their way.
    """

    process: subprocess.Popen[bytes]
    group: Group
    arrival: Arrival
    thread: threading.Thread

    def ended(self) -> bool:
        self.thread.join(20)
        return not self.thread.is_alive()


@pytest.fixture
def watch(transfer: ModuleType, sender: tuple[subprocess.Popen[bytes], int]) -> Watch:
    process, port = sender
    group, arrival = Group(port), Arrival()
    thread = threading.Thread(target=transfer.watch, args=(arrival, group), daemon=True)
    thread.start()
    return Watch(process, group, arrival, thread)


def test_a_communicator_whose_sender_dies_is_aborted(watch: Watch) -> None:
    assert not watch.group.aborted.wait(0.5)
    watch.process.kill()
    assert watch.group.aborted.wait(20)
    assert watch.ended()


def test_the_watch_ends_once_the_weights_have_come(watch: Watch) -> None:
    watch.arrival.happened.set()
    assert watch.ended()
    watch.process.kill()
    assert not watch.group.aborted.is_set()


@pytest.mark.parametrize("saver", [True, False])
@pytest.mark.parametrize("idle", [True, False])
def test_waiting_and_later_requests_do_not_use_a_cache_that_cannot_be_emptied(
    receive: ModuleType, monkeypatch: pytest.MonkeyPatch, idle: bool, saver: bool
) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(
        receive, "drop_unused", dropped.append
    )  # SGLang's own: tested at a real engine
    waiting = [SimpleNamespace(extra_key="3"), SimpleNamespace(extra_key=None)]
    scheduler = SimpleNamespace(
        is_fully_idle=lambda: idle,
        waiting_queue=waiting,
        server_args=SimpleNamespace(enable_memory_saver=saver),
    )
    emptied: list[bool] = []

    def original(_: object, empty_cache: bool) -> bool:
        emptied.append(empty_cache)
        return idle

    before = [request.extra_key for request in waiting]
    assert receive.flush_cache(original, scheduler) is idle
    first = [request.extra_key for request in waiting]
    assert receive.flush_cache(original, scheduler, True) is idle
    second = [request.extra_key for request in waiting]
    assert emptied == [saver, True], (
        "spare memory goes back only where a trainer wants it, or the caller does"
    )
    assert dropped == ([] if idle else [scheduler] * 2)
    names = {*before, *first, *second}
    assert len(names) == (2 if idle else 6)
    come = SimpleNamespace(extra_key="3")
    receive.in_new_cache(scheduler, come)
    assert come.extra_key == ("3" if idle else "3|2")


def alone(name: str) -> Any:
    """A process group of this process alone, as SGLang makes those that it receives
    weights over.
    """
    store = TCPStore("127.0.0.1", free_port(), 1, is_master=True, wait_for_workers=False)
    group, _ = _new_process_group_helper(
        1,
        0,
        [],
        Backend("gloo"),
        PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timedelta(seconds=10),
    )
    _world.pg_group_ranks[group] = {0: 0}
    return group


def test_a_new_communicator_replaces_older_ones_of_a_trainer(receive: ModuleType) -> None:
    before = set(_world.pg_names)
    groups: dict[str, Any] = {}
    updater = SimpleNamespace(_model_update_group=groups)

    def join(
        updater: Any, master_address: str, master_port: int, rank_offset: int, group_name: str
    ) -> str:
        groups[group_name] = alone(group_name)
        return group_name

    for name in ("somebody-else", "sluice-first", "sluice-second"):
        assert receive.join_group(join, updater, "127.0.0.1", 0, 1, group_name=name) == name
    assert sorted(groups) == ["sluice-second", "somebody-else"]
    assert set(_world.pg_names) - before == set(groups.values())
    assert set(_world.pg_group_ranks) >= set(groups.values())
    for group in groups.values():
        receive.release(group)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("sluice-a", ("sluice-a", "", 0, 0), id="a communicator alone"),
        pytest.param(
            "sluice-a|sluice-link-b|64", ("sluice-a", "sluice-link-b", 64, 0), id="passed on"
        ),
        pytest.param("sluice-link-a||64|1", ("sluice-link-a", "", 64, 1), id="the last of a chain"),
    ],
)
def test_a_request_names_the_route_of_a_bucket(
    receive: ModuleType, name: str, expected: tuple[str, str, int, int]
) -> None:
    assert receive.route(name) == expected


def test_sglang_looks_up_the_communicator_of_a_route(receive: ModuleType) -> None:
    def original(updater: Any, *, names: Any, group_name: str) -> str:
        return group_name

    call = {"names": [], "group_name": "sluice-a|sluice-link-b|64"}
    assert receive.along_route(original, None, **call) == "sluice-a"
    assert receive._routes == {"sluice-a": ("sluice-a", "sluice-link-b", 64, 0)}


def test_a_late_bucket_over_a_link_that_was_replaced_does_not_end_an_engine_of_0_5_17(
    receive: ModuleType,
) -> None:
    def original(updater: Any, names: Any, dtypes: Any, shapes: Any, group_name: str) -> Any:
        raise AssertionError(f"Group {group_name} not in []")

    answer = receive.update_along_route(original, None, [], [], [], "sluice-link-a||64")
    assert answer == (False, "Group sluice-link-a not in []")


@pytest.fixture
def coming(receive: ModuleType) -> Any:
    """A link whose buckets are their numbers. lost: those that never come; waited: for which."""

    class Coming(receive.Link):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.name, self.failure = "sluice-link-a", "it is gone"
            self.lost: set[int] = set()
            self.begun: list[int] = []
            self.waited: list[int] = []

        def receive(self, data: torch.Tensor, piece: int, onward: Any) -> int:
            self.begun.append(len(self.begun))
            return self.begun[-1]

        def arrived(self, event: int) -> bool:
            self.waited.append(event)
            return event not in self.lost

    return Coming()


def test_an_engine_answers_for_a_bucket_once_the_one_before_has_come(
    receive: ModuleType, coming: Any
) -> None:
    links = receive.Links()
    for ahead, waited in ((1, []), (1, [0]), (0, [0, 1, 2])):
        links.begin(coming, torch.empty(1), receive.Route("sluice-link-a", ahead=ahead))
        assert (links.failure(), coming.waited) == ("", waited)


def test_a_bucket_that_never_comes_is_reported_with_the_next_one(
    receive: ModuleType, coming: Any
) -> None:
    links, way = receive.Links(), receive.Route("sluice-link-a", ahead=1)
    coming.lost = {1}
    for failure in ("", "", "sluice-link-a: it is gone"):
        links.begin(coming, torch.empty(1), way)
        assert links.failure() == failure


def test_a_link_that_was_given_up_does_not_write_into_later_buckets(
    receive: ModuleType, coming: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, taken = receive.Links(), []
    monkeypatch.setattr(
        sys.modules[receive.Links.__module__], "take", lambda *_: taken.append([*coming.waited])
    )
    coming.lost = {0}
    links.begin(coming, torch.empty(1), receive.Route("sluice-link-a", ahead=1))
    links.begin("the trainer", torch.empty(1), receive.Route("sluice-b"))
    assert (taken, links.failure(), links.comes_over_link) == ([[0]], "", False)


def test_a_bucket_that_has_not_come_over_its_link_is_reported(
    receive: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SimpleNamespace(name="sluice-link-a", failure="it is gone", arrived=lambda _: False)
    monkeypatch.setattr(receive.links, "_coming", deque([(broken, None)]))
    monkeypatch.setattr(receive, "engine_ranks", lambda: None)
    loaded = receive.load_whole(lambda updater, tensors: (True, "loaded"), None, [])
    assert loaded == (False, "sluice-link-a: it is gone")
    assert receive.load_whole(lambda updater, tensors: (True, "loaded"), None, [])[0]
