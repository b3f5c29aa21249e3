"""`sluice validate --deep`: prompts as the model will see them, and one reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.api import Reward, RLJob, RLJobSpec
from sluice.api.groups.data import PromptSource
from sluice.data import chat
from sluice.data.answers import AnsweredRow, encode
from sluice.data.chat import PromptError
from sluice.data.checking import reader_of
from sluice.data.files import Row, read_source
from sluice.data.make import made_rows
from sluice.data.rows import PromptRow, RowError, parse_row
from sluice.data.vocabulary import check_ids, embedding_size
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judging.judge import Judge
from sluice.runtime import error_summary
from sluice.runtime.pod_env import ConfigurationError

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
    judged: list[Judged] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        prompts = [asdict(prompt) for prompt in self.prompts]
        return {"prompts": prompts, "reward": asdict(self.judged[0]) if self.judged else None}

    def text(self) -> str:
        parts = [f"--- {p.where}: {p.tokens} tokens\n{p.text}" for p in self.prompts]
        for judged in self.judged:
            named = "".join(f", {name} {value:g}" for name, value in judged.parts.items())
            parts.append(
                f"--- reward of the label {judged.label!r} as the answer to "
                f"{judged.where}: {judged.reward:g}{named}"
            )
        return "\n".join(parts)


def try_out(job: RLJob) -> Trial:
    """Render the first ten prompts, and judge as workers do: of each source of prompts and each
    data set of the evaluation the first label, taken as an answer.
    """
    trial, spec = Trial(), job.spec
    try:
        tokenizer = chat.load_tokenizer(
            Path(spec.model.path), trust_remote_code=spec.model.trust_remote_code
        )
        firsts = _rendered(trial, spec, tokenizer)
        trained = firsts if spec.judged and spec.reward is not None else []
        rows: dict[str, tuple[Reward | None, list[tuple[str, PromptRow]]]] = {
            "spec.reward": (spec.reward, trained)
        }
        for place, reward, row in _evaluated(spec):
            rows.setdefault(place, (reward, []))[1].append(row)
        for place, (judge, of_judge) in rows.items():
            if judge is not None and of_judge:
                _judge(trial, place, judge, of_judge, tokenizer, spec.samples_per_prompt)
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
    """Judge rows with a reward; what it raises is a problem of its field, once for all rows."""
    try:
        count = group if reward.group else 1
        trial.judged += asyncio.run(_judged(reward, rows, tokenizer, count))
    except RewardError as error:
        trial.problems.append(f"{place}: {error}")


def _evaluated(spec: RLJobSpec) -> Iterator[tuple[str, Reward, tuple[str, PromptRow]]]:
    """(field of its reward, reward, first row) of each data set of the evaluation."""
    for position, dataset in enumerate(spec.evaluation.datasets if spec.evaluation else []):
        reward = dataset.reward or spec.reward
        if reward is None:  # its environment judges it
            continue
        at = f"spec.evaluation.datasets[{position}]"
        place = f"{at}.reward" if dataset.reward else "spec.reward"
        located = _of_file(dataset) if dataset.path else _of_code(dataset, f"{at}.source")
        for where, row in islice(located, 1):
            try:
                yield place, reward, (where, parse_row(row, dataset))
            except RowError as error:
                raise ConfigurationError(f"{where}: {error}") from error


def _rendered(trial: Trial, spec: RLJobSpec, tokenizer: Any) -> list[tuple[str, PromptRow]]:
    """Fill the trial's prompts; (place, row) of the first one of each source."""
    firsts: dict[int, tuple[str, PromptRow]] = {}
    read, embedding = reader_of(spec), embedding_size(Path(spec.model.path))
    for where, source, row in _rows(spec):
        try:
            parsed = read(row, source)
            text, tokens = _seen(tokenizer, Path(spec.model.path), source, parsed)
            check_ids(tokenizer, tokens, embedding)
        except (PromptError, RowError) as error:
            raise ConfigurationError(f"{where}: {error}") from error
        trial.prompts.append(Rendered(where, len(tokens), text))
        firsts.setdefault(id(source), (where, parsed))
    if not firsts:
        raise ConfigurationError("spec.data.prompts: there is no row")
    return list(firsts.values())


def _seen(
    tokenizer: Any, model: Path, source: PromptSource, row: PromptRow
) -> tuple[str, list[int]]:
    """(text, its token ids) of a prompt; of a row with a given answer, with that."""
    arguments = source.chat_template_args
    if isinstance(row, AnsweredRow):
        encoded = encode(
            tokenizer,
            row,
            chat_text=source.apply_chat_template,
            arguments=arguments,
            stops=chat.stop_tokens(tokenizer, model),
        )
        return tokenizer.decode(encoded.tokens), encoded.tokens
    text = chat.render(
        tokenizer,
        row.prompt,
        chat=source.apply_chat_template,
        tools=row.tools,
        arguments=arguments,
    )
    rendered = source.apply_chat_template or not isinstance(row.prompt, str)
    return text, tokenizer.encode(text, add_special_tokens=not rendered)


def _rows(spec: RLJobSpec) -> Iterator[tuple[str, PromptSource, Row]]:
    """(where, source, row): ten first rows in all, of each source equally many."""
    each = max(PROMPTS // len(spec.data.prompts), 1)
    for position, source in enumerate(spec.data.prompts[:PROMPTS]):
        place = f"spec.data.prompts[{position}].source"
        rows = _of_file(source) if source.path else _of_code(source, place)
        yield from ((where, source, row) for where, row in islice(rows, each))


def _of_file(source: PromptSource) -> Iterator[tuple[str, Row]]:
    return ((located.where, located.row) for located in read_source(source.path or ""))


def _of_code(source: PromptSource, where: str) -> Iterator[tuple[str, Row]]:
    assert source.source is not None
    try:
        rows = enumerate(made_rows(source.source.function, source.source.args, PROMPTS))
        yield from ((f"{where}: row {number}", row) for number, row in rows)
    except ConfigurationError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigurationError(f"{where}: {error_summary.cause(error)}") from error


async def _judged(
    reward: Reward, rows: list[tuple[str, PromptRow]], tokenizer: Any, count: int
) -> list[Judged]:
    """Judge the label of each row as its answer, as `count` samples of a group.

    Raises RewardError, with the place of a row that the reward fails at.
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
            judged.append(Judged(where, response, row.label, *outcome))
    finally:
        await judge.close()
    return judged
