"""The glossary stays short, sorted and true to the words of the pages."""

from __future__ import annotations

import re

from tests.tools import ROOT

PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "glossary.md"]
ROWS = re.findall(
    r"^\| (?!term|---)([^|]+) \| ([^|]+) \|$",
    (ROOT / "docs" / "glossary.md").read_text(),
    re.MULTILINE,
)
TERMS = [term for term, _ in ROWS]


def test_the_glossary_has_at_most_forty_terms_in_order() -> None:
    assert 30 <= len(TERMS) <= 40
    assert sorted(TERMS, key=str.lower) == TERMS
    assert len(set(TERMS)) == len(TERMS)


def test_pages_use_every_term() -> None:
    text = "\n".join(path.read_text() for path in PAGES).lower()
    assert [term for term in TERMS if not re.search(rf"\b{re.escape(term.lower())}", text)] == []


def test_meanings_are_one_short_sentence() -> None:
    assert [term for term, meaning in ROWS if len(meaning.split()) > 26] == []
