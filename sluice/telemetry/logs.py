"""Structured logs: one line per event, as text for a terminal or as JSON for a cluster.

Libraries that use the standard library's logging go through the same processors, from WARNING on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import structlog

from sluice.runtime import open_files, pid1
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import terminal


def configure(role: str, **context: Any) -> structlog.typing.FilteringBoundLogger:
    """Log to stderr, as JSON if SLUICE_LOG_FORMAT=json. Every line carries `role` and `context`."""
    as_json = os.environ.get("SLUICE_LOG_FORMAT") == "json"
    last: list[Any] = [
        structlog.processors.format_exc_info,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.JSONRenderer() if as_json else _plain,
    ]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_of_libraries(last)])
    logging.captureWarnings(as_json)
    structlog.contextvars.bind_contextvars(role=role, **context)
    return get()


def _of_libraries(last: list[Any]) -> logging.Handler:
    """Return a handler that formats the standard library's log records like structlog's events."""
    handler = logging.StreamHandler(sys.stderr)
    first: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        _name_object,
    ]
    drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=first, processors=[drop, *last])
    )
    return handler


def _name_object(_logger: Any, _method: str, event: Any) -> Any:
    """Name the object of a line from kopf (`k8s_ref`): `job` or `pod`, as namespace/name."""
    reference = getattr(event["_record"], "k8s_ref", None) or {}
    if reference.get("name"):
        kind = {"RLJob": "job"}.get(
            reference.get("kind", ""), str(reference.get("kind", "object")).lower()
        )
        event[kind] = f"{reference.get('namespace')}/{reference['name']}"
    return event


def get() -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def _plain(_logger: Any, _method: str, event: Any) -> str:
    """Format an event as `2026-01-31T12:00:00Z info lease granted group=3 worker=rollout-0`.

    Values and tracebacks can hold a program's output with line ends and escape codes. They are
    escaped, so that an event stays one line, and tracebacks below it are indented.
    """
    exception = event.pop("exception", None)
    head = (
        f"{event.pop('timestamp', '')[:19]}Z {event.pop('level', 'info'):<7} "
        f"{event.pop('event', '')}"
    )
    for hidden in (
        "role",
        "name",
        "attempt",
    ):  # the name of a log file already identifies the process
        event.pop(hidden, None)
    fields = " ".join(f"{key}={value}" for key, value in event.items())
    line = terminal.escaped(f"{head} {fields}".rstrip())
    return line + (f"\n{terminal.block(exception)}" if exception else "")


def run(role: str, main: Callable[[], Coroutine[Any, Any, int | None]]) -> None:
    """Run a role's coroutine, then exit with the code and last line of docs/contracts.md."""
    run_blocking(role, lambda: asyncio.run(main()))


def run_blocking(role: str, main: Callable[[], int | None]) -> None:
    """Run a role's plain function and end the process as `run` does."""
    pid1.run_under_init()
    open_files.raise_limit()
    try:
        code = main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ConfigurationError as error:
        fail(str(error), 2)
    except Exception as error:
        get().exception("ends by an error", role=role)
        fail(f"{type(error).__name__}: {error}", 1)
    sys.exit(code or 0)


def fail(message: str, code: int) -> NoReturn:
    print_error(message)
    sys.exit(code)


def print_error(message: str) -> None:
    """Print the line `error: ...` that a pod's end is reported with; indent further lines."""
    first, *more = message.split("\n")
    below = [terminal.block(line) for line in more]
    lines = "\n".join([f"error: {terminal.escaped(first)}", *below])
    print(lines, file=sys.stderr, flush=True)
