"""Render a job's status: what it does, what it waits for, its last failure and what to try next.

The functions are pure: they turn a JobSnapshot and the current time into text that rich prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sluice.api import Condition, ManifestError, RLJob, RLJobStatus, RoleStatus
from sluice.telemetry.goodput import Goodput, tail_of
from sluice.telemetry.planner import advice_for
from sluice_client.advice import advice
from sluice_operator.cluster.view import JobEvent, JobSnapshot
from sluice_operator.plan import KubeObject, is_finished
from sluice_operator.plan.decide.deadlines import expiry, progress_due, queue_due
from sluice_operator.plan.decide.gangs import gang_facts, of_gang
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.model import Gang
from sluice_operator.spec_acceptance import parse

# Newest events, and last lines of a failure's message, that are shown.
EVENTS, LOG_LINES = 8, 12
STATE_STYLES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Restarting": "yellow",
}
# Conditions with a good status. Succeeded is neither good nor bad before the end.
_GOOD_CONDITIONS = {
    "Admitted": "True",
    "ModelFetched": "True",
    "Running": "True",
    "WeightsInSync": "True",
    "Suspended": "False",
    "Failed": "False",
}


def render_status(snapshot: JobSnapshot, now: datetime) -> RenderableType:
    """Render a job. Parts without content, such as a failure that did not happen, are left out."""
    status = status_of(snapshot.job)
    job = _job(snapshot.job)
    parts = [
        _head(snapshot, status, now),
        *_titled("", _progress(status)),
        *_goodput(status),
        *_plan(job, status),
        *_titled("conditions", _conditions(status, now)),
        *_titled("roles", _roles(status)),
        *_titled("pods", _pods(snapshot.pods, now)),
        *_titled("next", _next(job, status, snapshot.pods, now)),
        *_titled("last failure", _failure(snapshot, status, now)),
        *_titled("events", _events(snapshot.events, now)),
        *(Text(f"note: {note}", style="yellow") for note in snapshot.notes),
    ]
    return Group(*parts)


def status_of(stored: KubeObject) -> RLJobStatus:
    """Parse the status of an RLJob object.

    If an operator of another version wrote fields that do not parse, the result holds only the
    state, the step and the reward.
    """
    try:
        return RLJobStatus.model_validate(stored.get("status") or {})
    except ValidationError:
        headline = {
            key: value
            for key, value in stored["status"].items()
            if key in ("state", "step", "reward")
        }
        return RLJobStatus.model_validate(headline)


def _job(stored: KubeObject) -> RLJob | None:
    """Parse a job; None if its spec is invalid, which the condition Failed explains."""
    try:
        return parse({**stored, "status": None})
    except ManifestError:
        return None


def _titled(title: str, body: RenderableType | None) -> list[RenderableType]:
    if body is None:
        return []
    return [Text(""), *([Text(title, style="bold")] if title else []), body]


def _head(snapshot: JobSnapshot, status: RLJobStatus, now: datetime) -> Text:
    state = status.state or "Pending"
    head = Text.assemble(("RLJob ", ""), (snapshot.job["metadata"]["name"], "bold"), "  ")
    head.append(state, STATE_STYLES.get(state, "cyan"))
    begun = clock.parse_optional(status.start_time)
    ended = clock.parse_optional(status.completion_time)
    if begun:
        head.append(
            f"  {'took' if ended else 'for'} {duration(((ended or now) - begun).total_seconds())}",
            "dim",
        )
    head.append(f"  {snapshot.where}", "dim")
    return head


def _progress(status: RLJobStatus) -> Table | None:
    """Render step, reward, lag and weight version as one line."""
    total = f" of {status.total_steps}" if status.total_steps else ""
    cells = [
        ("step", f"{status.step}{total}" if status.step is not None else None),
        ("reward", status.reward),
        ("loss", status.loss),
        ("policy lag", status.policy_lag),
        ("weight version", status.weight_version),
        ("restarts", status.restarts or None),
    ]
    shown = [
        Text.assemble((f"{name} ", "dim"), (str(value), "bold"))
        for name, value in cells
        if value is not None
    ]
    if not shown:
        return None
    grid = Table.grid(padding=(0, 3))
    grid.add_row(*shown)
    return grid


def _goodput(status: RLJobStatus) -> list[RenderableType]:
    """Render how the GPUs' time was used, once the job has reported it."""
    if status.goodput is None:
        return []
    seconds, states = (
        {name: float(value) for name, value in counts.items()}
        for counts in (status.goodput.seconds, status.goodput.states)
    )
    text = Goodput(seconds, tail_of(states)).text()
    return [Text.assemble(("goodput ", "dim"), text)]


