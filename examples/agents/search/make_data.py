"""Write what the example trains: a corpus, a tiny model directory, and questions.

    python make_data.py DIRECTORY

The corpus has a hundred passages: four properties of each of twenty-five things with invented
names. The names are in no model's vocabulary, and names of held-out questions are in no training
row. A query is one word of the vocabulary, and so is a digit with the full stop that ends an
answer.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ["<pad>", "<bos>", "<eos>"]
THINGS = [
    "".join(parts)
    for parts in itertools.product(("bo", "ka", "zo", "mi", "tu"), ("rv", "lk", "mb", "sp", "zt"))
]
PROPERTIES = ["depth", "age", "weight", "price"]


def call(query: str) -> str:
    """Return a call of the search, as one word."""
    arguments = {"name": "search", "arguments": {"query": query}}
    return f"<tool_call>{json.dumps(arguments, separators=(',', ':'))}</tool_call>"


ANSWERS = [f"{digit}." for digit in "0123456789"]
WORDS = [">", "the", "of", "is", *PROPERTIES, *map(call, PROPERTIES), *ANSWERS, "<unused>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}> {{ m.content.split(') ')[-1] }} "
    "{% elif m.role == 'assistant' %}{{ m.content }} <eos> "
    "{% else %}{{ m.content }} {% endif %}"
    "{% endfor %}"
)
"""Of a passage, `Doc 1 (Title: zorv) the depth ...`, it shows what is behind the title."""
HELD_OUT, TRAINING_ROWS = 8, 4000


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


def make_rows(seed: int = 1234) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each file by its name. Training and held-out questions share no thing."""
    draw = random.Random(seed)
    facts = {pair: draw.choice("0123456789") for pair in itertools.product(THINGS, PROPERTIES)}
    things = draw.sample(THINGS, len(THINGS))
    held_out = [*itertools.product(things[:HELD_OUT], PROPERTIES)]
    asked = draw.choices([*itertools.product(things[HELD_OUT:], PROPERTIES)], k=TRAINING_ROWS)
    return {
        "corpus": [passage(*pair, digit) for pair, digit in facts.items()],
        "train": [question(*pair, facts[pair]) for pair in asked],
        "eval": [question(*pair, facts[pair]) for pair in held_out],
    }


def passage(thing: str, kind: str, digit: str) -> dict[str, str]:
    return {"title": thing, "text": f"the {kind} of {thing} is {digit}."}


def question(thing: str, kind: str, digit: str) -> dict[str, str]:
    return {"prompt": f"{thing} {kind}", "label": digit}


def main(directory: Path) -> None:
    make_model(directory / "model")
    for name, rows in make_rows().items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
