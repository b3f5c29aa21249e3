"""What a user's generate function (`rollout.function`) plays on: one sample, its model and its tokens.

    async def play(episode: Episode) -> None:
        turn = await episode.generate()           # the model speaks: tokens that are trained
        episode.observe(f" {run(turn.text)} ")    # the environment answers: tokens that are not
        await episode.generate()

Token in, token out: what the model made is kept as the tokens that it made, and never encoded again. Everything that is
needed to go on elsewhere is in the sample, because the function can be repeated: a sample that an interruption left
half-way is played again from the start, and `generate` answers with the turns that are there already, without asking
the engine. An observation that comes out otherwise than before ends that: what followed it is dropped, and made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sluice.rewards.types import RewardValue, read_value
from sluice.sample import Prompt, Sample, WeightSpan
from sluice_rollout.engine import EngineError, PromptRefusedError
from sluice_rollout.generate import Generator

TURNS = "turns"
"""Where a sample's metadata hold its turns: [{"by": "model" | "environment", "length": tokens, "finish": ...}, ...]."""
MODEL, ENVIRONMENT = "model", "environment"


class EpisodeEndError(Exception):
    """Nothing more can be generated for this sample. Let it pass; `generate` raises it again and again."""


class TruncatedError(EpisodeEndError):
    """The response has reached its limit of tokens (sampling.maxResponseTokens, observations included)."""


class InterruptedEpisodeError(EpisodeEndError):
    """The pod ends, or its engine does; the sample goes on elsewhere."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said. finish: `stop` or `length` (of the turn). stop: the stop string at its end, not in text."""

    text: str
    tokens: list[int]
    log_probs: list[float]
    finish: str
    stop: str | None = None


@dataclass(slots=True)
class Episode:
    """One sample in play. prompt: the row (prompt, label, metadata, tools); tokenizer: the model's own.

    sampling: SGLang's parameters of this sample; a function may change them. metadata of the sample go to the reward.
    """

    prompt: Prompt
    sample: Sample
    tokenizer: Any
    sampling: dict[str, Any]
    generator: Generator
    version: Callable[[], int]
    reward_key: str | None = None
    turn_seconds: float = 0.0
    deadline: asyncio.Timeout | None = None
    engine_free: asyncio.Event = field(default_factory=asyncio.Event)
    ended: BaseException | None = None
    _next: int = 0
    _at: int = 0

    def __post_init__(self) -> None:
        self.engine_free.set()

    @property
    def metadata(self) -> dict[str, Any]:
        """The sample's own; the reward sees them beside the prompt's. Only what JSON can hold."""
        return self.sample.metadata

    @property
    def room(self) -> int:
        """Tokens that the response may still have."""
        return int(self.sampling["max_new_tokens"]) - self._at

    def reward(self, value: RewardValue) -> None:
        """Give the reward here, where the environment knows it; nobody else is asked then."""
        self.sample.reward, self.sample.reward_parts = read_value(value, self.reward_key)

    async def generate(self, *, max_tokens: int | None = None, **sampling: Any) -> Turn:
        """The model's next turn, behind all tokens so far. sampling: other SGLang parameters for this turn.

        Raises TruncatedError where the response is full, at once or by this turn.
        """
        record = self._recorded(MODEL)
        if not record["finish"]:
            room = self.room if max_tokens is None else min(self.room, max_tokens)
            if room <= 0:
                self._end(TruncatedError(f"the response has its {self.sampling['max_new_tokens']} tokens"))
            await self._speak(record, self.sampling | sampling, room - record["length"])
        start, self._at = self._at, self._at + record["length"]
        if record["finish"] == "length" and self.room <= 0:
            self._end(TruncatedError(f"the response has its {self.sampling['max_new_tokens']} tokens"))
        tokens = self.sample.tokens[self.sample.prompt_length :].tolist()[start : self._at]
        log_probs = self.sample.rollout_log_probs[start : self._at].tolist()
        stop = record.get("stop")
        return Turn(self.generator.text(tokens, stop), tokens, log_probs, record["finish"], stop)

    def observe(self, what: str | list[int]) -> None:
        """Append what the environment says: text, or token ids. It is in the context and never trained on.

        Raises TruncatedError where it does not fit.
        """
        tokens = self.tokenizer.encode(what, add_special_tokens=False) if isinstance(what, str) else list(what)
        if not tokens:
            return
        if len(tokens) > self.room:
            self.sample.cut(self._at)
            del self._turns[self._next :]
            self._end(TruncatedError(f"an observation of {len(tokens)} tokens, room for {self.room}"))
        record = self._recorded(ENVIRONMENT)
        start = self.sample.prompt_length + self._at
        if record["finish"] and self.sample.tokens[start : start + record["length"]].tolist() != tokens:
            self._next -= 1
            self._diverge()
            record = self._recorded(ENVIRONMENT)
        if not record["finish"]:
            spans = self.sample.weight_versions
            version = spans[-1].version if spans else self.version()
            self.sample.append(tokens, [], [WeightSpan(version, 0, len(tokens))], trainable=False)
            record |= {"length": len(tokens), "finish": "stop"}
        self._at += len(tokens)

    async def ask(self, text: str | list[int], *, max_tokens: int = 256, **sampling: Any) -> Turn:
        """Generate beside the sample: a judge, a summary, another player. Nothing of it is kept or trained."""
        aside = Sample(index=-1)
        aside.append_prompt(self.tokenizer.encode(text) if isinstance(text, str) else text)
        record: dict[str, Any] = {"length": 0}
        await self._speak(record, self.sampling | sampling, max_tokens, aside)
        tokens, stop = aside.tokens[aside.prompt_length :].tolist(), record.get("stop")
        return Turn(self.generator.text(tokens, stop), tokens, aside.rollout_log_probs.tolist(), record["finish"], stop)

    async def _speak(
        self, record: dict[str, Any], sampling: dict[str, Any], room: int, sample: Sample | None = None
    ) -> None:
        """Have the engine finish a turn; the user's time stands still meanwhile."""
        if self.ended:
            raise self.ended
        sample = sample or self.sample
        before = sample.response_length - record["length"]
        self.engine_free.clear()
        if self.deadline:
            self.deadline.reschedule(None)
        try:
            made = await self.generator.turn(sample, sampling, room)
        except (PromptRefusedError, EngineError) as error:
            self.ended = error
            raise
        finally:
            record["length"] = sample.response_length - before
            self.engine_free.set()
            self.start_clock()
        if made is None:
            self._end(InterruptedEpisodeError("the pod ends"))
        record["finish"] = made.finish
        if made.matched_stop:
            record["stop"] = made.matched_stop

    def start_clock(self) -> None:
        """The user's code has `turn_seconds` until it asks the engine again, or returns."""
        if self.deadline and self.turn_seconds and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time() + self.turn_seconds)

    @property
    def _turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = self.sample.metadata.setdefault(TURNS, [])
        return turns

    def _recorded(self, by: str) -> dict[str, Any]:
        """The next turn: as an earlier play left it, or a new one."""
        if self.ended:
            raise self.ended
        if self._next < len(self._turns) and self._turns[self._next]["by"] != by:
            self._diverge()
        if self._next == len(self._turns):
            self._turns.append({"by": by, "length": 0, "finish": ""})
        self._next += 1
        return self._turns[self._next - 1]

    def _diverge(self) -> None:
        """What an earlier play had from here on belongs to another course of events."""
        self.sample.cut(self._at)
        del self._turns[self._next :]

    def _end(self, error: EpisodeEndError) -> NoReturn:
        self.ended = error
        raise error
