"""Rewards of two tasks with the same prompts, "max 3 7 2 =": the largest digit, or the first one.

An answer is a digit and then the end of the response.
"""

from sluice.rewards import RewardInput

END = "<end>"


def largest(sample: RewardInput) -> float:
    return _partly(sample, max(_digits(sample)))


def first(sample: RewardInput) -> float:
    return _partly(sample, _digits(sample)[0])


def largest_exactly(sample: RewardInput) -> float:
    return float(largest(sample) == 1)


def first_exactly(sample: RewardInput) -> float:
    return float(first(sample) == 1)


def _digits(sample: RewardInput) -> list[int]:
    return [int(word) for word in str(sample.prompt).split() if word.isdigit()]


def _partly(sample: RewardInput, answer: int) -> float:
    """Return 1 for the right digit and the end, 0.5 for the digit alone, 0 for another digit."""
    response = sample.response.split() + ([] if sample.truncated else [END])
    if response[:1] != [str(answer)]:
        return 0.0
    return 1.0 if response[1:] == [END] else 0.5
