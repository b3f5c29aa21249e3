"""The gate for values from outside: what it accepts can be written, sent and read again."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import input_checks
from sluice.input_checks import MAX_DEPTH, MAX_DIGITS, InputError, check_value, load_json


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def doubled(times: int) -> list[Any]:
    """A small object in memory that would be 2**times values in JSON."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


REFUSED: dict[str, tuple[Any, str]] = {
    "half a surrogate pair": ({"a": ["max \ud83d 3"]}, "metadata.a[0]: half of a surrogate pair"),
    "half a pair in a key": ({"a": {"\udc00": 1}}, "metadata.a: key '\\udc00': half of"),
    "too deep": (nested(MAX_DEPTH + 1), "nested more than 64 deep"),
    "900 deep": ({"a": nested(900)}, "nested more than 64 deep"),
    "100,000 deep": ({"a": nested(100_000)}, "nested more than 64 deep"),
    "contains itself": (endless(), "nested more than 64 deep"),
    "shared without end": (doubled(50), "more than 1048576 values"),
    "too many digits": ({"a": 10**MAX_DIGITS}, "metadata.a: an integer of more than 4300 digits"),
    "negative, too many digits": (-(10**MAX_DIGITS), "more than 4300 digits"),
    "nan": ([1.0, math.nan], "metadata[1]: nan is not a finite number"),
    "infinity": ([-math.inf], "metadata[0]: -inf is not a finite number"),
    "bytes": ({"a": b"x"}, "metadata.a: bytes has no form in JSON"),
    "a set": ({"a": {1}}, "metadata.a: set has no form in JSON"),
    "numpy": ({"a": np.int64(3)}, "metadata.a: int64 has no form in JSON"),
    "a tuple as key": ({(1, 2): 3}, "key (1, 2): tuple cannot be a key"),
    "an infinite key": ({math.inf: 3}, "key inf: inf is not a finite number"),
    "large": (["x" * (33 << 20), "y" * (33 << 20)], "metadata[1]: texts of more than 64 MiB"),
}


