"""Tables that translate a project's settings into fields of an RLJob, and how they are applied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sluice_migrate.draft import Draft

# Reason of a setting that a table does not have.
UNKNOWN_SETTING = "sluice does not know this setting"
# Unknown keys that one note names.
_SHOWN_KEYS = 12
# Values of these settings must not get into a manifest, not even in a comment.
_SECRET = re.compile(r"(wandb|api)[-_]?key|secret|password|token$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """An argument or a configuration key with its value.

    Attributes
    ----------
    values
        The words of an argument, or one parsed value.
    missing
        Variables and commands that the value depends on and that are not known.
    conditional
        Variables in it that are set under a condition that only the machine can decide.
    explicit
        False if it comes from a configuration file, in which it may be a default.

    """

    name: str
    values: tuple[Any, ...]
    line: int = 0
    missing: tuple[str, ...] = ()
    conditional: tuple[str, ...] = ()
    explicit: bool = True

    @property
    def value(self) -> Any:
        """The last word; True for a flag without any."""
        return self.values[-1] if self.values else True

    @property
    def shown(self) -> str:
        """Name and value for a message; only the name if the value is a secret."""
        if _SECRET.search(self.name):
            return self.name
        return " ".join([self.name, *map(str, self.values)])


class Settings(dict[str, Setting]):
    """Settings by name; `used` has the names that were translated already."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        super().__init__({name: _from_home(setting) for name, setting in settings.items()})
        self.used: set[str] = set()

    def take(self, name: str) -> Setting | None:
        """Return a setting, and mark it as translated."""
        self.used.add(name)
        return super().get(name)

    def on(self, name: str) -> bool:
        """Tell whether a flag is given, or a key is true; mark it as translated."""
        setting = self.take(name)
        return setting is not None and setting.value not in (False, None, "False", "false")


_HOME = "${HOME}"


def _from_home(setting: Setting) -> Setting:
    """Return the setting with `~` for an unknown home at the beginning of a path.

    Paths of a job may begin with `~`, the home of whoever runs it.
    """
    if "HOME" not in setting.missing:
        return setting
    values = tuple(map(_with_tilde, setting.values))
    if _HOME in str(values):
        return setting
    return replace(
        setting, values=values, missing=tuple(name for name in setting.missing if name != "HOME")
    )


def _with_tilde(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_with_tilde, value)]
    if isinstance(value, str) and (value == _HOME or value.startswith(f"{_HOME}/")):
        return "~" + value.removeprefix(_HOME)
    return value


@dataclass(frozen=True, slots=True)
class Field:
    """Entry of a setting that becomes a field of the job.

    Attributes
    ----------
    path
        The field, below `spec`.
    convert
        Converts the value; raises ValueError with the reason if it cannot.
    note
        Something that the reader of the manifest should check.
    convert_words
        Converts a list of several words; None if the last word counts.

    """

    path: str
    convert: Callable[[Any], Any]
    note: str = ""
    convert_words: Callable[[list[str]], Any] | None = None


@dataclass(frozen=True, slots=True)
class Covered:
    """Entry of a setting that needs no field: sluice does it always, or has no use for it.

    It is not reported.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Entry of a setting without a counterpart; not reported if its value is one of `unless`."""

    why: str
    unless: tuple[Any, ...] = ()


Translation = Field | Covered | Unsupported

# Entries that both projects share.
ALWAYS = Covered("sluice does it always")
PACKED = Covered("sluice packs micro-batches by tokens")


