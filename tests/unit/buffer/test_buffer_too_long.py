"""Prompts that do not fit: their place is free again, and each source's are counted."""

from collections.abc import Callable

from prometheus_client import generate_latest

from sluice.samples.sample import PROMPT_TOO_LONG, Sample, SampleGroup
from sluice.wire import codec
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.serving.metrics import registry
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.unit.buffer.buffer_tools import LocalBuffer


def too_long(message: pb.Prompt) -> pb.SampleGroup:
    """The group that a worker hands in for a prompt that it cannot use."""
    group = SampleGroup(codec.prompt_from_message(message), [Sample(index=0), Sample(index=1)])
    for sample in group.samples:
        sample.fail("prompts row 1: the prompt has 9 tokens, at most 8 fit")
    group.samples[0].metadata["filtered"] = PROMPT_TOO_LONG
    return codec.group_to_message(group)


def test_prompts_that_are_too_long_are_counted_by_source(
    make_buffer: Callable[..., LocalBuffer],
) -> None:
    buffer = make_buffer()
    leased = buffer.lease(count=4)
    for entry in leased[:2]:
        assert buffer.submit_group(too_long(entry.prompt)).outcome is SubmitOutcome.FILTERED
    assert [entry.prompt.group_id for entry in buffer.lease(count=9)] == [4, 5]
    buffer.restart()
    assert buffer.counters["prompts_too_long:prompts"] == 2
    assert (buffer.counters["groups_filtered"], buffer.counters["groups_failed"]) == (2, 0)
    buffer.check()


def test_the_counter_of_a_source_is_a_label(make_buffer: Callable[..., LocalBuffer]) -> None:
    buffer = make_buffer()
    buffer.submit_group(too_long(buffer.lease()[0].prompt))
    text = generate_latest(registry(lambda: buffer.stats)).decode()
    assert 'sluice_buffer_prompts_too_long_total{source="prompts"} 1.0' in text
    assert "sluice_buffer_filtered_prompt_too_long_total 1.0" in text
