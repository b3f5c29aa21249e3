"""A pod of a laptop: its processes, and its status as Kubernetes would report it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sluice.telemetry import steady
from sluice_operator.cluster.local import gpus, out_of_memory, supervisor
from sluice_operator.cluster.local.processes import MARKER, marker
from sluice_operator.cluster.local.translate import LOOPBACK, ContainerCommand
from sluice_operator.plan.facts.constants import EXIT_CONFIG_ERROR
from sluice_operator.plan.facts.model import KubeObject
from sluice_operator.plan.facts.podstate import OUT_OF_MACHINE

SUPERVISOR = [sys.executable, "-I", "-S", str(Path(supervisor.__file__))]
HOST_GONE_GRACE = 2.0
_TAIL_BYTES, _TAIL_LINES = 4096, 20


def now_text() -> str:
    """Return the time with fractions of a second, which tell which container died first."""
    return steady.now().isoformat().replace("+00:00", "Z")


def log_tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """Return the end of a log, as much as Kubernetes keeps in a termination message."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


@dataclass
class LocalContainer:
    """A container and its processes."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: str = ""
    finished: str = ""
    exit_code: int | None = None  # set once all processes of the container are gone
    reason: str = ""
    message: str = ""
    ready: bool = True  # the result of its readiness probe
    # The kernel's counters of kills for memory when the container was started.
    kills_before: tuple[int, ...] = ()
    prober: asyncio.Task[None] | None = None

    def start(
        self,
        command: ContainerCommand,
        run_dir: Path,
        pod: str,
        inherited: Sequence[int],
        life: int,
    ) -> None:
        """Start the container under a supervisor.

        Parameters
        ----------
        command
            What to start.
        run_dir, pod
            The run and the pod, with which its processes are marked.
        inherited
            Descriptors that the supervisor keeps open.
        life
            The descriptor by which the supervisor sees that this process is gone.

        """
        env = command.env | {MARKER: marker(run_dir, pod, self.name)}
        arguments = [*SUPERVISOR, str(life), str(HOST_GONE_GRACE), "--", *command.argv]
        self.started, self.kills_before = now_text(), out_of_memory.kills()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                arguments,
                env=env,
                cwd=command.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=inherited,
                start_new_session=True,
            )

    def on_end(self, notify: Callable[[], object]) -> None:
        """Call `notify` from another thread when the supervisor has ended.

        The thread does not reap it (WNOWAIT); whoever is notified does. So a signal never reaches
        another process with the same pid.
        """
        assert self.process is not None
        pid = self.process.pid

        def wait() -> None:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            notify()

        threading.Thread(target=wait, name=f"wait-{pid}", daemon=True).start()

    def stop_probing(self) -> None:
        if self.prober is not None:
            self.prober.cancel()

    def send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            # Popen.send_signal would reap the process.
            os.kill(self.process.pid, number)

    def end(self, exit_code: int, message: str = "", reason: str = "") -> None:
        code = exit_code if exit_code >= 0 else 128 - exit_code
        self.exit_code, self.finished = code, now_text()
        self.reason = reason or self._reason(code)
        self.message = message or (log_tail(self.log) if code else "")

    def _reason(self, code: int) -> str:
        if code == 128 + signal.SIGKILL and any(
            now > before
            for now, before in zip(out_of_memory.kills(), self.kills_before, strict=False)
        ):
            return OUT_OF_MACHINE
        return "Completed" if code == 0 else "Error"

    @property
    def is_ready(self) -> bool:
        return self.ready and self.process is not None and self.exit_code is None

    def status(self) -> dict[str, Any]:
        if self.exit_code is not None:
            state: dict[str, Any] = {
                "terminated": {
                    "exitCode": self.exit_code,
                    "reason": self.reason,
                    "message": self.message,
                    "startedAt": self.started,
                    "finishedAt": self.finished,
                }
            }
        elif self.process is not None:
            state = {"running": {"startedAt": self.started}}
        else:
            state = {"waiting": {"reason": "ContainerCreating"}}
        return {"name": self.name, "ready": self.is_ready, "state": state, "restartCount": 0}


@dataclass
class LocalPod:
    """A pod and its containers."""

    manifest: KubeObject  # as it was applied
    containers: list[LocalContainer]
    # Init containers, which run one after the other before the others.
    inits: list[LocalContainer] = field(default_factory=list)
    # Set when the pod is started: the commands of inits and containers, the URLs of the containers'
    # readiness probes, and ports of this machine by the names of container ports.
    commands: list[ContainerCommand] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    abandoned: bool = False  # ended before its containers were started
    created: str = field(default_factory=now_text)
    started: str = ""
    deletion_time: str = ""
    waiting: str = ""  # why the pod is not started yet, in words
    gpus: list[str] = field(default_factory=list)
    lost: KubeObject | None = None  # as last seen, for a pod of an earlier host

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def ended(self) -> bool:
        ended = all(container.exit_code is not None for container in self.containers)
        return ended or self.abandoned or self.lost is not None

    @property
    def everything(self) -> list[LocalContainer]:
        return [*self.inits, *self.containers]

    @property
    def next_init(self) -> LocalContainer | None:
        """The first init container that runs, has failed, or has not been started."""
        return next((container for container in self.inits if container.exit_code != 0), None)

    @property
    def gpu_request(self) -> int:
        return sum(gpus.requested(container) for container in self.manifest["spec"]["containers"])

    def refuse(self, message: str) -> None:
        """End a pod that cannot run on this machine, as a configuration error."""
        self.containers[0].end(EXIT_CONFIG_ERROR, f"error: {message}", "CreateContainerConfigError")
        for container in self.containers[1:]:
            container.end(128 + signal.SIGTERM)

    def mark_deleted(self, grace: float) -> None:
        self.deletion_time = (
            (steady.now() + timedelta(seconds=grace)).isoformat().replace("+00:00", "Z")
        )

    def send(self, number: signal.Signals) -> None:
        for container in self.everything:
            container.send(number)

    def observed(self) -> KubeObject:
        """Return the pod as an API server would show it."""
        if self.lost is not None:
            return self.lost
        metadata = self.manifest["metadata"] | {"creationTimestamp": self.created}
        if self.deletion_time:
            metadata["deletionTimestamp"] = self.deletion_time
        return {**self.manifest, "metadata": metadata, "status": self._status()}

    def _status(self) -> dict[str, Any]:
        phase = self._phase()
        ready = phase == "Running" and all(container.is_ready for container in self.containers)
        conditions = [{"type": "Ready", "status": str(ready)}]
        if self.waiting:
            conditions.append(
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": self.waiting,
                }
            )
        status: dict[str, Any] = {
            "phase": phase,
            "conditions": conditions,
            "containerStatuses": [container.status() for container in self.containers],
            "podIP": LOOPBACK,
        }
        if self.inits:
            status["initContainerStatuses"] = [container.status() for container in self.inits]
        return status | ({"startTime": self.started} if self.started else {})

    def _phase(self) -> str:
        if not self.ended:
            return "Running" if self.started and self.next_init is None else "Pending"
        failed = self.abandoned or any(container.exit_code for container in self.containers)
        return "Failed" if failed else "Succeeded"


def new_pod(manifest: KubeObject, logs: Path) -> LocalPod:
    def containers(kind: str) -> list[LocalContainer]:
        names = [container["name"] for container in manifest["spec"].get(kind, [])]
        return [
            LocalContainer(name, logs / f"{manifest['metadata']['name']}.{name}.log")
            for name in names
        ]

    return LocalPod(manifest, containers("containers"), containers("initContainers"))


def lost_pod(observed: KubeObject) -> LocalPod:
    """Return a pod of an earlier host.

    If it had not ended, it was killed with its host, which is a disruption.
    """
    if observed.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
        disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "HostProcessEnded"}
        observed = {
            **observed,
            "status": {**observed.get("status", {}), "phase": "Failed", "conditions": [disrupted]},
        }
    return LocalPod(observed, [], lost=observed)
