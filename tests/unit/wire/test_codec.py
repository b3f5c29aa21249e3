"""Messages come back from the wire as they went; broken ones are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.samples.sample import (
    Prompt,
    Purpose,
    Sample,
    SampleError,
    SampleGroup,
    SampleStatus,
    TokenSequence,
    WeightSpan,
)
from sluice.wire import codec
from sluice.wire.v1 import common_pb2 as pb

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3)
    ),
    max_leaves=6,
)


def fill(draw: st.DrawFn, sequence: TokenSequence) -> None:
    prompt = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
    sequence.tokens = np.asarray(prompt, dtype=np.int32)
    for version in range(draw(st.integers(0, 3)) if prompt else 0):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
        log_probs = draw(
            st.lists(st.floats(-50, 0, width=32), min_size=len(tokens), max_size=len(tokens))
        )
        sequence.append(
            tokens, log_probs, [WeightSpan(version, 0, len(tokens))], trainable=draw(st.booleans())
        )
    if sequence.response_length and draw(st.booleans()):
        scores = st.floats(-50, 0, width=32)
        teacher_scores = draw(
            st.lists(scores, min_size=sequence.response_length, max_size=sequence.response_length)
        )
        sequence.teacher_log_probs = np.asarray(teacher_scores, dtype=np.float32)
    sequence.seat = draw(st.sampled_from(["", "white"]))
    if (rows := draw(st.integers(0, max(len(sequence.tokens) - 1, 0)))) > 0:
        dtype = draw(st.sampled_from([np.uint8, np.uint16]))
        sequence.routed_experts = np.arange(rows * 3, dtype=dtype).reshape(rows, 3)


@st.composite
def samples(draw: st.DrawFn, index: int = 0) -> Sample:
    sample = Sample(index)
    fill(draw, sample)
    sample.branches = [TokenSequence() for _ in range(draw(st.integers(0, 2)))]
    for branch in sample.branches:
        fill(draw, branch)
    sample.status = draw(st.sampled_from(SampleStatus))
    sample.reward = draw(st.floats(-10, 10))
    sample.reward_parts = draw(st.dictionaries(st.text(max_size=4), st.floats(-1, 1), max_size=2))
    seats = {sequence.seat for sequence in sample.sequences} - {""}
    sample.seat_rewards = {seat: draw(st.floats(-1, 1)) for seat in seats}
    sample.metadata = draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3))
    sample.response = draw(st.text(max_size=10))
    return sample


@st.composite
def groups(draw: st.DrawFn) -> SampleGroup:
    prompt = Prompt(
        group_id=draw(st.integers(0, 2**60)),
        prompt=draw(st.text(max_size=20)),
        label=draw(json_values),
        metadata=draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)),
        purpose=draw(st.sampled_from(Purpose)),
        lease_id=draw(st.text(max_size=8)),
        lease_attempt=draw(st.integers(0, 100)),
    )
    return SampleGroup(prompt, [draw(samples(i)) for i in range(draw(st.integers(0, 3)))])


def same(a: Sample, b: Sample) -> bool:
    plain = ("index", "response", "reward", "reward_parts", "seat_rewards", "status", "metadata")
    return all(getattr(a, n) == getattr(b, n) for n in plain) and all(
        same_tokens(*pair) for pair in zip(a.sequences, b.sequences, strict=True)
    )


def same_tokens(a: TokenSequence, b: TokenSequence) -> bool:
    arrays = (
        "tokens",
        "loss_mask",
        "rollout_log_probs",
        "teacher_log_probs",
        "routed_experts",
    )
    plain = ("response_length", "weight_versions", "seat")
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in arrays) and all(
        getattr(a, n) == getattr(b, n) for n in plain
    )


@given(groups())
def test_round_trip(group: SampleGroup) -> None:
    data = codec.group_to_message(group).SerializeToString()
    back = codec.group_from_message(pb.SampleGroup.FromString(data))
    assert back.prompt == group.prompt
    assert all(same(a, b) for a, b in zip(group.samples, back.samples, strict=True))
    for sample in back.samples:
        sample.check()


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 9))
def test_chunks_of_interleaved_messages_come_together(messages: list[bytes], size: int) -> None:
    pieces = []
    for key, data in enumerate(messages):
        parts = [data[i : i + size] for i in range(0, max(len(data), 1), size)]
        pieces.append(
            [
                pb.Chunk(key=key, data=p, last=i == len(parts) - 1, size=0 if i else len(data))
                for i, p in enumerate(parts)
            ]
        )
    assembler, assembled = codec.Assembler(), {}
    while any(pieces):
        for queue in pieces:
            if queue:
                chunk = queue.pop(0)
                whole = assembler.add(chunk)
                if whole is not None:
                    assembled[chunk.key] = whole
    assert assembled == dict(enumerate(messages))


def test_chunks_stay_below_the_message_limit() -> None:
    data = bytes(3 * codec.CHUNK_BYTES + 1)
    chunks = list(codec.to_chunks(7, data))
    assert [len(c.data) for c in chunks] == [codec.CHUNK_BYTES] * 3 + [1]
    assert [c.last for c in chunks] == [False, False, False, True]


def test_a_message_that_is_too_large_is_refused_with_its_first_piece() -> None:
    assembler = codec.Assembler(max_bytes=10)
    with pytest.raises(SampleError, match="a message of 12 bytes; the limit is 10"):
        assembler.add(pb.Chunk(key=1, data=b"123456", size=12))


@pytest.mark.parametrize(
    ("pieces", "came"),
    [
        pytest.param([b"123", b"4567"], 7, id="more than was announced"),
        pytest.param([b"123", b"45"], 5, id="less than was announced"),
    ],
)
def test_pieces_come_to_what_was_announced(pieces: list[bytes], came: int) -> None:
    assembler = codec.Assembler()
    assembler.add(pb.Chunk(key=1, data=pieces[0], size=6))
    with pytest.raises(SampleError, match=f"got {came} bytes of a message of 6 bytes"):
        assembler.add(pb.Chunk(key=1, data=pieces[1], last=True))
    assert not assembler.holds(1)


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_a_message_may_be_sent_in_parts(parts: list[bytes]) -> None:
    assembler = codec.Assembler()
    *before, whole = [assembler.add(chunk) for chunk in codec.to_chunks(3, *parts)]
    assert whole == b"".join(parts)
    assert before == [None] * len(before)


def test_broken_bytes_name_the_field() -> None:
    with pytest.raises(SampleError, match=r"samples\[2\]\.tokens: 3 bytes"):
        codec.sample_from_message(pb.Sample(index=2, tokens=b"abc"))


@pytest.mark.parametrize(
    "table",
    [
        pytest.param({"ids": b"1234567", "rows": 3, "bytes_per_id": 1}, id="a part of a row"),
        pytest.param({"ids": b"123456", "rows": 3, "bytes_per_id": 4}, id="four bytes"),
        pytest.param({"ids": b"123456", "bytes_per_id": 1}, id="no rows"),
    ],
)
def test_broken_experts_name_the_field(table: dict[str, Any]) -> None:
    message = pb.Sample(index=2, routed_experts=pb.RoutedExperts(**table))
    with pytest.raises(SampleError, match=r"samples\[2\]\.routedExperts: . bytes are not . rows"):
        codec.sample_from_message(message)


def test_experts_of_what_is_cut_off_go_with_it() -> None:
    sample = Sample(0)
    sample.append_prompt([1, 2])
    sample.append([3, 4, 5], [-1.0] * 3, [WeightSpan(0, 0, 3)])
    sample.routed_experts = np.arange(4, dtype=np.uint8)[:, None]
    sample.cut(1)
    assert sample.routed_experts[:, 0].tolist() == [0, 1]
    sample.check_tokens()
    sample.fail("why")
    assert sample.routed_experts is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.ones(1, np.uint8)}, "lossMask: 1 entries for 2 response tokens"),
        ({"rollout_log_probs": np.zeros(3, np.float32)}, "rolloutLogProbs: 3 entries"),
        (
            {"rollout_log_probs": np.array([np.nan, 0], np.float32)},
            "rolloutLogProbs: a trainable token has no finite",
        ),
        ({"response_length": 9}, "responseLength: 9 with 3 tokens"),
        ({"weight_versions": [WeightSpan(0, 0, 1)]}, "weightVersions: cover 1 of 2"),
        ({"weight_versions": [WeightSpan(0, 1, 2)]}, "weightVersions: span"),
        ({"reward": None}, "reward: None on a completed sample"),
        ({"tokens": np.array([1, -2, 3], np.int32)}, "tokens: a token id is negative"),
        ({"routed_experts": np.zeros((3, 2), np.uint8)}, "routedExperts: 3 rows for 3 tokens"),
    ],
)
def test_invariants(change: dict[str, object], message: str) -> None:
    sample = Sample(0, reward=1.0, status=SampleStatus.COMPLETED)
    sample.append_prompt([1])
    sample.append([2, 3], [-0.5, -0.5], [WeightSpan(4, 0, 2)])
    sample.check()
    for name, value in change.items():
        setattr(sample, name, value)
    with pytest.raises(SampleError, match=r"samples\[0\]\.") as raised:
        sample.check()
    assert message in str(raised.value)
