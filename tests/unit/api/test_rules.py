"""Conditions and rules: the CEL, the Python check and the message come from one expression."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from sluice.api.schema.base import Model
from sluice.api.schema.rules import (
    Condition,
    any_set,
    at_most_one_of,
    belong_together,
    exactly_one,
    field,
    only_with,
    requires,
)


class Inner(Model):
    size: int = 3
    name: str | None = None


class Outer(Model):
    kind: str = "plain"
    ratio: float = 0.5
    upper: float = 1.0
    on: bool = False
    maybe: bool | None = None
    word: str | None = None
    function: str | None = None
    names: list[str] = Field(default_factory=list)
    filled: Inner = Field(default_factory=Inner)
    optional: Inner | None = None


CONDITIONS = [
    pytest.param(field("kind") == "x", "self.kind == 'x'", {"kind": "x"}, {}, id="equal"),
    pytest.param(field("kind") != "plain", "self.kind != 'plain'", {"kind": "x"}, {}, id="unequal"),
    pytest.param(field("ratio") > 0, "self.ratio > 0.0", {}, {"ratio": 0.0}, id="a double"),
    pytest.param(field("filled.size") >= 4, "self.filled.size >= 4", {"filled": {"size": 4}}, {}),
    pytest.param(
        field("ratio") <= field("upper"), "self.ratio <= self.upper", {}, {"ratio": 2.0}, id="order"
    ),
    pytest.param(
        field("word") == "x", "self.?word.orValue('') == 'x'", {"word": "x"}, {}, id="may be absent"
    ),
    pytest.param(
        field("kind").is_in(("a", "b")), "self.kind in ['a', 'b']", {"kind": "b"}, {}, id="choice"
    ),
    pytest.param(field("on").is_true, "self.on", {"on": True}, {}, id="true"),
    pytest.param(field("on").is_false, "!self.on", {}, {"on": True}, id="false"),
    pytest.param(
        field("maybe").is_false,
        "!(self.?maybe.orValue(true))",
        {"maybe": False},
        {},
        id="false, not absent",
    ),
    pytest.param(field("word").is_set, "has(self.word)", {"word": ""}, {}, id="given"),
    pytest.param(
        field("function").is_set,
        "has(self.__function__)",
        {"function": "f"},
        {},
        id="reserved word",
    ),
    pytest.param(field("on").is_set, "self.on", {"on": True}, {}, id="another value than false"),
    pytest.param(
        field("ratio").is_set, "self.ratio != 0.5", {"ratio": 1.0}, {}, id="another value"
    ),
    pytest.param(
        field("names").is_set,
        "(has(self.names) && size(self.names) > 0)",
        {"names": ["a"]},
        {"names": []},
        id="a list with entries",
    ),
    pytest.param(
        field("filled").is_set,
        "(self.filled.size != 3 || has(self.filled.name))",
        {"filled": {"name": "x"}},
        {"filled": {"size": 3}},
        id="a field of an object",
    ),
    pytest.param(
        field("optional.name").is_set,
        "self.?optional.?name.hasValue()",
        {"optional": {"name": "x"}},
        {"optional": {}},
        id="in an object that may be absent",
    ),
    pytest.param(
        field("optional.size").is_set,
        "self.?optional.size.orValue(3) != 3",
        {"optional": {"size": 4}},
        {},
        id="with a default in an object that may be absent",
    ),
    pytest.param(
        ~field("word").is_set & (field("kind") == "x"),
        "(!has(self.word) && self.kind == 'x')",
        {"kind": "x"},
        {"kind": "x", "word": "a"},
        id="not, and",
    ),
    pytest.param(
        any_set("word", "on") | (field("kind") == "x"),
        "((has(self.word) || self.on) || self.kind == 'x')",
        {"on": True},
        {},
        id="any, or",
    ),
]


@pytest.mark.parametrize(("condition", "cel", "true", "false"), CONDITIONS)
def test_a_condition_is_cel_and_python(
    condition: Condition, cel: str, true: dict[str, Any], false: dict[str, Any]
) -> None:
    assert condition.cel(Outer) == cel
    assert condition.holds(Outer.model_validate(true))
    assert not condition.holds(Outer.model_validate(false))


RULES = [
    pytest.param(
        only_with("word", field("kind") == "x"),
        "!has(self.word) || self.kind == 'x'",
        "word needs kind: x",
        {"word": "a"},
        id="only with",
    ),
    pytest.param(
        requires(field("on").is_true, field("kind").is_in(("a", "b"))),
        "!self.on || self.kind in ['a', 'b']",
        "on: true needs kind: a or b",
        {"on": True},
        id="requires",
    ),
    pytest.param(
        at_most_one_of("word", "on"),
        "!(has(self.word) && self.on)",
        "at most one of word and on may be set",
        {"word": "a", "on": True},
        id="at most one of two",
    ),
    pytest.param(
        at_most_one_of("word", "on", "function"),
        "[has(self.word), self.on, has(self.__function__)].filter(x, x).size() <= 1",
        "at most one of word, on and function may be set",
        {"word": "a", "function": "f"},
        id="at most one of three",
    ),
    pytest.param(
        exactly_one("word", "function"),
        "has(self.word) != has(self.__function__)",
        "exactly one of word and function must be set",
        {},
        id="exactly one",
    ),
    pytest.param(
        belong_together(field("on").is_true, field("word").is_set, "both", "on"),
        "(self.on) == (has(self.word))",
        "both",
        {"word": "a"},
        id="belong together",
    ),
]


@pytest.mark.parametrize(("rule", "cel", "message", "broken"), RULES)
def test_a_rule_is_cel_python_and_a_message(
    rule: Any, cel: str, message: str, broken: dict[str, Any]
) -> None:
    assert rule.cel(Outer) == cel
    assert rule.message == message
    assert not rule.check(Outer.model_validate(broken))
    assert rule.check(Outer.model_validate({"word": "a", "kind": "x"})) or message == "both"
