"""Fields of spec that were renamed or dropped, and the rewriting of manifests that have them.

`RENAMED` is the only list. Loading a manifest, the API server (`crd.py` keeps the old names, only
to refuse them with the new one) and `sluice migrate-manifest` all read it.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from sluice.api.schema import yaml_text
from sluice.api.schema.annotations import Location

KIND = "RLJob"
COMMAND = "sluice migrate-manifest"


@dataclass(frozen=True, slots=True)
class RenamedField:
    """A field of spec as it was called until `since`.

    old, new: dotted paths without `spec.`. new: empty if the field was dropped; `reason` then says
    what is in its place. exceptions: values of the old field that became another field or value.
    scalar: only a value that is no object is old, because the name now has an object. type: of the
    old value, as JSON Schema calls it.
    """

    old: str
    new: str = ""
    reason: str = ""
    exceptions: Mapping[Any, tuple[str, Any]] = field(default_factory=dict)
    scalar: bool = False
    type: Literal["object", "string"] = "object"
    since: str = "v0.2"

    def becomes(self, value: Any) -> tuple[str, Any]:
        """(path, value) in the new form."""
        if isinstance(value, str) and value in self.exceptions:
            return self.exceptions[value]
        return self.new, value

    def sentence(self, value: Any, below: str = "", file: str = "FILE") -> str:
        """The new name, for a user whose manifest has the field. below: the path within it."""
        old = ".".join(part for part in ("spec", self.old, below) if part)
        new, _ = self.becomes(value)
        if not new:
            return (
                f"{old} was dropped in {self.since}: {self.reason}; `{COMMAND} {file}` takes it out"
            )
        new = ".".join(part for part in ("spec", new, below) if part)
        return f"{old} is {new} since {self.since}; `{COMMAND} {file}` rewrites the file"


RENAMED = (
    RenamedField(
        "algorithm.loss",
        "algorithm.loss.type",
        exceptions={"clip": ("algorithm.loss.type", "ppo")},
        scalar=True,
    ),
    RenamedField(
        "algorithm.lossFunction",
        "algorithm.loss.function",
        exceptions={"sft": ("algorithm.loss.type", "sft")},
        type="string",
    ),
    RenamedField("algorithm.clip", "algorithm.loss.clip"),
    RenamedField("algorithm.gate", "algorithm.loss.gate"),
    RenamedField("algorithm.clipCov", "algorithm.loss.covariance"),
    RenamedField("algorithm.klCov.ppoKlCoef", reason="the weight is always 1"),
    RenamedField("algorithm.klCov", "algorithm.loss.covariance"),
    RenamedField(
        "trainer.balance.equalCounts", reason="ranks are balanced by tokens or operations alone"
    ),
    RenamedField("trainer.balance.by", "trainer.balance"),
    RenamedField(
        "trainer.deviceClass", reason="the DeviceClass is always gpu.nvidia.com", type="string"
    ),
    RenamedField("failurePolicy.rolloutBackoff.baseSeconds", "failurePolicy.rolloutBackoffSeconds"),
    RenamedField(
        "failurePolicy.rolloutBackoff.maxSeconds",
        reason="the longest pause is 30 times rolloutBackoffSeconds",
    ),
)


@dataclass(frozen=True, slots=True)
class OldField:
    """An old field that a spec sets. location: of its value in the manifest."""

    location: Location
    renamed: RenamedField
    value: Any

    def sentence(self, file: str = "FILE") -> str:
        below = ".".join(map(str, self.location[1:])).removeprefix(self.renamed.old).strip(".")
        return self.renamed.sentence(self.value, below, file)


def old_fields(spec: Any) -> list[OldField]:
    """The old fields that a spec sets, leaf by leaf, in the order of `RENAMED`."""
    seen: set[Location] = set()
    fields: list[OldField] = []
    for renamed in RENAMED:
        holder, name = _holder(spec, renamed.old)
        if holder is None or (renamed.scalar and isinstance(holder[name], Mapping)):
            continue
        at = ("spec", *renamed.old.split("."))
        for location, value in _leaves(holder[name], at):
            if location not in seen:
                seen.add(location)
                fields.append(OldField(location, renamed, value))
    return fields


def migrate_spec(spec: Any) -> bool:
    """Rewrite a spec in place, with its comments if it has any. False: it has no old field."""
    fields = old_fields(spec)
    for renamed in RENAMED:
        holder, name = _holder(spec, renamed.old)
        if holder is None or (renamed.scalar and isinstance(holder[name], Mapping)):
            continue
        _move(spec, renamed)
    return bool(fields)


def migrate_text(text: str) -> str:
    """A file of YAML documents with the spec of each RLJob rewritten; all else stays as it is.

    Raises YAMLError if the text is no YAML.
    """
    return "".join(map(_migrate_document, _documents(text)))


def _documents(text: str) -> Iterator[str]:
    """The documents of a file with the lines `---` before them, so that joining gives the file."""
    starts = [match.start() for match in re.finditer(r"^---(?=\s|$)", text, re.MULTILINE)]
    edges = [0, *(start for start in starts if start), len(text)]
    for start, end in itertools.pairwise(edges):
        yield text[start:end]


def _migrate_document(text: str) -> str:
    yaml_text.check_proportion(text)
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    documents = [document for document in yaml.load_all(text) if document is not None]
    if len(documents) != 1 or not isinstance(documents[0], CommentedMap):
        return text
    (document,) = documents
    if document.get("kind") != KIND or not migrate_spec(document.get("spec")):
        return text
    # Sequences are indented below their key in some files, and not in others.
    indented = re.search(r"^( *)[^\s#-][^\n]*:[ ]*(?:#[^\n]*)?\n\1  +- ", text, re.MULTILINE)
    yaml.indent(mapping=2, sequence=4 if indented else 2, offset=2 if indented else 0)
    yaml.explicit_start = text.startswith("---")
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _holder(spec: Any, path: str) -> tuple[Any, str]:
    """(object, key) of a path that a spec sets; (None, key) if it does not."""
    *parents, name = path.split(".")
    for parent in parents:
        spec = spec.get(parent) if isinstance(spec, Mapping) else None
    return (spec if isinstance(spec, Mapping) and name in spec else None), name


def _leaves(value: Any, at: Location) -> Iterator[tuple[Location, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*at, str(key)))
    else:
        yield at, value


def _move(spec: Any, renamed: RenamedField) -> None:
    old = renamed.old.split(".")
    holder, name = _holder(spec, renamed.old)
    assert holder is not None
    new_path, value = renamed.becomes(holder[name])
    new = new_path.split(".") if new_path else []
    shared = 0
    while shared < min(len(old), len(new)) and old[shared] == new[shared]:
        shared += 1
    # An object may take the name of a value (`algorithm.loss`), and the other way round
    # (`trainer.balance`).
    shared = min(shared, len(old) - 1, max(len(new) - 1, 0))
    top = spec
    for part in old[:shared]:
        top = top[part]
    position = list(top).index(old[shared])
    comment = _pop(holder, name)
    _drop_empty(spec, old[:-1], shared)
    if new:
        _insert(top, new[shared:], value, position, comment)


def _pop(holder: Any, name: str) -> Any:
    """Take a key out. Returns the comment at its end of line."""
    comments = holder.ca.items.pop(name, None) if isinstance(holder, CommentedMap) else None
    del holder[name]
    return comments


def _drop_empty(spec: Any, parents: list[str], shared: int) -> None:
    """Take out the objects of an old path that are empty now."""
    for end in range(len(parents), shared, -1):
        holder, name = _holder(spec, ".".join(parents[:end]))
        if holder is None or holder[name]:
            return
        del holder[name]


def _insert(top: Any, path: list[str], value: Any, position: int, comment: Any) -> None:
    """Set a value below `top`, in objects that are made at `position` if they are missing."""
    *parents, name = path
    if not parents:
        _set(top, name, value, position, comment)
        return
    block = isinstance(value, CommentedMap) and not value.fa.flow_style()
    inner = top.get(parents[0])
    if not isinstance(inner, Mapping):
        inner = CommentedMap() if isinstance(top, CommentedMap) else {}
        if isinstance(inner, CommentedMap) and not block:
            inner.fa.set_flow_style()
        # The comment ends the line, which is that of the outermost flow mapping.
        _set(top, parents[0], inner, position, None if block else comment)
        comment = comment if block else None
    elif (block or comment) and isinstance(inner, CommentedMap) and inner.fa.flow_style():
        inner.fa.set_block_style()
        if (moved := top.ca.items.pop(parents[0], None)) and inner:
            inner.ca.items[next(iter(inner))] = moved
    present = inner.get(name)
    if not parents[1:] and isinstance(present, Mapping) and isinstance(value, Mapping):
        present.update(value)  # type: ignore[attr-defined]
    else:
        _insert(inner, path[1:], value, len(inner), comment)


def _set(holder: Any, name: str, value: Any, position: int, comment: Any) -> None:
    if name in holder or not isinstance(holder, CommentedMap):
        holder[name] = value
    else:
        holder.insert(position, name, value)
    if comment is not None and isinstance(holder, CommentedMap):
        holder.ca.items[name] = comment
