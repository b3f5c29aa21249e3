"""`Client` and `Job`: plain calls that wait for their answers, also inside a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.api import RLJobStatus
from sluice.runtime.extras import install_command
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import run_directory
from sluice_client.errors import ClientError, JobFailedError
from sluice_client.job_list import JobSummary
from sluice_client.local_runs import LocalRuns
from sluice_client.logs import LogLine, merged
from sluice_client.pool_list import PoolSummary
from sluice_client.status_view import render_status, status_of
from sluice_client.submission import JobLike, Submission, prepare_submission
from sluice_operator.cluster.view import JobEvent, JobSnapshot, Reader, ReadError

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
# Seconds between two readings of a job that `Job.wait` waits for.
POLL_SECONDS = 2.0


class JobStore(Protocol):
    """The jobs of a cluster's namespace, or the runs of this machine.

    Every method may raise ClientError.
    """

    # True if jobs can read the files of this machine.
    shares_files: bool
    # What to say if there is no pool.
    no_pool: str

    async def submit(self, submission: Submission) -> str:
        """Create the job and return its name."""
        ...

    def reader(self, name: str) -> Reader:
        """Return what reads the status, pods and logs of a job."""
        ...

    async def list_jobs(self) -> list[JobSummary]:
        """Return all jobs."""
        ...

    async def list_pools(self) -> list[PoolSummary]:
        """Return all pools of engines."""
        ...

    async def suspend(self, name: str, suspend: bool) -> None:
        """Suspend a job, or resume it."""
        ...

    async def scale(self, name: str, replicas: int) -> None:
        """Set the number of engines."""
        ...

    async def delete(self, name: str) -> None:
        """Delete a job."""
        ...

    async def records(self, name: str, file: str) -> list[dict[str, Any]]:
        """Read a JSONL file of the run directory; empty if the file does not exist yet."""
        ...

    async def newest(self, name: str, pattern: str) -> str | None:
        """Return the last file of the run directory, by name, that matches a pattern."""
        ...

    async def close(self) -> None:
        """End connections."""
        ...


class Client:
    """Jobs of a cluster's namespace; with `Client.local()`, runs of this machine."""

    def __init__(self, namespace: str | None = None) -> None:
        """Connect to the cluster of the kubeconfig, or of the pod that this process runs in.

        Parameters
        ----------
        namespace
            Namespace of the jobs. Default: the namespace of the kubeconfig's context.

        Raises
        ------
        ClientError
            If no cluster is configured.

        """
        # A laptop needs no Kubernetes client.
        from sluice_client.cluster_jobs import ClusterJobs

        self._loop = _EventLoop()
        try:
            self._store: JobStore = self._loop.run(ClusterJobs.connect(namespace))
        except ConfigurationError as error:
            raise ClientError(f"{error}; for runs of this machine: Client.local()") from error

    @classmethod
    def local(cls, directory: str | Path = "runs") -> Client:
        """Return a client for the runs of this machine that are in `directory`."""
        client = cls.__new__(cls)
        client._loop, client._store = _EventLoop(), LocalRuns(Path(directory))
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

        Parameters
        ----------
        job
            Path of a manifest, an `RLJob`, or the same as plain data.
        name
            Name of the job. Default: the name in the manifest.
        overrides
            Values of fields by their paths, such as `{"trainer.steps": 20}`.
        reward
            Reward function: a Python function of this session, or `PATH.py:NAME`.
        prompts
            Rows to use instead of the prompt files that the manifest names.

        Raises
        ------
        ClientError
            If the job is not valid, with every problem, or cannot be created.

        """
        sent = prepare_submission(
            job,
            name=name,
            overrides=overrides or {},
            reward=reward,
            prompts=prompts,
            local=self._store.shares_files,
        )
        return Job(self._loop.run(self._store.submit(sent)), self._store, self._loop)

    def get(self, name: str) -> Job:
        """Return an existing job. Raises ClientError if there is no job of this name."""
        job = Job(name, self._store, self._loop)
        job.snapshot()
        return job

    def list(self) -> list[JobSummary]:
        """List all jobs."""
        return self._loop.run(self._store.list_jobs())

    def get_pool(self, name: str) -> Pool:
        """Return an existing pool of engines. Raises ClientError if there is none of this name."""
        pool = Pool(name, self._store, self._loop)
        _ = pool.summary
        return pool

    def list_pools(self) -> Sequence[PoolSummary]:
        """List the pools of engines of the namespace; locally those that run on this machine."""
        return self._loop.run(self._store.list_pools())

    def close(self) -> None:
        """Close the connection. Jobs go on."""
        self._loop.run(self._store.close())
        self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Job:
    """A job. Every call reads its present state."""

    def __init__(self, name: str, store: JobStore, loop: _EventLoop) -> None:
        self.name, self._store, self._loop = name, store, loop

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def _repr_html_(self) -> str:
        """Return what `sluice status` prints, for a notebook."""
        from datetime import UTC, datetime
        from io import StringIO

        from rich.console import Console

        console = Console(record=True, file=StringIO(), width=120)
        console.print(render_status(self.snapshot(), datetime.now(UTC)))
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def snapshot(self) -> JobSnapshot:
        """Return the RLJob object with its pods and events."""
        return self._loop.run(self._store.reader(self.name).snapshot())

    @property
    def status(self) -> RLJobStatus:
        """Status as `kubectl get rljob -o yaml` shows it."""
        return status_of(self.snapshot().job)

    @property
    def events(self) -> list[JobEvent]:
        """Events of the job and warnings about its pods, the oldest first."""
        return list(self.snapshot().events)

    def wait(self, seconds: float | None = None, *, progress: bool = True) -> RLJobStatus:
        """Wait for the end of the job.

        Parameters
        ----------
        seconds
            Longest time to wait. Default: no limit.
        progress
            Show a bar with the step and the reward.

        Raises
        ------
        JobFailedError
            If the job fails. The message holds the reason.
        TimeoutError
            If the job has not ended after `seconds`. The job goes on.

        """
        with _ProgressBar(self.name, visible=progress) as bar:
            return self._loop.run(self._until_ended(bar), seconds)

    async def _until_ended(self, bar: _ProgressBar) -> RLJobStatus:
        while True:
            status = status_of((await self._store.reader(self.name).snapshot()).job)
            bar.update(status)
            if status.is_true("Succeeded"):
                return status
            failed = status.condition("Failed")
            if failed is not None and failed.status == "True":
                raise JobFailedError(f"{self.name}: {failed.reason}: {failed.message}")
            await asyncio.sleep(POLL_SECONDS)

    def logs(self, role: str | None = None) -> Iterator[LogLine]:
        """Iterate over the present log lines of one role, or of all roles, in the order of time."""
        return merged(self._loop.run(self._lines(role)))

    async def _lines(self, role: str | None) -> list[tuple[Any, list[Any]]]:
        reader = self._store.reader(self.name)
        streams, _ = await reader.streams()
        return [
            (stream, [line async for line in reader.lines(stream, follow=False, tail=None)])
            for stream in streams
            if role in (None, stream.role) and not stream.silent
        ]

    def metrics(self) -> Records:
        """Return a record of each trained step, with the names of metrics.jsonl.

        For a job in a cluster a record holds only what the trainer logs of a step.
        """
        records = self._loop.run(self._store.records(self.name, run_directory.METRICS))
        # A run that resumed from a checkpoint has trained some steps twice.
        latest = {record["step"]: record for record in records}
        return Records(latest[step] for step in sorted(latest))

    def evaluations(self) -> Records:
        """Return a record of each evaluation of a data set."""
        return Records(self._loop.run(self._store.records(self.name, run_directory.EVALUATION)))

    def samples(self, step: int | None = None) -> Records:
        """Return sampled responses of a step, with prompt, label and reward.

        Without `step` they are those of the newest step.
        """
        return Records(self._loop.run(self._samples(step)))

    async def _samples(self, step: int | None) -> list[dict[str, Any]]:
        pattern = "samples/step_*.jsonl" if step is None else f"samples/step_{step:07d}.jsonl"
        file = await self._store.newest(self.name, pattern)
        return await self._store.records(self.name, file) if file else []

    def suspend(self) -> None:
        """End the pods and keep what is trained; `resume` continues the job."""
        self._loop.run(self._store.suspend(self.name, True))

    def resume(self) -> None:
        """Continue a job that was suspended."""
        self._loop.run(self._store.suspend(self.name, False))

    def scale(self, replicas: int) -> None:
        """Set the number of engines of a job in a cluster."""
        self._loop.run(self._store.scale(self.name, replicas))

    def delete(self) -> None:
        """Delete the job; for a run of this machine also all files that it has written."""
        self._loop.run(self._store.delete(self.name))


class Pool:
    """A pool of engines, which jobs share. Every call reads its present state."""

    def __init__(self, name: str, store: JobStore, loop: _EventLoop) -> None:
        self.name, self._store, self._loop = name, store, loop

    def __repr__(self) -> str:
        return f"Pool({self.name!r})"

    @property
    def summary(self) -> PoolSummary:
        """What `kubectl get rlenginepools` shows of it, and whether all engines answer."""
        return self._loop.run(self._read())

    def wait(self, seconds: float | None = None) -> PoolSummary:
        """Wait until all engines answer.

        Parameters
        ----------
        seconds
            Longest time to wait. Default: no limit.

        Raises
        ------
        ClientError
            If the pool is deleted, or ends.
        TimeoutError
            If an engine does not answer after `seconds`. The message says why.

        """
        try:
            return self._loop.run(self._until_ready(), seconds)
        except TimeoutError:
            message = self.summary.message
            raise TimeoutError(f"{self.name} after {seconds:g} s: {message}") from None

    async def _until_ready(self) -> PoolSummary:
        while not (summary := await self._read()).ready:
            await asyncio.sleep(POLL_SECONDS)
        return summary

    async def _read(self) -> PoolSummary:
        found = {pool.name: pool for pool in await self._store.list_pools()}
        if self.name not in found:
            present = f"expected one of {', '.join(found)}" if found else self._store.no_pool
            raise ClientError(f"there is no pool {self.name}: {present}")
        return found[self.name]


class Records(list[dict[str, Any]]):
    """Records of a run as a list of plain dictionaries."""

    def to_pandas(self) -> pd.DataFrame:
        """Return the records as rows of a data frame. Raises ClientError without pandas."""
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise ClientError(f"a data frame needs pandas: {install_command('client')}") from error
        return pd.DataFrame(list(self))


class _ProgressBar:
    """A bar of steps, on a terminal and in a notebook."""

    def __init__(self, name: str, *, visible: bool) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[headline]}"),
            TimeElapsedColumn(),
            disable=not visible,
        )
        self._task = self._bar.add_task(name, total=None, headline="")

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, status: RLJobStatus) -> None:
        """Show the job's state, step and reward, or its loss if it has no reward."""
        number = f"reward {status.reward}" if status.reward else ""
        number = number or (f"loss {status.loss}" if status.loss else "")
        self._bar.update(
            self._task,
            completed=status.step or 0,
            total=status.total_steps,
            headline=" ".join(filter(None, (status.state or "Pending", number))),
        )


class _EventLoop:
    """An event loop in a thread, since a notebook already runs one in the main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sluice", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Return the coroutine's result.

        Raises ClientError if a job cannot be read, and TimeoutError after `seconds`.
        """
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
