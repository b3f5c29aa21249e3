"""The time of a weight update to many engines, on paper."""

from __future__ import annotations

import pytest

from benchmarks.fan_out import chain, direct, tree

GB = 1e9


def test_a_chain_of_one_is_one_transfer() -> None:
    assert chain(1, 8 * GB, 360 * GB) == pytest.approx(direct(1, 8 * GB, 360 * GB))


def test_an_engine_more_in_a_chain_costs_a_piece() -> None:
    more = chain(4, 8 * GB, 50 * GB, piece=1e7, piece_seconds=0.0) - direct(1, 8 * GB, 50 * GB)
    assert more == pytest.approx(3 * 1e7 / (50 * GB))


def test_a_chain_that_is_longer_than_the_buckets_in_hand_waits_for_its_end() -> None:
    """Four buckets of a second, and 10 seconds until the last engine has a piece: the third bucket
    begins once the first has come, after 11 seconds; the fourth then ends at 13, and 10 later."""
    seconds = chain(11, 4.0, 1.0, bucket=1.0, piece=1.0, piece_seconds=0.0)
    assert seconds == pytest.approx(11 + 2 + 10)


def test_a_tree_sends_everything_twice() -> None:
    assert tree(7, 8.0, 1.0, piece=0.5, piece_seconds=0.0) == pytest.approx(2 * (8.0 + 2 * 0.5))
