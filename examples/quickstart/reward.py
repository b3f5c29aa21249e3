"""The training reward of the quickstart: which share of the answer's positions is right, its end included."""

from sluice.rewards import RewardInput

END = "<end>"


def positions(sample: RewardInput) -> float:
    """1 for "7" and then the end where 7 is the answer; less for "7 7 7", 0 where nothing is right."""
    response = sample.response.split() + ([] if sample.truncated else [END])
    answer = [str(sample.label), END]
    right = sum(a == b for a, b in zip(response, answer, strict=False))
    return right / max(len(response), len(answer))
