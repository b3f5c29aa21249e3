"""The provenance of a batch, from metadata of samples on several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.samples.sample import Prompt, Sample, SampleGroup, TokenSequence
from sluice_trainer.batch.provenance import Provenance


def group(number: int, **metadata: Any) -> SampleGroup:
    return SampleGroup(Prompt(number, "?"), [Sample(0, metadata=metadata), Sample(1)])


def engine(number: int, replica: int, latency: float) -> SampleGroup:
    return group(number, rollout_worker=f"rollout-{replica}", engine_latency=latency)


def metrics(*groups: SampleGroup) -> dict[str, float]:
    return Provenance.of_groups(groups).metrics()


def test_turns_of_the_model_are_counted() -> None:
    def turns(*by: str) -> Sample:
        return Sample(0, metadata={"turns": [{"by": author, "length": 1} for author in by]})

    counted = metrics(
        SampleGroup(Prompt(0, "?"), [turns("model"), turns("model", "environment", "model")])
    )
    assert (counted["multi_turn/turns/mean"], counted["multi_turn/turns/max"]) == (1.5, 2)
    assert (counted["multi_turn/branches/mean"], counted["multi_turn/branches/max"]) == (1, 1)
    assert metrics(SampleGroup(Prompt(0, "?"), [Sample(0)])) == {}


def test_the_acceptance_length_is_that_of_all_groups() -> None:
    groups = [
        group(0, speculated_tokens=90, speculative_passes=30),
        group(1, speculated_tokens=10, speculative_passes=10),
        group(2),
    ]
    assert metrics(*groups) == {"rollout/spec_accept_length": 2.5}


def test_metrics_show_how_busy_workers_were() -> None:
    busy = metrics(group(0, worker_busy=0.9), group(1, worker_busy=0.5), group(2))
    assert busy == {"rollout/worker_busy": pytest.approx(0.7)}
    tails = [group(0, worker_tail=0.0), group(1, worker_tail=1.5), group(2, worker_tail=4.0)]
    assert metrics(*tails) == {"rollout/tail_time": 4.0}, "the last to be submitted"
    assert metrics(group(2)) == {}


def test_metrics_show_how_many_engines_made_the_groups() -> None:
    groups = [group(number, rollout_worker=f"rollout-{number // 3}") for number in range(4)]
    assert metrics(*groups) == {"rollout/engines": 2, "rollout/engine_share/max": 0.75}


def test_groups_of_all_ranks_are_counted() -> None:
    ranks = [Provenance.of_groups([group(n, rollout_worker=f"rollout-{n}")]) for n in range(4)]
    assert Provenance.merge(ranks).metrics() == {
        "rollout/engines": 4,
        "rollout/engine_share/max": 0.25,
    }


def test_metrics_show_the_slowest_engine_and_the_first_quartile() -> None:
    groups = [engine(n, replica=n % 5, latency=0.02 + 0.001 * (n % 5)) for n in range(20)]
    groups += [engine(20 + n, replica=17, latency=0.05) for n in range(3)]
    groups += [engine(23, replica=2, latency=9.0)]  # one odd group makes no engine slow
    shown = metrics(*groups)
    assert shown["rollout/slowest_engine"] == 17
    assert shown["rollout/engine_latency/max"] == 0.05
    assert shown["rollout/engine_latency/p25"] == pytest.approx(0.02125)


def test_one_engine_alone_is_neither_slow_nor_fast() -> None:
    shown = metrics(engine(0, replica=0, latency=0.02), engine(1, replica=0, latency=0.04))
    assert shown == {"rollout/engines": 1, "rollout/engine_share/max": 1}


def test_a_turn_that_branches_share_is_counted_once() -> None:
    def turns(*numbers: int) -> list[dict[str, Any]]:
        return [{"by": "model", "length": 1, "turn": number} for number in numbers]

    metadata = {"turns": turns(0, 1), "branch_turns": [turns(0, 2), turns(3)]}
    tree = Sample(0, metadata=metadata, branches=[TokenSequence(), TokenSequence()])
    counted = metrics(SampleGroup(Prompt(0, "?"), [tree]))
    assert (counted["multi_turn/turns/max"], counted["multi_turn/branches/max"]) == (4, 3)
