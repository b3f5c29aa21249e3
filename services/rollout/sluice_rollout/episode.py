"""An episode: one sample, its model and its tokens,
on which a user's generate function (`rollout.function`) or program (`rollout.environment`) plays.

    async def play(episode: Episode) -> None:
        turn = await episode.generate()           # the model speaks: tokens that are trained
        episode.observe(f" {run(turn.text)} ")    # the environment answers: tokens that are not
        await episode.generate()

Token in, token out: what the model made is kept as the tokens that it made, and never encoded
again. Everything that is needed to go on elsewhere is in the sample, because the function can be
repeated: a sample that an interruption left half-way is played again from the start, and `generate`
answers with the turns that are there already, without asking the engine. An observation that comes
out otherwise than before ends that: what followed it is dropped, and made anew.

A function may try several ways and keep one (`branch`, `adopt`), and play all samples of a prompt
at once (`whole_group`).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from sluice import input_checks
from sluice.engines.protocol import EngineError, PromptRefusedError
from sluice.rewards.types import RewardValue, read_value
from sluice.samples.sample import Prompt, Sample, WeightSpan
from sluice.samples.turns import ENVIRONMENT, MODEL, TURNS
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.generate import Generator
from sluice_rollout.user_functions.time_limit import TimeLimit

_KEPT = (
    "tokens",
    "response_length",
    "response",
    "reward",
    "reward_parts",
    "seat_rewards",
    "loss_mask",
    "rollout_log_probs",
    "weight_versions",
    "routed_experts",
    "metadata",
)
"""Fields that `adopt` takes of a sample."""
ASIDE = -1
"""Index of what is none of the group's samples."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


class EpisodeEndError(Exception):
    """Nothing more can be generated for this sample.

    Let it pass; `generate` raises it again and again.
    """


class TruncatedError(EpisodeEndError):
    """The response has reached its limit of tokens (sampling.maxResponseTokens,
    observations included).
    """


class InterruptedEpisodeError(EpisodeEndError):
    """The pod ends, or its engine does; the sample goes on elsewhere."""


class PlayFailedError(Exception):
    """A sample fails: the message says why, behind the name of what played it.

    reason: for metrics.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model. finish: `stop` or `length` (of the turn). stop: the stop string at its
    end, not in text.
    """

    text: str
    tokens: list[int]
    log_probs: list[float]
    finish: str
    stop: str | None = None