@dataclass(frozen=True, slots=True)
class Table:
    """The translation of all settings of a project.

    Attributes
    ----------
    project
        Its name, as messages say it.
    entries
        Translations by the names of settings.
    prefixes
        (prefix, translation) of settings that `entries` does not have; the first that fits
        counts. A function gets the setting's name; it returns None if another prefix may fit.
    defaults
        (field, the project's default, its name there) if sluice has another default.

    """

    project: str
    entries: Mapping[str, Translation]
    prefixes: tuple[tuple[str, Translation | Callable[[str], Translation | None]], ...] = ()
    defaults: tuple[tuple[str, Any, str], ...] = field(default=())

    def entry(self, name: str) -> Translation:
        """Return the translation of a setting."""
        if name in self.entries:
            return self.entries[name]
        for prefix, translation in self.prefixes:
            if name.startswith(prefix):
                entry = translation(name) if callable(translation) else translation
                if entry:
                    return entry
        return Unsupported(UNKNOWN_SETTING)

    def translate(self, draft: Draft, settings: Settings) -> None:
        """Translate every setting that is not translated yet."""
        unknown: list[str] = []
        for name, setting in settings.items():
            if name in settings.used or setting.value is None:
                continue
            match self.entry(name):
                case Field(path, convert, note, convert_words):
                    if convert_words and len(setting.values) > 1:
                        words = [*map(str, setting.values)]
                        setting, convert = replace(setting, values=(words,)), convert_words
                    set_field(draft, path, setting, convert, note)
                case Unsupported(why, unless):
                    if not setting.explicit and name not in self.entries:
                        # A configuration file lists many defaults: one note for all of them.
                        unknown += [name] if setting.value not in (False, 0, "", [], {}) else []
                    elif setting.value not in unless:
                        draft.note("not translated", setting.shown, why, setting.line)
        if unknown:
            more = ", ..." if len(unknown) > _SHOWN_KEYS else ""
            shown = ", ".join(unknown[:_SHOWN_KEYS]) + more
            why = f"sluice has no counterpart: {shown}"
            draft.note("not translated", f"{len(unknown)} other keys", why)

    def write_defaults(self, draft: Draft) -> None:
        """Write the project's defaults into fields that are not set, with a note for each."""
        for path, value, name in self.defaults:
            if draft.get(path) is None:
                draft.set(path, value, f"default of {name}")
                draft.note("other default", path, f"{value} ({self.project}, {name})")


def note_unused(draft: Draft, settings: Settings, names: Iterable[str], why: str) -> None:
    """Report settings that have no effect in the script, so that each is accounted for."""
    for name in names:
        if setting := settings.take(name):
            draft.note("not translated", setting.shown, why, setting.line)


def set_field(
    draft: Draft,
    path: str,
    setting: Setting | None,
    convert: Callable[[Any], Any],
    note: str = "",
    *,
    keep_variables: bool = False,
) -> bool:
    """Set a field of the job from a setting.

    Parameters
    ----------
    draft
        The job.
    path
        The field, below `spec`.
    setting
        Its source; if None, the field is not set.
    convert
        Converts the value; raises ValueError with the reason if it cannot.
    note
        Something that the reader of the manifest should check.
    keep_variables
        Write a value with unknown variables as it is. Texts and paths always are.

    Returns
    -------
    True if the field is set. If the value cannot be translated, a note says why.

    """
    if setting is None:
        return False
    if setting.missing and convert not in (as_text, as_path) and not keep_variables:
        why = f"the value is not in the script: {how_to_supply(setting.missing)}"
        draft.note("not translated", setting.shown, why, setting.line)
        return False
    try:
        draft.set(path, convert(setting.value), setting.name)
    except ValueError as error:
        draft.note("not translated", setting.shown, str(error), setting.line)
        return False
    if setting.missing:
        why = f"part of the value is not in the script: {how_to_supply(setting.missing)}"
        draft.note("check", path, why, setting.line)
    if setting.conditional:
        variables = shown_names(setting.conditional)
        why = f"{variables} is set under a condition that only the machine can decide"
        draft.note("check", path, why, setting.line)
    if note:
        draft.note("check", path, note, setting.line)
    return True


def how_to_supply(missing: tuple[str, ...]) -> str:
    """Say how to supply a value: variables by --var; the output of commands is not known."""
    variables = shown_names(tuple(name for name in missing if name.isidentifier()))
    others = shown_names(tuple(name for name in missing if not name.isidentifier()))
    parts = [f"set {variables} with --var"] if variables else []
    return "; ".join(parts + ([f"{others} is not run"] if others else []))


def shown_names(expansions: tuple[str, ...]) -> str:
    """List variables with their dollar, and other expansions as they are, each once."""
    return ", ".join(
        dict.fromkeys(f"${name}" if name.isidentifier() else name for name in expansions)
    )


def as_text(value: Any) -> str:
    """Convert to a text. Raises ValueError."""
    if value is None or isinstance(value, bool | list | dict):
        raise ValueError(f"expected a text, found {value!r}")
    return str(value)


def as_path(value: Any) -> str:
    """Convert to a path. `~` stays: the home of a pod is another one."""
    return as_text(value)


def as_integer(value: Any) -> int:
    """Convert to a whole number. Raises ValueError."""
    number = as_number(value)
    if number != int(number):
        raise ValueError(f"expected a whole number, found {value!r}")
    return int(number)


def as_number(value: Any) -> float:
    """Convert to a number. Raises ValueError."""
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, found {value!r}") from None
    return number


def as_boolean(value: Any) -> bool:
    """Convert to true or false. Raises ValueError."""
    if str(value).lower() in ("true", "1", "yes"):
        return True
    if str(value).lower() in ("false", "0", "no"):
        return False
    raise ValueError(f"expected true or false, found {value!r}")
