"""Every command in a block of a page is run by a test, or the page says that it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import PAGES, Block, blocks, name_of
from tests.tools import ROOT

BLOCKS = [
    pytest.param(block, id=f"{name_of(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_what_our_test_does_not_run_is_marked(block: Block) -> None:
    """It runs calls of sluice alone (tests/integration/run/test_pages.py)."""
    assert [line for line in block.unmarked() if not line.startswith(("sluice ", "cd "))] == []


@pytest.mark.parametrize("block", BLOCKS)
def test_a_mark_is_about_a_command_of_its_block(block: Block) -> None:
    idle = [mark for mark in block.marks if not any(map(mark.covers, block.commands))]
    assert idle == []


@pytest.mark.parametrize("block", BLOCKS)
def test_the_test_that_runs_a_command_is_there(block: Block) -> None:
    marks = (*block.marks, *block.of_page)
    tests = [mark.words for mark in marks if mark.kind == "run by"]
    assert [path for path in tests if not (ROOT / path).is_file()] == []


def test_a_command_without_a_mark_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run (make): long -->\n```\nmake test\nkubectl get pods  # all\n```\n"
        "```console\n$ sluice list \\\n  -A\nrun  state\n```\n```yaml\nmake: kubectl\n```\n"
    )
    assert [list(block.unmarked()) for block in blocks(page)] == [
        ["kubectl get pods"],
        ["sluice list -A"],
    ]
