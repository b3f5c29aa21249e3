"""Commands in the blocks of a page, and what the page says of those that its test does not run.

A comment before a block says it: `<!-- not run: REASON -->`, or `<!-- run by PATH -->` where
another test does; with `(PREFIX, ...)` after the first words it is of some commands alone, as in
`<!-- not run (sluice run, make): REASON -->`. One that stands before no block is of the whole page.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tools import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "charts/sluice/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LANGUAGES = ("", "sh", "bash", "console")
PROGRAMS = {
    *("cd", "curl", "docker", "export", "git", "helm", "hf", "kubectl", "make", "pip"),
    *("python", "python3", "sluice", "source"),
}
_BLOCK = re.compile(
    r"^(?P<marks>(?: *<!-- [^\n]* -->\n)*) *```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"<!-- (not run|run by)(?: \(([^)]*)\))?:? (.*) -->")


@dataclass(frozen=True, slots=True)
class Mark:
    """kind: `not run` or `run by`. prefixes: of the commands that it is about; empty: of all.
    words: the reason, or the test's path.
    """

    kind: str
    prefixes: tuple[str, ...]
    words: str

    def covers(self, command: str) -> bool:
        return not self.prefixes or command.startswith(self.prefixes)


@dataclass(frozen=True, slots=True)
class Block:
    """commands: one line each, without prompts, comments and output. marks: its own; of_page: those
    of the whole page.
    """

    line: int
    commands: tuple[str, ...]
    marks: tuple[Mark, ...]
    of_page: tuple[Mark, ...]

    def unmarked(self) -> Iterator[str]:
        """Commands that the page's test runs."""
        for command in self.commands:
            if not any(mark.covers(command) for mark in (*self.marks, *self.of_page)):
                yield command


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell_lines(text: str) -> Iterator[str]:
    """Lines of a shell block, `$ ` and comments taken off, continued ones joined."""
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        yield re.sub(r"\s#\s.*$", "", line.removeprefix("$ ")).strip()


def blocks(page: Path) -> Iterator[Block]:
    """Blocks that have a command."""
    text = page.read_text()
    of_page = _marks(_BLOCK.sub("", text))
    for match in _BLOCK.finditer(text):
        commands = tuple(_commands(match)) if match["language"] in LANGUAGES else ()
        if commands:
            line = text[: match.start("text")].count("\n")
            yield Block(line, commands, _marks(match["marks"]), of_page)


def _marks(text: str) -> tuple[Mark, ...]:
    return tuple(
        Mark(kind, tuple(prefixes.split(", ")) if prefixes else (), words)
        for kind, prefixes, words in _MARK.findall(text)
    )


def _commands(match: re.Match[str]) -> Iterator[str]:
    """Those of a block without a language are known by their programs."""
    text = re.sub(r"\s*\\\n\s*", " ", textwrap.dedent(match["text"]))
    if match["language"] == "console":
        text = "\n".join(line for line in text.splitlines() if line.startswith("$ "))
    for line in shell_lines(text):
        words = re.sub(r"^(\w+=\S* )+", "", line).split()
        is_synopsis = "[OPTIONS]" in words
        if words and not is_synopsis and (match["language"] or _program(words[0]) in PROGRAMS):
            yield line


def _program(word: str) -> str:
    """python3.12 is python3."""
    return re.sub(r"3\.\d+$", "3", word)
