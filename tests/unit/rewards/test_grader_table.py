"""Rates of wrong verdicts on a table of answers; docs/rewards.md states them.

SLUICE_UPDATE_GOLDEN=1 writes the rates into the page.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

from tests.tools import ROOT
from tests.unit.rewards.grader_table import GRADERS, line, rates, rows

PAGE = ROOT / "docs" / "rewards.md"
NAMES = [grader.name for grader in GRADERS]
# Known false positives. A new one is a fault; one that is mended leaves this list.
PAID_ALTHOUGH_WRONG = {
    "math": {"6 <- 6\\%", "\\frac{22}{7} <- 3.142857"},
    "math_prm800k": {"6 <- 6\\%", "\\emptyset <- \\{\\emptyset\\}"},
    "deepscaler": {"6 <- 6\\%", "\\emptyset <- \\{\\emptyset\\}"},
    "contains": {
        "Paris <- Paris, London, Rome, Madrid",
        "Paris <- Paris or London",
        "Paris <- Not Paris",
        "Paris <- Parisian",
        "42 <- 40, 41, 42, 43",
        "yes <- yes and no",
        "yes <- yesterday",
    },
}


def test_most_rows_are_wrong_answers_and_each_has_a_name() -> None:
    assert len(rows()) >= 400
    assert sum(not row.right for row in rows()) > len(rows()) / 2
    assert [id_ for id_, count in Counter(row.id for row in rows()).items() if count > 1] == []
    assert all(row.why for row in rows())


def test_no_answer_is_both_right_and_wrong() -> None:
    verdicts = {(row.kind, str(row.label), row.answer, row.right) for row in rows()}
    assert len({verdict[:3] for verdict in verdicts}) == len(verdicts) == len(rows())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "math-verify alone"])
def test_a_grader_pays_no_wrong_answer_but_the_known_ones(name: str) -> None:
    labels = {row.id: f"{row.label} <- {row.answer}" for row in rows()}
    paid = {labels[id_] for id_ in rates(name).false_positives}
    assert paid == PAID_ALTHOUGH_WRONG.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_states_the_rates(name: str) -> None:
    page = PAGE.read_text()
    stated = re.search(rf"^{re.escape(line(name).split(' | ')[0])} \| \d.*$", page, re.MULTILINE)
    assert stated, f"docs/rewards.md has no line for {name} in its table of rates"
    if os.environ.get("SLUICE_UPDATE_GOLDEN"):
        PAGE.write_text(page.replace(stated[0], line(name)))
    assert stated[0] == line(name), f"pays in error: {rates(name).false_positives}"


def test_math_is_better_than_the_library_alone_in_both_ways() -> None:
    ours, alone = rates("math"), rates("math-verify alone")
    assert len(ours.false_positives) < len(alone.false_positives)
    assert len(ours.false_negatives) < len(alone.false_negatives)
