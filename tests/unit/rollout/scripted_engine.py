"""A scripted engine, and a runner of generate functions at it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.engines.protocol import Generation, OnPart
from sluice.images.image import Image
from sluice.samples.sample import Prompt, Sample, WeightSpan
from sluice.wire import codec
from sluice_rollout.episode import Episode, Play
from sluice_rollout.generate import Generator
from sluice_rollout.health import EngineHealth
from sluice_rollout.user_functions.runner import EpisodeRunner

PROMPT = [1, 2, 3]
PARAMS = {"max_new_tokens": 10, "temperature": 1.0}


class NumberTokenizer:
    """A tokenizer whose words are numbers."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]


@dataclass(frozen=True)
class Broken:
    """An answer of which some tokens come, and then an error."""

    tokens: list[int]
    error: BaseException


class Script:
    """An engine that answers each request with the next entry of a script, within its limit.

    An entry is the tokens of an answer, such a list as text for an answer that was cut off after
    them, an exception, or both (`Broken`). Answers come by parts of `part_tokens`, unless that is
    0.
    """

    url = "http://engine"
    part_tokens = 0

    def __init__(self, *answers: list[int] | str | Exception | Broken) -> None:
        self.answers = list(answers)
        self.prompt_ids: list[list[int]] = []
        self.images: list[list[Image]] = []
        self.version = 0

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        return False, "/health: refused"

    async def generate(
        self,
        rid: str,
        input_ids: list[int],
        sampling: dict[str, Any],
        *,
        cache: str,
        images: Sequence[Image] = (),
        on_part: OnPart | None = None,
    ) -> Generation:
        self.images.append(list(images))
        self.prompt_ids.append(input_ids)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Broken):
            await self._send_parts(answer.tokens, on_part)
            raise answer.error
        finish = "stop"
        if isinstance(answer, str):  # "7 8": cut off behind these
            finish, answer = "abort", [int(word) for word in answer.split()]
        assert isinstance(answer, list)
        room = sampling["max_new_tokens"]
        if len(answer) > room:
            finish, answer = "length", answer[:room]
        await self._send_parts(answer, on_part)
        return self._generation(answer, finish)

    def _generation(self, tokens: list[int], finish: str) -> Generation:
        spans = [WeightSpan(self.version, 0, len(tokens))] if tokens else []
        return Generation(tokens, [-0.5] * len(tokens), spans, finish, None)

    async def _send_parts(self, tokens: list[int], on_part: OnPart | None) -> None:
        if on_part and self.part_tokens:
            for start in range(0, len(tokens), self.part_tokens):
                on_part(self._generation(tokens[start : start + self.part_tokens], ""))
                await asyncio.sleep(0)


class SlowScript(Script):
    """An engine that answers as in its script, and after that only when a request is aborted.

    It then has sampled `cut` tokens. A deaf one does not answer even then.
    """

    def __init__(self, *answers: list[int], cut: list[int], deaf: bool = False) -> None:
        super().__init__(*answers)
        self.cut, self.deaf = cut, deaf
        self.aborted: list[str | None] = []
        self.cancelled = 0
        self._ended = asyncio.Event()

    async def generate(self, rid: str, *arguments: Any, **options: Any) -> Generation:
        if self.answers:
            return await super().generate(rid, *arguments, **options)
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        assert rid in self.aborted
        return self._generation(self.cut, "abort")

    async def abort(self, rid: str | None = None) -> None:
        self.aborted.append(rid)
        if not self.deaf:
            self._ended.set()


def scripted_runner(play: Play, engine: Script, seconds: float = 60.0) -> EpisodeRunner:
    """A runner of a function at a scripted engine."""

    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    health = EngineHealth(engine, 60.0)  # type: ignore[arg-type]
    generator = Generator(engine, decode, asyncio.Semaphore(4), lambda: engine.version, health)  # type: ignore[arg-type]
    return EpisodeRunner(play, "mine.py:play", generator, NumberTokenizer(), seconds, None)


def drain_after_the_last(engine: Script, playing: EpisodeRunner) -> None:
    """The pod ends while the engine's last answer is on its way."""
    request = engine.generate

    async def drained(*arguments: Any, **options: Any) -> Generation:
        answer = await request(*arguments, **options)
        if not engine.answers:
            playing.generator.draining.set()
        return answer

    engine.generate = drained  # type: ignore[method-assign]


async def run(
    play: Callable[[Episode], Awaitable[None]], engine: Script, sample: Sample | None = None
) -> Sample:
    """Play a sample, and check that it can be sent."""
    played = await scripted_runner(play, engine)(
        Prompt(0, "?"), PROMPT, sample or Sample(0), PARAMS
    )
    codec.sample_to_message(played)
    return played
