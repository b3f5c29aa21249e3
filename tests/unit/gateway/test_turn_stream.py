"""Which text of a turn a client gets before its end."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_rollout.gateway.turn_stream import IncrementalDecoder, TurnStream, certain_length
from tests import chat

TOKENIZER = chat.tokenizer()
CALL = "<tool_call>"


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def token_ids(text: str) -> list[int]:
    return [int(i) for i in TOKENIZER.encode(text, add_special_tokens=False)]


def stream(**options: object) -> TurnStream:
    return TurnStream(IncrementalDecoder(decode), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "stops", "call_start", "certain"),
    [
        pytest.param("hello", [], None, "hello", id="no stops and no tools"),
        pytest.param("so EN", ["END"], None, "so ", id="what may become a stop string"),
        pytest.param("so END", ["END"], None, "so ", id="a stop string"),
        pytest.param("so EN", ["x", "N", "END"], None, "so ", id="the longest of several"),
        pytest.param("so ENough", ["END"], None, "so ENough", id="what has not become one"),
        pytest.param("so", [], "", "", id="calls may begin anywhere"),
        pytest.param("Well.\n<tool", [], CALL, "Well.", id="what may become a call, and the space"),
        pytest.param("Well. <tool_call>{", [], CALL, "Well.", id="a call"),
        pytest.param(" \n", [], CALL, "", id="space alone"),
        pytest.param("a < b", [], CALL, "a < b", id="what has not become a call"),
        pytest.param("<tool_call>", [], None, "<tool_call>", id="a call without tools is text"),
    ],
)
def test_what_is_certain(text: str, stops: list[str], call_start: str | None, certain: str) -> None:
    assert text[: certain_length(text, stops, call_start)] == certain


@given(
    text=st.text(st.sampled_from("aé漢🙂 \n<tool_call>END"), max_size=60),
    sizes=st.lists(st.integers(1, 9), min_size=1),
)
def test_the_texts_are_the_whole_text(text: str, sizes: list[int]) -> None:
    turn, ids = stream(stops=["END"], call_start=CALL), token_ids(text)
    while ids:
        size = sizes[len(ids) % len(sizes)]
        turn.add(ids[:size])
        ids = ids[size:]
        assert text.startswith(turn.sent)
    assert turn.finish(text, None, has_calls=False) == text
    assert turn.sent == text


def test_long_texts_are_decoded_by_windows() -> None:
    calls: list[int] = []

    def counting(ids: list[int]) -> str:
        calls.append(len(ids))
        return decode(ids)

    text = "né漢 " * 500
    decoder = IncrementalDecoder(counting)
    assert "".join(decoder.add([token]) for token in token_ids(text)) == text
    assert max(calls) < 50


def test_bytes_that_never_make_a_character_are_not_kept_for_ever() -> None:
    broken = token_ids("é")[:1]
    decoder = IncrementalDecoder(decode)
    text = "".join(decoder.add(broken * 8) for _ in range(200)) + decoder.add(token_ids("a"))
    assert text.endswith("a")
    assert len(decoder._window) < 600


def test_no_text_is_certain_after_a_special_token_if_there_are_tools() -> None:
    special = frozenset(TOKENIZER.all_special_ids)
    turn = stream(call_start=CALL, special=special)
    turn.add(token_ids("so"))
    turn.add([*special][:1])
    turn.add(token_ids("hidden"))
    assert turn.sent == "so"
    assert turn.finish("so", None, has_calls=True) == "so"


@pytest.mark.parametrize("has_calls", [True, False], ids=["with calls", "without"])
def test_the_answer_is_what_the_client_has_if_the_whole_decodes_otherwise(has_calls: bool) -> None:
    turn = stream(stops=["END"])
    turn.add(token_ids("one two EN"))
    text = turn.finish("1 2", None, has_calls=has_calls)
    assert text == turn.sent == ("one two " if has_calls else "one two EN")


async def test_texts_that_come_while_the_client_is_slow_are_joined() -> None:
    turn, texts = stream(), []
    turn.add(token_ids("a"))
    turn.add(token_ids("b"))
    async with asyncio.timeout(10):
        async for text in turn.texts():
            texts.append(text)
            if len(texts) == 1:
                turn.add(token_ids("c"))
                turn.finish("abcd", None, has_calls=False)
                turn.close()
    assert texts == ["ab", "cd"]
