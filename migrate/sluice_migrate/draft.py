"""The RLJob that an import builds: fields with their origins, and notes for the reader."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from sluice.api.groups.losses import CLIPPED

NoteKind = Literal["not translated", "check", "other default"]


class ImportFailedError(ValueError):
    """The input cannot be imported. The message says what was expected."""


@dataclass(frozen=True, slots=True)
class Note:
    """A remark on a setting or a field, with the line of the script if it has one."""

    kind: NoteKind
    subject: str
    text: str
    line: int = 0


@dataclass(slots=True)
class Draft:
    """The job so far. `origins` has the setting that each field, a dotted path, comes from."""

    name: str = "imported"
    spec: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def set(self, path: str, value: Any, origin: str) -> None:
        """Set a field, and create its parents."""
        *parents, last = path.split(".")
        target = self.spec
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
        self.origins[path] = origin

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value of a field, or the default if it is not set."""
        target: Any = self.spec
        for part in path.split("."):
            if not isinstance(target, dict) or part not in target:
                return default
            target = target[part]
        return target

    def drop(self, path: str) -> Any:
        """Remove a field, and parents that are then empty. Returns its value."""
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
        """Add a note, once."""
        note = Note(kind, subject, text, line)
        if note not in self.notes:
            self.notes.append(note)


def job_name(title: str) -> str:
    """Make a name that Kubernetes accepts: `run-qwen3-4B.sh` becomes qwen3-4b."""
    slug = re.sub(
        r"[^a-z0-9]+", "-", title.lower().removeprefix("run-").removeprefix("run_")
    ).strip("-")
    slug = re.sub(r"^[^a-z]+", "", slug)[:40].rstrip("-")
    return slug or "imported"


def drop_unused_clip(draft: Draft) -> None:
    """Remove the bounds of the policy ratio if the loss does not clip, with a note for each."""
    loss = draft.get("algorithm.loss.type", "ppo")
    if loss in CLIPPED:
        return
    for path in [path for path in draft.origins if path.startswith("algorithm.loss.clip.")]:
        draft.note("not translated", draft.origins[path], f"the loss {loss} does not clip")
        draft.drop(path)
