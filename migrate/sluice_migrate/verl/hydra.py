"""Reads Hydra overrides and YAML files into settings by dotted keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from sluice.api.schema import yaml_text
from sluice.api.schema.yaml_text import DisproportionError
from sluice_migrate.bash.script import Argument
from sluice_migrate.draft import ImportFailedError
from sluice_migrate.translation import Setting

_OVERRIDE = re.compile(
    r"^(?P<sign>\+\+?|~)?(?P<key>[A-Za-z_][\w./@-]*)(?:=(?P<value>.*))?$", re.DOTALL
)
# A value that is one interpolation keeps the type of its target.
_WHOLE = re.compile(
    r"^\$\{(?:oc\.select:)?(?P<key>[\w.]+)(?:,\s*(?P<default>[^{}]*))?\}$", re.DOTALL
)
# An interpolation inside of a text.
_INSIDE = re.compile(r"\$\{(?:oc\.select:)?(?P<key>[\w.]+)(?:,\s*(?P<default>[^{}]*))?\}")
# Interpolations that refer to interpolations; more of them are a cycle.
_DEEPEST = 8


def overrides(words: Iterable[Argument]) -> Iterator[Setting]:
    """Return the overrides of a command; options such as --config-name are not overrides."""
    for word in words:
        match = _OVERRIDE.match(word.text)
        if match and match["value"] is not None:
            yield Setting(
                match["key"], (value_of(match["value"]),), word.line, word.missing, word.conditional
            )


def value_of(text: str) -> Any:
    """Parse the value of an override.

    Hydra's grammar is close to YAML's flow style. A value that is not valid YAML is a text.
    """
    try:
        return yaml_text.load(text) if text else None
    except DisproportionError as error:
        raise ImportFailedError(yaml_text.explain(error, f"{text[:40]}...")) from error
    except YAMLError:
        return text


def from_yaml(text: str, source: str) -> dict[str, Setting]:
    """Read a configuration file by dotted keys.

    Lists are values. Hydra's `defaults` are not followed.
    """
    try:
        documents = list(yaml_text.load_all(text))
    except YAMLError as error:
        raise ImportFailedError(yaml_text.explain(error, source)) from error
    document = documents[0] if len(documents) == 1 else None
    if not isinstance(document, CommentedMap):
        raise ImportFailedError(
            f"{source}: expected a configuration of verl: an object with its groups"
        )
    return {setting.name: setting for setting in _flat(document, "")}


def _flat(node: CommentedMap, prefix: str) -> Iterator[Setting]:
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, CommentedMap) and value:
            yield from _flat(value, f"{name}.")
        elif name not in ("defaults", "hydra") and key != "_target_":
            yield Setting(name, (_plain(value),), node.lc.key(key)[0] + 1, explicit=False)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, bool) or value is None:
        return value
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), value)


def resolved(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Replace the interpolations `${other.key}` and `${oc.select:other.key,default}`.

    An interpolation of an unknown key stays, and is reported as missing.
    """
    return {name: _resolve(setting, settings, _DEEPEST) for name, setting in settings.items()}


def _resolve(setting: Setting, settings: Mapping[str, Setting], depth: int) -> Setting:
    value = setting.value
    if not isinstance(value, str) or "${" not in value or setting.missing:
        return setting
    if match := _WHOLE.match(value):
        target = _target(match, setting, settings, depth)
        return replace(
            setting, values=target.values, missing=target.missing, conditional=target.conditional
        )
    missing: list[str] = []

    def fill(match: re.Match[str]) -> str:
        target = _target(match, setting, settings, depth)
        missing.extend(target.missing)
        return str(target.value)

    return replace(setting, values=(_INSIDE.sub(fill, value),), missing=tuple(missing))


def _target(
    match: re.Match[str], setting: Setting, settings: Mapping[str, Setting], depth: int
) -> Setting:
    key = match["key"]
    if key.startswith("."):
        key = f"{setting.name.rpartition('.')[0]}{key}"
    if key in settings and depth:
        return _resolve(settings[key], settings, depth - 1)
    if match["default"] is not None:
        return Setting(key, (value_of(match["default"].strip()),))
    return Setting(key, (match.group(),), setting.line, (match.group(),))
