"""The training reward of the quickstart: how much of the answer is right.

An answer is a digit and then the end of the response.
"""

from sluice.rewards import RewardInput

END = "<end>"


def positions(sample: RewardInput) -> float:
    """Return 1 for "7" and the end if 7 is the answer, 0.5 for "7 7 7", 0 for another digit.

    The end counts after the right digit only. Otherwise any digit with an end would be better than
    one without, and the model would learn to end before it has tried all ten digits.
    """
    response = sample.response.split() + ([] if sample.truncated else [END])
    if response[:1] != [str(sample.label)]:
        return 0.0
    return 1.0 if response[1:] == [END] else 0.5
