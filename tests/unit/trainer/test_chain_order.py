"""The order of engines in the chain of a weight update."""

from __future__ import annotations

import pytest

from sluice_trainer.weights.chain import chain_order, downstream_of, piece_bytes, upstream_of


@pytest.mark.parametrize(
    ("order", "passes_on", "expected"),
    [
        pytest.param("abcd", "abcd", {"b": "a", "c": "b", "d": "c"}, id="one chain"),
        pytest.param("a", "a", {}, id="one engine"),
        pytest.param("abcd", "abd", {"b": "a", "d": "b"}, id="one cannot relay"),
        pytest.param("abcd", "b", {}, id="only one can relay"),
        pytest.param("cabd", "abcd", {"a": "c", "b": "a", "d": "b"}, id="an earlier order"),
        pytest.param("", "", {}, id="no engine"),
    ],
)
def test_each_engine_that_can_gets_the_weights_from_the_previous_one(
    order: str, passes_on: str, expected: dict[str, str]
) -> None:
    assert upstream_of(list(order), set(passes_on)) == expected


@pytest.mark.parametrize(
    ("order", "engines", "expected"),
    [
        pytest.param("", "ba", "ab", id="the first update"),
        pytest.param("ca", "abc", "cab", id="an engine that joins comes last"),
        pytest.param("cab", "b", "cab", id="an update of joiners keeps the others"),
    ],
)
def test_engines_keep_their_places(order: str, engines: str, expected: str) -> None:
    assert chain_order(list(order), set(engines)) == list(expected)


def test_all_engines_downstream_depend_on_an_engine() -> None:
    chain = upstream_of(list("abcd"), set("abcd"))
    assert downstream_of("b", chain) == ["c", "d"]
    assert downstream_of("d", chain) == []
    assert downstream_of("another engine", chain) == []


def test_the_longer_a_chain_the_smaller_its_pieces() -> None:
    assert [piece_bytes(engines) >> 20 for engines in (0, 1, 4, 16, 64)] == [256, 256, 256, 128, 64]
