"""The reward of the example: the right letter, and then the end of the answer."""

from sluice.rewards import RewardInput


def letter(sample: RewardInput) -> float:
    """Return 1 for the right letter alone, 0.5 if more follows, 0 for any other answer."""
    if not sample.response.startswith(str(sample.label)):
        return 0.0
    return 0.5 if sample.truncated else 1.0
