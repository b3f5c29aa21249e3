"""The end of a program that has played: what its sample takes from it."""

from __future__ import annotations

from collections.abc import Callable

from sluice.episodes import RESULT
from sluice.rewards import RewardError
from sluice_rollout.environments.process import Ended
from sluice_rollout.environments.result import Result, ResultError
from sluice_rollout.episode import Episode, PlayFailedError
from sluice_rollout.gateway.errors import too_long

_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 2000


def conclude(episode: Episode, ended: Ended, read: Callable[[], Result]) -> None:
    """Give the sample what its program says of it.

    read: reads the program's result. Raises PlayFailedError where the program failed, GatewayError
    where it did because its history was too long.
    """
    full = bool(ended.status) and episode.gateway.full()
    if ended.status and not full:
        raise PlayFailedError("status", words_of(ended))
    _take(episode, read)
    if full:
        raise too_long("the program ended at a history that does not fit")


def _take(episode: Episode, read: Callable[[], Result]) -> None:
    try:
        told = read()
        if told.reward is not None:
            episode.reward(told.reward)
        for seat, reward in told.rewards.items():
            episode.reward(reward, seat=seat)
        _reward_turns(episode, told)
    except (ResultError, ValueError) as error:
        raise PlayFailedError("result", f"left a result that cannot be read: {error}") from error
    except RewardError as error:
        message = f"left a result that cannot be read: {RESULT}: {error}"
        raise PlayFailedError("result", message) from error
    episode.metadata.update(told.metadata)


def _reward_turns(episode: Episode, told: Result) -> None:
    for seat, rewards in told.turn_rewards.items():
        for turn, reward in enumerate(rewards):
            try:
                episode.turn_reward(reward, seat=seat, turn=turn)
            except IndexError as error:
                raise ResultError(
                    f"{RESULT}: turn_rewards: {len(rewards)} rewards, but the program was answered "
                    f"{turn} times{f' as {seat}' if seat else ''}"
                ) from error


def words_of(ended: Ended) -> str:
    """The end of a program that failed: the last line of its errors, then those before it."""
    lines = ended.err.splitlines()[-_SHOWN_LINES:]
    last = f": {lines[-1]}" if lines else ""
    return "\n".join([ended.how + last, *lines[:-1]])[:_SHOWN_CHARACTERS]
