"""`sluice init`: write the files of a new task, ready for `sluice run`."""

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
from sluice.data.preferences import parse_pair
from sluice.data.rows import RowReader, likely_columns, parse_row
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.init import small_task
from sluice_cli.init.small_task import RowStatistics
from sluice_cli.init.tiny_model import write_model

# Rows of the sample data.
TRAINING, HELD_OUT = 1024, 64
# Tokens that a chat template may add to a prompt's messages.
_TEMPLATE_TOKENS = 32
# Vocabulary of the sample task.
DIGITS = [*"0123456789", "=", "max"]


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The task to write."""

    directory: Path
    # None: a tiny model.
    model: Path | None
    # None: sample rows.
    data: Path | None
    gpus: int
    steps: int
    # Train an adapter of `model`.
    lora: bool = False
    # Learn from pairs of a chosen and a rejected answer, without a reward.
    pairs: bool = False


def write_task(options: TaskOptions) -> list[Path]:
    """Write the manifest, the data and, if none is given, a tiny model.

    A task with a reward also has its function.

    Returns the paths that were written. Raises ManifestError if the directory is not empty, or if
    the given files cannot be read.
    """
    directory = options.directory
    if directory.exists() and any(directory.iterdir()):
        raise ManifestError(f"{directory} is not empty; expected a new directory")
    for path, what in ((options.model, "--model"), (options.data, "--data")):
        if path is not None and not path.exists():
            raise ManifestError(f"{what} {path}: no such file or directory")
    parse: RowReader = parse_pair if options.pairs else parse_row
    columns = {} if options.pairs else _columns(options.data)
    rows = small_task.read(options.data, columns, parse) if options.data else None
    if options.lora and options.model is None:
        raise ManifestError("--lora adapts a trained model: name it with --model")
    directory.mkdir(parents=True, exist_ok=True)
    train, test = directory / "train.jsonl", directory / "eval.jsonl"
    if options.data is None or rows is None:
        training, held_out = _digits() if options.model is None else _sums()
        if options.pairs:
            training, held_out = _paired(training), _paired(held_out)
        _write_rows(train, training)
        _write_rows(test, held_out)
    else:
        small_task.split(options.data, columns, rows, train, test, parse)
    if options.model is None:
        _write_model(directory / "model", rows)
    if not options.pairs:
        (directory / "reward.py").write_text(_reward(options))
    (directory / "job.yaml").write_text(_manifest(options, columns, rows))
    return sorted(directory.iterdir())


def _write_model(directory: Path, rows: RowStatistics | None) -> None:
    """Write a tiny model whose vocabulary and context fit the rows."""
    if rows is None:
        write_model(directory, DIGITS, 64)
        return
    unit = rows.unit
    tokens = _TEMPLATE_TOKENS + rows.longest_prompt[unit] + _response_tokens(rows)
    # Round up to a multiple of 64.
    context = -(-tokens // 64) * 64
    write_model(directory, rows.vocabulary(unit), context, unit=unit, chats=rows.chats)


def _response_tokens(rows: RowStatistics | None) -> int:
    """Return the number of tokens of the longest answer and its end, for a tiny model."""
    if rows is None:
        return 4
    if not rows.answers:
        return 32
    return min(rows.longest_answer[rows.unit] + 1, small_task.MAX_ANSWER_TOKENS)


# --- rows


def _columns(data: Path | None) -> dict[str, str]:
    """Return the fields that name the file's columns, if they differ from prompt and label."""
    if data is None:
        return {}
    try:
        first: Row = next(read_source(str(data))).row
    except StopIteration:
        raise ManifestError(f"--data {data}: the file has no rows") from None
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
    """Make training and held-out rows that ask for the largest of three digits.

    No triple is in both. In the training rows every answer is equally frequent.
    """
    draw = random.Random(0)
    triples = list(itertools.product(range(10), repeat=3))
    draw.shuffle(triples)
    held_out, rest = triples[:HELD_OUT], triples[HELD_OUT:]
    by_answer = [[t for t in rest if max(t) == answer] for answer in range(10)]
    # Small answers have few triples (0 has one), so rows repeat.
    training = [draw.choice(by_answer[i % 10]) for i in range(TRAINING)]
    return [_largest(t) for t in training], [_largest(t) for t in held_out]


def _largest(triple: tuple[int, ...]) -> Row:
    return {"prompt": "max {} {} {} =".format(*triple), "label": str(max(triple))}


def _sums() -> tuple[list[Row], list[Row]]:
    """Make training and held-out rows that ask for sums, for a pretrained model."""
    draw = random.Random(0)
    pairs = draw.sample(list(itertools.product(range(10, 100), repeat=2)), TRAINING + HELD_OUT)
    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the number alone.", "label": str(a + b)}
        for a, b in pairs
    ]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def _paired(rows: list[Row]) -> list[Row]:
    """Return rows with the right answer as the chosen one, and that of another row as rejected."""
    others = itertools.cycle(rows)
    pairs = []
    for row in rows:
        wrong = next(other for other in others if other["label"] != row["label"])
        chosen, rejected = (f" {label}" for label in (row["label"], wrong["label"]))
        pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return pairs


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- texts