def _plan(job: RLJob | None, status: RLJobStatus) -> list[RenderableType]:
    """Render the split of the job's GPUs that would be fastest, once there are measurements."""
    split = advice_for(job.spec, status) if job else None
    return [Text.assemble(("plan ", "dim"), split.text())] if split else []


def _conditions(status: RLJobStatus, now: datetime) -> Table | None:
    if not status.conditions:
        return None
    rows = [
        (
            _condition(condition),
            condition.reason,
            _age(condition.last_transition_time, now),
            condition.message,
        )
        for condition in status.conditions
    ]
    return _table(("condition", "reason", "for", "message"), rows)


def _condition(condition: Condition) -> Text:
    good = _GOOD_CONDITIONS.get(condition.type, condition.status)
    style = (
        "green"
        if condition.status == good
        else "dim"
        if condition.status == "Unknown"
        else "yellow"
    )
    style = "red" if condition.type == "Failed" and condition.status == "True" else style
    return Text(f"{condition.type}={condition.status}", style=style)


def _roles(status: RLJobStatus) -> Table | None:
    if not status.roles:
        return None
    rows = [
        (
            role.name,
            Text(
                f"{role.ready}/{role.desired}", style="" if role.ready >= role.desired else "yellow"
            ),
            str(_started_attempt(role) or ""),
            str(role.restarts),
        )
        for role in status.roles
    ]
    return _table(("role", "ready", "attempt", "restarts"), rows)


def _started_attempt(role: RoleStatus) -> int:
    """Return the newest attempt that had a pod; 0 before the first one.

    A gang that waits for its next attempt, or belongs to a stopped run, already carries the number
    of that next attempt.
    """
    return max(
        (
            gang.attempt - 1 if gang.retry_time and not gang.seen else gang.attempt
            for gang in role.gangs
        ),
        default=0,
    )


def _pods(pods: Sequence[KubeObject], now: datetime) -> Table | None:
    if not pods:
        return None
    rows = []
    for pod in sorted(pods, key=podstate.name):
        state, why = pod_state(pod)
        style = {"Running": "green", "Succeeded": "dim", "Failed": "red"}.get(state, "yellow")
        node = (pod.get("spec") or {}).get("nodeName") or ""
        age = _age(pod["metadata"].get("creationTimestamp"), now)
        rows.append((podstate.name(pod), Text(state, style=style), node, age, why))
    return _table(("pod", "state", "node", "age", "because"), rows)


def pod_state(pod: KubeObject) -> tuple[str, str]:
    """Return a pod's state in one word, and what it waits for or why it ended."""
    if podstate.is_terminating(pod):
        return "Ending", ""
    # The cluster ended the pod, or is about to: an eviction, a preemption, a node that shut down.
    if podstate.disruption(pod):
        return "Disrupted", podstate.disruption(pod)
    if podstate.is_gated(pod):
        return "Queued", "waits for its queue to admit it"
    phase = str((pod.get("status") or {}).get("phase") or "Pending")
    containers = list(podstate.container_statuses(pod))
    waits = [
        _waiting(status) for status in containers if (status.get("state") or {}).get("waiting")
    ]
    ends = [
        f"{status['name']}: exit code {_exit_code(status)}"
        for status in containers
        if _exit_code(status)
    ]
    # The phase says Running as soon as containers start, before their readiness probes pass.
    if phase == "Running" and not podstate.is_ready(pod):
        phase = "NotReady"
    return phase, "; ".join(ends or waits) or podstate.unscheduled_because(pod)


def _waiting(status: dict[str, Any]) -> str:
    waits = status["state"]["waiting"]
    why = ": ".join(filter(None, (waits.get("reason"), waits.get("message"))))
    return f"{status['name']}: {why or 'waiting'}"


def _exit_code(status: dict[str, Any]) -> int:
    return int(((status.get("state") or {}).get("terminated") or {}).get("exitCode") or 0)


def _next(
    job: RLJob | None, status: RLJobStatus, pods: Sequence[KubeObject], now: datetime
) -> Table | None:
    deadlines = upcoming(job, status, pods, now) if job else []
    if not deadlines:
        return None
    grid = Table.grid(padding=(0, 2))
    for moment, consequence in deadlines:
        grid.add_row(f"in {duration((moment - now).total_seconds())}", consequence)
    return grid


