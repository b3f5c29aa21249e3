"""The end of a program that has played: what its sample takes from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sluice.rewards import RewardError
from sluice.samples.episode_protocol import RESULT
from sluice_rollout.environments.process import ProgramExit
from sluice_rollout.environments.result import Result, ResultError
from sluice_rollout.episode import Episode, PlayFailedError
from sluice_rollout.gateway.interfaces.errors import too_long


async def finish(
    episode: Episode, ended: ProgramExit, judge: Callable[[], Awaitable[None]]
) -> None:
    """Give the sample what is said of it.

    judge: gives it the program's result, or the verifier's. Raises PlayFailedError where the
    program failed, GatewayError where it did because its history was too long.
    """
    full = bool(ended.status) and episode.gateway.is_full()
    if ended.status and not full:
        raise PlayFailedError("status", ended.failure)
    await judge()
    if full:
        raise too_long("the program ended at a history that does not fit")


def apply_result(
    episode: Episode, read: Callable[[], Result], reason: str = "result", who: str = ""
) -> None:
    """Give the sample what a result says. Raises PlayFailedError.

    read: reads it. reason: for metrics. who: left it, where that was not the program itself.
    """
    left = f"{who} left a result that cannot be read:".lstrip()
    try:
        told = read()
        if told.reward is not None:
            episode.reward(told.reward)
        for seat, reward in told.rewards.items():
            episode.reward(reward, seat=seat)
        _reward_turns(episode, told)
    except (ResultError, ValueError) as error:
        raise PlayFailedError(reason, f"{left} {error}") from error
    except RewardError as error:
        raise PlayFailedError(reason, f"{left} {RESULT}: {error}") from error
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
