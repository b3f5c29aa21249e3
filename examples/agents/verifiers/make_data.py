"""Makes what the example trains: the tiny model of ../openai, and the taskset's questions as rows.

    python make_data.py DIRECTORY

The rows are what `sluice data from-verifiers two_tools FILE --arg 'taskset={"split": ...}'` writes.
They come from the interpreter that has verifiers: .venv-verifiers of this repository (make agents),
or SLUICE_VERIFIERS_PYTHON.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from sluice_cli.data.verifiers_rows import rows_of

HERE = Path(__file__).parent.resolve()
PYTHON = os.environ.get("SLUICE_VERIFIERS_PYTHON") or str(
    HERE.parents[2] / ".venv-verifiers/bin/python"
)
SPLITS = {"train": "train", "held_out": "eval"}


def main(directory: Path) -> None:
    os.environ["PYTHONPATH"] = str(HERE)  # the taskset need not be installed for this
    runpy.run_path(str(HERE.with_name("openai") / "make_data.py"))["make_model"](
        directory / "model"
    )
    for split, name in SPLITS.items():
        rows = rows_of("two_tools", {"taskset": {"split": split}}, PYTHON, None)
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
