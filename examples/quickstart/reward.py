"""The training reward of the quickstart: how much of the answer is right, which is a digit and then
the end.
"""

from sluice.rewards import RewardInput

END = "<end>"


def positions(sample: RewardInput) -> float:
    """1 for "7" and then the end where 7 is the answer, half for "7 7 7", nothing for another
    digit.

    The end counts after the right digit only. Else any digit with an end is better than one
    without: the model learns to end first, on the digits it happens to say, and now and then never
    says one of the ten again.
    """
    response = sample.response.split() + ([] if sample.truncated else [END])
    if response[:1] != [str(sample.label)]:
        return 0.0
    return 1.0 if response[1:] == [END] else 0.5
