"""`sluice validate --deep`: render prompts as the model will see them, and compute rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.api import Reward, RLJob, RLJobSpec
from sluice.api.groups.data import ImageLimits, PromptSource, parse_path
from sluice.data import chat
from sluice.data.answers import check_places, encode
from sluice.data.chat import PromptError
from sluice.data.checking import reader_of
from sluice.data.files import Row, read_source
from sluice.data.make import made_rows
from sluice.data.preferences import named_answers
from sluice.data.rows import PromptRow, RowError, prompt_reader
from sluice.data.vocabulary import check_ids, embedding_size
from sluice.images.processor import ImageProcessor
from sluice.images.reading import ImageError, read_image
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judging.judge import Judge
from sluice.runtime import error_summary
from sluice.runtime.pod_env import ConfigurationError

# Prompts that are rendered, over all sources.
PROMPTS = 10


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model sees it, with the place of its row and its number of tokens.

    `images` has width and height of each image, as it is stored; `tokens` counts their tokens.
    """

    where: str
    tokens: int
    text: str
    images: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JudgedResponse:
    """A response to the prompt of a row, and its reward, with the reward's named parts."""

    where: str
    response: str
    label: Any
    reward: float
    parts: dict[str, float]


@dataclass(slots=True)
class Trial:
    """Rendered prompts and judged responses, and the problems that would end a run."""

    prompts: list[RenderedPrompt] = field(default_factory=list)
    judged: list[JudgedResponse] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        prompts = [asdict(prompt) for prompt in self.prompts]
        return {"prompts": prompts, "reward": asdict(self.judged[0]) if self.judged else None}

    def text(self) -> str:
        parts = [
            f"--- {prompt.where}: {prompt.tokens} tokens{_sizes(prompt.images)}\n{prompt.text}"
            for prompt in self.prompts
        ]
        for judged in self.judged:
            reward_parts = "".join(f", {name} {value:g}" for name, value in judged.parts.items())
            parts.append(
                f"--- reward of the label {judged.label!r} as the answer to "
                f"{judged.where}: {judged.reward:g}{reward_parts}"
            )
        return "\n".join(parts)


def _sizes(images: list[tuple[int, int]]) -> str:
    """Describe the images of a prompt: `, 2 images: 640 x 480, 28 x 28`."""
    if not images:
        return ""
    sizes = ", ".join(f"{width} x {height}" for width, height in images)
    return f", {len(images)} image{'s' if len(images) > 1 else ''}: {sizes}"


def try_prompts(job: RLJob) -> Trial:
    """Render the first prompts, and compute rewards as workers do.

    For each source of prompts and each data set of the evaluation, the label of the first row is
    judged as if it were the response.
    """
    trial, spec = Trial(), job.spec
    try:
        tokenizer = chat.load_tokenizer(
            Path(spec.model.path), trust_remote_code=spec.model.trust_remote_code
        )
        first_rows = _render_prompts(trial, spec, tokenizer)
        trained = first_rows if spec.judged and spec.reward is not None else []
        # Rows that share a reward are judged together, so that its code is loaded once.
        rows_by_field: dict[str, tuple[Reward | None, list[tuple[str, PromptRow]]]] = {
            "spec.reward": (spec.reward, trained)
        }
        for place, evaluation_reward, row in _evaluated(spec):
            rows_by_field.setdefault(place, (evaluation_reward, []))[1].append(row)
        for place, (reward, rows) in rows_by_field.items():
            if reward is not None and rows:
                _judge(trial, place, reward, rows, tokenizer, spec.samples_per_prompt)
    except ConfigurationError as error:
        trial.problems.append(str(error))
    return trial


def _judge(
    trial: Trial,
    place: str,
    reward: Reward,
    rows: list[tuple[str, PromptRow]],
    tokenizer: Any,
    group: int,
) -> None:
    """Judge rows with a reward; an error of the reward becomes one problem of its field."""
    try:
        # A group reward compares the samples of a prompt, and so needs as many as in training.
        count = group if reward.group else 1
        trial.judged += asyncio.run(_judged(reward, rows, tokenizer, count))
    except RewardError as error:
        trial.problems.append(f"{place}: {error}")


def _evaluated(spec: RLJobSpec) -> Iterator[tuple[str, Reward, tuple[str, PromptRow]]]:
    """Yield the field of its reward, the reward and the first row of each evaluation data set."""
    read = prompt_reader(spec.data.images)
    for position, dataset in enumerate(spec.evaluation.datasets if spec.evaluation else []):
        reward = dataset.reward or spec.reward
        if reward is None:  # an environment gives the rewards
            continue
        field_path = f"spec.evaluation.datasets[{position}]"
        place = f"{field_path}.reward" if dataset.reward else "spec.reward"
        rows = (
            _rows_of_file(dataset)
            if dataset.path
            else _rows_of_code(dataset, f"{field_path}.source")
        )
        for where, row in islice(rows, 1):
            try:
                yield place, reward, (where, read(row, dataset))
            except RowError as error:
                raise ConfigurationError(f"{where}: {error}") from error


