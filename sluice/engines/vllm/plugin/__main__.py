"""`python -m sluice.engines.vllm.plugin TARGET`: copy the plugin and vLLM's launch script there."""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.engines.plugin_common.install import install

PATH = Path(__file__).resolve().parent / "path"


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m sluice.engines.vllm.plugin TARGET")
    install(PATH, Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
