"""Adapters of a pool's jobs in an engine: a job that was made again, and the deleted one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.engines.conftest import Plugin

JOB = "team/math"
IDLE = SimpleNamespace(
    running_batch=None,
    last_batch=None,
    waiting_queue=[],
    grammar_manager=SimpleNamespace(grammar_queue=[]),
    chunked_req=None,
)


@pytest.fixture
def store(plugin: Plugin) -> Any:
    return plugin("weights.adapter_store").AdapterStore(8, 1, pool=True)


def test_a_bucket_of_a_deleted_job_that_waited_in_the_engine_is_refused(store: Any) -> None:
    """Half of an update has come from the deleted job when the one made again sends its first."""
    store.enter(JOB, 5, IDLE)
    store.jobs[JOB].coming.append("a bucket of the deleted job")
    store.enter(JOB, 6, IDLE)
    assert store.jobs[JOB].coming == []
    with pytest.raises(ValueError, match="team/math: a later job of this name"):
        store.enter(JOB, 5, IDLE)


def test_further_buckets_of_a_job_go_on_with_its_update(store: Any) -> None:
    store.enter(JOB, 5, IDLE)
    store.jobs[JOB].coming.append("the first bucket")
    store.enter("team/code", 9, IDLE)
    store.enter(JOB, 5, IDLE)
    assert store.jobs[JOB].coming == ["the first bucket"]
