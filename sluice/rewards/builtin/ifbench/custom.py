"""IFBench's `custom:` instructions (Pyatkin et al. 2025), by their ids.

Each belongs to one prompt of the benchmark.
"""

from __future__ import annotations

import datetime
import re
import string
import unicodedata
from itertools import pairwise

from sluice.rewards.builtin.ifbench import text as t
from sluice.rewards.builtin.ifbench.ifeval import InstructionCheck

# European countries north of 45 degrees, from north to south.
_CAPITALS = (
    "Reykjavik",
    "Helsinki",
    "Oslo",
    "Tallinn",
    "Stockholm",
    "Riga",
    "Moscow",
    "Copenhagen",
    "Vilnius",
    "Minsk",
    "Dublin",
    "Berlin",
    "Amsterdam",
    "Warsaw",
    "London",
    "Brussels",
    "Prague",
    "Luxembourg",
    "Paris",
    "Vienna",
    "Bratislava",
    "Budapest",
    "Vaduz",
    "Chisinau",
    "Bern",
    "Ljubljana",
    "Zagreb",
)
# Minimum; the benchmark is lenient about what counts as a country.
_AFRICAN_COUNTRIES = 52
_NAPOLEON = range(1769, 1822)
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_QUESTION = re.compile(r"Question \d+[.|):;]?\s*")


def _multiples(text: str) -> bool:
    return re.findall(r"\d+", text) == [str(n) for n in range(14, 51, 7)]


def _multiple_choice(text: str) -> bool:
    """Check for four questions with five options each, every question longer than the last."""
    if not text.startswith("Question"):
        return False
    questions = [part.strip() for part in _QUESTION.split(text) if part.strip()]
    lengths = []
    for question in questions:
        rows = [row.strip() for row in question.split("\n")]
        options = [bool(_OPTION.match(row)) for row in rows]
        if sum(options) != 5:
            return False
        lengths.append(len(" ".join(rows[: options.index(True)]).strip()))
    return len(lengths) == 4 and all(a < b for a, b in pairwise(lengths))


def _reverse_lines(text: str) -> bool:
    rows = [ascii_only(row.strip(t.PUNCTUATION)) for row in text.split("\n")]
    rows = [row for row in rows if row]
    start = next((i for i, row in enumerate(rows) if "Zimbabwe" in row), len(rows))
    countries = rows[start:]
    return len(countries) >= _AFRICAN_COUNTRIES and countries == sorted(countries, reverse=True)


def _words_reversed(text: str) -> bool:
    return "bald eagle" in " ".join(reversed(t.bare_words(text.lower())))


def _alphabet_story(text: str) -> bool:
    first = [
        s.lstrip(string.punctuation + string.whitespace)[:1].lower() for s in t.sentences(text)
    ]
    return first == list(string.ascii_lowercase)


def _capitals(text: str) -> bool:
    return tuple(city.strip() for city in ascii_only(text).split(",") if city.strip()) == _CAPITALS


def _table(text: str, columns: str, rows: int, delimiter: str = ",") -> list[list[str]] | None:
    """Return header and rows with their quotes; None if the text is not such a table."""
    lines = [_cells(line, delimiter) for line in text.strip().split("\n")]
    names = columns.split()
    sound = [cell.strip('"') for cell in lines[0]] == names and len(lines) == rows + 1
    return lines if sound and all(len(row) == len(names) for row in lines) else None


def _cells(line: str, delimiter: str) -> list[str]:
    """Split a line into cells, ignoring delimiters between double quotes."""
    cells = re.findall(rf'((?:"[^"]*"|[^{delimiter}"])*)(?:{delimiter}|$)', line)
    return [cell.strip() for cell in cells[:-1]]  # the last cell follows the end of the line


def _cities(text: str) -> bool:
    return _table(text, "ID Country City Year Count", 7) is not None


def _special_character(text: str) -> bool:
    table = _table(text, "ProductID Category Brand Price Stock", 14) or []
    return any(re.fullmatch(r'"[^"]*[^\w\s"][^"]*"', cell) for row in table[1:] for cell in row)


def _all_quoted(text: str) -> bool:
    table = _table(text, "StudentID Subject Grade Semester Score", 3, "\t") or [[""]]
    return all(re.fullmatch(r'"[^"]*"', cell) for row in table for cell in row)


def _dates(text: str) -> bool:
    return all(_is_date(date.strip()) for date in text.strip().split(","))


def _is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return False
    try:
        return datetime.date.fromisoformat(text).year in _NAPOLEON
    except ValueError:
        return False


def ascii_only(text: str) -> str:
    """Remove accents: `São Tomé` becomes `Sao Tome`."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


CHECKS: dict[str, InstructionCheck] = {
    "custom:character_reverse": lambda text: "elgae dlab" in text.lower(),
    "custom:csv_city": _cities,
    "custom:csv_quotes": _all_quoted,
    "custom:csv_special_character": _special_character,
    "custom:date_format_list": _dates,
    "custom:european_capitals_sort": _capitals,
    "custom:mcq_count_length": _multiple_choice,
    "custom:multiples": _multiples,
    "custom:reverse_newline": _reverse_lines,
    "custom:sentence_alphabet": _alphabet_story,
    "custom:word_reverse": _words_reversed,
}
