"""Checks of submitted groups.

A peer with the job's token can neither end the buffer, nor store a group that would end the
trainer.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.samples.sample import SampleError
from sluice.samples.turns import BRANCH_TURNS, TURNS
from sluice.wire.codec import group_from_message
from sluice.wire.frames import SerializedGroup
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.rules.checks import Limits, as_trained, check_finished, prompt_of
from sluice_buffer.transitions.submits import SubmitOutcome
from sluice_trainer.batch import credit
from sluice_trainer.batch.provenance import Provenance
from sluice_trainer.batch.sequences import TrainSequence
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group, make_sample

MakeBuffer = Callable[..., LocalBuffer]
VOCABULARY = 258
IMAGE = "0a" * 32
LIMITS = Limits(newest=3, vocabulary=VOCABULARY, images=frozenset({IMAGE}))
TURN = {"by": "model", "length": 3, "finish": "stop", "turn": 0, "reward": 0.5}


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def stored() -> pb.SampleGroup:
    """A group with all that a group can have: branches, seats, turns, a teacher, experts."""
    group = make_group(pb.Prompt(group_id=1, prompt_json='"1 + 1 = "', label_json='"2"'))
    first, second = group.samples
    first.branches.add(
        tokens=bytes(20),
        response_length=3,
        loss_mask=b"\0\1\1",
        rollout_log_probs=floats(-1, -2, -3),
        weight_versions=[pb.WeightSpan(version=2, start=0, end=3)],
        seat="white",
        images=[IMAGE],
        image_tokens=2,
    )
    first.MergeFrom(pb.Sample(seat="black", seat_rewards={"white": 1.0, "black": -1.0}))
    first.reward_parts["score"] = 0.5
    first.metadata_json = json.dumps(
        {
            TURNS: [TURN, {"by": "environment", "length": 3, "finish": "stop"}],
            BRANCH_TURNS: [[TURN]],
            "rollout_worker": "job-rollout-0-1-0",
            "worker_busy": 0.5,
            "engine_latency": 0.01,
        }
    )
    second.teacher_log_probs = second.rollout_log_probs
    second.routed_experts.CopyFrom(pb.RoutedExperts(ids=b"123456", rows=3, bytes_per_id=1))
    return group


def trained(group: pb.SampleGroup) -> None:
    """Decode a stored group as a trainer does, and read in it what a trainer reads."""
    prompt = prompt_of(group.samples, [])
    samples = [as_trained(sample, prompt) for sample in group.samples]
    sent = pb.SampleGroup(prompt=group.prompt, samples=samples).SerializeToString()
    decoded = group_from_message(pb.SampleGroup.FromString(sent))
    for sample in decoded.samples:
        for sequence in TrainSequence.from_sample(decoded.group_id, sample, 0.0, 1):
            assert not len(sequence.tokens) or sequence.tokens.min() >= 0
            assert not len(sequence.tokens) or sequence.tokens.max() < VOCABULARY
            probs = sequence.rollout_log_probs[sequence.loss_mask > 0]
            assert all(-1e4 <= value <= 0.1 for value in probs)
        assert sample.reward is not None
        units = credit.units_of_sample((decoded.group_id, sample.index), sample)
        assert all(abs(unit.reward) <= 1e15 for unit in units)
        assert all(abs(turn) <= 1e15 for unit in units for turn in unit.turns)
        credit.turn_positions(sample)
        assert all(math.isfinite(part) for part in sample.reward_parts.values())
        assert max(sample.versions, default=0) <= LIMITS.newest
        for tokens in sample.sequences:
            assert LIMITS.images.issuperset(tokens.images)
            assert len(tokens.images) <= len(tokens.tokens)
            assert tokens.image_tokens >= 0
        json.dumps(sample.metadata, allow_nan=False, ensure_ascii=False).encode()
    Provenance.merge([Provenance.of_groups([decoded])] * 2).metrics()


numbers = st.sampled_from(
    [0.0, -1.0, 50.0, 3e38, -3e38, 1e39, math.nan, math.inf, -math.inf, 1e15, -1e4]
)
integers = st.sampled_from([0, -1, -5, 1, 3, 4, 999, VOCABULARY, 2**31 - 1, -(2**31)])
words = st.sampled_from(
    ["", "{", "[1]", "null", '{"a":"\\ud83d"}', '{"a":' + "9" * 5000 + "}", '{"turns":5}',
     '{"turns":[{"by":"model"}]}', '{"turns":[{"by":"model","length":-1}]}', '{"a":NaN}',
     '{"turns":[{"by":"model","length":1,"reward":1e39}]}', '{"branch_turns":[[],[],3]}',
     '{"turns":[{"by":"model","length":1,"turn":"x"}]}', '{"turns":[1],"branch_turns":[[]]}',
     '{"rollout_worker":"nobody"}', '{"rollout_worker":3}', '{"engine_latency":"slow"}',
     '{"baseline_reward":1e39}', '{"a":' + "[" * 900 + "]" * 900 + "}", '{"a":1e999}',
     '{"turns":[{"by":"model","length":1e3}]}', '{"turns":null}', '{"branch_turns":{}}']
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The bytes of the group, after some changes of its fields and perhaps of its bytes."""
    group = stored()
    for _ in range(draw(st.integers(0, 3))):
        message: Any = group.samples[draw(st.integers(0, 1))]
        if draw(st.booleans()) and message.branches:
            message = message.branches[0]
        field = draw(st.sampled_from(list(type(message).DESCRIPTOR.fields)))
        change(draw, message, field)
    data = bytearray(group.SerializeToString())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def change(draw: st.DrawFn, message: Any, field: Any) -> None:
    """Put something else into a field."""
    name, kind = field.name, field.type
    if name in ("reward_parts", "seat_rewards"):
        getattr(message, name)[draw(st.sampled_from(["white", "score", "x"]))] = draw(numbers)
    elif name == "weight_versions":
        spans = message.weight_versions
        (spans[0] if spans else spans.add(end=1)).version = draw(integers)
    elif name == "branches":
        message.branches.add()
    elif name == "images":
        message.images.append(draw(words | st.sampled_from([IMAGE, "f" * 64])))
    elif kind == field.TYPE_BYTES:
        value = bytearray(getattr(message, name))
        at = draw(st.integers(0, max(len(value) - 4, 0)))
        piece = draw(st.binary(max_size=5) | numbers.map(_float) | integers.map(_integer))
        value[at : at + draw(st.sampled_from([0, 4, 4]))] = piece
        setattr(message, name, bytes(value))
    elif kind == field.TYPE_DOUBLE:
        setattr(message, name, draw(numbers))
    elif kind in (field.TYPE_INT32, field.TYPE_ENUM):
        setattr(message, name, draw(st.integers(0, 7)))
    elif kind == field.TYPE_STRING:
        setattr(message, name, draw(words))
    else:
        message.routed_experts.rows = draw(st.integers(0, 12))


