"""Rules over several fields of a model, each as CEL for the API server and as a Python check.

A rule is made of conditions, and a condition of fields named by their path in YAML:

    only_with("gate", field("type") == "sapo")
    requires(field("engine") == "vllm", field("nodesPerReplica") == 1, "a vLLM engine is one pod")

`field` compares as Python does and gives a `Condition`; `&`, `|` and `~` join conditions. What CEL
reads differs with the field (an API server fills defaults in before it evaluates a rule, so only
fields without a default may be absent), so a condition becomes CEL for the model that is `self`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# The API server's name of an error: a wrong value, a missing one, one that must not be there.
ErrorReason = Literal["FieldValueInvalid", "FieldValueRequired", "FieldValueForbidden"]
# Words that CEL reserves and that a field of an RLJob has.
_RESERVED = ("function",)


@dataclass(frozen=True, slots=True)
class Condition:
    """A statement about an instance of a model.

    cel: its CEL expression over `self`, for the model that `self` is. holds: the same in Python.
    text: the same in words, for messages.
    """

    cel: Callable[[type[BaseModel]], str]
    holds: Callable[[Any], bool]
    text: str = ""

    def __and__(self, other: Condition) -> Condition:
        return Condition(
            lambda model: f"({self.cel(model)} && {other.cel(model)})",
            lambda instance: self.holds(instance) and other.holds(instance),
            f"{self.text} and {other.text}",
        )

    def __or__(self, other: Condition) -> Condition:
        return Condition(
            lambda model: f"({self.cel(model)} || {other.cel(model)})",
            lambda instance: self.holds(instance) or other.holds(instance),
            f"{self.text} or {other.text}",
        )

    def __invert__(self) -> Condition:
        return Condition(
            lambda model: _negated(self.cel(model)),
            lambda instance: not self.holds(instance),
            f"no {self.text}",
        )


def written(cel: str, check: Callable[[Any], bool], text: str = "") -> Condition:
    """Make a condition of CEL and Python that say the same, for what fields cannot say."""
    return Condition(lambda model: cel, check, text)


class FieldReference:
    """A field of a model, by its dotted path in YAML. Comparisons give a `Condition`."""

    def __init__(self, path: str) -> None:
        self.path = path

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("==", value, f"{self.path}: {_word(value)}")

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("!=", value, f"{self.path} other than {_word(value)}")

    def __gt__(self, value: float) -> Condition:
        return self._compared(">", value, f"{self.path} above {value}")

    def __ge__(self, value: float) -> Condition:
        return self._compared(">=", value, f"{self.path} of at least {value}")

    # Order is defined between fields of one type alone, so CEL needs no conversion.
    def __le__(self, value: FieldReference) -> Condition:
        return Condition(
            lambda model: f"{_cel_path(model, self.path)} <= {_cel_path(model, value.path)}",
            lambda instance: value_of(instance, self.path) <= value_of(instance, value.path),
            f"{self.path} of at most {value.path}",
        )

    def __lt__(self, value: FieldReference) -> Condition:
        return Condition(
            lambda model: f"{_cel_path(model, self.path)} < {_cel_path(model, value.path)}",
            lambda instance: value_of(instance, self.path) < value_of(instance, value.path),
            f"{self.path} below {value.path}",
        )

    def is_in(self, values: Iterable[str]) -> Condition:
        """True if the field has one of some values."""
        accepted = tuple(values)
        return Condition(
            lambda model: f"{_cel_value(model, self.path, '')} in {listed(accepted)}",
            lambda instance: value_of(instance, self.path) in accepted,
            f"{self.path}: {' or '.join(accepted)}",
        )

    @property
    def is_true(self) -> Condition:
        """True if the field is `true`."""
        return Condition(
            lambda model: _cel_value(model, self.path, False),
            lambda instance: value_of(instance, self.path) is True,
            f"{self.path}: true",
        )

    @property
    def is_false(self) -> Condition:
        """True if the field is `false`."""
        return Condition(
            lambda model: _negated(_cel_value(model, self.path, True)),
            lambda instance: value_of(instance, self.path) is False,
            f"{self.path}: false",
        )

    @property
    def is_set(self) -> Condition:
        """True if the field has another value than its default.

        A list without entries counts as left out.
        """

        def holds(instance: Any) -> bool:
            value = value_of(instance, self.path)
            return value is not None and bool(value != _default(type(instance), self.path))

        return Condition(lambda model: _cel_set(model, self.path), holds, self.path)

    def _compared(self, operator: str, value: object, text: str) -> Condition:
        def cel(model: type[BaseModel]) -> str:
            info = _fields(model, self.path)[-1][1]
            # CEL does not compare a double with an integer.
            is_float = _is_float(info) and isinstance(value, int | float)
            literal = _literal(float(value) if is_float else value)  # type: ignore[arg-type]
            return f"{_cel_value(model, self.path, '')} {operator} {literal}"

        def holds(instance: Any) -> bool:
            actual = value_of(instance, self.path)
            match operator:
                case "==":
                    return bool(actual == value)
                case "!=":
                    return bool(actual != value)
                case ">":
                    return bool(actual > value)
                case _:
                    return bool(actual >= value)

        return Condition(cel, holds, text)


def field(path: str) -> FieldReference:
    """Name a field by its path in YAML: `field("trainer.gpusPerNode") > 0`."""
    return FieldReference(path)


def any_set(*paths: str) -> Condition:
    """True if one of some fields has another value than its default."""
    choices = [field(path).is_set for path in paths]
    return Condition(
        lambda model: f"({' || '.join(condition.cel(model) for condition in choices)})",
        lambda instance: any(condition.holds(instance) for condition in choices),
        " or ".join(paths),
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that every valid instance of a model fulfils.

    Parameters
    ----------
    condition
        What must hold.
    message
        What is expected and what to do. `{}` stands for the values that `shows` gives in Python;
        CEL leaves it out.
    field
        The field that the message is about, as a path relative to the model.
    shows
        Values of an instance for the message.
    reason
        The kind of error.
    alternatives
        Fields of which only one may be set.

    """

    condition: Condition
    message: str
    field: str = ""
    shows: Callable[[Any], str] | None = None
    reason: ErrorReason = "FieldValueInvalid"
    alternatives: tuple[str, ...] = ()

    def check(self, instance: Any) -> bool:
        """Return whether an instance of the model fulfils the rule."""
        return self.condition.holds(instance)

    def cel(self, model: type[BaseModel]) -> str:
        """Return the rule as CEL over `self`, an instance of `model`."""
        text = self.condition.cel(model)
        return text[1:-1] if _is_wrapped(text) else text


