"""For all unit tests: a busy machine fails no property test, and spans can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Record traces; the exporter has the finished spans."""
    # Few tests need it, and it takes a while to import.
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from sluice.telemetry import tracing

    exporter = InMemorySpanExporter()
    tracing.begin(SimpleSpanProcessor(exporter), seed="a job's token", resource={})
    yield exporter
    tracing.end()
