"""Rows of table tests have names that tell them apart: `-k` finds one, and a failure says which.

pytest names a row by its strings and numbers and counts everything else (`spec3`). So a table needs
`ids=`, or rows with `id=`, unless each row has strings and numbers that no other row has. Seen are
tables written out in `parametrize`; those that are made elsewhere are not.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_rows_of_tables_are_told_apart_by_name() -> None:
    nameless = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for line in nameless_rows(path.read_text())
    ]
    assert not nameless, "rows without a name, give `ids=` or pytest.param(..., id=...):\n" + (
        "\n".join(nameless)
    )


def test_a_row_that_pytest_would_count_is_seen() -> None:
    table = (
        "@pytest.mark.parametrize(('spec', 'ok'), [\n({'a': 1}, True),\n({}, True),\n('x', 1),\n])"
    )
    assert nameless_rows(f"{table}\ndef test(): ...") == [2, 3]
    assert nameless_rows(f"{table[:-1]}, ids=str)\ndef test(): ...") == []


def nameless_rows(source: str) -> list[int]:
    """Lines of the rows whose name would be a count."""
    return [
        row.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and _name(call.func) == "parametrize"
        for row in _nameless(call)
    ]


def _nameless(call: ast.Call) -> list[ast.expr]:
    if len(call.args) < 2 or any(keyword.arg == "ids" for keyword in call.keywords):
        return []
    table = call.args[1]
    rows = table.elts if isinstance(table, ast.List | ast.Tuple) else []
    words = {row: _words(row) for row in rows if not isinstance(row, ast.Starred)}
    often = Counter(words.values())
    return [
        row
        for row, row_id in words.items()
        if row_id is not None and (not row_id or often[row_id] > 1)
    ]


def _words(row: ast.expr) -> tuple[str, ...] | None:
    """Cells of a row that pytest writes in its id; None of a row with an id or of such cells
    alone."""
    cells: list[ast.expr] = row.elts if isinstance(row, ast.Tuple) else [row]
    if isinstance(row, ast.Call) and _name(row.func) == "param":
        if any(keyword.arg == "id" for keyword in row.keywords):
            return None
        cells = row.args
    written = [ast.unparse(cell) for cell in cells if _is_written(cell)]
    return None if len(written) == len(cells) else tuple(written)


def _is_written(cell: ast.expr) -> bool:
    operand = cell.operand if isinstance(cell, ast.UnaryOp) else cell
    return isinstance(operand, ast.Constant)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ""