def _render_prompts(trial: Trial, spec: RLJobSpec, tokenizer: Any) -> list[tuple[str, PromptRow]]:
    """Render prompts into the trial; return the place and the first row of each source."""
    first_rows: dict[int, tuple[str, PromptRow]] = {}
    read, embedding = reader_of(spec), embedding_size(Path(spec.model.path))
    processor = ImageProcessor(Path(spec.model.path)) if spec.data.images else None
    for where, source, row, directory in _rows(spec):
        try:
            parsed = read(row, source)
            sizes = _image_sizes(parsed, directory, spec.data.images)
            text, tokens = _model_input(
                tokenizer,
                Path(spec.model.path),
                source,
                parsed,
                processor.placeholder if processor else None,
            )
            check_ids(tokenizer, tokens, embedding)
            added = processor.added(sizes) if processor else 0
        except (PromptError, RowError, ImageError, ValueError) as error:
            raise ConfigurationError(f"{where}: {error}") from error
        trial.prompts.append(RenderedPrompt(where, len(tokens) + added, text, sizes))
        first_rows.setdefault(id(source), (where, parsed))
    if not first_rows:
        raise ConfigurationError("spec.data.prompts: there are no rows")
    return list(first_rows.values())


def _image_sizes(
    row: PromptRow, directory: Path, limits: ImageLimits | None
) -> list[tuple[int, int]]:
    """Return width and height of a row's images as they are stored. Raises ImageError."""
    if limits is None:
        return []
    images = (read_image(raw, directory, limits) for raw in row.images)
    return [(image.width, image.height) for image in images]


def _model_input(
    tokenizer: Any, model: Path, source: PromptSource, row: PromptRow, placeholder: int | None
) -> tuple[str, list[int]]:
    """Return the text and the token ids of a prompt, and of its given answer if it has one.

    Of two answers it is the longer one. placeholder: token of an image, if rows may have images.
    """
    arguments = source.chat_template_args
    if answers := named_answers(row):
        encoded = [
            encode(
                tokenizer,
                answer,
                chat_text=source.apply_chat_template,
                arguments=arguments,
                stops=chat.stop_tokens(tokenizer, model),
            )
            for _, answer in answers
        ]
        if placeholder is not None:
            for answer in encoded:
                check_places(tokenizer, answer, placeholder, len(row.images))
        longest = max((answer.tokens for answer in encoded), key=len)
        return tokenizer.decode(longest), longest
    text = chat.render(
        tokenizer,
        row.prompt,
        chat=source.apply_chat_template,
        tools=row.tools,
        arguments=arguments,
    )
    # A chat template writes the special tokens itself.
    rendered = source.apply_chat_template or not isinstance(row.prompt, str)
    return text, tokenizer.encode(text, add_special_tokens=not rendered)


def _rows(spec: RLJobSpec) -> Iterator[tuple[str, PromptSource, Row, Path]]:
    """Yield place, source, row and directory of the first prompts.

    Each source gives the same number.
    """
    count = max(PROMPTS // len(spec.data.prompts), 1)
    for position, source in enumerate(spec.data.prompts[:PROMPTS]):
        place = f"spec.data.prompts[{position}].source"
        rows = _rows_of_file(source) if source.path else _rows_of_code(source, place)
        directory = Path(parse_path(source.path)[0]) if source.path else Path()
        directory = directory if directory.is_dir() else directory.parent
        yield from ((where, source, row, directory) for where, row in islice(rows, count))


def _rows_of_file(source: PromptSource) -> Iterator[tuple[str, Row]]:
    return ((located.where, located.row) for located in read_source(source.path or ""))


def _rows_of_code(source: PromptSource, where: str) -> Iterator[tuple[str, Row]]:
    assert source.source is not None
    try:
        rows = enumerate(made_rows(source.source.function, source.source.args, PROMPTS))
        yield from ((f"{where}: row {number}", row) for number, row in rows)
    except ConfigurationError:
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigurationError(f"{where}: {error_summary.cause(error)}") from error


async def _judged(
    reward: Reward, rows: list[tuple[str, PromptRow]], tokenizer: Any, count: int
) -> list[JudgedResponse]:
    """Judge the label of each row as the response of `count` samples in a group.

    Raises RewardError, with the place of the row that the reward fails on.
    """
    judged = []
    judge = Judge(reward, workers=1)
    try:
        await judge.check()
        for where, row in rows:
            response = "" if row.label is None else str(row.label)
            tokens = [int(i) for i in tokenizer.encode(response, add_special_tokens=False)]
            sample = RewardInput(row.prompt, response, row.label, row.metadata, tokens, len(tokens))
            outcome = (await judge([sample] * count))[0]
            if isinstance(outcome, RewardError):
                raise RewardError(f"{outcome} (the label of {where} as the answer)")
            judged.append(JudgedResponse(where, response, row.label, *outcome))
    finally:
        await judge.close()
    return judged
