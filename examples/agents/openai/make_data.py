"""Write what the example trains: a tiny model directory, training and held-out questions.

    python make_data.py DIRECTORY

Half of the questions are for the calculator, half for the shelf. A model of this size does not
learn to calculate in minutes; it can learn which tool to call and to read the answer. A call is one
word of its vocabulary, and so is a digit with the full stop that ends an answer.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent))
import agent  # type: ignore[import-not-found]

SPECIAL = ["<pad>", "<bos>", "<eos>"]
CALLS = [
    f'<tool_call>{{"name":"{tool["function"]["name"]}","arguments":{{}}}}</tool_call>'
    for tool in agent.TOOLS
]
ANSWERS = [f"{answer}." for answer in [*"0123456789", "error"]]
WORDS = [*"0123456789", "*", "+", "=", ">", "shelf", *ANSWERS, *CALLS, "<unused>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}> {{ m.content }}. "
    "{% elif m.role == 'assistant' %}{{ m.content }} <eos> "
    "{% else %}{{ m.content }} {% endif %}"
    "{% endfor %}"
)
HELD_OUT, TRAINING_ROWS = 128, 4096


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


def make_rows(seed: int = 1234) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training rows and held-out rows. They share shelf questions, but no calculation."""
    draw = random.Random(seed)
    sums = [f"{a} * {b} + {c} =" for a, b, c in itertools.product(range(10), repeat=3)]
    draw.shuffle(sums)
    shelf = [f"shelf {number} =" for number in agent.SHELF]
    half = HELD_OUT // 2
    held_out = [*sums[:half], *itertools.islice(itertools.cycle(shelf), half)]
    training = [draw.choice((sums[half:], shelf)[i % 2]) for i in range(TRAINING_ROWS)]
    return [row(question) for question in training], [row(question) for question in held_out]


def row(question: str) -> dict[str, str]:
    tool = agent.lookup if question.startswith("shelf") else agent.calculate
    return {"prompt": question, "label": tool(question)}


def main(directory: Path) -> None:
    make_model(directory / "model")
    for name, rows in zip(("train", "eval"), make_rows(), strict=True):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
