"""`sluice init`: the files of a new task, which `sluice run` takes as they are."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice.api import ManifestError
from sluice.data.chat import has_template
from sluice.data.files import Row, read_source
from sluice.data.rows import likely_columns
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.init import small_task
from sluice_cli.init.small_task import Rows
from sluice_cli.init.tiny_model import write_model

TRAINING, HELD_OUT = 1024, 64
# Tokens that a chat template may write around a prompt's messages.
_ROOM_OF_A_TEMPLATE = 32
DIGITS = [*"0123456789", "=", "max"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """The task to write. model, data: the user's own; None: a tiny model, a sample of rows."""

    directory: Path
    model: Path | None
    data: Path | None
    gpus: int
    steps: int


def write_task(wishes: Wishes) -> list[Path]:
    """Write manifest, reward, data and, where there is none, a model; the files.

    Raises ManifestError where the directory holds something, or what is given cannot be read.
    """
    directory = wishes.directory
    if directory.exists() and any(directory.iterdir()):
        raise ManifestError(f"{directory} is not empty; expected a new directory")
    for path, what in ((wishes.model, "--model"), (wishes.data, "--data")):
        if path is not None and not path.exists():
            raise ManifestError(f"{what} {path}: no such file or directory")
    columns = _columns(wishes.data)
    rows = small_task.read(wishes.data, columns) if wishes.data else None
    directory.mkdir(parents=True, exist_ok=True)
    train, test = directory / "train.jsonl", directory / "eval.jsonl"
    if wishes.data is None or rows is None:
        training, held_out = _digits() if wishes.model is None else _sums()
        _write_rows(train, training)
        _write_rows(test, held_out)
    else:
        small_task.split(wishes.data, columns, rows, train, test)
    if wishes.model is None:
        _write_model(directory / "model", rows)
    (directory / "reward.py").write_text(_reward(wishes))
    (directory / "job.yaml").write_text(_manifest(wishes, columns, rows))
    return sorted(directory.iterdir())


def _write_model(directory: Path, rows: Rows | None) -> None:
    """A tiny model that can read the prompts and say the answers."""
    if rows is None:
        write_model(directory, DIGITS, 64)
        return
    unit = rows.unit
    tokens = _ROOM_OF_A_TEMPLATE + rows.longest_prompt[unit] + _response_tokens(rows)
    context = -(-tokens // 64) * 64
    write_model(directory, rows.vocabulary(unit), context, unit=unit, chats=rows.chats)


def _response_tokens(rows: Rows | None) -> int:
    """Tokens of the longest answer and its end, for a tiny model."""
    if rows is None:
        return 4
    if not rows.answers:
        return 32
    return min(rows.longest_answer[rows.unit] + 1, small_task.LONGEST_ANSWER)


# --- rows


def _columns(data: Path | None) -> dict[str, str]:
    """Keys of the user's file, by field, where its columns have other names than ours."""
    if data is None:
        return {}
    try:
        first: Row = next(read_source(str(data))).row
    except StopIteration:
        raise ManifestError(f"--data {data}: no rows") from None
    except ConfigurationError as error:
        raise ManifestError(f"--data {error}") from error
    keys = likely_columns(first)
    if "promptKey" not in keys:
        raise ManifestError(
            f"--data {data}: no column looks like a prompt; the first row has "
            f"{', '.join(map(repr, first))}; rename one to 'prompt'"
        )
    return {key: column for key, column in keys.items() if column not in ("prompt", "label")}


def _digits() -> tuple[list[Row], list[Row]]:
    """The largest of three digits; no triple is in both parts, each answer comes equally often."""
    draw = random.Random(0)
    triples = list(itertools.product(range(10), repeat=3))
    draw.shuffle(triples)
    held_out, rest = triples[:HELD_OUT], triples[HELD_OUT:]
    by_answer = [[t for t in rest if max(t) == answer] for answer in range(10)]
    training = [draw.choice(by_answer[i % 10]) for i in range(TRAINING)]
    return [_largest(t) for t in training], [_largest(t) for t in held_out]


def _largest(triple: tuple[int, ...]) -> Row:
    return {"prompt": "max {} {} {} =".format(*triple), "label": str(max(triple))}


def _sums() -> tuple[list[Row], list[Row]]:
    """Sums in words, for a model that can read."""
    draw = random.Random(0)
    pairs = draw.sample(list(itertools.product(range(10, 100), repeat=2)), TRAINING + HELD_OUT)
    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the number alone.", "label": str(a + b)}
        for a, b in pairs
    ]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- texts


