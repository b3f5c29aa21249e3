"""Reports problems of a job that the planner does not see, in the job's status and as events.

Each problem is reported once: an invalid spec, a refused change, objects that the API server does
not accept, and internal errors of the operator.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import structlog

from sluice.api import RLJobStatus
from sluice.runtime import error_summary
from sluice_operator import spec_acceptance
from sluice_operator.cluster import errors
from sluice_operator.plan import Event, KubeObject
from sluice_operator.plan.facts.constants import RECONCILE_FAILED
from sluice_operator.plan.facts.model import uid
from sluice_operator.plan.report import remedies

log = structlog.get_logger(__name__)


class StatusWriter(Protocol):
    """The part of a cluster that is needed here."""

    async def store_status(self, stored: KubeObject, status: RLJobStatus) -> None: ...
    async def tell(self, stored: KubeObject, events: Sequence[Event]) -> None: ...


@dataclass
class JobNotices:
    """The problems of a job that have been reported."""

    refused: str = ""  # part of the spec that is not followed
    problem: str = ""  # refusal of the API server, or internal error
    # Type and source line of an internal error. Its message may differ each time.
    error_location: str = ""
    has_run: bool = False

    @property
    def note(self) -> str:
        """The note that is added to the message of the condition Running."""
        refused = f"spec change refused: {self.refused}" if self.refused else ""
        return "; ".join(filter(None, (refused, self.problem)))

    def resolve(self) -> bool:
        """Forget the problem after a complete pass. Return True if there was one."""
        problem, self.problem, self.error_location = self.problem, "", ""
        return bool(problem)


class UserNotices:
    def __init__(self, cluster: StatusWriter) -> None:
        self.cluster = cluster
        self._by_job: dict[str, JobNotices] = {}

    def of_job(self, stored: KubeObject) -> JobNotices:
        return self._by_job.setdefault(uid(stored), JobNotices())

    def forget(self, stored: KubeObject) -> None:
        self._by_job.pop(uid(stored), None)

    async def report_invalid_spec(self, stored: KubeObject, message: str) -> None:
        """Fail a job that has not started and whose spec breaks a rule."""
        before = stored.get("status") or {}
        status, event = spec_acceptance.invalid(stored, message, datetime.now(UTC))
        await self.cluster.store_status(stored, status)
        if before.get("state") != status.state:
            log.warning("invalid spec", message=message)
            await self.cluster.tell(stored, [event])

    async def report_refused_change(self, stored: KubeObject, refused: str) -> None:
        """Report which part of the spec is not followed; empty if all of it is."""
        notices = self.of_job(stored)
        if refused and refused != notices.refused:
            log.warning("spec change refused", message=refused)
            await self.cluster.tell(stored, [Event("Warning", spec_acceptance.REFUSED, refused)])
        notices.refused = refused

    async def report_not_applied(
        self, stored: KubeObject, error: errors.ApiError | errors.ForeignObjectError
    ) -> None:
        """Report objects that the API server did not accept, for a cause that people can remove."""
        notices = self.of_job(stored)
        text = remedies.with_remedy(str(error), remedies.REFUSALS)
        if notices.problem != text:
            notices.problem = text
            await self.cluster.tell(stored, [Event("Warning", spec_acceptance.NOT_APPLIED, text)])

    async def report_internal_error(self, stored: KubeObject, error: Exception) -> None:
        """Report an error of the operator itself, so that the job's user does not wait in vain."""
        notices, line = self.of_job(stored), _operator_line(error)
        location = f"{type(error).__name__} {line}"
        if notices.error_location == location:
            return
        text = internal_error(error)
        try:
            status = spec_acceptance.with_internal_error(
                stored, text, notices.problem, datetime.now(UTC)
            )
            if status is not None:
                await self.cluster.store_status(stored, status)
            await self.cluster.tell(stored, [Event("Warning", RECONCILE_FAILED.name, text)])
        except Exception:
            # The next pass tries again.
            log.exception("cannot report an internal error in the job's status")
            return
        notices.problem, notices.error_location = text, location


def internal_error(error: Exception) -> str:
    """Return an error of the operator itself in words."""
    cause = f"{error_summary.type_and_message(error)} ({_operator_line(error)})"
    return RECONCILE_FAILED.text(cause=cause)


def _operator_line(error: Exception) -> str:
    """Return the innermost line in sluice's code, such as `controller.py:79`."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [
        (frame, line)
        for frame, line in frames
        if frame.f_globals.get("__name__", "").startswith("sluice")
    ]
    return f"{Path(own[-1][0].f_code.co_filename).name}:{own[-1][1]}" if own else ""
