"""The files that docs/architecture.md names exist, and its table of additions is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text()
PRODUCTION = ("sluice", "cli", "client", "operator", "services")
# Folders of the examples that have one: files in it may name the example.
OWN_FOLDERS = {
    "sglang": "sluice/engines/sglang",
    "fsdp": "services/trainer/sluice_trainer/fsdp",
    "sluice_migrate.verl": "migrate/sluice_migrate/verl",
}
# Folders and suffixes of files that are searched for an example, if it is not production code.
SEARCHED = {
    "sluice_migrate.verl": (("migrate",), ".py"),
    "math-001": (("tests/unit/rewards",), ".jsonl"),
}


def additions() -> list[tuple[str, list[str]]]:
    """(example, files that name it) of each row of the table."""
    rows = [
        line.split(" | ")
        for line in PAGE.partition("## Where do I add")[2].splitlines()
        if line.startswith("| a")
    ]
    return [(cells[3].strip("`"), re.findall(r"`([^`]+)`", cells[4])) for cells in rows]


def naming(word: str) -> list[str]:
    """Files that name the word: as a quoted string, or as an identifier if it has an underscore."""
    text = re.escape(word)
    pattern = re.compile(rf"\b{text}\b" if "_" in word else rf"[\"']{text}[\"']")
    folders, suffix = SEARCHED.get(word, (PRODUCTION, ".py"))
    files = []
    for path in (path for folder in folders for path in (ROOT / folder).rglob(f"*{suffix}")):
        name = str(path.relative_to(ROOT))
        elsewhere = not name.startswith((OWN_FOLDERS.get(word, "-"), "sluice/wire/v1"))
        if elsewhere and pattern.search(path.read_text()):
            files.append(name)
    return sorted(files)


def test_there_are_eleven_additions() -> None:
    assert len(additions()) == 11


@pytest.mark.parametrize(
    ("example", "files"), [pytest.param(*row, id=row[0]) for row in additions()]
)
def test_an_addition_is_named_where_the_table_says(example: str, files: list[str]) -> None:
    assert naming(example) == files


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE))))
def test_a_file_that_is_named_exists(name: str) -> None:
    assert [
        path
        for folder in (*PRODUCTION, "migrate", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if str(path).endswith(f"/{name}")
    ]


def test_rooms_and_files_of_the_walks_exist() -> None:
    walks = PAGE.partition("## How a sample travels")[2].partition("## Where do I add")[0]
    existing = {
        path
        for folder in PRODUCTION
        for path in (ROOT / folder).rglob("*")
        if path.suffix in ("", ".py")
    }
    ends = {str(path.with_suffix("")) for path in existing}
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+|[a-z_]+/)`", walks):
        assert any(end.endswith(f"/{name.rstrip('/')}") for end in ends), name