def _float(value: float) -> bytes:
    return floats(value) if abs(value) < 3.5e38 or not math.isfinite(value) else floats(math.inf)


def _integer(value: int) -> bytes:
    return struct.pack("<i", value)


@pytest.mark.parametrize(
    "read", [pb.SampleGroup.FromString, SerializedGroup], ids=["whole", "parts"]
)
def test_the_group_that_is_mutated_is_sound(read: Any) -> None:
    check_finished(read(stored().SerializeToString()), 2, 0, LIMITS)
    trained(stored())


@settings(max_examples=1500, deadline=None)
@given(mutated(), st.booleans())
def test_whatever_is_accepted_can_be_decoded_as_the_trainer_decodes_it(
    data: bytes, whole: bool
) -> None:
    try:
        message = pb.SampleGroup.FromString(data) if whole else SerializedGroup(data)
    except DecodeError:
        return
    if message.prompt != stored().prompt:  # it is not the one that was leased
        return
    try:
        check_finished(message, 2, 0, LIMITS)
    except SampleError as error:
        str(error).encode()
        return
    trained(pb.SampleGroup.FromString(data))


ATTACKS: dict[str, tuple[Callable[[pb.SampleGroup, pb.Sample], object], str]] = {
    "5,000 digits": (
        lambda g, s: setattr(s, "metadata_json", '{"a":' + "9" * 5000 + "}"),
        "samples[1].metadataJson: an integer of more than 4300 digits",
    ),
    "900 deep": (
        lambda g, s: setattr(s, "metadata_json", '{"a":' + "[" * 900 + "]" * 900 + "}"),
        "nested more than 64 deep",
    ),
    "version 999": (
        lambda g, s: setattr(s.weight_versions[0], "version", 999),
        "samples[1].weightVersions: 999, expected at most 0: no newer weights can be at an engine",
    ),
    "version -5": (
        lambda g, s: setattr(s.weight_versions[0], "version", -5),
        "samples[1].weightVersions: -5 is not a version",
    ),
    "version 2^31 - 1": (
        lambda g, s: setattr(s.weight_versions[0], "version", 2**31 - 1),
        "samples[1].weightVersions: 2147483647, expected at most 0",
    ),
    "token id 2^31 - 1": (
        lambda g, s: setattr(s, "tokens", s.tokens[:-4] + _integer(2**31 - 1)),
        "samples[1].tokens: token id 2147483647, expected ids below 258",
    ),
    "token id of the vocabulary's size": (
        lambda g, s: setattr(s, "tokens", s.tokens[:-4] + _integer(258)),
        "samples[1].tokens: token id 258, expected ids below 258",
    ),
    "log-prob 50": (
        lambda g, s: setattr(s, "rollout_log_probs", s.rollout_log_probs[:-4] + floats(50)),
        "samples[1].rolloutLogProbs: log-probs from -0.5 to 50, expected -10000 to 0.1",
    ),
    "log-prob 3e38": (
        lambda g, s: setattr(s, "rollout_log_probs", s.rollout_log_probs[:-4] + floats(3e38)),
        "log-probs from -0.5 to 3e+38",
    ),
    "log-prob -3e38": (
        lambda g, s: setattr(s, "rollout_log_probs", s.rollout_log_probs[:-4] + floats(-3e38)),
        "log-probs from -3e+38 to -0.5",
    ),
    "a part that is NaN": (
        lambda g, s: s.reward_parts.update({"score": math.nan}),
        "samples[1].rewardParts[score] is nan, expected a finite number",
    ),
    "a reward beyond float32": (
        lambda g, s: setattr(s, "reward", 1e39),
        "samples[1].reward is 1e+39, expected a finite number of at most 1e+15",
    ),
    "no prompt": (
        lambda g, s: setattr(s, "tokens", s.tokens[16:]),
        "samples[1].responseLength: 6, without a prompt token before them",
    ),
    "turns that are a number": (
        lambda g, s: setattr(s, "metadata_json", '{"turns":5}'),
        "samples[1].metadataJson.turns: expected a list of turns, found 5",
    ),
    "another prompt": (
        lambda g, s: setattr(g.prompt, "prompt_json", '"99 + 1 = "'),
        "prompt: not the one that was leased",
    ),
    "another label": (
        lambda g, s: setattr(g.prompt, "label_json", '"7"'),
        "prompt: not the one that was leased",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("attack", "message"), ATTACKS.values(), ids=ATTACKS)
def test_a_group_of_no_use_is_refused_and_leased_again(
    make_buffer: MakeBuffer, attack: Callable[[pb.SampleGroup, pb.Sample], object], message: str
) -> None:
    buffer = make_buffer()
    buffer.core.rewind(0, 1, VOCABULARY)
    [leased] = buffer.lease()
    group = make_group(leased.prompt)
    attack(group, group.samples[1])
    answer = buffer.submit_group(group)
    assert answer.outcome is SubmitOutcome.REFUSED
    assert message in answer.message
    [again] = buffer.lease()
    assert again.prompt.group_id == leased.prompt.group_id
    assert buffer.submit(again).outcome is SubmitOutcome.STORED


def test_what_a_worker_gives_back_is_checked_too(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.core.rewind(0, 1, VOCABULARY)
    [leased] = buffer.lease()
    partial = make_sample(0, status=pb.SAMPLE_STATUS_ABORTED, reward=None)
    partial.metadata_json = '{"a":' + "9" * 5000 + "}"
    assert buffer.give_back(leased, [partial]) == (
        False,
        "samples[0].metadataJson: an integer of more than 4300 digits",
    )


def test_weights_reach_engines_before_their_step_is_committed(make_buffer: MakeBuffer) -> None:
    """The version that a fixed batch makes is let through, and no newer one."""
    buffer = make_buffer(rollout__mode="async", rollout__maxStaleness=2)
    early = buffer.lease(count=3)
    assert buffer.submit(early[0], version=1).outcome is SubmitOutcome.REFUSED
    buffer.fill(4)
    assert buffer.core.take(1, 1) is None
    assert buffer.submit(early[1], version=2).outcome is SubmitOutcome.REFUSED
    assert buffer.submit(early[2], version=1).outcome is SubmitOutcome.STORED


def test_the_vocabulary_and_the_prompts_are_known_after_a_restart(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    buffer.core.rewind(0, 1, VOCABULARY)
    good, bad = buffer.lease(count=2)
    buffer.restart()
    assert buffer.submit(good).outcome is SubmitOutcome.STORED
    group = make_group(bad.prompt)
    group.samples[0].tokens = group.samples[0].tokens[:-4] + _integer(VOCABULARY)
    assert buffer.submit_group(group).outcome is SubmitOutcome.REFUSED
