"""`python -m sluice.engines.sglang.cpu`: let this Python environment serve SGLang on its CPU.

Writes one .pth file, which puts the `path` directory beside this file on every interpreter's path.
A GPU environment does not need it and must not have it.
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
