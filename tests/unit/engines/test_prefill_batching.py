"""Prompts wait for each other at an engine. The scheduler has the shape of SGLang's."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from tests.unit.engines.conftest import Plugin


@pytest.fixture
def prefill_batching(plugin: Plugin) -> ModuleType:
    return plugin("prefill_batching")


def scheduler(waiting: int, *, chunked: object = None, parallel: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        waiting_queue=[*range(waiting)], chunked_req=chunked, enable_dp_attention=parallel
    )


def running(requests: int) -> SimpleNamespace:
    return SimpleNamespace(reqs=[None] * requests)


def take_all(scheduler: SimpleNamespace, _: SimpleNamespace) -> list[int]:
    """SGLang's choice: all that wait."""
    taken: list[int] = scheduler.waiting_queue
    scheduler.waiting_queue = []
    return taken


@pytest.mark.parametrize(
    ("waiting", "generating", "taken"),
    [
        pytest.param(1, 0, 1, id="nobody generates"),
        pytest.param(1, 1, 1, id="one beside one"),
        pytest.param(1, 2, 0, id="one beside two"),
        pytest.param(511, 512, 0, id="too few"),
        pytest.param(512, 512, 512, id="enough"),
        pytest.param(0, 512, 0, id="none wait"),
    ],
)
def test_prompts_wait_while_they_are_few_compared_to_running_requests(
    prefill_batching: ModuleType, waiting: int, generating: int, taken: int
) -> None:
    engine = scheduler(waiting)
    chosen = prefill_batching.PrefillBatching(8)(take_all, engine, running(generating))
    assert len(chosen) == taken
    assert len(engine.waiting_queue) == waiting - taken, "what waits is kept"


@pytest.mark.parametrize(
    ("each_pass", "taken"),
    [
        pytest.param(1, 8, id="the longest wait"),
        pytest.param(5, 8 * 5, id="still the longest: 180 of 512"),
        pytest.param(20, 7 * 20, id="560 of 512"),
        pytest.param(50, 5 * 50, id="750 of 512"),
        pytest.param(300, 2 * 300, id="900 of 512"),
    ],
)
def test_prompts_wait_until_empty_places_cost_as_much_as_a_pass(
    prefill_batching: ModuleType, each_pass: int, taken: int
) -> None:
    batching, engine = prefill_batching.PrefillBatching(8 - 1), scheduler(0)
    for _ in range(3):
        chosen: list[int] = []
        while not chosen:
            engine.waiting_queue += [0] * each_pass
            chosen = batching(take_all, engine, running(512))
        assert len(chosen) == taken


def test_a_prompt_waits_for_a_limited_number_of_passes(prefill_batching: ModuleType) -> None:
    batching, engine = prefill_batching.PrefillBatching(3), scheduler(1)
    for _ in range(2):
        passes = [len(batching(take_all, engine, running(100))) for _ in range(4)]
        assert passes == [0, 0, 0, 1]
        engine.waiting_queue = [1]


def test_prompts_that_come_within_a_pass_are_queued_last(prefill_batching: ModuleType) -> None:
    def ready(scheduler: SimpleNamespace, _: SimpleNamespace) -> None:
        assert scheduler.waiting_queue == []
        scheduler.waiting_queue.append("its grammar is ready")

    engine = scheduler(2)
    prefill_batching.PrefillBatching(8)(ready, engine, running(100))
    assert engine.waiting_queue == [0, 1, "its grammar is ready"]


def test_waiting_prompts_are_kept_if_the_pass_fails(prefill_batching: ModuleType) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    engine = scheduler(2)
    with pytest.raises(MemoryError):
        prefill_batching.PrefillBatching(8)(fail, engine, running(100))
    assert engine.waiting_queue == [0, 1]


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(scheduler(1, chunked="the rest"), id="a prompt in parts"),
        pytest.param(scheduler(1, parallel=True), id="data-parallel attention"),
    ],
)
def test_ranks_that_must_go_together_and_parts_of_a_prompt_do_not_wait(
    prefill_batching: ModuleType, engine: SimpleNamespace
) -> None:
    assert prefill_batching.PrefillBatching(8)(take_all, engine, running(100)) == [0]
