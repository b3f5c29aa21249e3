"""The fast check of whole groups, held against the invariants of sluice.samples.sample."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.samples.sample import SampleError
from sluice.wire.codec import group_from_message
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import unpack_facts
from sluice_buffer.rules.checks import (
    as_trained,
    check_finished,
    check_partial,
    oldest_version,
    progress,
    prompt_of,
)
from tests.unit.buffer.buffer_tools import make_group, make_sample

NAN = b"\0\0\xc0\x7f"


def with_branch(sample: pb.Sample, version: int = 2) -> pb.Branch:
    """A sound branch of 2 + 3 tokens, 2 of them trained."""
    span = pb.WeightSpan(version=version, start=0, end=3)
    sample.branches.add(
        tokens=bytes(20),
        response_length=3,
        loss_mask=b"\0\1\1",
        rollout_log_probs=bytes(12),
        weight_versions=[span],
    )
    return sample.branches[-1]


DAMAGE: list[Callable[[pb.SampleGroup, pb.Sample], object]] = [
    lambda g, s: with_branch(s),
    lambda g, s: setattr(with_branch(s), "loss_mask", b""),
    lambda g, s: setattr(with_branch(s), "rollout_log_probs", NAN * 3),
    lambda g, s: setattr(with_branch(s), "tokens", b"\xff" * 20),
    lambda g, s: with_branch(s).weight_versions.add(version=1, start=9, end=10),
    lambda g, s: with_branch(s).MergeFrom(pb.Branch(loss_mask=bytes(3), rollout_log_probs=NAN * 3)),
    lambda g, s: setattr(with_branch(s), "seat", "white"),
    lambda g, s: s.seat_rewards.update({"white": 1.0}),
    lambda g, s: s.seat_rewards.update({"white": float("nan")}),
    lambda g, s: s.MergeFrom(pb.Sample(seat="white", seat_rewards={"white": 1.0})),
    lambda g, s: s.MergeFrom(pb.Sample(seat="white", seat_rewards={"black": 1.0})),
    lambda g, s: setattr(s, "tokens", s.tokens[:-1]),
    lambda g, s: setattr(s, "loss_mask", s.loss_mask + b"\1"),
    lambda g, s: setattr(s, "loss_mask", bytes(b * 2 for b in s.loss_mask)),
    lambda g, s: setattr(s, "loss_mask", bytes(s.response_length)),
    lambda g, s: setattr(s, "rollout_log_probs", s.rollout_log_probs[4:]),
    lambda g, s: setattr(s, "rollout_log_probs", NAN * s.response_length),
    lambda g, s: s.MergeFrom(
        pb.Sample(loss_mask=bytes(s.response_length), rollout_log_probs=NAN * s.response_length)
    ),
    lambda g, s: setattr(s, "teacher_log_probs", s.rollout_log_probs),
    lambda g, s: setattr(s, "teacher_log_probs", s.rollout_log_probs + s.rollout_log_probs[:4]),
    lambda g, s: setattr(s, "teacher_log_probs", s.rollout_log_probs[:3]),
    lambda g, s: setattr(s, "teacher_log_probs", NAN * s.response_length),
    lambda g, s: s.MergeFrom(
        pb.Sample(loss_mask=bytes(s.response_length), teacher_log_probs=NAN * s.response_length)
    ),
    *[
        lambda g, s, table=table: s.routed_experts.CopyFrom(pb.RoutedExperts(**table))
        for table in (
            {"ids": b"123456", "rows": 3, "bytes_per_id": 1},
            {"ids": b"123456", "rows": 3, "bytes_per_id": 3},
            {"ids": b"12345", "rows": 3, "bytes_per_id": 1},
            {"ids": b"12" * 99, "rows": 99, "bytes_per_id": 2},
            {"bytes_per_id": 1},
        )
    ],
    lambda g, s: setattr(s, "tokens", b"\xff" * len(s.tokens)),
    lambda g, s: setattr(s, "index", 7),
    lambda g, s: s.ClearField("reward"),
    lambda g, s: setattr(s, "reward", float("nan")),
    lambda g, s: s.weight_versions.add(version=1, start=9, end=10),
    lambda g, s: g.samples.pop(),
    lambda g, s: setattr(s, "response_length", s.response_length - 1),
    lambda g, s: setattr(s, "response_length", 30),
    *[
        lambda g, s, text=text: setattr(s, "metadata_json", text)
        for text in ("{", "[1]", '{"a": 1}', "null")
    ],
    lambda g, s: None,
]
STATUSES = [
    pb.SAMPLE_STATUS_COMPLETED,
    pb.SAMPLE_STATUS_TRUNCATED,
    pb.SAMPLE_STATUS_FAILED,
    pb.SAMPLE_STATUS_PENDING,
]


@st.composite
def groups(draw: st.DrawFn) -> pb.SampleGroup:
    """Groups of two samples, most with one thing broken."""
    group = make_group(
        pb.Prompt(group_id=1),
        response=draw(st.integers(0, 5)),
        status=draw(st.sampled_from(STATUSES)),
    )
    sample = group.samples[draw(st.integers(0, 1))]
    draw(st.sampled_from(DAMAGE))(group, sample)
    return group


@settings(max_examples=400)
@given(groups())
def test_agrees_with_the_invariants(group: pb.SampleGroup) -> None:
    try:
        decoded = group_from_message(group)
        decoded.check_finished(2)
        sound = all(isinstance(s.metadata, dict) for s in decoded.samples)
    except ValueError:
        sound = False
    try:
        checked = check_finished(group, 2, 0)
    except SampleError:
        assert not sound
        return
    assert sound
    for facts, sample in zip(unpack_facts(checked.summary), decoded.samples, strict=True):
        trained = sample.sequences[:1] if sample.status == "failed" else sample.sequences
        assert facts.length == sum(len(sequence.tokens) for sequence in trained)
        assert facts.response_length == sample.response_length
        if sample.status != "failed":
            assert facts.trainable_tokens == sample.trainable_tokens
            assert facts.reward == sample.reward


def test_a_refusal_names_the_field() -> None:
    group = make_group(pb.Prompt(group_id=1))
    group.samples[1].loss_mask = b"\1"
    with pytest.raises(
        SampleError, match=r"samples\[1\].lossMask: 1 entries for 6 response tokens"
    ):
        check_finished(group, 2, 0)


def test_a_teachers_log_probs_are_one_for_each_response_token() -> None:
    group = make_group(pb.Prompt(group_id=1))
    group.samples[0].teacher_log_probs = group.samples[0].rollout_log_probs
    check_finished(group, 2, 0)
    group.samples[1].teacher_log_probs = group.samples[0].rollout_log_probs[4:]
    with pytest.raises(
        SampleError, match=r"samples\[1\].teacherLogProbs: 5 entries for 6 response tokens"
    ):
        check_finished(group, 2, 0)
    group.samples[1].teacher_log_probs = NAN * 6
    with pytest.raises(
        SampleError, match=r"samples\[1\].teacherLogProbs: a trainable token has no finite log-prob"
    ):
        check_finished(group, 2, 0)


def test_versions_come_from_the_spans() -> None:
    group = make_group(pb.Prompt(group_id=1), version=3)
    group.samples[0].weight_versions[0].end = 2
    group.samples[0].weight_versions.add(version=5, start=2, end=6)
    facts = unpack_facts(check_finished(group, 2, 0).summary)
    assert [(f.min_version, f.max_version) for f in facts] == [(3, 5), (3, 3)]


def test_a_branch_counts_with_its_sample() -> None:
    group = make_group(pb.Prompt(group_id=1), version=3)
    with_branch(group.samples[0], version=2)
    first, second = unpack_facts(check_finished(group, 2, 0).summary)
    assert (first.length, first.trainable_tokens, first.min_version) == (10 + 5, 6 + 2, 2)
    assert (second.length, second.trainable_tokens, second.min_version) == (10, 6, 3)
    assert (oldest_version(group), progress(group)) == (2, 6 + 6 + 3)
    group.samples[0].branches[0].loss_mask = b"\1"
    message = r"samples\[0\].branches\[0\].lossMask: 1 entries for 3 response tokens"
    with pytest.raises(SampleError, match=message):
        check_finished(group, 2, 0)


def test_a_failed_sample_has_no_branches_in_a_batch() -> None:
    failed = make_sample(1, status=pb.SAMPLE_STATUS_FAILED, reward=None)
    with_branch(failed)
    group = pb.SampleGroup(samples=[make_sample(0), failed])
    assert unpack_facts(check_finished(group, 2, 0).summary)[1].length == 10
    assert not as_trained(failed, pb.Sample()).branches


def test_a_failed_sample_is_made_harmless() -> None:
    group = make_group(pb.Prompt(group_id=1))
    failed = make_sample(1, status=pb.SAMPLE_STATUS_FAILED, reward=None)
    harmless = as_trained(failed, prompt_of(group.samples, []))
    assert (harmless.reward, harmless.loss_mask, harmless.tokens) == (0.0, bytes(6), failed.tokens)
    empty = pb.Sample(index=1, status=pb.SAMPLE_STATUS_FAILED)
    assert as_trained(empty, prompt_of(group.samples, [])).tokens == group.samples[0].tokens[:16]


def test_partial_samples_need_not_be_complete() -> None:
    sample = make_sample(1, status=pb.SAMPLE_STATUS_ABORTED, reward=None)
    check_partial(pb.SampleGroup(samples=[sample]), 2)
    with pytest.raises(SampleError, match="twice"):
        check_partial(pb.SampleGroup(samples=[sample, sample]), 2)
    sample.rollout_log_probs = b""
    with pytest.raises(SampleError, match=r"samples\[1\].rolloutLogProbs"):
        check_partial(pb.SampleGroup(samples=[sample]), 2)
