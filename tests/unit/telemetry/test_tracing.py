"""Traces: a group has one trace across processes, and calls carry their caller's span."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sluice.runtime import pod_env
from sluice.telemetry import tracing


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_spans_of_a_group_form_one_trace_across_processes(
    exporter: InMemorySpanExporter,
) -> None:
    with tracing.span("work", group="t7", worker="rollout-0"), tracing.span("generate"):
        pass
    tracing.end()
    later = InMemorySpanExporter()
    tracing.begin(SimpleSpanProcessor(later), seed="a job's token", resource={})
    tracing.record("prompt group", 10.0, 12.5, group="t7", root=True, attributes={"group": 7})
    tracing.record("prompt group", 10.0, 12.5, group="t8", root=True)
    work, generate = (by_name(exporter)[name] for name in ("work", "generate"))
    root, other = later.get_finished_spans()
    assert root.parent is None
    assert (root.start_time, root.end_time) == (10_000_000_000, 12_500_000_000)
    assert work.parent is not None
    assert generate.parent is not None
    assert work.parent.span_id == root.context.span_id
    assert generate.parent.span_id == work.context.span_id
    assert {span.context.trace_id for span in (root, work, generate)} == {root.context.trace_id}
    assert other.context.trace_id != root.context.trace_id
    assert work.attributes == {"sluice.worker": "rollout-0"}


def test_a_call_carries_the_span_of_its_caller(exporter: InMemorySpanExporter) -> None:
    assert tracing.outgoing_metadata() == ()
    with tracing.span("step"):
        metadata = tracing.outgoing_metadata()
        links = tracing.links_to_current()
    with tracing.span("CommitStep", parent=tracing.caller_context(metadata)):
        tracing.record("in training", 1.0, 2.0, group="t1", links=links)
    step, commit, trained = (
        by_name(exporter)[name] for name in ("step", "CommitStep", "in training")
    )
    assert commit.parent is not None
    assert commit.parent.span_id == step.context.span_id
    assert commit.context.trace_id == step.context.trace_id
    assert [link.context.span_id for link in trained.links] == [step.context.span_id]
    assert tracing.caller_context([("authorization", "Bearer x")]) is None


def test_a_root_call_is_linked_to_the_surrounding_span(
    exporter: InMemorySpanExporter,
) -> None:
    @tracing.traced("weight update", root=True)
    def update(version: int) -> int:
        tracing.set_attributes(version=version)
        return version

    with tracing.span("step"):
        assert update(3) == 3
    step, weight_update = (by_name(exporter)[name] for name in ("step", "weight update"))
    assert weight_update.parent is None
    assert weight_update.context.trace_id != step.context.trace_id
    assert weight_update.links[0].context.span_id == step.context.span_id
    assert weight_update.attributes == {"sluice.version": 3}


def test_a_sampler_decides_for_whole_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    exporter = InMemorySpanExporter()
    tracing.begin(SimpleSpanProcessor(exporter), seed="seed", resource={})
    for number in range(64):
        with tracing.span("work", group=f"t{number}"):
            pass
        tracing.record("prompt group", 1.0, 2.0, group=f"t{number}", root=True)
    tracing.end()
    spans = exporter.get_finished_spans()
    kept = {span.context.trace_id for span in spans}
    assert 8 < len(kept) < 56
    assert len(spans) == 2 * len(kept)


def test_without_an_endpoint_nothing_is_traced() -> None:
    tracing.configure(pod_env.read("buffer", {}))
    assert not tracing.enabled()
    with tracing.span("work", group="t1"):
        tracing.set_attributes(version=1)
    tracing.record("prompt group", 1.0, 2.0, group="t1", root=True)
    assert (tracing.outgoing_metadata(), tracing.links_to_current()) == ((), [])