def _failure(snapshot: JobSnapshot, status: RLJobStatus, now: datetime) -> Group | None:
    failure = status.last_failure
    if failure is None:
        return None
    origin = f"{failure.pod}{f', container {failure.container}' if failure.container else ''}"
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
    head = Text.assemble(
        (origin, "bold"), f": {failure.reason or 'Error'}{code}, {_age(failure.time, now)} ago"
    )
    lines = [Text(f"  {line}", style="dim") for line in failure.message.splitlines()[-LOG_LINES:]]
    return Group(
        head,
        *lines,
        Text(f"what to do: {advice(failure, snapshot.job, snapshot.directory)}", style="yellow"),
    )


def _events(events: Sequence[JobEvent], now: datetime) -> Table | None:
    if not events:
        return None
    rows = []
    for event in events[-EVENTS:]:
        style = "yellow" if event.type == "Warning" else ""
        seen = f" (x{event.count})" if event.count > 1 else ""
        age = duration((now - event.time).total_seconds())
        rows.append((age, Text(event.reason, style=style), event.about, event.message + seen))
    return _table(("age", "reason", "about", "message"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Make a table without the columns that are empty in every row."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    shown = [index for index in range(len(columns)) if any(str(row[index]) for row in rows)]
    for index in shown:
        table.add_column(columns[index], overflow="fold")
    for row in rows:
        table.add_row(
            *(
                Text(cell) if isinstance(cell, str) else cell
                for cell in (row[index] for index in shown)
            )
        )
    return table


def _age(moment: str | None, now: datetime) -> str:
    return duration((now - clock.parse(moment)).total_seconds()) if moment else "-"


def duration(seconds: float) -> str:
    """Format seconds as `h:mm:ss`, or `m:ss` below an hour; less than 0 counts as 0."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- deadlines, by the rules of the operator's planner

Deadline = tuple[datetime, str]


def upcoming(
    job: RLJob, status: RLJobStatus, pods: Sequence[KubeObject], now: datetime
) -> list[Deadline]:
    """List what time alone will do to a job, the next event first."""
    if is_finished(status):
        end = expiry(job.spec, status)
        deadlines = [(end, "the finished job is deleted (ttlSecondsAfterFinished)")] if end else []
    else:
        deadlines = [*_deadlines(job, status), *_hang(job, status, pods, now), *_retries(status)]
    return sorted(deadline for deadline in deadlines if deadline[0] > now)


def _deadlines(job: RLJob, status: RLJobStatus) -> list[Deadline]:
    start, spec, deadlines = clock.parse_optional(status.start_time), job.spec, list[Deadline]()
    if due := queue_due(spec, status):
        text = "the job fails if its queue has not admitted it (queueTimeoutSeconds)"
        deadlines.append((due, text))
    if start and spec.active_deadline_seconds is not None:
        text = "the job fails if it still runs (activeDeadlineSeconds)"
        deadlines.append((start + timedelta(seconds=spec.active_deadline_seconds), text))
    # This deadline ends with the first step.
    if start and spec.startup_deadline_seconds and not status.last_progress_time:
        text = "the job fails if it has not finished its first step (startupDeadlineSeconds)"
        deadlines.append((start + timedelta(seconds=spec.startup_deadline_seconds), text))
    return deadlines


def _hang(
    job: RLJob, status: RLJobStatus, pods: Sequence[KubeObject], now: datetime
) -> list[Deadline]:
    gang, reported = Gang("trainer", 0, job.spec.trainer.nodes), status.gang("trainer", 0)
    if reported is None:
        return []
    # Pods of an earlier attempt may still be terminating.
    members = [pod for pod in of_gang(gang, pods) if podstate.attempt(pod) == reported.attempt]
    due = progress_due(job.spec, status, gang_facts(gang, members, now), gang.size)
    text = "the trainer restarts if it has not finished another step (progressDeadlineSeconds)"
    return [(due, text)] if due else []


def _retries(status: RLJobStatus) -> list[Deadline]:
    return [
        (clock.parse(gang.retry_time), f"{role.name}-{gang.replica} starts attempt {gang.attempt}")
        for role in status.roles
        for gang in role.gangs
        if gang.retry_time
    ]