@dataclass(slots=True)
class Episode:
    """One sample in play.

    prompt: the row (prompt, label, metadata, tools); tokenizer: the model's own.

    sampling: SGLang's parameters of this sample; a function may change them. metadata of the sample
    go to the reward. seats: names of `rollout.seats`.
    """

    prompt: Prompt
    sample: Sample
    tokenizer: Any
    sampling: dict[str, Any]
    generator: Generator
    clock: TimeLimit
    reward_key: str | None = None
    open_gateway: Callable[[Episode], Gateway] | None = None
    seats: tuple[str, ...] = ()
    ended: BaseException | None = None
    _trunk: Episode | None = None
    _next: int = 0
    _at: int = 0
    _gateway: Gateway | None = None
    _left: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        """The sample's own; the reward sees them beside the prompt's. Only what JSON can hold."""
        return self.sample.metadata

    def version(self) -> int:
        """Of the weights that the engine has now. -1: it has none yet."""
        return self.generator.version()

    @property
    def room(self) -> int:
        """Tokens that the response may still have."""
        return int(self.sampling["max_new_tokens"]) - self._at

    @property
    def gateway(self) -> Gateway:
        """Where a program that speaks the OpenAI API plays this episode, in place of `generate`.

        Its key opens this episode alone, until the function returns. Raises RuntimeError where the
        episode has turns of `generate` already, or has ended.
        """
        if self._gateway is None:
            if self.open_gateway is None or self._left or self._next:
                raise RuntimeError(
                    "episode.gateway: expected an episode that goes on and has no turn of "
                    "episode.generate or episode.observe"
                )
            self._gateway = self.open_gateway(self)
        return self._gateway

    def leave(self, *, interrupted: bool) -> None:
        """Close the gateway. What its program asked for is then in the sample."""
        gateway, self._gateway, self._left = self._gateway, None, True
        if gateway:
            gateway.close(interrupted)

    def reward(self, value: RewardValue, *, seat: str = "") -> None:
        """Give the reward here, where the environment knows it; nobody else is asked then.

        seat: the one of `rollout.seats` that it is of; without it, it is that of all seats that are
        given none of their own. Raises ValueError where the job has no such seat.
        """
        reward, parts = read_value(value, self.reward_key)
        if seat:
            self._check_seat(seat)
            self.sample.seat_rewards[seat] = reward
            self.sample.reward_parts |= {f"{seat}/{name}": part for name, part in parts.items()}
        else:
            of_seats = self.sample.reward_parts if self.seats else {}
            self.sample.reward, self.sample.reward_parts = reward, of_seats | parts

    def turn_reward(self, value: float, *, seat: str = "", turn: int = -1) -> None:
        """Give a turn of the model a reward of its own, in addition to the episode's.

        turn: its place among the turns (of this seat), in the order in which they began; the last
        one by default. Two rewards of one turn add up. Raises IndexError where there is no such
        turn, ValueError where the value is no finite number or there is no such seat.
        """
        value = input_checks.reward(value, "turn_reward")
        if seat or self.seats:
            self._check_seat(seat)
        if self._gateway:
            self._gateway.reward_turn(value, seat, turn)
            return
        played = [record for record in self._turns[: self._next] if record["by"] == MODEL]
        record = played[turn]
        record["reward"] = record.get("reward", 0.0) + value

    def _check_seat(self, seat: str) -> None:
        if seat not in self.seats:
            names = ", ".join(self.seats) or "none"
            raise ValueError(f"there is no seat {seat!r}; rollout.seats has: {names}")

    async def generate(self, *, max_tokens: int | None = None, **sampling: Any) -> Turn:
        """The model's next turn, behind all tokens so far. sampling: other SGLang parameters for
        this turn.

        Raises TruncatedError where the response is full, at once or by this turn.
        """
        record = self._recorded(MODEL)
        record.pop("reward", None)  # an earlier play's
        if not record["finish"]:
            room = self.room if max_tokens is None else min(self.room, max_tokens)
            if room <= 0:
                self._end(
                    TruncatedError(f"the response has its {self.sampling['max_new_tokens']} tokens")
                )
            await self.speak(record, self.sampling | sampling, room - record["length"])
        start, self._at = self._at, self._at + record["length"]
        if record["finish"] == "length" and self.room <= 0:
            self._end(
                TruncatedError(f"the response has its {self.sampling['max_new_tokens']} tokens")
            )
        tokens = self.sample.tokens[self.sample.prompt_length :].tolist()[start : self._at]
        log_probs = self.sample.rollout_log_probs[start : self._at].tolist()
        stop = record.get("stop")
        return Turn(self.generator.text(tokens, stop), tokens, log_probs, record["finish"], stop)

    def observe(self, what: str | list[int]) -> None:
        """Append what the environment says: text, or token ids. It is in the context and never
        trained on.

        Raises TruncatedError where it does not fit.
        """
        tokens = (
            self.tokenizer.encode(what, add_special_tokens=False)
            if isinstance(what, str)
            else list(what)
        )
        if not tokens:
            return
        if len(tokens) > self.room:
            self.sample.cut(self._at)
            del self._turns[self._next :]
            self._end(
                TruncatedError(f"an observation of {len(tokens)} tokens, room for {self.room}")
            )
        record = self._recorded(ENVIRONMENT)
        start = self.sample.prompt_length + self._at
        if (
            record["finish"]
            and self.sample.tokens[start : start + record["length"]].tolist() != tokens
        ):
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
        """Generate beside the sample: a judge, a summary, another player.

        Nothing of it is kept or trained.
        """
        aside = Sample(index=ASIDE)
        aside.append_prompt(self.tokenizer.encode(text) if isinstance(text, str) else text)
        record: dict[str, Any] = {"length": 0}
        await self.speak(record, self.sampling | sampling, max_tokens, aside)
        tokens, stop = aside.tokens[aside.prompt_length :].tolist(), record.get("stop")
        return Turn(
            self.generator.text(tokens, stop),
            tokens,
            aside.rollout_log_probs.tolist(),
            record["finish"],
            stop,
        )

    async def speak(
        self,
        record: dict[str, Any],
        sampling: dict[str, Any],
        room: int,
        sample: Sample | None = None,
    ) -> None:
        """Have the engine finish a turn; the user's time stands still meanwhile."""
        if self.ended:
            raise self.ended
        sample = sample or self.sample
        before = sample.response_length - record["length"]
        try:
            with self.clock.at_engine():
                answer = await self.generator.turn(sample, sampling, room)
        except (PromptRefusedError, EngineError) as error:
            self._stop(error)
            raise
        finally:
            record["length"] = sample.response_length - before
        if answer is None:
            self._end(InterruptedEpisodeError("the pod ends"))
        record["finish"] = answer.finish
        if answer.matched_stop:
            record["stop"] = answer.matched_stop

    def branch(self) -> Episode:
        """Another way on from here: an episode of the same tokens, of which nothing is kept unless
        `adopt` takes it.
        """
        return replace(
            self, sample=self._so_far(), sampling=dict(self.sampling), _trunk=self._trunk or self
        )

    def adopt(self, other: Episode) -> None:
        """Take another episode's tokens, turns, metadata and reward in place of one's own, and go
        on from there.

        other: a branch, or another sample of the same prompt.
        Both may be played on, each for itself.
        """
        if isinstance(self.ended, InterruptedEpisodeError | EngineError):
            raise self.ended
        if other.prompt is not self.prompt:
            raise ValueError("adopt: the other episode answers another prompt")
        taken = other._so_far()
        for name in _KEPT:
            setattr(self.sample, name, getattr(taken, name))
        self._next, self._at, self.ended = other._next, other._at, other.ended

    def _so_far(self) -> Sample:
        """A copy of the sample as far as it has been played;
        an earlier play may have gone further.
        """
        self._must_be_played_here()
        copy_ = replace(
            self.sample,
            reward_parts=dict(self.sample.reward_parts),
            seat_rewards=dict(self.sample.seat_rewards),
            weight_versions=list(self.sample.weight_versions),
            metadata=copy.deepcopy(self.sample.metadata | {TURNS: self._turns[: self._next]}),
        )
        copy_.cut(self._at)
        return copy_

    @property
    def _turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = self.sample.metadata.setdefault(TURNS, [])
        return turns

    def _recorded(self, by: str) -> dict[str, Any]:
        """The next turn: as an earlier play left it, or a new one."""
        self._must_be_played_here()
        if self.ended:
            raise self.ended
        if self._next < len(self._turns) and self._turns[self._next]["by"] != by:
            self._diverge()
        if self._next == len(self._turns):
            self._turns.append({"by": by, "length": 0, "finish": ""})
        self._next += 1
        return self._turns[self._next - 1]

    def _must_be_played_here(self) -> None:
        if self._gateway:
            raise RuntimeError(
                "a program at episode.gateway plays this episode: generate, observe, branch and "
                "adopt are not for it"
            )

    def _diverge(self) -> None:
        """Drop what an earlier play had from here on: it belongs to another course of events."""
        self.sample.cut(self._at)
        del self._turns[self._next :]

    def _end(self, error: EpisodeEndError) -> NoReturn:
        self._stop(error)
        raise error

    def _stop(self, error: BaseException) -> None:
        """Nothing more can be generated. What ends the pod or the engine ends the sample of a
        branch as well.
        """
        self.ended = error
        if self._trunk and not isinstance(error, TruncatedError):
            self._trunk.ended = error


Play = Callable[[Episode], Awaitable[None]] | Callable[[list[Episode]], Awaitable[None]]
"""A generate function."""


def whole_group(function: _Function) -> _Function:
    """Decorates a generate function that plays all samples of a prompt in one call:
    `async def play(episodes)`.

    episodes: a list, one for each sample; of length 1 for the greedy response of remax.
    """
    function.whole_group = True  # type: ignore[attr-defined]
    return function


async def together(*plays: Awaitable[object]) -> None:
    """Play episodes, or branches, side by side. One that is truncated ends alone; what else ends
    one, ends all.
    """
    for outcome in await asyncio.gather(*plays, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, TruncatedError):
            raise outcome