def _reward(options: TaskOptions) -> str:
    if options.model is not None:
        meaning, body = _CONTAINS
    else:
        meaning, body = _BEGINS if options.data else _FIRST_WORD
    imported = "from os.path import commonprefix\n\n" if "commonprefix" in body else ""
    return f'''"""The reward function. `sluice validate job.yaml --deep` tries it."""

{imported}from sluice.rewards import RewardInput


def score(sample: RewardInput) -> float:
    """{meaning}

    The sample has the row's prompt, label and metadata, the response as text, and truncated, which
    is True if the response was cut off at maxResponseTokens. The function may also return a
    dictionary of numbers: `score` is the reward, and the other numbers are recorded.
    """
{body}'''


_FIRST_WORD = (
    "Return 1 for the right word and nothing else, 0.5 if the right word comes first.",
    """    words = sample.response.split() + ([] if sample.truncated else ["<end>"])
    if words[:1] != [str(sample.label)]:
        return 0.0
    return 1.0 if words[1:] == ["<end>"] else 0.5
""",
)
_CONTAINS = (
    "Return 1 for the label and nothing else, 0.5 if the response contains it.",
    """    answer = sample.response.strip()
    if answer == str(sample.label):
        return 1.0
    return 0.5 if str(sample.label) in answer else 0.0
""",
)
_BEGINS = (
    "Return 1 for the label and nothing else, up to 0.5 for a response that begins like it.",
    """    answer, label = (" ".join(str(text).split()) for text in (sample.response, sample.label))
    if answer == label and not sample.truncated:
        return 1.0
    return 0.5 * len(commonprefix([answer, label])) / max(len(label), 1)
""",
)


def _manifest(options: TaskOptions, columns: dict[str, str], rows: RowStatistics | None) -> str:
    parts = [*_head(options), *_data(options, columns, rows), *_work(options, rows)]
    return "\n".join(parts) + "\n"


def _head(options: TaskOptions) -> Iterator[str]:
    yield "# Check: sluice validate job.yaml --deep    Run: sluice run job.yaml"
    yield "# Explain a field: sluice explain trainer.steps"
    yield "apiVersion: sluice.dev/v1alpha1"
    yield "kind: RLJob"
    yield f"metadata: {{name: {job_name(options.directory)}}}"
    yield "spec:"
    yield "  model:"
    if options.model is None:
        yield "    path: model # a tiny model to try the task; replace it with your checkpoint"
        yield "    init: random # random weights; remove this line if you use a checkpoint"
    else:
        yield f"    path: {_quoted(options.model.resolve())}"


def _data(
    options: TaskOptions, columns: dict[str, str], rows: RowStatistics | None
) -> Iterator[str]:
    keys = [f"        {key}: {_quoted(column)}" for key, column in columns.items()]
    keys += (
        ["        applyChatTemplate: true"] if options.model and has_template(options.model) else []
    )
    yield "  data:"
    yield "    prompts:"
    yield "      - path: train.jsonl"
    yield from keys
    if not options.pairs:
        yield "  reward:"
        yield "    function: reward.py:score"
    if rows is None or rows.held_out:
        yield "  evaluation:"
        yield "    everySteps: 10"
        # The loss of held-out pairs needs no engine.
        yield f"    {'heldOut' if options.pairs else 'datasets'}:"
        yield "      - path: eval.jsonl"
        yield "        name: held-out"
        yield from keys


def _work(options: TaskOptions, rows: RowStatistics | None) -> Iterator[str]:
    small = options.model is None
    tokens = _response_tokens(rows) if small else 512
    yield "  rollout:"
    yield f"    gpusPerReplica: {1 if options.gpus else 0}"
    rows_of_step = "pairs" if options.pairs else "prompts"
    yield f"    batchSize: {32 if small else 64} # {rows_of_step} per step"
    if not options.pairs:
        yield "    samplesPerPrompt: 8 # responses per prompt; GRPO compares them"
        yield "    sampling:"
        yield f"      maxResponseTokens: {tokens}"
    if options.pairs:
        yield "  algorithm:"
        yield "    loss:"
        yield "      type: dpo # or ipo, simpo, orpo; reward_model trains a reward model"
    elif small:
        yield "  algorithm:"
        yield "    entropyCoef: 0.1 # keeps an untrained model from settling too early"
    yield "  trainer:"
    if options.lora:
        yield "    backend: fsdp"
        yield "    lora: # an adapter of all linear layers; the model itself does not change"
        yield "      rank: 32"
    # One GPU is for the engine and the others are for the trainer; they share a single GPU.
    # Pairs need no engine.
    trainer = options.gpus if options.pairs else max(options.gpus - 1, 1)
    yield f"    gpusPerNode: {trainer if options.gpus else 0}"
    if options.gpus == 1 and not options.pairs:
        yield "    colocate: true # trainer and engine take turns on one GPU"
    yield f"    steps: {options.steps}"
    yield "    optimizer:"
    yield f"      lr: {_learning_rate(options)}"
    yield "  checkpoint:"
    yield "    everySteps: 20"


def _learning_rate(options: TaskOptions) -> str:
    """Return a rate at which most models of this kind learn, as text."""
    if options.model is None:
        return "1.5e-3"  # it would ruin a pretrained model
    return "1.0e-5" if options.lora else "1.0e-6"


def job_name(directory: Path) -> str:
    """Turn the directory's name into a job name of lower-case letters, digits and '-'."""
    # A job name has at most 40 characters and begins with a letter (metadata.name of an RLJob).
    plain = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"task-{plain}".strip("-"))[:40].rstrip("-")


def _quoted(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)
