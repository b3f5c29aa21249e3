"""Find the answer in a response: behind the thought, in the last box."""

from __future__ import annotations

import re

_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
THINK_START, THINK_END = "<think>", "</think>"


def after_thinking(response: str) -> str:
    """Return the text after the last `</think>`; all of it if there is no thought.

    A thought that is opened and never closed reaches to the end of the response.
    """
    return response.rpartition(THINK_END)[2].partition(THINK_START)[0]


def answer_box(response: str) -> str | None:
    """Return the content of the last box behind the thought, None if there is none."""
    return boxed(after_thinking(response))


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox`) that is closed; None where there is none.

    Braces are counted, those behind a backslash are not (a set's `\{1, 2\}`). A box in a box counts
    as the outer one. One pass, whatever the text: a model may well write ten thousand boxes.
    """
    content: str | None = None
    open_: list[int] = []  # where the content of a box starts; -1 for other braces
    for match in _BRACE.finditer(text):
        if match[1]:
            open_.append(match.end())
        elif match[0] == "{":
            open_.append(-1)
        elif match[0] == "}" and open_ and (start := open_.pop()) >= 0:
            content = text[start : match.start()]
    return content
