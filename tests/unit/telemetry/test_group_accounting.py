"""Accounting of a run's prompt groups."""

import pytest

from sluice.telemetry.group_accounting import GroupCounts, Totals


def group_counts(reasons: dict[str, int] | None = None, /, **groups: int) -> GroupCounts:
    return GroupCounts.from_counters(
        {f"groups_{name}": count for name, count in groups.items()}, reasons or {}
    )


def test_a_balance_is_one_line() -> None:
    counts = group_counts(
        {"reward_raised": 2}, leased=12, trained=8, filtered=1, failed=2, in_work=1
    )
    assert counts.lost == 0
    assert (
        counts.text()
        == "12 groups leased = 8 trained + 1 filtered + 2 failed (2 reward raised) + 1 open"
    )


def test_a_warning_gives_the_share_of_failed_groups() -> None:
    reasons = {"a_b": 5, "c": 2, "d": 2, "e": 1}
    (warning,) = group_counts(reasons, leased=100, trained=90, failed=10).warnings()
    assert (warning.kind, warning.active) == ("failed groups", True)
    assert warning.text == (
        "10 of 100 groups (10.0%) failed and were not trained: 5 a b, 2 c, 2 d, 1 e. "
        "failures.jsonl in the run directory lists them"
    )


def test_the_number_of_failed_groups_agrees_with_their_reasons() -> None:
    """Groups go back once a job is given up, and groups of evaluations are not leased for training.

    Both count as failures.
    """
    counts = group_counts({"reward_raised": 33}, leased=33, failed=1, in_work=32)
    (warning,) = counts.warnings("row 7 of gsm8k: reward raised KeyError: 'answer'")
    assert warning.text == (
        "groups failed 33 times, and 1 of 33 groups (3.0%) were not trained because of it: "
        "the others belonged to an evaluation or were tried again: 33 reward raised. For example, "
        "row 7 of gsm8k: reward raised KeyError: 'answer'. failures.jsonl in the run directory "
        "lists them"
    )
    assert "1 failed + 32 open" in counts.text()


def test_failures_in_evaluations_cause_a_warning() -> None:
    (warning,) = group_counts({"reward_raised": 2}, leased=8, trained=8).warnings()
    assert warning.text.startswith("groups failed 2 times, and 0 of 8 groups")


def test_a_warning_counts_stale_groups() -> None:
    counters = {"groups_leased": 100, "groups_trained": 100, "stale_groups": 6}
    (warning,) = GroupCounts.from_counters(counters, {}).warnings()
    assert warning.text == (
        "6 of 100 trained groups were older than rollout.maxStaleness: with rollout.partial or "
        "rollout.overSampling a batch consists of the groups that finish first, and the later ones "
        "are trained as well"
    )


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        pytest.param(
            {"leased": 5, "trained": 4}, "1 groups are lost and 0 were trained twice", id="lost"
        ),
        pytest.param(
            {"leased": 4, "trained": 4, "stored": 1}, "-1 groups are lost", id="in two states"
        ),
        pytest.param(
            {"leased": 4, "trained": 4, "trained_twice": 1},
            "0 groups are lost and 1 were",
            id="twice",
        ),
    ],
)
def test_lost_and_repeated_groups_cause_a_warning(groups: dict[str, int], words: str) -> None:
    (warning,) = group_counts(**groups).warnings()
    assert words in warning.text


def test_a_complete_balance_causes_no_warning() -> None:
    assert list(group_counts(leased=8, trained=8).warnings()) == []


def test_the_latest_reading_of_the_buffer_counts() -> None:
    watched = Totals({"groups_leased": 912, "groups_trained": 904}, {})
    closing = Totals({"groups_leased": 960, "groups_trained": 960}, {"too long": 1})
    assert Totals.latest(watched, closing) is Totals.latest(closing, watched) is closing
    assert Totals.latest(None, watched) is watched
    assert Totals.latest(None, None).group_counts().leased == 0
    assert Totals(**closing.to_json()) == closing
