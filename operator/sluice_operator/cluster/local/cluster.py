"""LocalCluster: the pods of one job, or of one pool of engines, as processes of this machine.

A container is a process, a Service is a port on 127.0.0.1, a volume is a directory below the run
directory, and logs are files. Objects look as an API server would show them, so a restart policy
that was tried here runs unchanged on a cluster.

Promise: no process of a pod outlives its pod, whatever dies and however. Each container runs under
a supervisor (supervisor.py), which kills everything below it when the container ends or when this
process is gone. If a supervisor is killed, this process adopts and kills what it leaves. The next
run in the same directory kills what is left even then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sluice.api import RLJob, RLJobStatus, manifest
from sluice.telemetry import run_directory
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.local import (
    gpus,
    pools,
    processes,
    readiness,
    run_state,
    services,
    volumes,
)
from sluice_operator.cluster.local.pod import LocalContainer, LocalPod, lost_pod, new_pod, now_text
from sluice_operator.cluster.local.supervisor import become_subreaper
from sluice_operator.cluster.local.translate import (
    LOOPBACK,
    ContainerCommand,
    HostBindings,
    PodError,
    commands,
    inherited_env,
)
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.facts.model import Deletion, Event, KubeObject, Observed
from sluice_operator.plan.facts.names import Owner

_CLOSE_DEADLINE = 15.0


class LocalCluster:
    """The cluster of one run, used as `async with LocalCluster(run_dir) as cluster`.

    At the end of the block all remaining pods are killed.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        volumes: Mapping[str, Path] | None = None,
        gpus: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        lock: int | None = None,
        lock_seconds: float = 10.0,
    ) -> None:
        """Create a cluster that is not open yet.

        Parameters
        ----------
        run_dir
            Directory of the run.
        volumes
            Directories for some volume names ("run", "checkpoint", ...) in place of
            `<run_dir>/volumes/<name>`. The trainer's files are in "run", its checkpoints in a
            subdirectory, as on a job's claim in a cluster.
        gpus
            GPUs to assign; None for those of this machine. Two pods share a GPU that is listed
            twice.
        env
            Further variables for every container.
        lock
            Descriptor of the directory's lock if the caller holds it (`run_state.lock`) and keeps
            it; None if the cluster should take it.
        lock_seconds
            Seconds to wait for an earlier run to end.

        """
        self.run_dir = run_dir.resolve()
        defaults = {"run": self.run_dir / "volumes" / "run", "dshm": Path("/dev/shm")}  # noqa: S108 - the machine's
        self._volumes = defaults | dict(volumes or {})
        self._gpus = gpus
        self._env = dict(env or {})
        self._held_lock, self._lock_seconds = lock, lock_seconds
        self._pods: dict[str, LocalPod] = {}
        self._claims: dict[str, dict[str, list[str]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._change = asyncio.Event()
        self._closing = False

    async def __aenter__(self) -> Self:
        if not sys.platform.startswith("linux"):
            raise run_state.RunDirectoryError("running pods as local processes needs Linux")
        self._loop = asyncio.get_running_loop()
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as resources:
            self._lock = (
                await run_state.lock(self.run_dir, self._lock_seconds)
                if self._held_lock is None
                else os.dup(self._held_lock)
            )
            resources.callback(os.close, self._lock)
            self._life, self._life_end = os.pipe()
            resources.callback(os.close, self._life)
            resources.callback(become_subreaper, become_subreaper(True))
            await processes.kill_marked(processes.marker(self.run_dir))
            self._open_state()
            self._resources = resources.pop_all()
        return self

    def _open_state(self) -> None:
        self._store = run_state.StateFile(self.run_dir)
        self._state = self._store.load()
        self._keys = JobKeys(run_state.key(self.run_dir))
        self._pods = {
            name: lost_pod(pod)
            for name, pod in self._state.pods.items()
            # A terminating pod has ended with its host.
            if not podstate.is_terminating(pod)
        }
        shutil.rmtree(self.run_dir / "pods", ignore_errors=True)
        self._state.objects = {
            name: stored
            for name, stored in self._state.objects.items()
            if not pools.is_credential(stored)
        }
        services.renew_addresses(self._state.objects, self._state.ports, self._taken_ports())
        self._save()

    async def __aexit__(self, *_: object) -> None:
        """Kill all remaining pods.

        In the state file they stay as running, so that the next run sees them as lost and not as
        failed.
        """
        self.kill()
        try:
            async with asyncio.timeout(_CLOSE_DEADLINE):
                while not all(pod.ended or not pod.started for pod in self._pods.values()):
                    await asyncio.sleep(0.02)
        finally:
            # A supervisor that is left kills its container now.
            os.close(self._life_end)
            await processes.kill_marked(processes.marker(self.run_dir))
            processes.reap_adopted(self._supervisors())
            self._resources.close()

    @property
    def logs_dir(self) -> Path:
        return self.run_dir / "logs"

    # -- Cluster
    # ----------------------------------------------------------------------------------------------

    async def observe(self, job: Owner) -> Observed:
        self._raise_failure()
        if self._state.job not in (None, job.key):
            raise run_state.RunDirectoryError(
                f"{self.run_dir} belongs to {job.kind} {self._state.job}; use another directory"
            )
        objects = {
            (stored["kind"], stored["metadata"]["name"]): stored
            for stored in self._state.objects.values()
        }
        status = (
            RLJobStatus.model_validate(self._state.status)
            if self._state.status is not None
            else None
        )
        pods = tuple(pod.observed() for pod in self._pods.values())
        pool = pools.facts(job) if isinstance(job, RLJob) else None
        return Observed(pods, objects, status, pool=pool)

    async def write_status(self, job: RLJob, status: RLJobStatus) -> None:
        self._state.job, self._state.status = job.key, manifest(status)
        self._save()

    async def apply(self, job: Owner, objects: Sequence[KubeObject]) -> None:
        self._state.job = job.key
        pool_key = pools.key(job) if isinstance(job, RLJob) else ""
        owner = pools.as_created_now(job) if isinstance(job, RLJob) else job
        for document in objects:
            kind, name = document["kind"], document["metadata"]["name"]
            if kind != "Pod":
                filled = self._keys.filled(owner, document, pool_key)
                self._state.objects[f"{kind}/{name}"] = services.accepted(
                    filled, self._state.ports, self._taken_ports()
                )
            elif name not in self._pods:
                self._pods[name] = new_pod(document, self.logs_dir)
        # Pods are saved before they are started, so that a pod of a crashed host counts as lost.
        self._save()
        self._schedule()

    async def delete(self, job: Owner, deletions: Sequence[Deletion]) -> None:
        for deletion in deletions:
            pod = self._pods.get(deletion.name)
            if deletion.kind == "Pod" and pod is not None:
                self._delete_pod(pod, deletion.grace)
            elif deletion.kind != "Pod":
                self._state.objects.pop(f"{deletion.kind}/{deletion.name}", None)
        self._save()

    async def emit(self, job: RLJob, events: Sequence[Event]) -> None:
        with (self.run_dir / run_directory.EVENTS).open("a") as file:
            for event in events:
                line = {
                    "time": now_text(),
                    "type": event.type,
                    "reason": event.reason,
                    "message": event.message,
                }
                file.write(json.dumps(line) + "\n")

    # -- InProcessCluster
    # ----------------------------------------------------------------------------------------------

    async def changed(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._change.wait()
        except TimeoutError:
            return False
        self._change.clear()
        self._raise_failure()
        return True

    def kill(self) -> None:
        self._closing = True
        for pod in self._pods.values():
            pod.send(signal.SIGUSR1)

    # -- pods
    # ----------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Start the pods that wait and for which there are GPUs."""
        for pod in self._pods.values():
            if pod.started or pod.ended or pod.deletion_time or self._closing:
                continue
            assigned = self._assign_gpus(pod)
            if isinstance(assigned, str):
                pod.waiting = assigned
                continue
            pod.gpus, pod.waiting = assigned, ""
            try:
                self._start(pod)
            except PodError as error:
                pod.refuse(str(error))
        self._save()
        self._change.set()

    def _assign_gpus(self, pod: LocalPod) -> list[str] | str:
        """Return GPUs for the pod alone, or why there are none.

        GPUs of claims are shared, and stay assigned to the claim.
        """
        all_gpus = self._gpus if self._gpus is not None else gpus.visible_gpus()
        for claim in gpus.claim_names(pod.manifest).values():
            if claim not in self._claims:
                allocated = gpus.allocate(
                    self._state.objects[f"ResourceClaim/{claim}"], all_gpus, self._taken_gpus()
                )
                if isinstance(allocated, str):
                    return allocated
                self._claims[claim] = allocated
        return gpus.assign(pod.gpu_request, all_gpus, self._taken_gpus()) if pod.gpu_request else []

    def _taken_gpus(self) -> list[str]:
        taken = [name for pod in self._pods.values() for name in pod.gpus]
        for claim in self._claims.values():
            taken += [name for gpu_names in claim.values() for name in gpu_names]
        return taken

    def _start(self, pod: LocalPod) -> None:
        pod_dir = self.run_dir / "pods" / pod.name
        directories = volumes.prepare(
            pod.manifest, self.run_dir, pod_dir, self._volumes, self._state.objects
        )
        named_ports = services.pod_ports(
            pod.manifest, self._state.objects.values(), self._taken_ports()
        )
        pod.ports = named_ports
        overrides = {
            "SLUICE_BIND": LOOPBACK,
            "SLUICE_ADVERTISE": LOOPBACK,
            "SLUICE_EPISODES": "processes",
        }
        addresses = services.named_addresses(pod.manifest, self._state.ports, self._taken_ports())
        bindings = HostBindings(directories, named_ports, overrides, self._state.objects, addresses)
        pod.commands = commands(pod.manifest, bindings, inherited_env() | self._env)
        specs = pod.manifest["spec"]["containers"]
        pod.urls = [readiness.url(spec, named_ports) for spec in specs]
        left = list(pod.gpus)
        counts = [0] * len(pod.inits) + [gpus.requested(spec) for spec in specs]
        for command, count in zip(pod.commands, counts, strict=True):
            command.env["CUDA_VISIBLE_DEVICES"] = ",".join(left[:count])
            del left[:count]
        for command, spec in zip(pod.commands[len(pod.inits) :], specs, strict=True):
            if shared := gpus.claimed(pod.manifest, spec, self._claims):
                command.env["CUDA_VISIBLE_DEVICES"] = ",".join(shared)
        pod.started = now_text()
        self._go_on(pod)

    def _go_on(self, pod: LocalPod) -> None:
        """Start the next init container, or all other containers after the last one."""
        if (first := pod.next_init) is not None:
            if first.exit_code is None:
                self._start_container(pod, first, pod.commands[pod.inits.index(first)])
            pod.abandoned = first.exit_code is not None
            return
        specs, main_commands = pod.manifest["spec"]["containers"], pod.commands[len(pod.inits) :]
        for container, command, spec, url in zip(
            pod.containers, main_commands, specs, pod.urls, strict=True
        ):
            self._start_container(pod, container, command)
            if url and container.process is not None:
                container.ready = False
                container.prober = self._spawn(self._probe(container, spec["readinessProbe"], url))

    def _start_container(
        self, pod: LocalPod, container: LocalContainer, command: ContainerCommand
    ) -> None:
        try:
            container.start(command, self.run_dir, pod.name, (self._life, self._lock), self._life)
        except OSError as error:
            container.end(127, f"error: cannot start: {error}", "StartError")
            return
        container.on_end(
            lambda: self._loop.call_soon_threadsafe(self._supervisor_ended, pod, container)
        )

    async def _probe(self, container: LocalContainer, probe: Mapping[str, Any], url: str) -> None:
        async for ready in readiness.answers(probe, url):
            container.ready = ready
            self._change.set()

    def _supervisor_ended(self, pod: LocalPod, container: LocalContainer) -> None:
        self._spawn(self._container_ended(pod, container))

    async def _container_ended(self, pod: LocalPod, container: LocalContainer) -> None:
        """End a container once all of its processes are gone, even if its supervisor was killed."""
        assert container.process is not None
        await processes.kill_marked(processes.marker(self.run_dir, pod.name, container.name))
        container.end(container.process.wait())
        container.stop_probing()
        processes.reap_adopted(self._supervisors())
        if container in pod.inits:
            pod.abandoned = self._closing or bool(pod.deletion_time)
            if not pod.abandoned:
                self._go_on(pod)
        if pod.ended and pod.deletion_time:
            self._forget(pod)
        self._save()
        if pod.ended:
            pod.gpus, pod.ports = [], {}
            self._schedule()
        self._change.set()

    def _supervisors(self) -> set[int]:
        running = (container.process for pod in self._pods.values() for container in pod.everything)
        return {process.pid for process in running if process is not None}

    def _delete_pod(self, pod: LocalPod, grace: int) -> None:
        pod.mark_deleted(grace)
        if pod.ended or not pod.started:
            self._forget(pod)
        elif grace > 0:
            pod.send(signal.SIGTERM)
            self._loop.call_later(grace, pod.send, signal.SIGUSR1)
        else:
            pod.send(signal.SIGUSR1)
        self._change.set()

    def _forget(self, pod: LocalPod) -> None:
        del self._pods[pod.name]
        shutil.rmtree(self.run_dir / "pods" / pod.name, ignore_errors=True)

    # -- state
    # ----------------------------------------------------------------------------------------------

    def _taken_ports(self) -> set[int]:
        pod_ports = (pod.ports.values() for pod in self._pods.values())
        return set(self._state.ports.values()).union(*pod_ports)

    def _save(self) -> None:
        if not self._closing:
            self._state.pods = {name: pod.observed() for name, pod in self._pods.items()}
        self._store.save(self._state)
        services.write_targets(self.run_dir, self._pods.values())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._change.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
