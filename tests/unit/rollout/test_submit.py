"""Masking of tokens that older weights have sampled."""

from __future__ import annotations

from sluice.samples.sample import Sample, TokenSequence, WeightSpan
from sluice_rollout.submit import mask_off_policy


def test_masking_leaves_only_tokens_of_the_newest_weights() -> None:
    sample = Sample(0)
    sample.append_prompt([1])
    sample.append([2, 3, 4], [-1.0] * 3, [WeightSpan(5, 0, 3)])
    sample.append([9], [], [WeightSpan(6, 0, 1)], trainable=False)
    sample.append([5, 6], [-1.0] * 2, [WeightSpan(6, 0, 2)])
    mask_off_policy(sample)
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_masking_looks_at_all_branches() -> None:
    sample = Sample(0, branches=[TokenSequence(), TokenSequence()])
    for sequence, version in zip(sample.sequences, (6, 5, 6), strict=True):
        sequence.append([2, 3], [-1.0] * 2, [WeightSpan(version, 0, 2)])
    mask_off_policy(sample)
    assert [sequence.loss_mask.tolist() for sequence in sample.sequences] == [
        [1, 1],
        [0, 0],
        [1, 1],
    ]


def test_masking_leaves_a_sample_of_one_version_alone() -> None:
    sample = Sample(0)
    sample.append([2, 3], [-1.0] * 2, [WeightSpan(5, 0, 2)])
    mask_off_policy(sample)
    assert sample.loss_mask.tolist() == [1, 1]
