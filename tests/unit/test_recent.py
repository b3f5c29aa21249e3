"""Values of a limited size, by least recent use."""

from __future__ import annotations

from sluice.runtime.recent import Recent


def test_the_least_recently_used_values_make_room() -> None:
    recent: Recent[str] = Recent(10)
    recent.put("a", "first", 4)
    recent.put("b", "second", 4)
    assert recent.get("a") == "first"
    recent.put("c", "third", 4)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == ("first", None, "third")


def test_a_value_that_is_put_again_counts_once() -> None:
    recent: Recent[str] = Recent(10)
    recent.put("a", "first", 4)
    for _ in range(5):
        recent.put("b", "second", 4)
    assert recent.get("a") == "first"


def test_a_value_beyond_the_limit_is_kept_alone() -> None:
    recent: Recent[str] = Recent(10)
    recent.put("a", "first", 4)
    recent.put("b", "large", 40)
    assert (recent.get("a"), recent.get("b")) == (None, "large")
