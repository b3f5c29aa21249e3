"""Write what the example trains: a tiny vision-language model, and rows of mazes.

    python make_data.py [DIRECTORY]

The model has 30 words, and one token for a whole drawing. From random weights it learns, in less
than a minute, the first moves of a walker who often errs; the job goes on from there. The seed of a
row draws its maze.
"""

from __future__ import annotations

import io
import json
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from sluice.images.image import Image
from sluice.images.processor import ImageProcessor

MAZE = runpy.run_path(str(Path(__file__).with_name("maze.py")))
MOVES = list(MAZE["MOVES"])
MAKER = runpy.run_path(str(Path(__file__).resolve().parents[1] / "make_model.py"))
QUESTION = "Go to the green square."
# Words of the rows' prompt, and of the worker's description of the moves.
WORDS = ["go", "to", "the", "green", "square", ".", "answer", "with", "one", "of", ","]
WORDS += ["error", ":", "expected", "<unused>"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    + MAKER["CONTENT_TEMPLATE"]
    + "{{- '<|im_end|>' }}\n{%- endfor %}"
)
# As the worker shows a first drawing (docs/agents/environments.md).
OPENING = (
    f"{QUESTION}<|vision_start|><|image_pad|><|vision_end|>Answer with one of {', '.join(MOVES)}."
    "<|im_end|>"
)
PATCH = 32  # two by two patches are a drawing of maze.py, and become one token
TRAINING_ROWS, HELD_OUT = 4096, 64
# Settings of the imitation: mazes that no row has, steps, mazes per step, and the share of right
# moves; the walker draws the others at random.
MAZES, STEPS, BATCH, RIGHT = 1500, 80, 96, 0.5


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*WORDS, *MOVES])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unused>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(list(MAKER["SPECIAL"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unused>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def row(seed: int) -> str:
    message = {"role": "user", "content": QUESTION}
    return json.dumps({"prompt": [message], "metadata": {"reset": {"seed": seed}}}) + "\n"


def imitate(directory: Path) -> None:
    """Train the model of a directory to move as the walker does."""
    draw, maze = random.Random(0), MAZE["Maze"]()
    drawings, moves = [], []
    for seed in range(TRAINING_ROWS + HELD_OUT, TRAINING_ROWS + HELD_OUT + MAZES):
        drawings.append(as_image(maze.reset(seed=seed)[0]))
        moves.append(draw.choice(maze.best_moves() if draw.random() < RIGHT else MOVES))
    words = tokenizer()
    answers = torch.tensor(words.convert_tokens_to_ids(moves))
    prompt = torch.tensor([words.encode(OPENING, add_special_tokens=False)] * BATCH)
    processor = ImageProcessor(directory)
    pixels = processor.pixels(drawings)
    values = torch.from_numpy(pixels.values).view(MAZES, 4, -1)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(MAZES, (BATCH,))
        logits = model(
            input_ids=prompt,
            pixel_values=values[chosen].flatten(0, 1),
            image_grid_thw=torch.from_numpy(pixels.grids)[chosen],
            mm_token_type_ids=(prompt == processor.placeholder).long(),
        ).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, answers[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(directory)
    print(f"imitation: loss {loss.item():.2f} after {STEPS} steps")


def as_image(drawing: NDArray[np.uint8]) -> Image:
    file = io.BytesIO()
    Pillow.fromarray(drawing).save(file, "PNG")
    return Image("image/png", drawing.shape[1], drawing.shape[0], file.getvalue())


def main(directory: Path) -> None:
    MAKER["make_model"](directory / "model", tokenizer=tokenizer(), patch_size=PATCH)
    imitate(directory / "model")
    (directory / "train.jsonl").write_text("".join(map(row, range(TRAINING_ROWS))))
    held_out = range(TRAINING_ROWS, TRAINING_ROWS + HELD_OUT)
    (directory / "eval.jsonl").write_text("".join(map(row, held_out)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
