"""`sluice status` as text: what one job is doing, what it waits for, what went wrong last and what
to do about it.

Pure: from a Picture and the time to something that rich prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sluice.api import Condition, LastFailure, ManifestError, RLJob, RLJobStatus, RoleStatus
from sluice.api.groups.resources import less_memory, memory_field
from sluice.telemetry.goodput import Goodput, tail_of
from sluice.telemetry.planner import advice_for
from sluice_cli.options import RUNS
from sluice_cli.run.view import duration
from sluice_cli.status.deadlines import upcoming
from sluice_operator.cluster.view import Happened, Picture
from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.spec_acceptance import parse

EVENTS, LOG_LINES = 8, 12
STATES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Restarting": "yellow",
}
_GOOD = {
    "Admitted": "True",
    "Running": "True",
    "WeightsInSync": "True",
    "Suspended": "False",
    "Failed": "False",
}


def show(picture: Picture, now: datetime) -> RenderableType:
    """The whole picture. What is not there, such as a failure, takes no room."""
    status = status_of(picture.job)
    job = _job(picture.job)
    parts = [
        _head(picture, status, now),
        *_titled("", _progress(status)),
        *_goodput(status),
        *_plan(job, status),
        *_titled("conditions", _conditions(status, now)),
        *_titled("roles", _roles(status)),
        *_titled("pods", _pods(picture.pods, now)),
        *_titled("next", _upcoming(job, status, picture.pods, now)),
        *_titled("last failure", _failure(picture, status, now)),
        *_titled("events", _events(picture.events, now)),
        *(Text(f"note: {note}", style="yellow") for note in picture.notes),
    ]
    return Group(*parts)


def status_of(stored: KubeObject) -> RLJobStatus:
    """The stored status; empty where an operator of another version wrote what we cannot read."""
    try:
        return RLJobStatus.model_validate(stored.get("status") or {})
    except ValidationError:
        known = {
            key: value
            for key, value in stored["status"].items()
            if key in ("state", "step", "reward")
        }
        return RLJobStatus.model_validate(known)


def _job(stored: KubeObject) -> RLJob | None:
    """None: its spec is invalid; the condition Failed says why."""
    try:
        return parse({**stored, "status": None})
    except ManifestError:
        return None


def _titled(title: str, body: RenderableType | None) -> list[RenderableType]:
    if body is None:
        return []
    return [Text(""), *([Text(title, style="bold")] if title else []), body]


def _head(picture: Picture, status: RLJobStatus, now: datetime) -> Text:
    state = status.state or "Pending"
    head = Text.assemble(("RLJob ", ""), (picture.job["metadata"]["name"], "bold"), "  ")
    head.append(state, STATES.get(state, "cyan"))
    begun = clock.parse_optional(status.start_time)
    ended = clock.parse_optional(status.completion_time)
    if begun:
        head.append(
            f"  {'took' if ended else 'for'} {duration(((ended or now) - begun).total_seconds())}",
            "dim",
        )
    head.append(f"  {picture.where}", "dim")
    return head


def _progress(status: RLJobStatus) -> Table | None:
    """Step, reward, lag, weights: one line."""
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
    """The use of the GPUs' time: one line, or none before anything was counted."""
    if status.goodput is None:
        return []
    seconds, states = (
        {name: float(whole) for name, whole in of.items()}
        for of in (status.goodput.seconds, status.goodput.states)
    )
    text = Goodput(seconds, tail_of(states)).text()
    return [Text.assemble(("goodput ", "dim"), text)]


def _plan(job: RLJob | None, status: RLJobStatus) -> list[RenderableType]:
    """The fastest split of the job's GPUs by what they have done so far, once that is known."""
    advice = advice_for(job.spec, status) if job else None
    return [Text.assemble(("plan ", "dim"), advice.text())] if advice else []


def _conditions(status: RLJobStatus, now: datetime) -> Table | None:
    if not status.conditions:
        return None
    rows = [
        (_condition(each), each.reason, _age(each.last_transition_time, now), each.message)
        for each in status.conditions
    ]
    return _table(("condition", "reason", "for", "message"), rows)


def _condition(condition: Condition) -> Text:
    """Succeeded is neither good nor bad before the end."""
    wanted = _GOOD.get(condition.type, condition.status)
    style = (
        "green"
        if condition.status == wanted
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
            str(_begun_attempt(role) or ""),
            str(role.restarts),
        )
        for role in status.roles
    ]
    return _table(("role", "ready", "attempt", "restarts"), rows)


