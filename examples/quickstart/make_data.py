"""Write what the quickstart trains: a tiny model directory, training and held-out prompts.

    python make_data.py DIRECTORY

The task is the largest of three digits. All 1000 triples are split once: 128 are held out for
evaluation. Training rows are drawn from the other 872, each answer equally often, because "9" would
otherwise be a good guess for everything. Rows have slime's format: {"prompt", "label", "metadata"};
`metadata.rm_type` of held-out rows selects exact match.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ["<pad>", "<bos>", "<eos>"]
WORDS = [*"0123456789", "=", "max", "<unused>"]
HELD_OUT, TRAINING_ROWS = 128, 4096


def make_model(directory: Path) -> None:
    """Write config.json and a tokenizer of 16 words; the job draws the weights itself."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unused>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
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
    """Return training rows and held-out rows. They share no triple."""
    draw = random.Random(seed)
    triples = list(itertools.product(range(10), repeat=3))
    draw.shuffle(triples)
    held_out, rest = triples[:HELD_OUT], triples[HELD_OUT:]
    by_answer = [[t for t in rest if max(t) == answer] for answer in range(10)]
    training = [draw.choice(by_answer[i % 10]) for i in range(TRAINING_ROWS)]
    return [row(t) for t in training], [
        row(t) | {"metadata": {"rm_type": "exact_match"}} for t in held_out
    ]


def row(triple: tuple[int, ...]) -> dict[str, Any]:
    return {"prompt": "max {} {} {} =".format(*triple), "label": str(max(triple))}


def main(directory: Path) -> None:
    make_model(directory / "model")
    for name, rows in zip(("train", "eval"), make_rows(), strict=True):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
