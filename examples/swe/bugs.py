"""Twelve small repositories, each with a bug, the issue that reports it and the tests that find it.

A task has the files of its repository as they should be. `bug` replaces a text of one of them, so
the repository that the agent gets and the patch that repairs it follow from the two texts.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One repository. Files are texts by path; `tests` are hidden from the agent."""

    name: str
    issue: str
    files: dict[str, str]
    bug: tuple[str, str, str]  # file, the right text, the wrong text
    tests: dict[str, str]  # put over the repository's own before they run

    @property
    def repository(self) -> dict[str, str]:
        """Files with the bug."""
        path, right, wrong = self.bug
        assert self.files[path].count(right) == 1, f"{self.name}: {path} has no single {right!r}"
        return self.files | {path: self.files[path].replace(right, wrong)}

    @property
    def patch(self) -> str:
        """The unified diff that repairs the bug."""
        path = self.bug[0]
        before, after = (files[path].splitlines(True) for files in (self.repository, self.files))
        return "".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"))


def _suite(imports: str, **tests: str) -> str:
    """Return a module of unittest from expressions that have to be true."""
    methods = "".join(
        f"    def test_{name}(self):\n        self.assertTrue({expression})\n\n"
        for name, expression in tests.items()
    )
    head = f"import unittest\n\n{imports}\n\n\nclass Tests(unittest.TestCase):\n"
    return f"{head}{methods}"


def _task(
    name: str,
    issue: str,
    files: dict[str, str],
    bug: tuple[str, str, str],
    imports: str,
    visible: dict[str, str],
    hidden: dict[str, str],
) -> Task:
    suite = "tests/test_all.py"
    own = {"tests/__init__.py": "", suite: _suite(imports, **visible)}
    return Task(name, issue, files | own, bug, {suite: _suite(imports, **visible, **hidden)})


