"""Traces in OpenTelemetry's protocol, off unless OTEL_EXPORTER_OTLP_ENDPOINT is set.

There is one trace per prompt group, from its lease to the step that trains on it; one per step of
the trainer; and one per weight update. The SDK's variables apply: OTEL_TRACES_SAMPLER and its ARG,
OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES and so on.

A group passes through processes that may die and be replaced, on streams that carry many groups.
Its trace id and the id of its root span are therefore computed from its name: every process knows
them, and a restarted buffer continues the same trace. Calls of the trainer carry their span in gRPC
metadata, as W3C's traceparent.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sluice.runtime.extras import install_command
from sluice.runtime.pod_env import Environment
from sluice.telemetry import logs

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link, Span, SpanContext

P = ParamSpec("P")
T = TypeVar("T")
Metadata = Iterable[tuple[str, str | bytes]]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# Bounds the last export, so that an absent collector does not delay the exit.
_FLUSH_SECONDS = 2.0
_chosen_ids: ContextVar[tuple[int, int] | None] = ContextVar("chosen_ids", default=None)


@dataclass(slots=True)
class _Tracing:
    """Tracer of this process. `seed` makes the ids of groups equal in all pods of a job."""

    provider: TracerProvider
    seed: str

    def group(self, name: str) -> SpanContext:
        """Return the root span of a group's trace, which another process may have begun."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import SpanContext, TraceFlags

        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        trace_id, span_id = (int.from_bytes(part) or 1 for part in (digest[:16], digest[16:24]))
        sampled = self.provider.sampler.should_sample(None, trace_id, "prompt group").decision
        flags = TraceFlags(TraceFlags.SAMPLED if sampled is Decision.RECORD_AND_SAMPLE else 0)
        return SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


_tracing: _Tracing | None = None


def configure(env: Environment) -> None:
    """Start tracing if an endpoint is set.

    Without the SDK, log a warning that says what to install.
    """
    if not any(env.variables.get(name) for name in _ENDPOINTS):
        return
    if importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        logs.get().warning(
            f"{_ENDPOINTS[0]} is set, but OpenTelemetry is not installed: "
            f"{install_command('tracing')}"
        )
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    job = env.job().metadata.name if env.variables.get("SLUICE_JOB_FILE") else ""
    begin(
        BatchSpanProcessor(OTLPSpanExporter()),
        seed=env.variables.get("SLUICE_TOKEN", "") or job,
        resource={
            "service.name": f"sluice-{env.role}",
            "service.namespace": job,
            "service.instance.id": env.name,
            "sluice.attempt": env.attempt,
        },
    )
    atexit.register(end)


def begin(processor: Any, *, seed: str, resource: Mapping[str, str | int]) -> None:
    """Trace to this span processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class ChosenIds(RandomIdGenerator):
        """Generates the chosen ids for the root span of a group, random ids otherwise."""

        def generate_trace_id(self) -> int:
            chosen = _chosen_ids.get()
            return chosen[0] if chosen else super().generate_trace_id()

        def generate_span_id(self) -> int:
            chosen = _chosen_ids.get()
            return chosen[1] if chosen else super().generate_span_id()

    global _tracing
    provider = TracerProvider(
        resource=Resource.create(resource), id_generator=ChosenIds(), shutdown_on_exit=False
    )
    provider.add_span_processor(processor)
    _tracing = _Tracing(provider, seed)


def end() -> None:
    """Send the remaining spans, within _FLUSH_SECONDS, and stop tracing."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is None:
        return
    closing = threading.Thread(target=tracing.provider.shutdown, daemon=True)
    closing.start()
    closing.join(_FLUSH_SECONDS)


def enabled() -> bool:
    return _tracing is not None


@contextmanager
def span(
    name: str, *, group: str | None = None, parent: Context | None = None, **attributes: Any
) -> Iterator[None]:
    """Trace the block as a child of the current span.

    Parameters
    ----------
    name
        Name of the span.
    group
        Name of a prompt group whose root becomes the parent.
    parent
        Span of another process (see `caller_context`).
    **attributes
        Attributes, exported as `sluice.<name>`.

    """
    if _tracing is None:
        yield
        return
    from opentelemetry import trace

    if group is not None:
        parent = trace.set_span_in_context(trace.NonRecordingSpan(_tracing.group(group)))
    tracer = _tracing.provider.get_tracer("sluice")
    with tracer.start_as_current_span(name, parent, attributes=_named(attributes)):
        yield


def traced(name: str, *, root: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function: `span` around each call.

    `root` starts a new trace, linked to the caller's.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            if _tracing is None:
                return function(*args, **kwargs)
            from opentelemetry.context import Context

            tracer = _tracing.provider.get_tracer("sluice")
            parent, links = (Context(), links_to_current()) if root else (None, [])
            with tracer.start_as_current_span(name, parent, links=links):
                return function(*args, **kwargs)

        return inside

    return decorate


def set_attributes(**attributes: Any) -> None:
    """Set attributes of the current span."""
    if _tracing is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(_named(attributes))


def record_child(name: str, began: float, ended: float, **attributes: Any) -> None:
    """Record a finished part of the current span, between two readings of `now`."""
    if _tracing is not None:
        tracer = _tracing.provider.get_tracer("sluice")
        child = tracer.start_span(name, attributes=_named(attributes), start_time=int(began * 1e9))
        child.end(int(ended * 1e9))


def record(
    name: str,
    began: float,
    ended: float,
    *,
    group: str,
    root: bool = False,
    links: Sequence[Link] = (),
    attributes: Mapping[str, str | int] | None = None,
) -> None:
    """Record a finished part of a group's life, between two readings of `now`.

    The span of the whole life is the `root`; the others are its children.
    """
    if _tracing is None:
        return
    from opentelemetry import trace
    from opentelemetry.context import Context

    group_span = _tracing.group(group)
    parent = Context() if root else trace.set_span_in_context(trace.NonRecordingSpan(group_span))
    token = _chosen_ids.set((group_span.trace_id, group_span.span_id) if root else None)
    try:
        recorded: Span = _tracing.provider.get_tracer("sluice").start_span(
            name,
            parent,
            attributes=_named(attributes or {}),
            links=links,
            start_time=int(began * 1e9),
        )
    finally:
        _chosen_ids.reset(token)
    recorded.end(int(ended * 1e9))


def now() -> float:
    """Seconds since the epoch, the clock of spans."""
    return time.time()


def links_to_current() -> list[Link]:
    """Return a link to the current span, if there is one."""
    if _tracing is None:
        return []
    from opentelemetry import trace

    current = trace.get_current_span().get_span_context()
    return [trace.Link(current)] if current.is_valid else []


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Return the current span as metadata for a call."""
    if _tracing is None:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def caller_context(metadata: Metadata) -> Context | None:
    """Return the caller's span from the metadata of a call; None if it carries none."""
    carrier = {key: str(value) for key, value in metadata if key in ("traceparent", "tracestate")}
    if _tracing is None or "traceparent" not in carrier:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(carrier)


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"sluice.{key}": value for key, value in attributes.items()}
