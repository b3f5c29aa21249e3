"""Write what the example distils: a teacher that knows its task, a smaller student, and prompts.

    python make_data.py DIRECTORY

The task is to sort three digits: "sort 7 3 2 =" -> "2 3 7". All 1000 triples are split once: 128
are held out for evaluation. The teacher learns the others here by plain supervised training, in
about half a minute on two CPU cores. The student is shown no answer, only the teacher's opinion of
the student's answers.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<pad>", "<bos>", "<eos>"]
WORDS = [*"0123456789", "=", "sort", "<unused>"]
HELD_OUT, TRAINING_ROWS = 128, 4096
TEACHER_STEPS, BATCH = 400, 128
Triple = tuple[int, ...]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 16 words.

    Teacher and student share it, so that log-probs of their tokens can be compared.
    """
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unused>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def shape(fast: PreTrainedTokenizerFast, hidden: int) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(fast),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
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


def triples(seed: int = 1234) -> tuple[list[Triple], list[Triple]]:
    """Return the triples for training and those that are held out."""
    pool = list(itertools.product(range(10), repeat=3))
    random.Random(seed).shuffle(pool)
    return pool[HELD_OUT:], pool[:HELD_OUT]


def prompt(triple: Triple) -> str:
    return "sort {} {} {} =".format(*triple)


def answer(triple: Triple) -> str:
    return "{} {} {}".format(*sorted(triple))


def make_teacher(directory: Path, fast: PreTrainedTokenizerFast, training: list[Triple]) -> None:
    """Train the teacher by next-token prediction of the answers."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(shape(fast, hidden=128))
    rows = torch.tensor([fast.encode(f"{prompt(t)} {answer(t)} <eos>") for t in training])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=TEACHER_STEPS)
    for _ in range(TEACHER_STEPS):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        logits = model(input_ids=batch[:, :-1]).logits[:, -4:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, -4:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(directory)
    fast.save_pretrained(directory)


def main(directory: Path) -> None:
    fast, (training, held_out) = tokenizer(), triples()
    shape(fast, hidden=64).save_pretrained(directory / "model")
    fast.save_pretrained(directory / "model")
    draw = random.Random(0)
    drawn = [draw.choice(training) for _ in range(TRAINING_ROWS)]
    for name, chosen in (("train", drawn), ("eval", held_out)):
        rows = [{"prompt": prompt(t), "label": answer(t)} for t in chosen]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_teacher(directory / "teacher", fast, training)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
