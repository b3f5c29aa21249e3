"""Write what the example trains: a tiny vision-language model, and images with questions.

    python make_data.py [DIRECTORY]

Each image is a plain area in some shade of red, green, blue or yellow, and the answer is the first
letter of the colour. Sizes differ, so images take 1 to 9 tokens. Rows have slime's format.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

from PIL import Image

COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (30, 50, 220), "y": (230, 220, 40)}
SIDES = (32, 48, 64, 96)
TRAINING_ROWS, HELD_OUT = 1024, 64


def row(directory: Path, name: str, letter: str, draw: random.Random) -> dict[str, Any]:
    """Write an image below `directory`, and return its row."""
    shade = tuple(min(max(value + draw.randint(-25, 25), 0), 255) for value in COLOURS[letter])
    path = Path("images", f"{name}.png")
    (directory / path).parent.mkdir(exist_ok=True)
    Image.new("RGB", (draw.choice(SIDES), draw.choice(SIDES)), shade).save(directory / path)
    message = {"role": "user", "content": "<image>Which colour?"}
    return {"prompt": [message], "images": [str(path)], "label": letter}


def main(directory: Path) -> None:
    make_model = runpy.run_path(str(Path(__file__).parent / "make_model.py"))["make_model"]
    make_model(directory / "model")
    draw = random.Random(0)
    for name, count in (("train", TRAINING_ROWS), ("eval", HELD_OUT)):
        letters = [list(COLOURS)[i % len(COLOURS)] for i in range(count)]
        rows = [row(directory, f"{name}-{i}", letter, draw) for i, letter in enumerate(letters)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