def requires(
    premise: Condition,
    consequence: Condition,
    message: str = "",
    path: str = "",
    *,
    shows: Callable[[Any], str] | None = None,
    reason: ErrorReason = "FieldValueInvalid",
) -> Rule:
    """Rule: if the premise holds, so does the consequence.

    message: by default the words of both. path: the field that it is about.
    """
    condition = Condition(
        lambda model: f"({_negated(premise.cel(model))} || {consequence.cel(model)})",
        lambda instance: not premise.holds(instance) or consequence.holds(instance),
    )
    text = message or f"{premise.text} needs {consequence.text}"
    return Rule(condition, text, path, shows, reason)


def only_with(path: str, condition: Condition, message: str = "", *, about: str = "") -> Rule:
    """Rule: a field may be set only if a condition holds.

    message: by default `<field> needs <condition>`. about: the field of the message, if another.
    """
    return requires(
        field(path).is_set, condition, message, about or path, reason="FieldValueForbidden"
    )


def at_most_one_of(*paths: str, message: str = "", about: str | None = None) -> Rule:
    """Rule: at most one of some fields may be set.

    about: the field of the message, by default the last one.
    """
    choices = [field(path).is_set for path in paths]
    condition = Condition(
        lambda model: _count(model, choices, "<= 1"),
        lambda instance: sum(choice.holds(instance) for choice in choices) <= 1,
    )
    return Rule(
        condition,
        message or f"at most one of {_and(paths)} may be set",
        paths[-1] if about is None else about,
        reason="FieldValueForbidden",
        alternatives=paths,
    )


def exactly_one(*paths: str, message: str = "", field: str = "") -> Rule:
    """Rule: exactly one of some fields without defaults must be set."""
    choices = [FieldReference(path).is_set for path in paths]
    condition = Condition(
        lambda model: _count(model, choices, "== 1"),
        lambda instance: sum(choice.holds(instance) for choice in choices) == 1,
    )
    return Rule(
        condition,
        message or f"exactly one of {_and(paths)} must be set",
        field,
        alternatives=paths,
    )