@pytest.mark.parametrize(("value", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_is_refused_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(InputError) as raised:
        check_value(value, "metadata")
    assert words in str(raised.value)
    assert len(str(raised.value)) < 300
    str(raised.value).encode()


ACCEPTED: dict[str, Any] = {
    "as deep as allowed": nested(MAX_DEPTH),
    "as long as allowed": 10**MAX_DIGITS - 1,
    "both halves": "\U0001f600",
    "keys that JSON turns into text": {1: "a", None: "b", False: "c", 1.5: "d"},
    "numpy's float is a float": np.float64(2.5),
    "a tuple": (1, "zwei", 3.5, None, True),
}


@pytest.mark.parametrize("value", ACCEPTED.values(), ids=ACCEPTED)
def test_what_can_be_written_passes(value: Any) -> None:
    check_value(value, "metadata")
    json.loads(json.dumps(value, ensure_ascii=False).encode())


def test_other_objects_pass_where_they_are_written_as_text() -> None:
    check_value({"a": b"x", "b": [{1}]}, "row", as_text=True)


TEXTS: dict[str, tuple[str | bytes, str]] = {
    "an escape of half a pair": ('{"a":"\\ud83d"}', "result.json.a: half of a surrogate pair"),
    "capitals": ('{"a":"\\uDC00"}', "half of a surrogate pair"),
    "half a pair itself": ('{"a":"\ud83d"}', "half of a surrogate pair"),
    "bytes that are half a pair": (b'{"a":"\xed\xa0\xbd"}', "result.json: not UTF-8"),
    "not UTF-8": (b'{"a":"\xff"}', "result.json: not UTF-8: invalid start byte at byte 6"),
    "digits": ('{"a":' + "9" * 5000 + "}", "result.json: an integer of more than 4300 digits"),
    "65 deep": ("[" * 65 + "]" * 65, "nested more than 64 deep"),
    "100,000 deep": ("[" * 100_000 + "]" * 100_000, "nested more than 64 deep"),
    "nan": ('{"a":NaN}', "result.json: NaN is not a finite number"),
    "infinity": ('{"a":-Infinity}', "result.json: -Infinity is not a finite number"),
    "overflow": ('{"a":1e999}', "result.json: 1e999 is not a finite number"),
    "not JSON": ("{", "result.json: not valid JSON: Expecting property name"),
    "empty": ("", "result.json: not valid JSON"),
}


@pytest.mark.parametrize(("text", "words"), TEXTS.values(), ids=TEXTS)
def test_json_that_nobody_could_write_again_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(InputError) as raised:
        load_json(text, "result.json")
    assert words in str(raised.value)
    str(raised.value).encode()


@pytest.mark.parametrize(
    "text",
    ['{"a":"\\ud83d\\ude00"}', b'[{"a":1.5e3,"b":"\xc3\xa4"}]', "[" * 64 + "]" * 64],
    ids=["both halves", "bytes", "64 deep"],
)
def test_other_json_is_read(text: str | bytes) -> None:
    assert load_json(text, "result.json") == json.loads(text)


NUMBERS: dict[str, tuple[Any, str]] = {
    "beyond float32": (1e39, "turn 2 is 1e+39, expected a finite number of at most 3.4e+38"),
    "nan": (math.nan, "turn 2 is nan, expected a finite number"),
    "an integer beyond floats": (10**400, "turn 2 is int, expected one number"),
    "an integer beyond digits": (-(10**5000), "turn 2 is int, expected one number"),
    "a text": ("1", "turn 2 is str '1', expected a number"),
    "half a pair": ("\ud83d", "turn 2 is str '\\ud83d', expected a number"),
    "nothing": (None, "turn 2 is NoneType None, expected a number"),
    "several": (np.ones(2), "turn 2 is ndarray, expected one number"),
}


@pytest.mark.parametrize(("value", "words"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_is_no_float32_is_refused(value: Any, words: str) -> None:
    with pytest.raises(InputError) as raised:
        input_checks.float32(value, "turn 2")
    assert words in str(raised.value)
    str(raised.value).encode()


@pytest.mark.parametrize(
    "value",
    [3, True, 2.5, np.float32(0.5), np.array(1.0), -3.4e38],
    ids=["int", "bool", "float", "numpy's scalar", "numpy's array", "large"],
)
def test_other_numbers_are_floats(value: Any) -> None:
    assert input_checks.float32(value, "turn 2") == float(value)


def test_a_reward_leaves_room_for_the_sums_of_its_squares() -> None:
    assert input_checks.reward(-1e15) == -1e15
    with pytest.raises(InputError, match="the reward is 1e\\+38, expected a finite number of at"):
        input_checks.reward(1e38)
    with np.errstate(over="raise"):
        np.sum(np.full(100_000, input_checks.MAX_REWARD, np.float32) ** 2)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä", "plain ä"),
        ("a\ud83db", "a\ufffdb"),
        ("\udc00\ud83d", "\ufffd\ufffd"),
        ("\U0001f600\ud83d", "\U0001f600\ufffd"),
    ],
)
def test_a_text_for_people_loses_only_its_halves(text: str, shown: str) -> None:
    assert input_checks.without_surrogates(text) == shown


texts = st.text(st.characters(exclude_categories=[])) | st.just("\ud83d")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_both_ways_in_agree_and_what_passes_can_be_sent(value: Any) -> None:
    """A value as an object and as JSON text gets the same answer; what passes survives the trip."""

    def passes(check: Any, *arguments: Any) -> bool:
        try:
            check(*arguments)
        except InputError:
            return False
        return True

    passed = passes(check_value, value, "value")
    assert passed == passes(load_json, json.dumps(value), "value")
    if passed:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        assert json.loads(text.encode()) == value
        assert pickle.loads(pickle.dumps(value)) == value
