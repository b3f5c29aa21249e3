"""`python -m sluice.engines.sglang.plugin TARGET`: put the plugin, and the script that starts
SGLang with it, there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PATH = Path(__file__).resolve().parent / "path"


def install(target: Path) -> None:
    """Copy `path`. On a laptop engines share the directory: one may start while another's files
    come.
    """
    for source in PATH.rglob("*"):
        if not source.is_file() or source.parent.name == "__pycache__":
            continue
        copy = target / source.relative_to(PATH)
        copy.parent.mkdir(parents=True, exist_ok=True)
        unfinished = copy.with_name(f".{copy.name}-{os.getpid()}")
        unfinished.write_bytes(source.read_bytes())
        unfinished.replace(copy)


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m sluice.engines.sglang.plugin TARGET")
    install(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
