"""Locate the answer in a response: after the reasoning, in the last box."""

from __future__ import annotations

import re

_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
THINK_START, THINK_END = "<think>", "</think>"


def after_thinking(response: str) -> str:
    """Return the text after the last `</think>`, or all of it if there is no reasoning.

    Reasoning that is opened and never closed extends to the end of the response.
    """
    return response.rpartition(THINK_END)[2].partition(THINK_START)[0]


def answer_box(response: str) -> str | None:
    """Return the content of the last box after the reasoning; None if there is no box."""
    return boxed(after_thinking(response))


def boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}` (or `\fbox`); None without one.

    Braces are counted, except those after a backslash (a set's `\{1, 2\}`). A box inside a box
    counts as the outer one. The search takes one pass, because a model may write ten thousand
    boxes.
    """
    content: str | None = None
    open_: list[int] = []  # start of a box's content, or -1 for another brace
    for match in _BRACE.finditer(text):
        if match[1]:
            open_.append(match.end())
        elif match[0] == "{":
            open_.append(-1)
        elif match[0] == "}" and open_ and (start := open_.pop()) >= 0:
            content = text[start : match.start()]
    return content
