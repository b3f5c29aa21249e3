"""`sluice validate --deep`: prompts as the model will see them, and one reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sluice import causes
from sluice.api import RLJob, RLJobSpec
from sluice.api.data import PromptSource
from sluice.data import chat
from sluice.data.answers import AnsweredRow, encode
from sluice.data.chat import PromptError
from sluice.data.checking import reader_of
from sluice.data.files import Row, read_source
from sluice.data.make import made_rows
from sluice.data.rows import PromptRow, RowError
from sluice.environment import ConfigurationError
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judging.judge import Judge

PROMPTS = 10


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the model sees it. tokens: of the text."""

    where: str
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Judged:
    """A response, and the reward that the job gives it. parts: the named numbers in it."""

    where: str
    response: str
    label: Any
    reward: float
    parts: dict[str, float]


@dataclass(slots=True)
class Trial:
    """The results of a try; problems: what no run survives."""

    prompts: list[Rendered] = field(default_factory=list)
    judged: Judged | None = None
    problems: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        prompts = [asdict(prompt) for prompt in self.prompts]
        return {"prompts": prompts, "reward": asdict(self.judged) if self.judged else None}

    def text(self) -> str:
        parts = [f"--- {p.where}: {p.tokens} tokens\n{p.text}" for p in self.prompts]
        if self.judged is not None:
            each = "".join(f", {name} {value:g}" for name, value in self.judged.parts.items())
            parts.append(
                f"--- reward of the label {self.judged.label!r} as the answer to "
                f"{self.judged.where}: {self.judged.reward:g}{each}"
            )
        return "\n".join(parts)


def try_out(job: RLJob) -> Trial:
    """Render the first ten prompts and judge the first label, taken as an answer: as workers do."""
    trial, spec = Trial(), job.spec
    try:
        tokenizer = chat.load_tokenizer(
            Path(spec.model.path), trust_remote_code=spec.model.trust_remote_code
        )
        first = _rendered(trial, spec, tokenizer)
        if spec.judged and spec.reward is not None:
            trial.judged = asyncio.run(_judged(spec, tokenizer, *first))
    except ConfigurationError as error:
        trial.problems.append(str(error))
    except RewardError as error:
        trial.problems.append(f"spec.reward: {error}")
    return trial


def _rendered(trial: Trial, spec: RLJobSpec, tokenizer: Any) -> tuple[str, PromptRow]:
    """Fill the trial's prompts; where the first one stands, and its row."""
    rows = []
    for where, source, row in _rows(spec):
        try:
            parsed = reader_of(spec)(row, source)
            text, tokens = _seen(tokenizer, source, parsed)
        except (PromptError, RowError) as error:
            raise ConfigurationError(f"{where}: {error}") from error
        trial.prompts.append(Rendered(where, tokens, text))
        rows.append((where, parsed))
    if not rows:
        raise ConfigurationError("spec.data.prompts: there is no row")
    return rows[0]


def _seen(tokenizer: Any, source: PromptSource, row: PromptRow) -> tuple[str, int]:
    """(text, its tokens) of a prompt; of a row with a given answer, with that."""
    arguments = source.chat_template_args
    if isinstance(row, AnsweredRow):
        encoded = encode(tokenizer, row, chat_text=source.apply_chat_template, arguments=arguments)
        return tokenizer.decode(encoded.tokens), len(encoded.tokens)
    text = chat.render(
        tokenizer,
        row.prompt,
        chat=source.apply_chat_template,
        tools=row.tools,
        arguments=arguments,
    )
    rendered = source.apply_chat_template or not isinstance(row.prompt, str)
    return text, len(tokenizer.encode(text, add_special_tokens=not rendered))


def _rows(spec: RLJobSpec) -> Iterator[tuple[str, PromptSource, Row]]:
    """(where, source, row): ten first rows in all, of each source equally many."""
    each = max(PROMPTS // len(spec.data.prompts), 1)
    for position, source in enumerate(spec.data.prompts[:PROMPTS]):
        rows = _of_file(source) if source.path else _of_code(source, position)
        yield from ((where, source, row) for where, row in islice(rows, each))


def _of_file(source: PromptSource) -> Iterator[tuple[str, Row]]:
    return ((located.where, located.row) for located in read_source(source.path or ""))


def _of_code(source: PromptSource, position: int) -> Iterator[tuple[str, Row]]:
    assert source.source is not None
    where = f"spec.data.prompts[{position}].source"
    try:
        rows = enumerate(made_rows(source.source.function, source.source.args, PROMPTS))
        yield from ((f"{where}: row {number}", row) for number, row in rows)
    except ConfigurationError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigurationError(f"{where}: {causes.cause(error)}") from error


async def _judged(spec: RLJobSpec, tokenizer: Any, where: str, row: PromptRow) -> Judged:
    """Raises RewardError."""
    assert spec.reward is not None
    response = "" if row.label is None else str(row.label)
    tokens = [int(i) for i in tokenizer.encode(response, add_special_tokens=False)]
    judge = Judge(spec.reward, workers=1)
    try:
        await judge.check()
        [outcome] = await judge(
            [RewardInput(row.prompt, response, row.label, row.metadata, tokens, len(tokens))]
        )
    finally:
        await judge.close()
    if isinstance(outcome, RewardError):
        raise outcome
    return Judged(where, response, row.label, *outcome)
