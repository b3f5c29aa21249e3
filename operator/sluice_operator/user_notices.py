"""Tells users what stands in a job's way besides what the planner says of it: once, in its status
and as an event.
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
    """Of a cluster what is needed here."""

    async def store_status(self, stored: KubeObject, status: RLJobStatus) -> None: ...
    async def tell(self, stored: KubeObject, events: Sequence[Event]) -> None: ...


@dataclass
class JobNotices:
    """The things that a job's user has been told already, so that nothing is told twice."""

    refused: str = ""
    trouble: str = ""
    place: str = ""
    """Of an error of ours: its type, and where it was raised.
    Its message may be another one each time."""
    has_run: bool = False

    @property
    def note(self) -> str:
        """The note that stands behind the message of Running."""
        refused = f"spec change refused: {self.refused}" if self.refused else ""
        return "; ".join(filter(None, (refused, self.trouble)))

    def cured(self) -> bool:
        """A pass has come to its end. True: there was trouble until now."""
        trouble, self.trouble, self.place = self.trouble, "", ""
        return bool(trouble)


class UserNotices:
    def __init__(self, cluster: StatusWriter) -> None:
        self.cluster = cluster
        self._told: dict[str, JobNotices] = {}

    def told(self, stored: KubeObject) -> JobNotices:
        return self._told.setdefault(uid(stored), JobNotices())

    def forget(self, stored: KubeObject) -> None:
        self._told.pop(uid(stored), None)

    async def invalid(self, stored: KubeObject, message: str) -> None:
        """The spec breaks a rule, and nothing was started: the job fails."""
        before = stored.get("status") or {}
        status, event = spec_acceptance.invalid(stored, message, datetime.now(UTC))
        await self.cluster.store_status(stored, status)
        if before.get("state") != status.state:
            log.warning("invalid spec", message=message)
            await self.cluster.tell(stored, [event])

    async def refused(self, stored: KubeObject, refused: str) -> None:
        """Tell which part of the spec is not followed; empty: all of it is."""
        told = self.told(stored)
        if refused and refused != told.refused:
            log.warning("spec change refused", message=refused)
            await self.cluster.tell(stored, [Event("Warning", spec_acceptance.REFUSED, refused)])
        told.refused = refused

    async def not_applied(
        self, stored: KubeObject, error: errors.ApiError | errors.ForeignObjectError
    ) -> None:
        """The API server did not take what the plan wanted, and people can cure that."""
        told, text = self.told(stored), remedies.with_remedy(str(error), remedies.REFUSALS)
        if told.trouble != text:
            told.trouble = text
            await self.cluster.tell(stored, [Event("Warning", spec_acceptance.NOT_APPLIED, text)])

    async def of_ours(self, stored: KubeObject, error: Exception) -> None:
        """An error of ours in one job must not stop all others,
        nor must its user wait without a word.
        """
        told, place = self.told(stored), f"{type(error).__name__} {_line_of_ours(error)}"
        if told.place == place:
            return
        text = RECONCILE_FAILED.text(cause=f"{error_summary.named(error)} ({_line_of_ours(error)})")
        try:
            status = spec_acceptance.hampered(stored, text, told.trouble, datetime.now(UTC))
            if status is not None:
                await self.cluster.store_status(stored, status)
            await self.cluster.tell(stored, [Event("Warning", RECONCILE_FAILED.name, text)])
        except Exception:
            log.exception("cannot tell of it in the job's status")  # the next pass tries again
            return
        told.trouble, told.place = text, place


def _line_of_ours(error: Exception) -> str:
    """`accept.py:79`: the innermost line of the operator's own."""
    frames = traceback.walk_tb(error.__traceback__)
    ours = [
        (frame, line)
        for frame, line in frames
        if frame.f_globals.get("__name__", "").startswith("sluice")
    ]
    return f"{Path(ours[-1][0].f_code.co_filename).name}:{ours[-1][1]}" if ours else ""