def _begun_attempt(role: RoleStatus) -> int:
    """The newest attempt of which a pod was there; 0: none yet.

    A gang that is to have no pods for now, as in a run that was stopped, has the number of its next
    attempt already.
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
    """A word, and what it waits for or died of."""
    if podstate.is_terminating(pod):
        return "Ending", ""
    if podstate.disruption(pod):
        return "Disrupted", podstate.disruption(pod)
    if podstate.is_gated(pod):
        return "Queued", "waits for admission by a queue"
    phase = str((pod.get("status") or {}).get("phase") or "Pending")
    waits = [
        _waiting(each)
        for each in podstate.container_statuses(pod)
        if (each.get("state") or {}).get("waiting")
    ]
    ends = [_ended(each) for each in podstate.container_statuses(pod) if _exit_code(each)]
    if phase == "Running" and not podstate.is_ready(pod):
        phase = "NotReady"
    return phase, "; ".join(ends or waits) or podstate.unscheduled_because(pod)


def _waiting(status: dict[str, Any]) -> str:
    waits = status["state"]["waiting"]
    why = ": ".join(filter(None, (waits.get("reason"), waits.get("message"))))
    return f"{status['name']}: {why or 'waiting'}"


def _ended(status: dict[str, Any]) -> str:
    return f"{status['name']}: exit code {_exit_code(status)}"


def _exit_code(status: dict[str, Any]) -> int:
    return int(((status.get("state") or {}).get("terminated") or {}).get("exitCode") or 0)


def _upcoming(
    job: RLJob | None, status: RLJobStatus, pods: Sequence[KubeObject], now: datetime
) -> Table | None:
    moments = upcoming(job, status, pods, now) if job else []
    if not moments:
        return None
    grid = Table.grid(padding=(0, 2))
    for moment, what in moments:
        grid.add_row(f"in {duration((moment - now).total_seconds())}", what)
    return grid


def _failure(picture: Picture, status: RLJobStatus, now: datetime) -> Group | None:
    failure = status.last_failure
    if failure is None:
        return None
    where = f"{failure.pod}{f', container {failure.container}' if failure.container else ''}"
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
    head = Text.assemble(
        (where, "bold"), f": {failure.reason or 'Error'}{code}, {_age(failure.time, now)} ago"
    )
    lines = [Text(f"  {line}", style="dim") for line in failure.message.splitlines()[-LOG_LINES:]]
    return Group(
        head,
        *lines,
        Text(f"what to do: {advice(failure, picture.job, picture.directory)}", style="yellow"),
    )


def advice(failure: LastFailure, job: KubeObject, directory: Path | None) -> str:
    """The next thing that a person would try. directory: of a run of this machine."""
    logs = _logs_command(job, failure.role, directory)
    message = failure.message.lower()
    if failure.reason == "OOMKilled":
        return (
            "it used more memory than it may; raise "
            f"{memory_field(failure.role, failure.container)}"
        )
    if failure.reason == podstate.OUT_OF_MACHINE:
        return (
            "the kernel's out-of-memory killer ended it, since the machine, or the container that "
            f"sluice runs in, had no memory left; {less_memory(failure.container)}"
        )
    if failure.exit_code == 2:
        return (
            "a configuration error, which no restart cures; mend what the last line names, and "
            "start the job anew"
        )
    if "out of memory" in message and "cuda" in message:
        return (
            "the GPU ran out of memory; lower trainer.maxTokensPerGpu, or "
            "rollout.engineArgs.memFractionStatic"
        )
    if failure.reason == "ProgressDeadlineExceeded":
        return f"it hung; see what it did last with: {logs}"
    if failure.exit_code in (134, 136, 139):
        return f"a crash in native code; its trace is in: {logs}"
    if failure.exit_code in (137, 143):
        return _advice_on_kill(failure, logs, on_cluster=directory is None)
    return f"see the whole log with: {logs}"


def _advice_on_kill(failure: LastFailure, logs: str, *, on_cluster: bool) -> str:
    """Advise on a container that was ended by SIGKILL or SIGTERM, without a trace of the sender."""
    killed = failure.exit_code == 137
    if on_cluster:
        who = "the node's out-of-memory killer, or somebody, killed it" if killed else ""
        who = who or "somebody ended it"
        return f"{who}; what the cluster did says: kubectl describe pod {failure.pod}"
    if not killed:
        return f"somebody ended it (SIGTERM); see what it did last with: {logs}"
    return (
        "it was killed (SIGKILL), and nothing shows that the kernel's out-of-memory killer did it; "
        "if nobody else did, look with: sudo dmesg | grep 'Killed process'; and "
        f"{less_memory(failure.container)}"
    )


def _logs_command(job: KubeObject, role: str, directory: Path | None) -> str:
    """The command that shows the logs of a role."""
    name, namespace = job["metadata"]["name"], job["metadata"].get("namespace")
    if directory is None:
        return f"sluice logs {name} {role}" + (f" -n {namespace}" if namespace else "")
    if directory.resolve() == (RUNS / name).resolve():
        return f"sluice logs {name} {role}"
    return f"sluice logs {role} --run-dir {directory}"


def _events(events: Sequence[Happened], now: datetime) -> Table | None:
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
    """Without the columns in which no row says anything."""
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
