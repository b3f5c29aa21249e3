"""Write what the throughput example trains: a model of Qwen3-0.6B's shape, and prompts.

    python make_data.py DIRECTORY [--tiny]

The task: "first 3 7 2 =" -> "3 3 3 ..." to the end. The vocabulary is small and the job draws the
weights; the layers have the width and number of Qwen3-0.6B's (0.44 billion parameters), so a step
costs the same. `--tiny` makes a model for a rehearsal on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

WORDS = ["<pad>", "<bos>", "<eos>", *"0123456789", "=", "first", "<unused>"]
SHAPES = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.05,
        "dtype": "float32",
    },
}
HELD_OUT = 64


def make_model(directory: Path, shape: str) -> None:
    """Write config.json and a tokenizer of 16 words."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unused>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.save_pretrained(directory)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(vocabulary),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        **SHAPES[shape],
    )
    config.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    make_model(options.directory / "model", "tiny" if options.tiny else "0.6b")
    rows = [
        {"prompt": "first {} {} {} =".format(*digits), "label": str(digits[0])}
        for digits in itertools.product(range(10), repeat=3)
    ]
    random.Random(1234).shuffle(rows)
    for name, part in (("eval", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (options.directory / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part)
        )


if __name__ == "__main__":
    main()
