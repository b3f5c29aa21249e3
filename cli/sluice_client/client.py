"""`Client` and `Job`: plain calls that wait for their answers, also inside a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sluice.api import RLJobStatus
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import run_directory
from sluice_cli.status.listing import Listed
from sluice_cli.status.logs import LogLine, merged
from sluice_cli.status.view import show, status_of
from sluice_client.errors import ClientError, JobFailedError
from sluice_client.files import JobLike, submission
from sluice_client.machine import Machine
from sluice_client.places import Place
from sluice_client.records import Records
from sluice_client.watching import Progress
from sluice_operator.cluster.view import Happened, Picture, ReadError

T = TypeVar("T")
LOOK_SECONDS = 2.0


class Client:
    """Jobs of a cluster's namespace; with `Client.local()`, runs of this machine."""

    def __init__(self, namespace: str | None = None) -> None:
        """namespace: None: that of the kubeconfig's context. ClientError: no cluster is known."""
        from sluice_client.cluster import Cluster  # a laptop needs no client of Kubernetes

        self._loop = _Loop()
        try:
            self._place: Place = self._loop.run(Cluster.connect(namespace))
        except ConfigurationError as error:
            raise ClientError(f"{error}; for runs of this machine: Client.local()") from error

    @classmethod
    def local(cls, directory: str | Path = "runs") -> Client:
        """Runs of this machine, which lie in `directory`."""
        client = cls.__new__(cls)
        client._loop, client._place = _Loop(), Machine(Path(directory))
        return client

    def submit(
        self,
        job: JobLike,
        *,
        name: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        reward: Callable[..., Any] | str | None = None,
        prompts: Iterable[Mapping[str, Any]] | None = None,
    ) -> Job:
        """Start a job.

        job: a manifest's path, an RLJob, or the same as plain data. name: instead of the job's.
        overrides: fields by their paths, such as {"trainer.steps": 20}. reward: a function of this
        session, or `PATH.py:NAME`. prompts: rows instead of files. Raises ClientError, with all
        that is wrong.
        """
        sent = submission(
            job,
            name=name,
            overrides=overrides or {},
            reward=reward,
            prompts=prompts,
            here=self._place.here,
        )
        return Job(self._loop.run(self._place.submit(sent)), self._place, self._loop)

    def get(self, name: str) -> Job:
        """A job that is there. Raises ClientError where it is not."""
        job = Job(name, self._place, self._loop)
        job.picture()
        return job

    def list(self) -> list[Listed]:
        """All jobs, in short."""
        return self._loop.run(self._place.listed())

    def close(self) -> None:
        """End the connection. Jobs go on."""
        self._loop.run(self._place.close())
        self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Job:
    """One job. Every call asks anew."""

    def __init__(self, name: str, place: Place, loop: _Loop) -> None:
        self.name, self._place, self._loop = name, place, loop

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def _repr_html_(self) -> str:
        """`sluice status`, in a notebook."""
        from datetime import UTC, datetime
        from io import StringIO

        from rich.console import Console

        console = Console(record=True, file=StringIO(), width=120)
        console.print(show(self.picture(), datetime.now(UTC)))
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def picture(self) -> Picture:
        """The job as it is stored, its pods, its events."""
        return self._loop.run(self._place.reader(self.name).picture())

    @property
    def status(self) -> RLJobStatus:
        """The status as `kubectl get rljob -o yaml` shows it."""
        return status_of(self.picture().job)

    @property
    def events(self) -> list[Happened]:
        """Events of the job and warnings about its pods, the oldest first."""
        return list(self.picture().events)

    def wait(self, seconds: float | None = None, *, progress: bool = True) -> RLJobStatus:
        """Wait for the end, and show steps and reward meanwhile.

        Raises JobFailedError with the reason, TimeoutError after `seconds`; the job goes on.
        """
        with Progress(self.name, visible=progress) as shown:
            return self._loop.run(self._until_ended(shown), seconds)

    async def _until_ended(self, shown: Progress) -> RLJobStatus:
        while True:
            status = status_of((await self._place.reader(self.name).picture()).job)
            shown.update(status)
            if status.is_true("Succeeded"):
                return status
            failed = status.condition("Failed")
            if failed is not None and failed.status == "True":
                raise JobFailedError(f"{self.name}: {failed.reason}: {failed.message}")
            await asyncio.sleep(LOOK_SECONDS)

    def logs(self, role: str | None = None) -> Iterator[LogLine]:
        """All lines of now in the order of time, of one role or of all."""
        return merged(self._loop.run(self._lines(role)))

    async def _lines(self, role: str | None) -> list[tuple[Any, list[Any]]]:
        reader = self._place.reader(self.name)
        streams, _ = await reader.streams()
        return [
            (stream, [each async for each in reader.lines(stream, follow=False, tail=None)])
            for stream in streams
            if role in (None, stream.role) and not stream.silent
        ]

    def metrics(self) -> Records:
        """A record of each trained step, with the names of metrics.jsonl. Of a job in a cluster:
        what its trainer logs of each step.
        """
        records = self._loop.run(self._place.records(self.name, run_directory.METRICS))
        latest = {record["step"]: record for record in records}
        return Records(latest[step] for step in sorted(latest))

    def evaluations(self) -> Records:
        """A record of each evaluation of a data set."""
        return Records(self._loop.run(self._place.records(self.name, run_directory.EVALUATION)))

    def samples(self, step: int | None = None) -> Records:
        """Sampled responses of a step, with prompt, label and reward; None: of the last one."""
        return Records(self._loop.run(self._samples(step)))

    async def _samples(self, step: int | None) -> list[dict[str, Any]]:
        pattern = "samples/step_*.jsonl" if step is None else f"samples/step_{step:07d}.jsonl"
        file = await self._place.newest(self.name, pattern)
        return await self._place.records(self.name, file) if file else []

    def suspend(self) -> None:
        """End the pods; what is trained is kept, and `resume` goes on."""
        self._loop.run(self._place.suspend(self.name, True))

    def resume(self) -> None:
        self._loop.run(self._place.suspend(self.name, False))

    def scale(self, replicas: int) -> None:
        """Set the number of engines of a job in a cluster."""
        self._loop.run(self._place.scale(self.name, replicas))

    def delete(self) -> None:
        """Delete the job; a run of this machine with all that it has written."""
        self._loop.run(self._place.delete(self.name))


class _Loop:
    """An event loop in a thread of its own: a notebook's is taken by the notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sluice", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """The coroutine's result. Raises ClientError for what cannot be read, TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except ReadError as error:
            raise ClientError(str(error)) from error
        except (TimeoutError, KeyboardInterrupt):
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
