"""An RLJob in the making: fields, where each came from, and what is to be said about the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

NoteKind = Literal["not translated", "check", "other default"]
_SHOWN = 12
_SECRET = re.compile(r"(wandb|api)[-_]?key|secret|password|token$", re.IGNORECASE)


class ImportFailedError(ValueError):
    """Nothing to translate. The message says what was looked for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One argument or configuration key as it was given. values: its words, or one parsed value.

    missing: what it would take to know the value. doubtful: variables in it that are set under a
    condition which is not known.
    """

    name: str
    values: tuple[Any, ...]
    line: int = 0
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    explicit: bool = True
    """False for what stands in a configuration file,
    which may be no more than a default written out."""

    @property
    def value(self) -> Any:
        """The last word; True for a flag without any."""
        return self.values[-1] if self.values else True

    @property
    def shown(self) -> str:
        """As it was given; but what is secret is not for a manifest, not even in a comment."""
        if _SECRET.search(self.name):
            return self.name
        return " ".join([self.name, *map(str, self.values)])


@dataclass(frozen=True, slots=True)
class Note:
    kind: NoteKind
    subject: str
    text: str
    line: int = 0


@dataclass(slots=True)
class Draft:
    """`spec` by dotted paths. origins: what wrote each path."""

    name: str = "imported"
    spec: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def set(self, path: str, value: Any, origin: str) -> None:
        *parents, last = path.split(".")
        target = self.spec
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
        self.origins[path] = origin

    def get(self, path: str, default: Any = None) -> Any:
        target: Any = self.spec
        for part in path.split("."):
            if not isinstance(target, dict) or part not in target:
                return default
            target = target[part]
        return target

    def drop(self, path: str) -> Any:
        """Take a field out, and parents that are empty without it."""
        *parents, last = path.split(".")
        target = self.get(".".join(parents)) if parents else self.spec
        if not isinstance(target, dict) or last not in target:
            return None
        value = target.pop(last)
        self.origins.pop(path, None)
        if not target and parents:
            self.drop(".".join(parents))
        return value

    def note(self, kind: NoteKind, subject: str, text: str, line: int = 0) -> None:
        note = Note(kind, subject, text, line)
        if note not in self.notes:
            self.notes.append(note)


class Settings(dict[str, Setting]):
    """All settings by name; knows which were looked at."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        super().__init__(settings)
        self.seen: set[str] = set()

    def take(self, name: str) -> Setting | None:
        self.seen.add(name)
        return super().get(name)

    def on(self, name: str) -> bool:
        """True where a flag is given, or a key is true."""
        setting = self.take(name)
        return setting is not None and setting.value not in (False, None, "False", "false")


def idle(draft: Draft, settings: Settings, names: Iterable[str], why: str) -> None:
    """Note settings that have no effect in the source, so that none is left out without a word."""
    for name in names:
        if setting := settings.take(name):
            draft.note("not translated", setting.shown, why, setting.line)


@dataclass(frozen=True, slots=True)
class To:
    """Becomes a field. convert raises ValueError with what it cannot do. many: the same of a list
    of several words.
    """

    path: str
    convert: Callable[[Any], Any]
    note: str = ""
    many: Callable[[list[str]], Any] | None = None


@dataclass(frozen=True, slots=True)
class Same:
    """Needs nothing: sluice does it always, or has no use for it. Not reported."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Cannot be translated. unless: the value with which it changes nothing."""

    why: str
    unless: tuple[Any, ...] = ()


Translation = To | Same | Lost


def translate(
    draft: Draft,
    settings: Settings,
    table: Mapping[str, Translation],
    fallback: Callable[[str], Translation],
) -> None:
    """Every setting that nobody took: by its entry, or by the fallback."""
    others: list[str] = []
    for name, setting in settings.items():
        if name in settings.seen or setting.value is None:
            continue
        match table.get(name) or fallback(name):
            case To(path, convert, note, many):
                if many and len(setting.values) > 1:
                    setting, convert = replace(setting, values=([*map(str, setting.values)],)), many
                put(draft, path, setting, convert, note)
            case Lost(why, unless):
                if not setting.explicit and name not in table:
                    others += [name] if setting.value not in (False, 0, "", [], {}) else []
                elif setting.value not in unless:
                    draft.note("not translated", setting.shown, why, setting.line)
    if others:
        shown = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
        draft.note(
            "not translated", f"{len(others)} other keys", f"sluice knows none of them: {shown}"
        )


def put(
    draft: Draft,
    path: str,
    setting: Setting | None,
    convert: Callable[[Any], Any],
    note: str = "",
    *,
    literal: bool = False,
) -> bool:
    """Set a field from a setting. False where there is no setting, or where it cannot be
    translated: that is noted.

    literal: a value that is not wholly known is written as it stands, variables and all, as texts
    always are.
    """
    if setting is None:
        return False
    if setting.missing and convert not in (text, location) and not literal:
        draft.note(
            "not translated",
            setting.shown,
            f"the script does not say it: {needs(setting.missing)}",
            setting.line,
        )
        return False
    try:
        draft.set(path, convert(setting.value), setting.name)
    except ValueError as error:
        draft.note("not translated", setting.shown, str(error), setting.line)
        return False
    if setting.missing:
        draft.note(
            "check",
            path,
            f"the script does not say all of it: {needs(setting.missing)}",
            setting.line,
        )
    if setting.doubtful:
        doubtful = names(setting.doubtful)
        draft.note(
            "check",
            path,
            f"only a condition that the machine would decide sets {doubtful}",
            setting.line,
        )
    if note:
        draft.note("check", path, note, setting.line)
    return True


def needs(missing: tuple[str, ...]) -> str:
    """Words for the source of a value: variables of the environment,
    or what only a shell can work out.
    """
    variables = names(tuple(name for name in missing if name.isidentifier()))
    others = names(tuple(name for name in missing if not name.isidentifier()))
    parts = [f"--var gives {variables}"] if variables else []
    return "; ".join(parts + ([f"{others} would have to be run"] if others else []))


def names(expansions: tuple[str, ...]) -> str:
    """Variables with their dollar, and other expansions as they are, each once."""
    return ", ".join(
        dict.fromkeys(f"${name}" if name.isidentifier() else name for name in expansions)
    )


def text(value: Any) -> str:
    if value is None or isinstance(value, bool | list | dict):
        raise ValueError(f"expected a text, found {value!r}")
    return str(value)


def location(value: Any) -> str:
    """A path. `~` is left alone: it means another home in a pod."""
    return text(value)


def integer(value: Any) -> int:
    number = real(value)
    if number != int(number):
        raise ValueError(f"expected a whole number, found {value!r}")
    return int(number)


def real(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, found {value!r}") from None
    return number


def flag(value: Any) -> bool:
    if str(value).lower() in ("true", "1", "yes"):
        return True
    if str(value).lower() in ("false", "0", "no"):
        return False
    raise ValueError(f"expected true or false, found {value!r}")


def job_name(title: str) -> str:
    """A name that Kubernetes takes: `run-qwen3-4B.sh` -> qwen3-4b."""
    slug = re.sub(
        r"[^a-z0-9]+", "-", title.lower().removeprefix("run-").removeprefix("run_")
    ).strip("-")
    slug = re.sub(r"^[^a-z]+", "", slug)[:40].rstrip("-")
    return slug or "imported"
