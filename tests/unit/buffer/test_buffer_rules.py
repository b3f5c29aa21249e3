"""The pure rules: admission, filters, lease names, evaluation metrics, capacity."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import (
    TRAINING,
    Group,
    GroupKey,
    GroupState,
    SampleFacts,
    lease_id,
    parse_lease_id,
)
from sluice_buffer.rules.admission import (
    AdmissionPolicy,
    admitted,
    may_start,
    total_steps,
)
from sluice_buffer.rules.evaluation import failed_facts, metrics
from sluice_buffer.rules.filters import dynamic_filter, nonzero_std, worker_filter
from sluice_buffer.rules.staleness import outdated, stale
from sluice_buffer.state.storage import PIECE_BYTES, capacity, footprint, pieces
from sluice_buffer.transitions.rounds import EvalPlan, EvalSet

POLICY = AdmissionPolicy(
    batch_size=4,
    samples_per_prompt=2,
    max_staleness=0,
    over_sampling=1.0,
    partial=False,
    sync=True,
    total_steps=10,
    stream_end=None,
)
ASYNC = replace(POLICY, max_staleness=2, sync=False)


@pytest.mark.parametrize(
    ("policy", "version", "expected"),
    [
        (POLICY, 0, 4),
        (POLICY, 3, 16),
        (POLICY, 10, 40),  # never more than all steps need
        (POLICY, -1, 0),  # an engine that holds none of our weights
        (ASYNC, 0, 12),
        (ASYNC, 9, 40),
        (replace(POLICY, over_sampling=1.4), 0, 6),
        (replace(POLICY, over_sampling=2.0), 9, 40),
    ],
    ids=[
        "first batch",
        "fourth batch",
        "last batch",
        "no weights yet",
        "async, two ahead",
        "async, last batch",
        "over-sampled",
        "over-sampled, last batch",
    ],
)
def test_admitted(policy: AdmissionPolicy, version: int, expected: int) -> None:
    assert admitted(policy, version) == expected


@pytest.mark.parametrize(
    ("version", "worker", "kept", "next_group", "expected"),
    [(1, 1, 4, 4, 4), (1, 0, 4, 4, 0), (0, 1, 4, 4, 0), (1, 1, 8, 9, 0), (1, 1, 5, 11, 1)],
)
def test_may_start(version: int, worker: int, kept: int, next_group: int, expected: int) -> None:
    policy = replace(POLICY, stream_end=12)
    assert (
        may_start(policy, version=version, worker_version=worker, kept=kept, next_group=next_group)
        == expected
    )


def test_the_bound_on_staleness() -> None:
    assert not stale(ASYNC, step=3, min_version=0)
    assert stale(ASYNC, step=4, min_version=0)
    assert outdated(POLICY, version=1, start_version=0)
    assert not outdated(ASYNC, version=9, start_version=0)


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"), [(7, None, 7), (None, 2, 5), (None, 1, 2)]
)
def test_total_steps(steps: int | None, epochs: int | None, expected: int) -> None:
    assert total_steps(steps=steps, epochs=epochs, epoch_size=10, batch_size=4) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_nonzero_std(rewards: list[float]) -> None:
    assert (
        nonzero_std(rewards) == (statistics.stdev(rewards) > 1e-6)
        or abs(statistics.stdev(rewards) - 1e-6) < 1e-9
    )


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        pytest.param(None, [1.0, 1.0], None, id="no filter"),
        pytest.param("nonzero_std", [1.0, 1.0], "zero_std_1.0", id="equal"),
        pytest.param("nonzero_std", [1.0, 0.0], None, id="different"),
        pytest.param("nonzero_std", [7.5], "zero_std", id="one sample"),
    ],
)
def test_dynamic_filter(name: str | None, rewards: list[float], expected: str | None) -> None:
    assert dynamic_filter(name, rewards) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        pytest.param("", None, id="no metadata"),
        pytest.param('{"filtered": "too easy"}', "too easy", id="dropped"),
        pytest.param('{"filtered": ""}', None, id="kept"),
        pytest.param('["filtered"]', None, id="not an object"),
    ],
)
def test_a_workers_own_filter_tells_by_the_metadata(metadata: str, expected: str | None) -> None:
    assert worker_filter(metadata) == expected


@given(
    st.integers(TRAINING, 2**40), st.integers(0, 2**50), st.integers(0, 99), st.integers(1, 2**31)
)
def test_lease_names_are_read_back(round_: int, group_id: int, serial: int, attempt: int) -> None:
    name = parse_lease_id(lease_id(GroupKey(round_, group_id), serial, attempt))
    assert name == (GroupKey(round_, group_id), 0 if round_ == TRAINING else serial, attempt)


@pytest.mark.parametrize(
    "text", ["", "t", "t1", "t1.x", "e1.2.3", "t-1.2", "x1.2", "t1.99999999999999999999"]
)
def test_what_is_no_lease_name_is_none(text: str) -> None:
    assert parse_lease_id(text) is None


@given(
    st.sampled_from(GroupState),
    st.text(max_size=30),
    st.integers(-1, 2**40),
    st.binary(max_size=50),
)
def test_records_are_read_back(state: GroupState, note: str, version: int, summary: bytes) -> None:
    group = Group(state, 3, 2, version, 5, 77, "rollout-0", 4, note, summary)
    assert Group.unpack(group.pack()) == group


def test_evaluation_metrics() -> None:
    def fact(length: int, reward: float, status: int = pb.SAMPLE_STATUS_COMPLETED) -> SampleFacts:
        return SampleFacts(length + 4, length, length, status, reward, 3, 5)

    groups = [[fact(2, 1.0), fact(4, 0.0, pb.SAMPLE_STATUS_TRUNCATED)], failed_facts(2, 0)]
    figures = metrics(groups, [1, 2, 3])
    assert figures == {
        "reward": 0.25,
        "response_len/mean": 3.0,
        "response_len/median": 3.0,
        "response_len/max": 4.0,
        "response_len/min": 2.0,
        "truncated_ratio": 0.25,
        "failed_ratio": 0.5,
        "weight_version/min": 3.0,
        "weight_version/max": 5.0,
        "count": 4.0,
        "groups": 2.0,
        "pass@1": 0.25,
        "pass@2": 0.5,
        "pass^2": 0.0,
    }


def test_round_groups_are_numbered_through_all_data_sets() -> None:
    plan = EvalPlan([EvalSet("a", 2, 1), EvalSet("b", 3, 4)], 10, before_train=True, ks=())
    assert [plan.locate(i) for i in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert [v for v in range(31) if plan.due(v, final=False)] == [0, 10, 20, 30]


@given(st.integers(0, 5 * PIECE_BYTES))
def test_pieces_fill_whole_pages(size: int) -> None:
    parts = pieces(bytes(size))
    assert sum(map(len, parts)) == size
    assert footprint(size) >= size
    assert footprint(size) <= size + 4096 * len(parts) + 256 + 16 * len(parts)


def test_capacity_is_what_map_and_disk_hold_less_a_reserve() -> None:
    gib = 1 << 30
    assert capacity(8 * gib, 0, 100 * gib, 0) == 7 * gib
    assert capacity(8 * gib, 2 * gib, 2 * gib, 0) == 4 * gib - gib // 2
    assert capacity(1 << 20, 1 << 20, 0, 0) == (1 << 20) - 64 * 4096
    assert capacity(8 * gib, 0, 100 * gib, gib // 4) == 7 * gib - gib // 4
    assert capacity(8 * gib, 0, 100 * gib, gib) == 5 * gib


@pytest.mark.parametrize(
    ("seats", "expected"),
    [
        pytest.param([{"a": 1.0, "b": -1.0}, {"a": -1.0, "b": 1.0}], None, id="a game that varies"),
        pytest.param([{"a": 1.0, "b": -1.0}] * 2, "zero_std_0.0", id="the same end each time"),
        pytest.param([{"a": 1.0}, {"a": 1.0, "b": 0.5}], None, id="one seat spoke once"),
        pytest.param([{"a": 0.5}, {}], None, id="a failed sample"),
    ],
)
def test_the_dynamic_filter_compares_each_seat_with_itself(
    seats: list[dict[str, float]], expected: str | None
) -> None:
    assert dynamic_filter("nonzero_std", [0.0, 0.0], seats) == expected
