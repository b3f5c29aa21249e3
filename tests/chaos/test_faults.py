"""The list of faults that a seed gives."""

from __future__ import annotations

from tests.chaos.faults import KILL, LEAVE, LEAVE_AT_ONCE, ROLES, STOP, draw
from tests.chaos.network import PAIRS
from tests.chaos.proxy import Harm


def test_a_seed_repeats_its_faults() -> None:
    assert draw(7, 50) == draw(7, 50)
    assert draw(7, 50) != draw(8, 50)


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert draw(7, 200)[:50] == draw(7, 50)


def test_each_round_has_one_fault_of_each_kind() -> None:
    kinds = {KILL, STOP, LEAVE, LEAVE_AT_ONCE, *Harm}
    faults = draw(7, 3 * len(kinds))
    for start in range(0, len(faults), len(kinds)):
        assert {fault.kind for fault in faults[start : start + len(kinds)]} == kinds


def test_two_hundred_faults_harm_every_role_and_every_pair_in_every_way() -> None:
    everything: set[tuple[str, str | tuple[str, str]]] = {
        (kind, role) for kind in (KILL, STOP) for role in ROLES
    }
    everything |= {(LEAVE, "run"), (LEAVE_AT_ONCE, "run")}
    everything |= {(harm, pair) for harm in Harm for pair in PAIRS}
    assert {(fault.kind, fault.target) for fault in draw(7, 200)} == everything


def test_some_faults_strike_a_run_that_has_not_recovered() -> None:
    hasty = [fault.hasty for fault in draw(7, 200)]
    assert 30 < sum(hasty) < 90
