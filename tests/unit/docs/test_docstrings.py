"""Words: docstrings open with what a thing is or does, and names say what they hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RELATIVE = re.compile(r"(What|Who|Whom|Whose|Whether)\b")
# Names that say how a value came about.
NAMELESS = {"found", "made", "given"}
FOLDERS = (
    "sluice",
    "cli",
    "migrate",
    "client",
    "operator",
    "services",
    "observability",
    "tests",
    "benchmarks",
)
FILES = [
    path
    for folder in (*FOLDERS, "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "wire/v1" not in str(path)
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_names_are_words_for_a_stranger(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documented = [
        n
        for n in nodes
        if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    texts = [text for node in documented if (text := ast.get_docstring(node))]
    assert [text.splitlines()[0] for text in texts if RELATIVE.match(text)] == []
    assert NAMELESS.isdisjoint(filter(None, map(name_of, nodes)))


def name_of(node: ast.AST) -> str | None:
    """The name that a node gives to something."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
    return None
