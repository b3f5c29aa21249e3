"""Applies the end of a program, and the result that it left, to the episode's sample."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sluice.rewards import RewardError
from sluice.samples.episode_protocol import RESULT
from sluice_rollout.environments.process import ProgramExit
from sluice_rollout.environments.result import Result, ResultError
from sluice_rollout.episode import Episode, EpisodeTimeError, PlayFailedError
from sluice_rollout.gateway.interfaces.errors import too_long


async def finish(
    episode: Episode, ended: ProgramExit, judge: Callable[[], Awaitable[None]]
) -> None:
    """Finish an episode whose program has ended, or was ended by the limit of the episode's time.

    Parameters
    ----------
    episode
        The episode.
    ended
        The end of the program.
    judge
        Applies the result of the program or of the verifier to the episode.

    Raises
    ------
    PlayFailedError
        The program failed.
    GatewayError
        The program failed because its history was too long, or its time had passed.

    """
    late = isinstance(episode.ended, EpisodeTimeError)
    full = bool(ended.status) and (late or episode.gateway.is_full())
    if ended.status and not full:
        raise PlayFailedError("status", ended.failure)
    await judge()
    if full:
        limit = str(episode.ended) if late else "its history does not fit"
        raise too_long(f"the program ended because of a limit: {limit}")


def apply_result(
    episode: Episode, read: Callable[[], Result], reason: str = "result", who: str = ""
) -> None:
    """Apply a result to the episode. Raises PlayFailedError if it is invalid.

    Parameters
    ----------
    episode
        The episode.
    read
        Reads the result.
    reason
        Reason of a failure, for metrics.
    who
        Author of the result in messages, if it is not the program.

    """
    left = f"{who} left a result that cannot be read:".lstrip()
    try:
        result = read()
        if result.reward is not None:
            episode.reward(result.reward)
        for seat, reward in result.rewards.items():
            episode.reward(reward, seat=seat)
        _reward_turns(episode, result)
    except (ResultError, ValueError) as error:
        raise PlayFailedError(reason, f"{left} {error}") from error
    except RewardError as error:
        raise PlayFailedError(reason, f"{left} {RESULT}: {error}") from error
    episode.metadata.update(result.metadata)


def _reward_turns(episode: Episode, result: Result) -> None:
    for seat, rewards in result.turn_rewards.items():
        for turn, reward in enumerate(rewards):
            try:
                episode.turn_reward(reward, seat=seat, turn=turn)
            except IndexError as error:
                raise ResultError(
                    f"{RESULT}: turn_rewards: {len(rewards)} rewards, but the program was answered "
                    f"{turn} times{f' as {seat}' if seat else ''}"
                ) from error