def _reward(wishes: Wishes) -> str:
    if wishes.model is not None:
        meaning, body = _CONTAINS
    else:
        meaning, body = _BEGINS if wishes.data else _FIRST_WORD
    imported = "from os.path import commonprefix\n\n" if "commonprefix" in body else ""
    return f'''"""How an answer is judged. `sluice validate job.yaml --deep` tries it."""

{imported}from sluice.rewards import RewardInput


def score(sample: RewardInput) -> float:
    """{meaning}

    sample: prompt, response (text), label and metadata of the row, truncated (cut off at
    maxResponseTokens). A dictionary of numbers with the key `score` is recorded part by part.
    """
{body}'''


_FIRST_WORD = (
    "1 for the right word and then the end, half for the right word first.",
    """    words = sample.response.split() + ([] if sample.truncated else ["<end>"])
    if words[:1] != [str(sample.label)]:
        return 0.0
    return 1.0 if words[1:] == ["<end>"] else 0.5
""",
)
_CONTAINS = (
    "1 for the label and nothing else, half where the response has it somewhere.",
    """    answer = sample.response.strip()
    if answer == str(sample.label):
        return 1.0
    return 0.5 if str(sample.label) in answer else 0.0
""",
)
_BEGINS = (
    "1 for the label and nothing else, up to half for as much of it as the response begins with.",
    """    answer, label = (" ".join(str(text).split()) for text in (sample.response, sample.label))
    if answer == label and not sample.truncated:
        return 1.0
    return 0.5 * len(commonprefix([answer, label])) / max(len(label), 1)
""",
)


def _manifest(wishes: Wishes, columns: dict[str, str], rows: Rows | None) -> str:
    parts = [*_head(wishes), *_data(wishes, columns, rows), *_work(wishes, rows)]
    return "\n".join(parts) + "\n"


def _head(wishes: Wishes) -> Iterator[str]:
    yield "# Try it: sluice validate job.yaml --deep    Run it: sluice run job.yaml"
    yield "# What a field means: sluice explain trainer.steps"
    yield "apiVersion: sluice.dev/v1alpha1"
    yield "kind: RLJob"
    yield f"metadata: {{name: {job_name(wishes.directory)}}}"
    yield "spec:"
    yield "  model:"
    if wishes.model is None:
        yield "    path: model # a tiny one, to see that all fits; put your checkpoint's here"
        yield "    init: random # its weights are drawn; leave this out with a checkpoint"
    else:
        yield f"    path: {_quoted(wishes.model.resolve())}"


def _data(wishes: Wishes, columns: dict[str, str], rows: Rows | None) -> Iterator[str]:
    keys = [f"        {key}: {_quoted(column)}" for key, column in columns.items()]
    keys += (
        ["        applyChatTemplate: true"] if wishes.model and has_template(wishes.model) else []
    )
    yield "  data:"
    yield "    prompts:"
    yield "      - path: train.jsonl"
    yield from keys
    yield "  reward:"
    yield "    function: reward.py:score"
    if rows is None or rows.held_out:
        yield "  evaluation:"
        yield "    everySteps: 10"
        yield "    datasets:"
        yield "      - path: eval.jsonl"
        yield "        name: held-out"
        yield from keys


def _work(wishes: Wishes, rows: Rows | None) -> Iterator[str]:
    small = wishes.model is None
    tokens = _response_tokens(rows) if small else 512
    yield "  rollout:"
    yield f"    gpusPerReplica: {1 if wishes.gpus else 0}"
    yield f"    batchSize: {32 if small else 64} # prompts a step"
    yield "    samplesPerPrompt: 8 # responses a prompt, which GRPO compares"
    yield "    sampling:"
    yield f"      maxResponseTokens: {tokens}"
    if small:
        yield "  algorithm:"
        yield "    entropyCoef: 0.1 # keeps a model that knows nothing from settling too early"
    yield "  trainer:"
    yield f"    gpusPerNode: {max(wishes.gpus - 1, 1) if wishes.gpus else 0}"
    if wishes.gpus == 1:
        yield "    colocate: true # trainer and engine take turns on the one GPU"
    yield f"    steps: {wishes.steps}"
    yield "    optimizer:"
    yield f"      lr: {'1.5e-3' if small else '1.0e-6'}"
    yield "  checkpoint:"
    yield "    everySteps: 20"


def job_name(directory: Path) -> str:
    """The directory's name as the name of a job: small letters, digits and '-'."""
    plain = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"task-{plain}".strip("-"))[:40].rstrip("-")


def _quoted(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)
