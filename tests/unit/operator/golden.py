"""Golden files of rendered objects: one job in full, every other job as its differences from it.

`NAME.yaml` of the base job holds all of its objects. `NAME.diff` of another job holds, for each of
its objects in order, a unified diff from the most similar object: one of the base job, or an
earlier one of the same job. Together with the base a diff determines its object completely,
so a comparison of diffs is a comparison of whole objects. `SLUICE_UPDATE_GOLDEN=1 pytest` writes
the files anew.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from sluice_operator.plan import KubeObject

DIRECTORY = Path(__file__).with_name("golden")
UPDATE_HINT = "SLUICE_UPDATE_GOLDEN=1 writes the golden files anew"


def assert_golden(file_name: str, text: str) -> None:
    """Compare a text with its golden file, or write the file if SLUICE_UPDATE_GOLDEN is set."""
    path = DIRECTORY / file_name
    if os.environ.get("SLUICE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), UPDATE_HINT


def to_yaml(*objects: KubeObject) -> str:
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 4096
    yaml.representer.ignore_aliases = lambda _: True
    text = io.StringIO()
    yaml.dump_all([_literal(document) for document in objects], text)
    return text.getvalue()


def _literal(node: Any) -> Any:
    """Write texts of several lines as such, for people who read the golden files."""
    if isinstance(node, dict):
        return {key: _literal(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_literal(value) for value in node]
    return LiteralScalarString(node) if isinstance(node, str) and "\n" in node else node


@dataclass(frozen=True)
class _Rendered:
    """An object as YAML. title: kind and name, with the job if it is another one."""

    title: str
    kind: str
    lines: list[str]


def differences(objects: Sequence[KubeObject], base_name: str, base: Sequence[KubeObject]) -> str:
    """Return the objects of a job as differences from the base job's objects."""
    candidates = [_rendered(manifest, f" of {base_name}") for manifest in base]
    parts = []
    for manifest in objects:
        rendered = _rendered(manifest)
        parts.append(_described(rendered, candidates))
        candidates.append(rendered)
    return "\n".join(parts)


def _rendered(manifest: KubeObject, suffix: str = "") -> _Rendered:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    return _Rendered(f"{kind} {name}{suffix}", kind, to_yaml(manifest).splitlines())


def _described(rendered: _Rendered, candidates: Sequence[_Rendered]) -> str:
    """Return a heading and the diff from the most similar candidate, or the object in full."""
    diffs = [
        (candidate.title, _diff(candidate.lines, rendered.lines))
        for candidate in candidates
        if candidate.kind == rendered.kind
    ]
    title, diff = min(diffs, key=lambda pair: len(pair[1]), default=("", rendered.lines))
    if len(diff) >= len(rendered.lines):
        return "\n".join([f"=== {rendered.title}, in full", *rendered.lines, ""])
    return "\n".join([f"=== {rendered.title}, from {title}", *diff, ""])


def _diff(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines of a unified diff, with the path in the YAML after each `@@`."""
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    for number, line in enumerate(lines):
        if match := re.match(r"@@ -(\d+)(,0)?", line):
            # The number of an insertion is that of the line before it.
            above = before[: int(match[1]) if match[2] else int(match[1]) - 1]
            lines[number] = f"{line} {_path(above, lines[number + 1][1:])}".rstrip()
    return lines


def _path(above: Sequence[str], line: str) -> str:
    """Return the keys above a line of YAML, outermost first; list items by their first field."""
    keys: list[str] = []
    indent = _indent(line)
    for upper in reversed(above):
        if _indent(upper) < indent:
            indent = _indent(upper)
            keys.append(upper.strip().removeprefix("- ").removesuffix(":"))
    return " > ".join(reversed(keys))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
