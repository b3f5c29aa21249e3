"""Claims of samples are checked against the turns that were sampled."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.samples.sample import Sample, WeightSpan
from sluice.samples.turns import TURNS
from sluice_rollout.gateway.conversation import Turn
from sluice_rollout.gateway.sample_claims import ClaimError, SampleClaim, claimed_sample


def turn(parent: Turn | None, added: list[int], tokens: list[int], version: int = 0) -> Turn:
    return Turn(
        parent,
        np.array(added, np.int32),
        np.array(tokens, np.int32),
        np.array([-float(token) for token in tokens], np.float32),
        [WeightSpan(version, 0, len(tokens))],
        "stop",
    )


FIRST = turn(None, [1, 2], [3, 4])
SECOND = turn(FIRST, [5], [6, 7], version=1)
ASIDE = turn(None, [1, 2], [3, 9])
TURNS_PLAYED = [FIRST, SECOND, ASIDE]


@pytest.mark.parametrize(
    ("tokens", "mask", "trained", "log_probs"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [1, 1, 0, 1, 1], [1, 1, 0, 1, 1], [-3, -4, 0, -6, -7]),
        ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [-3, -4, 0, -6, -7]),
        ([1, 2, 3, 4, 5, 6], [1, 1, 0, 1], [1, 1, 0, 1], [-3, -4, 0, -6]),
        ([1, 2, 3, 9], [1, 1], [1, 1], [-3, -9]),
        ([1, 2, 3, 4, 5, 6, 7], [0, 1, 1], [0, 1, 1], [0, -6, -7]),
        ([1, 2, 3, 4, 8, 8], [1, 1, 0, 0], [1, 1, 0, 0], [-3, -4, 0, 0]),
        ([1, 2], [], [], []),
    ],
    ids=[
        "all turns", "a turn masked", "cut in a turn", "another turn at the same place",
        "a first turn in the prompt", "text behind the last turn", "nothing",
    ],
)  # fmt: skip
def test_claimed_tokens_have_their_log_probs(
    tokens: list[int], mask: list[int], trained: list[int], log_probs: list[float]
) -> None:
    sample = claimed_sample(SampleClaim(tokens, mask), TURNS_PLAYED, Sample(0))
    sample.check_tokens()
    assert sample.tokens.tolist() == tokens
    assert sample.loss_mask.tolist() == trained
    assert sample.rollout_log_probs.tolist() == log_probs
    assert sum(changed_one["length"] for changed_one in sample.metadata[TURNS]) == len(mask)


def test_each_token_knows_its_weights() -> None:
    claim = SampleClaim([1, 2, 3, 4, 5, 6, 7], [1, 1, 0, 1, 1])
    spans = claimed_sample(claim, TURNS_PLAYED, Sample(0)).weight_versions
    assert spans == [WeightSpan(0, 0, 3), WeightSpan(1, 3, 5)]


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [1, 1, 1, 1, 1], r"token 2 of the response \(id 5\)"),
        ([1, 2, 3, 8], [1, 1], r"token 1 of the response \(id 8\)"),
        ([0, 2, 3, 4], [1, 1], "2 in all"),
        ([1, 2, 3, 4, 8, 6, 7], [1, 1, 0, 1, 1], r"token 3 of the response \(id 6\)"),
        ([1], [1, 1], "a loss mask of 2 entries for 1 tokens"),
        ([1, 2, 3], [2], "entries other than 0 and 1"),
    ],
    ids=[
        "a tool's answer", "another token", "another prompt", "behind another observation",
        "longer than the tokens", "a weight",
    ],
)  # fmt: skip
def test_a_claim_of_a_token_that_was_not_sampled_is_refused(
    tokens: list[int], mask: list[int], message: str
) -> None:
    with pytest.raises(ClaimError, match=message):
        claimed_sample(SampleClaim(tokens, mask), TURNS_PLAYED, Sample(0))


def test_any_prefix_of_a_conversation_can_be_claimed() -> None:
    """A sample of any prefix of the tokens passes its checks."""
    tokens, mask = [1, 2, 3, 4, 5, 6, 7], [1, 1, 0, 1, 1]
    for length in range(6):
        sample = claimed_sample(
            SampleClaim(tokens[: 2 + length], mask[:length]), TURNS_PLAYED, Sample(0)
        )
        sample.check_tokens()
        assert sample.trainable_tokens == sum(mask[:length])


def test_no_sample_of_a_conversation_with_images_is_claimed() -> None:
    seen = turn(None, [1, 2], [3, 4])
    seen.images = ("0" * 64,)
    with pytest.raises(ClaimError, match="a conversation with images cannot be claimed"):
        claimed_sample(SampleClaim([1, 2, 3, 4], [1, 1]), [seen], Sample(0))
