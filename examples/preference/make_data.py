"""Write what the example trains: a tiny model directory, conversations, pairs and held-out rows.

    python make_data.py DIRECTORY

The user asks for the largest or the smallest of three digits. All 1000 triples are split once: 128
are held out, as questions and as pairs. The conversations, few on purpose, leave the model much to
learn from the pairs, in which the right digit is chosen and another one rejected. Every tenth pair
is the wrong way round, as preferences of people are; no held-out one is.
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

SPECIAL = ["<pad>", "<user>", "<assistant>", "<eos>"]
WORDS = [*"0123456789", "max", "min", "of", "<unused>"]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant> {{ "
    "message.content }} <eos>{% else %}<user> {{ message.content }} {% endif %}{% endfor %}{% if "
    "add_generation_prompt %}<assistant> {% endif %}"
)
BEST = {"max": max, "min": min}
HELD_OUT, CONVERSATIONS, PAIRS, SWAPPED = 128, 1024, 8192, 10
Row = dict[str, Any]


def make_model(directory: Path) -> None:
    """Write config.json and a tokenizer of 18 words; the first job draws the weights itself."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unused>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
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
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="float32",
    )
    config.save_pretrained(directory)


def question(triple: tuple[int, ...], asked: str) -> Row:
    return {"role": "user", "content": "{} of {} {} {}".format(asked, *triple)}


def answer(digit: int) -> Row:
    return {"role": "assistant", "content": str(digit)}


def make_rows(seed: int = 1234) -> dict[str, list[Row]]:
    """Return the rows of each file. Held-out rows share no triple with the others."""
    draw = random.Random(seed)
    triples = list(itertools.product(range(10), repeat=3))
    draw.shuffle(triples)
    held_out, rest = triples[:HELD_OUT], triples[HELD_OUT:]
    conversations, pairs, questions, held_out_pairs = [], [], [], []
    for _ in range(CONVERSATIONS):
        triple, asked = draw.choice(rest), draw.choice(list(BEST))
        messages = [question(triple, asked), answer(BEST[asked](triple))]
        conversations.append({"messages": messages})
    for number in range(PAIRS):
        triple, asked = draw.choice(rest), draw.choice(list(BEST))
        right = BEST[asked](triple)
        wrong = draw.choice([digit for digit in range(10) if digit != right])
        chosen, rejected = (wrong, right) if number % SWAPPED == 0 else (right, wrong)
        prompt = [question(triple, asked)]
        pairs.append({"prompt": prompt, "chosen": [answer(chosen)], "rejected": [answer(rejected)]})
    for triple in held_out:
        asked = draw.choice(list(BEST))
        prompt, right = [question(triple, asked)], BEST[asked](triple)
        wrong = draw.choice([digit for digit in range(10) if digit != right])
        questions.append({"prompt": prompt, "label": str(right)})
        held_out_pairs.append(
            {"prompt": prompt, "chosen": [answer(right)], "rejected": [answer(wrong)]}
        )
    return {
        "chats": conversations,
        "pairs": pairs,
        "eval": questions,
        "eval_pairs": held_out_pairs,
    }


def main(directory: Path) -> None:
    make_model(directory / "model")
    for name, rows in make_rows().items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