def belong_together(first: Condition, second: Condition, message: str, path: str) -> Rule:
    """Rule: either both conditions hold or neither."""
    condition = Condition(
        lambda model: f"({first.cel(model)}) == ({second.cel(model)})",
        lambda instance: first.holds(instance) == second.holds(instance),
    )
    return Rule(condition, message, path)


def escaped(name: str) -> str:
    """Spell a field's name for CEL: Kubernetes escapes the words that CEL reserves."""
    return f"__{name}__" if name in _RESERVED else name


def listed(names: Iterable[str]) -> str:
    """Write a list of strings as CEL."""
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"


def value_of(instance: Any, path: str) -> Any:
    """Return the value at a path of an instance; None if the path ends early."""
    for name in path.split("."):
        if instance is None:
            return None
        instance = getattr(instance, _attributes(instance.__class__)[name])
    return instance


def nested_model(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is an object even if a manifest leaves it out."""
    factory = info.default_factory
    return factory if isinstance(factory, type) and issubclass(factory, BaseModel) else None


@cache
def _attributes(model: type[BaseModel]) -> dict[str, str]:
    """Name in YAML -> attribute."""
    return {info.alias or name: name for name, info in model.model_fields.items()}


def _fields(model: type[BaseModel], path: str) -> list[tuple[str, FieldInfo]]:
    """The names and fields along a path."""
    fields = []
    for name in path.split("."):
        info = model.model_fields[_attributes(model)[name]]
        fields.append((name, info))
        model = _model_of(info) or model
    return fields


def _model_of(info: FieldInfo) -> type[BaseModel] | None:
    options = (info.annotation, *get_args(info.annotation))
    models = (option for option in options if isinstance(option, type))
    return next((model for model in models if issubclass(model, BaseModel)), None)


def _default(model: type[BaseModel], path: str) -> Any:
    info = _fields(model, path)[-1][1]
    return None if info.is_required() else info.get_default(call_default_factory=True)


def _is_filled(info: FieldInfo) -> bool:
    """True if a field is never absent on an API server: it is required, or has a default there."""
    if info.is_required() or nested_model(info):
        return True
    return info.get_default(call_default_factory=True) not in (None, "", [], {})


def _is_float(info: FieldInfo) -> bool:
    return float in (info.annotation, *get_args(info.annotation))


def _cel_path(model: type[BaseModel], path: str) -> str:
    return "self" + "".join(
        f"{'.' if _is_filled(info) else '.?'}{escaped(name)}" for name, info in _fields(model, path)
    )


def _cel_value(model: type[BaseModel], path: str, absent: object) -> str:
    """CEL of the value at a path, or of `absent` if there is none."""
    text = _cel_path(model, path)
    return f"{text}.orValue({_literal(absent)})" if "?" in text else text


def _cel_set(model: type[BaseModel], path: str) -> str:
    *parents, (_, info) = _fields(model, path)
    if inner := nested_model(info):
        choices = (_cel_set(model, f"{path}.{child}") for child in _attributes(inner))
        return f"({' || '.join(choices)})"
    text = _cel_path(model, path)
    if _is_filled(info) and not info.is_required():
        default = info.get_default(call_default_factory=True)
        value = _cel_value(model, path, default)
        return value if default is False else f"{value} != {_literal(default)}"
    if any(not _is_filled(parent) for _, parent in parents):
        return f"{text}.hasValue()"
    text = text.replace("?", "")
    if info.get_default(call_default_factory=True) == []:
        return f"(has({text}) && size({text}) > 0)"
    return f"has({text})"


def _count(model: type[BaseModel], conditions: list[Condition], bound: str) -> str:
    texts = [condition.cel(model) for condition in conditions]
    if len(texts) == 2:
        return " != ".join(texts) if bound == "== 1" else f"!({' && '.join(texts)})"
    return f"[{', '.join(texts)}].filter(x, x).size() {bound}"


def _negated(cel: str) -> str:
    is_simple = _is_wrapped(cel) or re.fullmatch(r"[\w.]+|has\([\w.]+\)", cel)
    return f"!{cel}" if is_simple else f"!({cel})"


def _literal(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _and(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _is_wrapped(text: str) -> bool:
    """True if the first parenthesis closes with the last."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position == len(text) - 1 and text[0] == "("
    return False
