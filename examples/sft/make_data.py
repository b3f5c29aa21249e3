"""Write what the example trains: a tiny model directory, conversations, and held-out chats.

    python make_data.py DIRECTORY

The user asks for the largest or the smallest of three digits, and then for the other one. In every
fourth conversation the assistant is wrong at first and is corrected; that answer says `loss_mask:
0`, so it is read but not learned. All 1000 triples are split once: the conversations use 872 of
them. Half of the held-out rows ask for a first answer about the other 128, half for the second
one.
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
WORDS = [*"0123456789", "max", "min", "of", "and", "no", "<unused>"]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant> {{ "
    "message.content }} <eos> {% else %}<user> {{ message.content }} {% endif %}{% endfor %}{% if "
    "add_generation_prompt %}<assistant> {% endif %}"
)
BEST = {"max": max, "min": min}
HELD_OUT, CONVERSATIONS = 128, 4096


def make_model(directory: Path) -> None:
    """Write config.json and a tokenizer of 20 words; the job draws the weights itself."""
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


Message = dict[str, Any]
Triple = tuple[int, ...]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(digit: int, **mask: int) -> Message:
    return {"role": "assistant", "content": str(digit), **mask}


def conversation(triple: Triple, first: str, wrong: int | None) -> list[Message]:
    """Return `max of 3 7 2` 7 `and min` 2.

    With a wrong answer, `no` follows it.
    """
    second = "min" if first == "max" else "max"
    mistake = [] if wrong is None else [assistant(wrong, loss_mask=0), user("no")]
    question = user("{} of {} {} {}".format(first, *triple))
    return [
        question,
        *mistake,
        assistant(BEST[first](triple)),
        user(f"and {second}"),
        assistant(BEST[second](triple)),
    ]


def make_rows(seed: int = 1234) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return conversations and held-out rows. They share no triple."""
    draw = random.Random(seed)
    triples = list(itertools.product(range(10), repeat=3))
    draw.shuffle(triples)
    held_out, rest = triples[:HELD_OUT], triples[HELD_OUT:]
    training = []
    for number in range(CONVERSATIONS):
        triple, first = draw.choice(rest), draw.choice(list(BEST))
        wrong = draw.choice([digit for digit in range(10) if digit != BEST[first](triple)])
        training.append(
            {"messages": conversation(triple, first, wrong if number % 4 == 0 else None)}
        )
    questions = []
    for number, triple in enumerate(held_out):
        messages = conversation(triple, draw.choice(list(BEST)), None)
        asked = 1 if number % 2 else 3
        questions.append({"prompt": messages[:asked], "label": messages[asked]["content"]})
    return training, questions


def main(directory: Path) -> None:
    make_model(directory / "model")
    for name, rows in zip(("train", "eval"), make_rows(), strict=True):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
