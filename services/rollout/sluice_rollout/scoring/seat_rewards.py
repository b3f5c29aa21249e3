"""Rewards of samples, of their seats (`rollout.seats`) and turns: the parts that are to be judged,
and what they come to together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from sluice.rewards import RewardInput
from sluice.rewards.types import Judgement
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import records_of, turn_rewards
from sluice_rollout.tool_calls import SEATS

SEAT = "seat"
"""Key of the metadata that tells a reward which seat it judges."""


def missing(sample: Sample) -> list[str]:
    """The seats of a finished sample that are still to be judged; "" is a sample without seats.

    One that was given a reward as a whole has none: its seats share that.
    """
    if sample.reward is not None:
        return []
    return [seat for seat in _seats(sample) if seat not in sample.seat_rewards] or (
        [] if sample.seat_rewards else [""]
    )


def reward_input(
    prompt: Prompt, sample: Sample, seat: str, text: Callable[[list[int], str | None], str]
) -> RewardInput:
    """The input of a reward. Of a seat it is that seat's longest branch."""
    place = [one.seat for one in sample.sequences].index(seat)
    sequence = sample.sequences[place]
    response, metadata = sample.response, prompt.metadata | sample.metadata
    if seat:
        records = records_of(sample.metadata)[place]
        tokens = sequence.tokens[sequence.prompt_length :].tolist()
        response = text(tokens, records[-1].get("stop") if records else None)
        metadata = metadata | sample.metadata.get(SEATS, {}).get(seat, {}) | {SEAT: seat}
    return RewardInput(
        prompt=prompt.prompt,
        response=response,
        label=prompt.label,
        metadata=metadata,
        tokens=sequence.tokens.tolist(),
        response_length=sequence.response_length,
        truncated=sample.status is SampleStatus.TRUNCATED,
    )


def give(sample: Sample, seat: str, judgement: Judgement) -> None:
    """Set the reward of a seat, or of a sample without seats."""
    reward, parts = judgement
    if seat:
        sample.seat_rewards[seat] = reward
        sample.reward_parts |= {f"{seat}/{name}": part for name, part in parts.items()}
    else:
        sample.reward, sample.reward_parts = reward, parts


def settle(sample: Sample) -> None:
    """Fill in what follows from the rewards that are there.

    A seat without a reward of its own has the sample's. The rewards of turns are added to their
    seat's. A sample that was given none has the mean of its seats'.
    """
    of_turns = {seat: sum(rewards) for seat, rewards in turn_rewards(sample).items()}
    for seat in _seats(sample):
        reward = sample.seat_rewards.get(seat, sample.reward or 0.0)
        sample.seat_rewards[seat] = reward + of_turns[seat]
    if sample.seat_rewards and sample.reward is None:
        sample.reward = fmean(sample.seat_rewards.values())
    elif not sample.seat_rewards:
        sample.reward = (sample.reward or 0.0) + of_turns.get("", 0.0)


def _seats(sample: Sample) -> Sequence[str]:
    return list(dict.fromkeys(one.seat for one in sample.sequences if one.seat))
