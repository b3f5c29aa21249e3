"""`python -m sluice.engines.sglang.cpu`: let this Python environment serve SGLang on its CPU.

Writes a .pth file, which adds the directory `path` of this package to the path of every
interpreter. A GPU environment does not need the file and must not have it.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

PTH = "sluice_sglang_cpu.pth"


def main() -> None:
    directory = Path(__file__).resolve().parent / "path"
    target = Path(sysconfig.get_paths()["purelib"]) / PTH
    target.write_text(f"{directory}\nimport torchvision_on_cpu\n")


if __name__ == "__main__":
    main()
