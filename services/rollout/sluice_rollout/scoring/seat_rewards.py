"""Rewards of samples, of their seats (`rollout.seats`) and of turns.

Finds the parts of a sample that are still to be judged, and combines their rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from sluice.rewards import RewardInput
from sluice.rewards.types import Judgement
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import records_of, turn_rewards
from sluice_rollout.generate import images_of_group
from sluice_rollout.tool_calls import SEATS

# Key of the metadata that tells a reward which seat it judges.
SEAT = "seat"


def missing(sample: Sample) -> list[str]:
    """Return the seats of a finished sample that are still to be judged.

    A sample without seats has the seat "". If a sample was given a reward as a whole, its seats
    share that.
    """
    if sample.reward is not None:
        return []
    return [seat for seat in _seats(sample) if seat not in sample.seat_rewards] or (
        [] if sample.seat_rewards else [""]
    )


def reward_input(
    prompt: Prompt, sample: Sample, seat: str, text: Callable[[list[int], str | None], str]
) -> RewardInput:
    """Return the input of a reward: the sample or, for a seat, that seat's longest branch."""
    index = [sequence.seat for sequence in sample.sequences].index(seat)
    sequence = sample.sequences[index]
    response, metadata = sample.response, prompt.metadata | sample.metadata
    if seat:
        records = records_of(sample.metadata)[index]
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
        images=images_of_group(prompt.images),
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
    """Combine the rewards that a sample has.

    A seat without a reward gets the sample's. Rewards of turns are added to those of their seats. A
    sample without a reward gets the mean of its seats'.
    """
    turn_sums = {seat: sum(rewards) for seat, rewards in turn_rewards(sample).items()}
    for seat in _seats(sample):
        reward = sample.seat_rewards.get(seat, sample.reward or 0.0)
        sample.seat_rewards[seat] = reward + turn_sums[seat]
    if sample.seat_rewards and sample.reward is None:
        sample.reward = fmean(sample.seat_rewards.values())
    elif not sample.seat_rewards:
        sample.reward = (sample.reward or 0.0) + turn_sums.get("", 0.0)


def _seats(sample: Sample) -> Sequence[str]:
    return list(dict.fromkeys(s.seat for s in sample.sequences if s.seat))
