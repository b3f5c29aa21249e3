"""An episode: one sample, its model and its tokens, as user code plays it.

A generate function (`rollout.function`) or a program (`rollout.environment`) plays episodes:

    async def play(episode: Episode) -> None:
        turn = await episode.generate()           # the model speaks: tokens that are trained
        episode.observe(f" {run(turn.text)} ")    # the environment answers: tokens that are not
        await episode.generate()

Token in, token out: the tokens of the model are kept as it made them, and never encoded again. The
sample has all that is needed to continue elsewhere, because the function can be repeated: after an
interruption the sample is played again from the start, and `generate` returns the turns that exist
already, without the engine. If an observation differs from the earlier one, the turns after it are
dropped and generated again.

A function may try several ways and keep one (`branch`, `adopt`), and play all samples of a prompt
in one call (`whole_group`).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from sluice import input_checks
from sluice.engines.protocol import EngineError, Generation, PromptRefusedError
from sluice.images.image import Image
from sluice.images.reading import ImageError, raw_image
from sluice.rewards.types import RewardValue, read_value
from sluice.samples.sample import Prompt, Sample, WeightSpan
from sluice.samples.turns import ENVIRONMENT, IMAGE_TOKENS, IMAGES, MODEL, TURNS
from sluice.wire import rpc
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.generate import REQUESTS, Generator, OnTokens, images_of_group
from sluice_rollout.user_functions.time_limit import TimeLimit

if TYPE_CHECKING:
    from sluice_rollout.gateway.images import ImageGate

# Fields of a sample that `adopt` copies.
_ADOPTED_FIELDS = (
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
    "images",
    "image_tokens",
    "metadata",
)
# Reason of samples that fail because of `rollout.limits.seconds`.
EPISODE_TIMEOUT = "episode_timeout"
# Index of a sample that is not part of the group.
ASIDE = -1
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Outcome = TypeVar("_Outcome")


class EpisodeEndError(Exception):
    """No more turns can be generated for this sample.

    Do not catch it: `generate` raises it again each time.
    """


class TruncatedError(EpisodeEndError):
    """The response has reached its limit of tokens.

    The limit is sampling.maxResponseTokens, and observations count.
    """


class EpisodeTimeError(TruncatedError):
    """The episode has reached its limit of time, rollout.limits.seconds."""


class InterruptedEpisodeError(EpisodeEndError):
    """The pod ends, or its engine does. The sample continues elsewhere."""


class PlayFailedError(Exception):
    """A sample fails: the message, put after the name of what played it, says why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        # Label in metrics.
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model."""

    text: str
    tokens: list[int]
    log_probs: list[float]
    # `stop`, or `length` if the turn reached its limit.
    finish: str
    # The stop string that ended the turn, which the text does not have.
    stop: str | None = None


@dataclass(slots=True)
class Episode:
    """A sample that is being played."""

    # The row: prompt, label, metadata and tools.
    prompt: Prompt
    sample: Sample
    # The model's.
    tokenizer: Any
    # SGLang's parameters of this sample, which a function may change.
    sampling: dict[str, Any]
    generator: Generator
    time_limit: TimeLimit
    reward_key: str | None = None
    open_gateway: Callable[[Episode], Gateway] | None = None
    # Names of `rollout.seats`.
    seats: tuple[str, ...] = ()
    # Why no more can be generated; None while it can.
    ended: BaseException | None = None
    # The episode that this one is a branch of.
    _trunk: Episode | None = None
    # Turns and response tokens that this play has reached. An earlier play may have left more.
    _next: int = 0
    _at: int = 0
    # Reads and stores images of observations; None if the job's model gets none.
    image_gate: ImageGate | None = None
    # Images of this play's observations, by digest, which the engine needs.
    _held: dict[str, Image] = field(default_factory=dict)
    _gateway: Gateway | None = None
    _left: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        """The sample's metadata, which the reward sees together with the prompt's.

        Values must be representable in JSON.
        """
        return self.sample.metadata

    def version(self) -> int:
        """Return the version of the engine's weights; -1 before the first update."""
        return self.generator.version()

    @property
    def images(self) -> list[Image]:
        """The prompt's images, in their order. `data` of an image is its file."""
        return images_of_group(self.prompt.images)

    @property
    def room(self) -> int:
        """Tokens that the response may still have. Those of its images count."""
        played = self.sample.metadata.get(TURNS, [])[: self._next]
        images: int = sum(record.get(IMAGE_TOKENS, 0) for record in played)
        return int(self.sampling["max_new_tokens"]) - self._at - images

    @property
    def gateway(self) -> Gateway:
        """An OpenAI-compatible endpoint for a program that plays this episode.

        It takes the place of `generate`. Its key opens this episode only, until the function
        returns. Messages of the prompt may be sent as they are, with their references to images.
        Raises RuntimeError if the episode has turns of `generate` already, or has ended.
        """
        if self._gateway is None:
            if self.open_gateway is None or self._left or self._next:
                raise RuntimeError(
                    "episode.gateway: expected an episode that has not ended and has no turn of "
                    "episode.generate or episode.observe"
                )
            self._gateway = self.open_gateway(self)
        return self._gateway

    def leave(self, *, interrupted: bool) -> None:
        """Close the gateway. The sample then has the turns of its program."""
        gateway, self._gateway, self._left = self._gateway, None, True
        if gateway:
            gateway.close(interrupted)

    def reward(self, value: RewardValue, *, seat: str = "") -> None:
        """Set the reward here, if the environment knows it; no other reward is asked then.

        Parameters
        ----------
        value
            The reward, or named rewards as a reward function may return them.
        seat
            The one of `rollout.seats` that earned it. Without a seat it counts for all seats
            without a reward.

        Raises
        ------
        ValueError
            If the job has no such seat.

        """
        reward, parts = read_value(value, self.reward_key)
        if seat:
            self._check_seat(seat)
            self.sample.seat_rewards[seat] = reward
            self.sample.reward_parts |= {f"{seat}/{name}": part for name, part in parts.items()}
        else:
            seat_parts = self.sample.reward_parts if self.seats else {}
            self.sample.reward, self.sample.reward_parts = reward, seat_parts | parts

    def turn_reward(self, value: float, *, seat: str = "", turn: int = -1) -> None:
        """Give a turn of the model a reward, in addition to the episode's.

        Parameters
        ----------
        value
            The reward. Two rewards of one turn add up.
        seat
            The seat whose turn it is.
        turn
            Index among the turns (of this seat), in the order in which they began. Default: the
            last one.

        Raises
        ------
        IndexError
            If there is no such turn.
        ValueError
            If the value is not a finite number, or there is no such seat.

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
        """Generate the model's next turn, after all tokens so far.

        Parameters
        ----------
        max_tokens
            Most tokens of this turn.
        **sampling
            SGLang parameters that differ for this turn.

        Raises
        ------
        TruncatedError
            If the response is full, before or after this turn.

        """
        record = self._recorded(MODEL)
        record.pop("reward", None)  # from an earlier play
        if not record["finish"]:
            room = self.room if max_tokens is None else min(self.room, max_tokens)
            if room <= 0:
                self._end(
                    TruncatedError(f"the response has its {self.sampling['max_new_tokens']} tokens")
                )
            if self.generator.has_sampled_placeholder(self.sample):
                self._end(TruncatedError("the model has generated the placeholder of an image"))
            await self.speak(record, self.sampling | sampling, room - record["length"])
        start, self._at = self._at, self._at + record["length"]
        if self.ended:  # by the limit of time, in the middle of this turn
            raise self.ended
        if record["finish"] == "length" and self.room <= 0:
            self._end(
                TruncatedError(f"the response has its {self.sampling['max_new_tokens']} tokens")
            )
        tokens = self.sample.tokens[self.sample.prompt_length :].tolist()[start : self._at]
        log_probs = self.sample.rollout_log_probs[start : self._at].tolist()
        stop = record.get("stop")
        return Turn(self.generator.text(tokens, stop), tokens, log_probs, record["finish"], stop)

    def observe(self, what: str | list[int]) -> None:
        """Append what the environment says: text, or token ids.

        The tokens are part of the context and never trained on. Raises TruncatedError if they do
        not fit.
        """
        tokens = (
            self.tokenizer.encode(what, add_special_tokens=False)
            if isinstance(what, str)
            else list(what)
        )
        self._observe(tokens, [], 0)

    async def read_image(self, source: bytes | str | dict[str, Any]) -> Image:
        """Return an image that the model shall see, checked and scaled like one of a row.

        Parameters
        ----------
        source
            The bytes of a file, a data URL, base64 text, or a part of a message with one of these.

        Raises
        ------
        ImageError
            If it cannot be read, or the job's model gets no images. Addresses and paths are
            refused.

        """
        if self.image_gate is None:
            raise ImageError("the job's model gets no images: set data.images: {} in its manifest")
        raw = raw_image(source, "image")
        if isinstance(raw.source, Path):
            raise ImageError("image: expected bytes or a data URL; no path is read")
        return await self.image_gate.read(raw)

    async def observe_images(self, tokens: list[int], images: Sequence[Image]) -> None:
        """Append what the environment shows: tokens with a placeholder for each image.

        Parameters
        ----------
        tokens
            Tokens of the chat template, such as `between_turns` returns them.
        images
            Images as `read_image` returned them, in the order of their placeholders.

        Raises
        ------
        TruncatedError
            If tokens and images do not fit.
        ValueError
            If the job's model gets no images, refuses the size of one, or the tokens have another
            number of placeholders.
        PlayFailedError
            If the buffer cannot store an image.

        """
        placeholder = self.generator.placeholder
        count = 0 if placeholder is None else tokens.count(placeholder)
        if self.image_gate is None or count != len(images):
            raise ValueError(f"observe_images: {count} placeholders for {len(images)} images")
        added = self.image_gate.tokens_added(images)
        try:
            with self.time_limit.at_engine():
                await self.image_gate.store(self.prompt.lease_id, images)
        except (rpc.RefusedError, rpc.DeadlineError) as error:
            failure = PlayFailedError("images", f"cannot store an image that it shows: {error}")
            self._stop(failure)
            raise failure from error
        self._held |= {image.digest: image for image in images}
        self._observe(tokens, [image.digest for image in images], added)

    def _observe(self, tokens: list[int], images: list[str], image_tokens: int) -> None:
        if not tokens:
            return
        length = len(tokens) + image_tokens
        if length > self.room:
            self._cut()
            self._end(TruncatedError(f"an observation of {length} tokens, room for {self.room}"))
        record = self._recorded(ENVIRONMENT)
        if record["finish"] and self._seen(record) != (tokens, images):
            self._next -= 1
            self._cut()
            record = self._recorded(ENVIRONMENT)
        if not record["finish"]:
            spans = self.sample.weight_versions
            version = spans[-1].version if spans else self.version()
            self.sample.append(tokens, [], [WeightSpan(version, 0, len(tokens))], trainable=False)
            self.sample.images = [*self.sample.images, *images]
            self.sample.image_tokens += image_tokens
            record |= {"length": len(tokens), "finish": "stop"}
            if images:
                record |= {IMAGES: len(images), IMAGE_TOKENS: image_tokens}
        self._at += len(tokens)

    def _seen(self, record: dict[str, Any]) -> tuple[list[int], list[str]]:
        """Return the tokens and the images of an observation, the last one that was reached."""
        start = self.sample.prompt_length + self._at
        first = len(self.prompt.images) + _count_images(self._turns[: self._next - 1])
        return (
            self.sample.tokens[start : start + record["length"]].tolist(),
            self.sample.images[first : first + record.get(IMAGES, 0)],
        )

    async def ask(self, text: str | list[int], *, max_tokens: int = 256, **sampling: Any) -> Turn:
        """Generate text that is not part of the sample: a judge, a summary, another player.

        It is not trained on. Placeholders of images in the tokens stand for the first images of
        the prompt.
        """
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        aside = Sample(index=ASIDE, images=self._images_in(ids))
        aside.append_prompt(ids)
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

    def _images_in(self, ids: list[int]) -> list[str]:
        """Return the digests of the images that a request's tokens have placeholders for.

        They are the first ones of the prompt.
        """
        placeholder, images = self.generator.placeholder, self.prompt.images
        count = 0 if placeholder is None else ids.count(placeholder)
        if count > len(images):
            raise ValueError(
                f"ask: {count} placeholders of images, and the prompt has {len(images)} images"
            )
        return images[:count]

    async def speak(
        self,
        record: dict[str, Any],
        sampling: dict[str, Any],
        room: int,
        sample: Sample | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Let the engine finish a turn, and return its end. The user's time limit is suspended.

        `on_tokens` gets the turn's new tokens as they come. The first turn starts the episode's
        time. A turn that is cut off when that has passed ends as at a limit of tokens, and the
        episode with it.
        """
        if self.ended:
            raise self.ended
        limit = self.time_limit
        limit.start_episode()
        over = None if limit.episode_seconds is None else limit.over
        sample = sample or self.sample
        before = sample.response_length - record["length"]
        try:
            with limit.at_engine(), REQUESTS.get().holding(self._held):
                answer = await self.generator.turn(sample, sampling, room, on_tokens, over)
        except (PromptRefusedError, EngineError) as error:
            self._stop(error)
            raise
        finally:
            record["length"] = sample.response_length - before
        if answer is None:
            self._end(InterruptedEpisodeError("the pod ends"))
        if answer.finish == "abort":
            late = self._time_error()
            self._stop(late)
            if not record["length"]:
                raise late
            answer = replace(answer, finish="length")
        record["finish"] = answer.finish
        if answer.matched_stop:
            record["stop"] = answer.matched_stop
        return answer

    async def in_time(self, work: Awaitable[_Outcome]) -> _Outcome:
        """Await what plays this episode, and end it if the episode's time has passed.

        Raises
        ------
        EpisodeTimeError
            If it was ended, and the sample is truncated.
        PlayFailedError
            If it was ended, and the sample fails.

        """
        if self.time_limit.episode_seconds is None:
            return await work
        if await self.time_limit.ends_in_time(task := asyncio.ensure_future(work)):
            return task.result()
        if not self.time_limit.truncates:
            raise PlayFailedError(EPISODE_TIMEOUT, str(self._time_error()))
        self._end(self._time_error())

    def _time_error(self) -> EpisodeTimeError:
        seconds = self.time_limit.episode_seconds or 0.0
        return EpisodeTimeError(f"took more than {seconds:g} s (rollout.limits.seconds)")

    def branch(self) -> Episode:
        """Return an episode that continues from the same tokens, as an alternative.

        It is dropped unless `adopt` takes it.
        """
        return replace(
            self, sample=self._so_far(), sampling=dict(self.sampling), _trunk=self._trunk or self
        )

    def adopt(self, other: Episode) -> None:
        """Replace tokens, turns, metadata and reward by another episode's, and continue from there.

        `other` is a branch, or another sample of the same prompt. Both may be played on,
        independently.
        """
        if isinstance(self.ended, InterruptedEpisodeError | EngineError):
            raise self.ended
        if other.prompt is not self.prompt:
            raise ValueError("adopt: the other episode answers another prompt")
        taken = other._so_far()
        for name in _ADOPTED_FIELDS:
            setattr(self.sample, name, getattr(taken, name))
        self._next, self._at, self.ended = other._next, other._at, other.ended
        self._held |= other._held

    def _so_far(self) -> Sample:
        """Return a copy of the sample as far as it has been played.

        An earlier play may have gone further.
        """
        self._must_be_played_here()
        copy_ = replace(
            self.sample,
            reward_parts=dict(self.sample.reward_parts),
            seat_rewards=dict(self.sample.seat_rewards),
            weight_versions=list(self.sample.weight_versions),
            metadata=copy.deepcopy(self.sample.metadata | {TURNS: self._turns[: self._next]}),
        )
        _cut(copy_, self._at, self.sample.metadata.get(TURNS, [])[self._next :])
        return copy_

    @property
    def _turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = self.sample.metadata.setdefault(TURNS, [])
        return turns

    def _recorded(self, by: str) -> dict[str, Any]:
        """Return the record of the next turn: as an earlier play left it, or a new one."""
        self._must_be_played_here()
        if self.ended:
            raise self.ended
        if self._next < len(self._turns) and self._turns[self._next]["by"] != by:
            self._cut()
        if self._next == len(self._turns):
            self._turns.append({"by": by, "length": 0, "finish": ""})
        self._next += 1
        return self._turns[self._next - 1]

    def _must_be_played_here(self) -> None:
        if self._gateway:
            raise RuntimeError(
                "a program at episode.gateway plays this episode: generate, observe, branch and "
                "adopt are not available"
            )

    def _cut(self) -> None:
        """Drop the turns of an earlier play from here on, because this play differs from it."""
        _cut(self.sample, self._at, self._turns[self._next :])
        del self._turns[self._next :]

    def _end(self, error: EpisodeEndError) -> NoReturn:
        self._stop(error)
        raise error

    def _stop(self, error: BaseException) -> None:
        """Note that no more can be generated.

        An error that ends the pod or the engine also ends the sample that a branch came from.
        """
        self.ended = error
        if self._trunk and not isinstance(error, TruncatedError):
            self._trunk.ended = error


def _count_images(records: Iterable[dict[str, Any]]) -> int:
    return sum(record.get(IMAGES, 0) for record in records)


def _cut(sample: Sample, response_length: int, dropped: list[dict[str, Any]]) -> None:
    """Cut a sample where its `dropped` turns begin, with their images."""
    sample.cut(response_length)
    sample.images = sample.images[: len(sample.images) - _count_images(dropped)]
    sample.image_tokens -= sum(record.get(IMAGE_TOKENS, 0) for record in dropped)


# A generate function.
Play = Callable[[Episode], Awaitable[None]] | Callable[[list[Episode]], Awaitable[None]]


def whole_group(function: _Function) -> _Function:
    """Mark a generate function that plays all samples of a prompt in one call.

    The function is `async def play(episodes)`. The list has one episode for each sample, and a
    single one for the greedy response of remax.
    """
    function.whole_group = True  # type: ignore[attr-defined]
    return function


async def together(*plays: Awaitable[object]) -> None:
    """Play episodes, or branches, concurrently.

    A truncated one ends alone. Any other error is raised once all have ended.
    """
    for outcome in await asyncio.gather(*plays, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, TruncatedError):
            raise outcome
