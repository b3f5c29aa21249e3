"""Write what the example trains: a tiny model directory, training tasks and held-out tasks.

    python make_data.py DIRECTORY

A task is a function that the model cannot see and that lacks the import of one name of `math`. A
program is one word of the model's vocabulary: an import and a call of the function.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ["<pad>", "<bos>", "<eos>"]
CALLS = {
    "sqrt": "sqrt({n} ** 2)",
    "ceil": "ceil({n} - 0.5)",
    "floor": "floor({n} + 0.5)",
    "factorial": "factorial({n} % 9)",
    "gcd": "gcd({n}, 12)",
    "lcm": "lcm({n}, 12)",
    "log2": "log2(2 ** {n})",
    "fabs": "fabs(-{n})",
    "comb": "comb({n}, 2)",
    "hypot": "hypot({n}, 0)",
}
"""Names of `math`, and calls of them with a number."""


def program(name: str) -> str:
    """Return a call of the tool. It has tabs, because blanks separate words."""
    code = f"from\tmath\timport\t{name}\nprint(task())"
    call = {"name": "python", "arguments": {"code": code}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


QUESTION = "task ( ) ="
WORDS = [*QUESTION.split(), ">", *CALLS, *map(program, CALLS), "<unused>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}> {{ (m.content.split(\"'\") + ['<unused>'])[1] }} "
    "{% elif m.role == 'assistant' %}{{ m.content }} <eos> "
    "{% else %}{{ m.content }} {% endif %}"
    "{% endfor %}"
)
"""Of an error it shows the name that is quoted there."""
HELD_OUT, TRAINING_ROWS = 100, 4000


def make_model(directory: Path) -> None:
    """Write config.json and a tokenizer; the job draws the weights itself."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unused>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="float32",
    )
    config.save_pretrained(directory)


def make_rows(seed: int = 1234) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training rows and held-out rows. They share no number."""
    draw = random.Random(seed)
    training = [row(draw.choice([*CALLS]), draw.randrange(20, 400)) for _ in range(TRAINING_ROWS)]
    names = [*CALLS] * (HELD_OUT // len(CALLS))
    return training, [row(name, 2 + number // 10) for number, name in enumerate(names)]


def row(name: str, n: int) -> dict[str, Any]:
    """Return a task: `code` is the function, the label its result once the import is there."""
    call = CALLS[name].format(n=n)
    label = str(eval(call, {name: getattr(math, name)}))
    code = f"def task():\n    return {call}\n"
    return {"prompt": QUESTION, "label": label, "metadata": {"code": code}}


def main(directory: Path) -> None:
    make_model(directory / "model")
    for name, rows in zip(("train", "eval"), make_rows(), strict=True):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