TASKS = [
    _task(
        "intervals",
        "merge([(1, 2), (2, 3)]) should give [(1, 3)]: intervals that touch are one interval. It "
        "gives both back.",
        {
            "intervals/__init__.py": "from intervals.merging import merge\n",
            "intervals/merging.py": '''\
"""Merges intervals."""


def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
''',
        },
        ("intervals/merging.py", "start <= merged", "start < merged"),
        "from intervals import merge",
        {
            "apart": "merge([(3, 4), (1, 2)]) == [(1, 2), (3, 4)]",
            "overlap": "merge([(1, 5), (2, 3)]) == [(1, 5)]",
            "empty": "merge([]) == []",
        },
        {"touching": "merge([(1, 2), (2, 3)]) == [(1, 3)]"},
    ),
    _task(
        "roman",
        "to_roman(4) returns IIII. It should be IV, and the same for 9, 40, 90, 400 and 900.",
        {
            "roman/__init__.py": "from roman.numerals import from_roman, to_roman\n",
            "roman/tables.py": '''\
"""Values of the numerals, from the largest."""

NUMERALS = [
    ("M", 1000), ("CM", 900), ("D", 500), ("CD", 400), ("C", 100), ("XC", 90),
    ("L", 50), ("XL", 40), ("X", 10), ("IX", 9), ("V", 5), ("IV", 4), ("I", 1),
]
''',
            "roman/numerals.py": '''\
"""Converts numbers to Roman numerals and back."""

from roman.tables import NUMERALS


def to_roman(number):
    text = ""
    for numeral, value in NUMERALS:
        while number >= value:
            text += numeral
            number -= value
    return text


def from_roman(text):
    values = {numeral: value for numeral, value in NUMERALS if len(numeral) == 1}
    total = 0
    for here, after in zip(text, text[1:] + "I"):
        total += -values[here] if values[here] < values[after] else values[here]
    return total
''',
        },
        (
            "roman/tables.py",
            """    ("M", 1000), ("CM", 900), ("D", 500), ("CD", 400), ("C", 100), ("XC", 90),
    ("L", 50), ("XL", 40), ("X", 10), ("IX", 9), ("V", 5), ("IV", 4), ("I", 1),
""",
            """    ("M", 1000), ("D", 500), ("C", 100), ("L", 50), ("X", 10), ("V", 5), ("I", 1),
""",
        ),
        "from roman import from_roman, to_roman",
        {
            "seven": "to_roman(7) == 'VII'",
            "thousands": "to_roman(3112) == 'MMMCXII'",
            "back": "from_roman('MCMXC') == 1990",
        },
        {
            "four": "to_roman(4) == 'IV'",
            "year": "to_roman(1994) == 'MCMXCIV'",
            "round_trip": "all(from_roman(to_roman(n)) == n and len(to_roman(n)) < 16 "
            "and 'IIII' not in to_roman(n) for n in range(1, 4000))",
        },
    ),
    _task(
        "lru",
        "Cache(2) drops the key that was used last. After put(a), put(b), get(a), put(c) the key a "
        "is gone, but b was the least recently used one.",
        {
            "lru/__init__.py": "from lru.cache import Cache\n",
            "lru/cache.py": '''\
"""A cache that drops the least recently used entry."""

from collections import OrderedDict


class Cache:
    def __init__(self, size):
        self.size, self.entries = size, OrderedDict()

    def get(self, key, default=None):
        if key not in self.entries:
            return default
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key, value):
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) > self.size:
            self.entries.popitem(last=False)
        return self
''',
        },
        (
            "lru/cache.py",
            "            return default\n        self.entries.move_to_end(key)\n",
            "            return default\n",
        ),
        "from lru import Cache",
        {
            "get": "Cache(2).put('a', 1).get('a') == 1",
            "default": "Cache(2).get('a', 7) == 7",
            "drops": "Cache(1).put('a', 1).put('b', 2).get('a') is None",
        },
        {
            "use": "(lambda c: (c.get('a'), c.put('c', 3), c.get('a'), c.get('b'))[2:])"
            "(Cache(2).put('a', 1).put('b', 2)) == (1, None)"
        },
    ),
    _task(
        "csvline",
        'split(\'"a ""b"" c",d\') should give [\'a "b" c\', \'d\']: two quotes inside a quoted '
        "field are one quote. They are dropped.",
        {
            "csvline/__init__.py": "from csvline.reader import split\n",
            "csvline/reader.py": '''\
"""Splits a line of a CSV file (RFC 4180)."""


def split(line):
    fields, field, quoted, at = [], "", False, 0
    while at < len(line):
        character = line[at]
        if quoted and character == '"' and line[at + 1 : at + 2] == '"':
            field += '"'
            at += 1
        elif character == '"':
            quoted = not quoted
        elif character == "," and not quoted:
            fields.append(field)
            field = ""
        else:
            field += character
        at += 1
    return [*fields, field]
''',
        },
        (
            "csvline/reader.py",
            """        if quoted and character == '"' and line[at + 1 : at + 2] == '"':
            field += '"'
            at += 1
        elif character""",
            "        if character",
        ),
        "from csvline import split",
        {
            "plain": "split('a,b') == ['a', 'b']",
            "quoted": "split('\"a,b\",c') == ['a,b', 'c']",
            "empty": "split(',') == ['', '']",
        },
        {
            "doubled": 'split(\'"a ""b"" c",d\') == [\'a "b" c\', \'d\']',
            "only_quotes": 'split(\'""""\') == [\'"\']',
        },
    ),
    _task(
        "bank",
        "A transfer that fails must change nothing. If the source has too little money, the target "
        "gets the amount all the same.",
        {
            "bank/__init__.py": "from bank.accounts import Bank, OverdrawnError\n",
            "bank/errors.py": '''\
"""Errors of the bank."""


class OverdrawnError(Exception):
    """An account has too little money."""
''',
            "bank/accounts.py": '''\
"""Accounts and transfers, in cents."""

from bank.errors import OverdrawnError


class Bank:
    def __init__(self, **balances):
        self.balances = balances

    def transfer(self, source, target, cents):
        if self.balances[source] < cents:
            raise OverdrawnError(source)
        self.balances[target] += cents
        self.balances[source] -= cents

    def tries(self, *transfer):
        try:
            self.transfer(*transfer)
        except OverdrawnError:
            return False
        return True
''',
        },
        (
            "bank/accounts.py",
            """        if self.balances[source] < cents:
            raise OverdrawnError(source)
        self.balances[target] += cents
""",
            """        self.balances[target] += cents
        if self.balances[source] < cents:
            raise OverdrawnError(source)
""",
        ),
        "from bank import Bank",
        {
            "moves": "(lambda b: (b.tries('a', 'b', 3), b.balances))(Bank(a=5, b=0)) "
            "== (True, {'a': 2, 'b': 3})",
            "refuses": "not Bank(a=5, b=0).tries('a', 'b', 6)",
        },
        {
            "refused": "(lambda b: (b.tries('a', 'b', 6), b.balances)[1])(Bank(a=5, b=0)) "
            "== {'a': 5, 'b': 0}",
            "itself": "(lambda b: (b.tries('a', 'a', 6), b.balances))(Bank(a=5)) "
            "== (False, {'a': 5})",
        },
    ),
    _task(
        "paths",
        "matches('src/*.py', 'src/deep/a.py') should be false: a star does not cross a slash. Only "
        "two stars do.",
        {
            "paths/__init__.py": "from paths.patterns import matches\n",
            "paths/patterns.py": '''\
"""Patterns of paths: `*`, `**` and `?`."""

import re


def matches(pattern, path):
    return re.fullmatch(_regular(pattern), path) is not None


def _regular(pattern):
    parts = re.split(r"(\\*\\*|\\*|\\?)", pattern)
    meaning = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(part, re.escape(part)) for part in parts)
''',
        },
        ("paths/patterns.py", '"*": "[^/]*"', '"*": ".*"'),
        "from paths import matches",
        {
            "star": "matches('*.py', 'a.py')",
            "two_stars": "matches('src/**.py', 'src/deep/a.py')",
            "dot": "not matches('a.py', 'axpy')",
            "question": "not matches('a?b', 'a/b')",
        },
        {
            "slash": "not matches('src/*.py', 'src/deep/a.py')",
            "middle": "not matches('a/*/d', 'a/b/c/d') and matches('a/*/d', 'a/b/d')",
        },
    ),
    _task(
        "dates",
        "days_in(2, 1900) is 29. 1900 was no leap year: a century is one only if 400 divides it.",
        {
            "dates/__init__.py": "from dates.months import day_of_year, days_in\n",
            "dates/years.py": '''\
"""Years of the Gregorian calendar."""


def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
''',
            "dates/months.py": '''\
"""Lengths of months."""

from dates.years import is_leap

_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def days_in(month, year):
    return _DAYS[month - 1] + (month == 2 and is_leap(year))


def day_of_year(day, month, year):
    return day + sum(days_in(earlier, year) for earlier in range(1, month))
''',
        },
        (
            "dates/years.py",
            "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
            "year % 4 == 0",
        ),
        "from dates import day_of_year, days_in",
        {
            "leap": "days_in(2, 2024) == 29 and days_in(2, 2000) == 29",
            "common": "days_in(2, 2023) == 28 and days_in(4, 2023) == 30",
            "last": "day_of_year(31, 12, 2024) == 366",
        },
        {"century": "days_in(2, 1900) == 28", "last_1900": "day_of_year(31, 12, 1900) == 365"},
    ),
    _task(
        "arithmetic",
        "evaluate('10 - 4 - 3') returns 9. Subtraction and division work from the left.",
        {
            "arithmetic/__init__.py": "from arithmetic.parser import evaluate\n",
            "arithmetic/tokens.py": '''\
"""Splits an expression into numbers and signs."""

import re


def tokens(text):
    return re.findall(r"\\d+|[-+*/()]", text)
''',
            "arithmetic/parser.py": '''\
"""Evaluates expressions of whole numbers by recursive descent."""

from arithmetic.tokens import tokens

_SIGNS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


def evaluate(text):
    value, rest = _chain(tokens(text), "+-", _product)
    return value


def _product(words):
    return _chain(words, "*/", _atom)


def _chain(words, signs, operand):
    value, words = operand(words)
    while words and words[0] in signs:
        sign = words[0]
        other, words = operand(words[1:])
        value = _SIGNS[sign](value, other)
    return value, words


def _atom(words):
    if words[0] == "(":
        value, words = _chain(words[1:], "+-", _product)
        return value, words[1:]
    return int(words[0]), words[1:]
''',
        },
        (
            "arithmetic/parser.py",
            """    while words and words[0] in signs:
        sign = words[0]
        other, words = operand(words[1:])
        value = _SIGNS[sign](value, other)
""",
            """    if words and words[0] in signs:
        sign = words[0]
        other, words = _chain(words[1:], signs, operand)
        value = _SIGNS[sign](value, other)
""",
        ),
        "from arithmetic import evaluate",
        {
            "sum": "evaluate('1 + 2 * 3') == 7",
            "brackets": "evaluate('(1 + 2) * 3') == 9",
            "one": "evaluate('42') == 42",
        },
        {
            "minus": "evaluate('10 - 4 - 3') == 3",
            "divide": "evaluate('100 / 5 / 2') == 10",
            "mixed": "evaluate('2 - (3 - 4) - 1') == 2",
        },
    ),
    _task(
        "graphs",
        "order({'a': ['b'], 'b': ['a']}) should raise CycleError. It returns an order.",
        {
            "graphs/__init__.py": "from graphs.sorting import CycleError, order, has_cycle\n",
            "graphs/sorting.py": '''\
"""Topological order: each node after those that it needs."""


class CycleError(Exception):
    """Nodes need each other."""


def order(needs):
    done, active = [], set()

    def visit(node):
        if node in done:
            return
        if node in active:
            raise CycleError(node)
        active.add(node)
        for other in needs.get(node, ()):
            visit(other)
        done.append(node)

    for node in sorted(needs):
        visit(node)
    return done


def has_cycle(needs):
    try:
        order(needs)
    except CycleError:
        return True
    return False
''',
        },
        (
            "graphs/sorting.py",
            "        if node in active:\n            raise CycleError(node)\n",
            "        if node in active:\n            return\n",
        ),
        "from graphs import has_cycle, order",
        {
            "chain": "order({'a': ['b'], 'b': ['c']}) == ['c', 'b', 'a']",
            "diamond": "order({'a': ['b', 'c'], 'b': ['d'], 'c': ['d']}) == ['d', 'b', 'c', 'a']",
            "no_cycle": "not has_cycle({'a': ['b', 'c'], 'b': ['c']})",
        },
        {
            "two": "has_cycle({'a': ['b'], 'b': ['a']})",
            "itself": "has_cycle({'a': ['a']})",
            "far": "has_cycle({'a': ['b'], 'b': ['c'], 'c': ['b']})",
        },
    ),
    _task(
        "wrapping",
        "wrap('aaa bbb', 7) gives two lines, although the text is exactly as long as a line.",
        {
            "wrapping/__init__.py": "from wrapping.lines import wrap\n",
            "wrapping/lines.py": '''\
"""Wraps words into lines."""


def wrap(text, width):
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
''',
        },
        ("wrapping/lines.py", "1 + len(word) <= width", "1 + len(word) < width"),
        "from wrapping import wrap",
        {
            "breaks": "wrap('aaa bbb', 5) == ['aaa', 'bbb']",
            "long": "wrap('aaaaaaaa', 3) == ['aaaaaaaa']",
            "spaces": "wrap('  a   b ', 10) == ['a b']",
        },
        {
            "exact": "wrap('aaa bbb', 7) == ['aaa bbb']",
            "three": "wrap('a b c d', 3) == ['a b', 'c d']",
        },
    ),
    _task(
        "queries",
        "parse('q=a+b%26c') should give {'q': ['a b&c']}. The plus sign stays a plus sign.",
        {
            "queries/__init__.py": "from queries.parsing import parse\n",
            "queries/decoding.py": '''\
"""Decodes parts of a query."""

import re


def decode(text):
    spaced = text.replace("+", " ")
    return re.sub("%([0-9a-fA-F]{2})", lambda code: chr(int(code[1], 16)), spaced)
''',
            "queries/parsing.py": '''\
"""Parses the query of a URL."""

from queries.decoding import decode


def parse(query):
    values = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        values.setdefault(decode(name), []).append(decode(value))
    return values
''',
        },
        ("queries/decoding.py", 'text.replace("+", " ")', "text"),
        "from queries import parse",
        {
            "two": "parse('a=1&b=2') == {'a': ['1'], 'b': ['2']}",
            "repeated": "parse('a=1&a=2') == {'a': ['1', '2']}",
            "escaped": "parse('a=%26') == {'a': ['&']}",
            "encoded_plus": "parse('a=1%2B1') == {'a': ['1+1']}",
        },
        {
            "plus": "parse('q=a+b%26c') == {'q': ['a b&c']}",
            "plus_in_name": "parse('a+b=c') == {'a b': ['c']}",
        },
    ),
    _task(
        "matrices",
        "rotate turns a matrix to the left. It should turn it to the right, as its docstring says.",
        {
            "matrices/__init__.py": "from matrices.turning import rotate, transpose\n",
            "matrices/turning.py": '''\
"""Turns matrices, which are lists of rows."""


def transpose(matrix):
    return [list(column) for column in zip(*matrix)]


def rotate(matrix):
    """Turn a matrix by 90 degrees to the right."""
    return [row[::-1] for row in transpose(matrix)]
''',
        },
        (
            "matrices/turning.py",
            "return [row[::-1] for row in transpose(matrix)]",
            "return transpose(matrix)[::-1]",
        ),
        "from matrices import rotate, transpose",
        {
            "transpose": "transpose([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]",
            "empty": "rotate([]) == []",
            "four_times": "rotate(rotate(rotate(rotate([[1, 2, 3], [4, 5, 6]])))) "
            "== [[1, 2, 3], [4, 5, 6]]",
        },
        {
            "right": "rotate([[1, 2], [3, 4]]) == [[3, 1], [4, 2]]",
            "row": "rotate([[1, 2, 3]]) == [[1], [2], [3]]",
        },
    ),
]
