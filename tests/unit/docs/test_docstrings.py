"""Docstrings open with what a thing is or does, and so name their subject."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RELATIVE = re.compile(r"(What|Who|Whom|Whose|Whether)\b")
FILES = [
    path
    for folder in ("sluice", "cli", "operator", "services")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "wire/v1" not in str(path)
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_opens_with_a_relative_clause(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text()))
    documented = [
        n
        for n in nodes
        if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    texts = [text for node in documented if (text := ast.get_docstring(node))]
    assert [text.splitlines()[0] for text in texts if RELATIVE.match(text)] == []
