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
from sluice.environment import ConfigurationError
from sluice_cli.tiny import write_model

TRAINING, HELD_OUT = 1024, 64
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
    directory.mkdir(parents=True, exist_ok=True)
    if wishes.data is None:
        training, held_out = _digits() if wishes.model is None else _sums()
        _write_rows(directory / "train.jsonl", training)
        _write_rows(directory / "eval.jsonl", held_out)
    if wishes.model is None:
        sample = wishes.data is None
        write_model(directory / "model", DIGITS if sample else (), 64 if sample else 2048)
    (directory / "reward.py").write_text(_reward(wishes))
    (directory / "job.yaml").write_text(_manifest(wishes, columns))
    return sorted(directory.iterdir())


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
    sample = wishes.data is None and wishes.model is None
    words = """    words = sample.response.split() + ([] if sample.truncated else ["<end>"])
    if words[:1] != [str(sample.label)]:
        return 0.0
    return 1.0 if words[1:] == ["<end>"] else 0.5
"""
    contains = """    answer = sample.response.strip()
    if answer == str(sample.label):
        return 1.0
    return 0.5 if str(sample.label) in answer else 0.0
"""
    meaning = (
        "1 for the right word and then the end, half for the right word first"
        if sample
        else "1 for the label and nothing else, half where the response has it somewhere"
    )
    return f'''"""How an answer is judged. `sluice validate job.yaml --deep` tries it."""

from sluice.rewards import RewardInput


def score(sample: RewardInput) -> float:
    """{meaning[0].upper()}{meaning[1:]}.

    sample: prompt, response (text), label and metadata of the row, truncated (cut off at
    maxResponseTokens). A dictionary of numbers with the key `score` is recorded part by part.
    """
{words if sample else contains}'''


def _manifest(wishes: Wishes, columns: dict[str, str]) -> str:
    return "\n".join([*_head(wishes), *_data(wishes, columns), *_work(wishes)]) + "\n"


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


def _data(wishes: Wishes, columns: dict[str, str]) -> Iterator[str]:
    keys = [f"        {key}: {_quoted(column)}" for key, column in columns.items()]
    keys += (
        ["        applyChatTemplate: true"] if wishes.model and has_template(wishes.model) else []
    )
    path = "train.jsonl" if wishes.data is None else _quoted(wishes.data.resolve())
    yield "  data:"
    yield "    prompts:"
    yield f"      - path: {path}"
    yield from keys
    yield "  reward:"
    yield "    function: reward.py:score"
    if wishes.data is None:
        yield "  evaluation:"
        yield "    everySteps: 10"
        yield "    datasets:"
        yield "      - path: eval.jsonl"
        yield "        name: held-out"
        yield from keys


def _work(wishes: Wishes) -> Iterator[str]:
    small = wishes.model is None
    tokens = (4 if wishes.data is None else 32) if small else 512
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
