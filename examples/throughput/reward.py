"""The reward of the throughput example.

It is the fraction of a response of full length that is the right digit.
"""

from sluice.rewards import RewardInput

LENGTH = 256
"""As `rollout.sampling.maxResponseTokens`: a response that ends early loses what it did not write.
"""


def share(sample: RewardInput) -> float:
    return sum(word == str(sample.label) for word in sample.response.split()) / LENGTH
