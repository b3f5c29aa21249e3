"""Write what the example trains: a tiny model directory, and rows of walks over the ice.

    python make_data.py DIRECTORY

The seed of a row draws the square on which its walk begins.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent))
import words  # type: ignore[import-not-found]

SPECIAL = ["<pad>", "<bos>", "<eos>"]
SQUARES = [str(number) for number in range(9)]
VOCABULARY = [*SPECIAL, "cross", *SQUARES, *words.MOVES, "error:", "which?", "<unused>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}<eos> {% endif %}"
    "{% endfor %}"
)
TRAINING_ROWS, HELD_OUT = 4096, 32


def make_model(directory: Path) -> None:
    """Write config.json and a tokenizer; the job draws the weights itself."""
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
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
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="float32",
    )
    config.save_pretrained(directory)


def row(seed: int) -> str:
    return json.dumps({"prompt": "cross", "metadata": {"reset": {"seed": seed}}}) + "\n"


def main(directory: Path) -> None:
    make_model(directory / "model")
    (directory / "train.jsonl").write_text("".join(map(row, range(TRAINING_ROWS))))
    held_out = range(TRAINING_ROWS, TRAINING_ROWS + HELD_OUT)
    (directory / "eval.jsonl").write_text("".join(map(row, held_out)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
