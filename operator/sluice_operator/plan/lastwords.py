"""The exception at the end of a log: what a process that was killed had died of before.

SGLang's scheduler is a process of its own. When it raises, its parent kills the whole container,
and the exception is some lines above the end of the log.
"""

from __future__ import annotations

import itertools
import re

_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: |:?$)")
_LONGEST = 300


def last_exception(log: str) -> str:
    """`RuntimeError: out of memory`: the line behind the last frames of a traceback; empty: there
    is none.
    """
    lines = [line for line in log.splitlines() if line.strip()]
    ends = [
        line
        for before, line in itertools.pairwise(lines)
        if before.startswith("  ") and _EXCEPTION.match(line)
    ]
    return ends[-1].strip()[:_LONGEST] if ends else ""
