"""Judging processes, and the queue of jobs for them.

Ready jobs are sent to a process in chunks and come back one by one, each with its own time limit. A
job that takes longer than a moment keeps its process to itself: the rest of its chunk goes back to
the queue, and another process is started, up to a bound, so that hanging jobs do not block others.
If a process must be killed, only the job that it was running fails. Every job gets an answer: one
that cannot be sent fails at once, and if a process is lost its jobs are answered or queued again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sluice import input_checks
from sluice.rewards.judging.child import JudgeTask
from sluice.rewards.judging.configuration import Configuration
from sluice.rewards.judging.process import LostError, Process
from sluice.rewards.types import Judgement, RewardError, late
from sluice.runtime import error_summary

MOMENT_SECONDS = 1.0
# Maximum number of processes per slot; the extra ones run slow jobs.
MOST_PER_SLOT = 4

_CHUNK = 64
_AT_ONCE = 64
_GRACE_SECONDS = 5.0
_TRIES = 2

JudgeOutcome = Judgement | RewardError


@dataclass(eq=False, slots=True)
class _Job:
    number: int
    reward: str
    samples: int
    # Pickled argument.
    body: bytes
    done: asyncio.Future[list[JudgeOutcome]]
    # Process that has the job; None while it is queued.
    process: Process | None = None
    started: float = 0.0
    tries: int = 0

    def finish(self, outcomes: list[JudgeOutcome]) -> None:
        if not self.done.done():
            self.done.set_result(outcomes)

    def fail(self, error: RewardError) -> None:
        self.finish([error] * self.samples)

    def wire(self) -> JudgeTask:
        return self.number, self.reward, self.samples, self.body


@dataclass(eq=False, slots=True)
class Pool:
    """Runs jobs in judging processes: `await pool(reward, argument)` returns outcomes.

    `reward` is the name of a built-in reward, or "" for the configured function. `argument` is a
    sample or a list of samples.
    """

    configuration: Configuration
    size: int
    _queue: deque[_Job] = field(default_factory=deque)
    _idle: deque[asyncio.Event] = field(default_factory=deque)
    # Started by `check`; not yet serving the queue.
    _started: list[Process] = field(default_factory=list)
    _lives: set[asyncio.Task[None]] = field(default_factory=set)
    _ends: set[asyncio.Task[None]] = field(default_factory=set)
    _open: set[_Job] = field(default_factory=set)
    _slow: int = 0
    _closed: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def __call__(self, reward: str, argument: Any) -> list[JudgeOutcome]:
        samples = len(argument) if isinstance(argument, list) else 1
        try:
            body = pickle.dumps(argument, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # errors of the objects, or RecursionError
            reason = error_summary.type_and_message(error)
            text = f"the sample cannot be sent to a judging process: {reason}"
            return [
                RewardError(text, "invalid", error_summary.formatted_traceback(error))
            ] * samples
        done: asyncio.Future[list[JudgeOutcome]] = asyncio.get_running_loop().create_future()
        job = _Job(next(self._numbers), reward, samples, body, done)
        self._open.add(job)
        self._queue.append(job)
        self._wake()
        try:
            return await job.done
        finally:
            self._open.discard(job)

    async def check(self) -> None:
        """Start processes for the first jobs, and wait for one of them.

        Imports of a function take seconds, which the first batch would wait for otherwise. Raises
        RewardError if the process cannot start.
        """
        self._started.append(await Process.start(self.configuration))
        while len(self._lives) < self.size:
            self._begin()

    async def close(self) -> None:
        self._closed = True
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await asyncio.gather(*self._ends, *(process.kill() for process in self._started))
        for job in self._open:
            job.fail(RewardError("the judge was closed", "unavailable"))

    # --- processes

    def _wake(self) -> None:
        """Wake an idle process, or start another one if the pool may grow."""
        if self._closed:
            return
        if self._idle:
            self._idle.popleft().set()
        elif (
            len(self._lives) - self._slow < self.size
            and len(self._lives) < MOST_PER_SLOT * self.size
        ):
            self._begin()

    def _begin(self) -> None:
        life = asyncio.create_task(self._live(), name="judging process")
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    async def _live(self) -> None:
        try:
            process = (
                self._started.pop() if self._started else await Process.start(self.configuration)
            )
        except RewardError as error:
            return self._fail_waiting(error)
        except Exception as error:  # for example, the limit of processes or files is reached
            what = self.configuration.function or "the judge"
            text = f"{what}: no process can be started: {error_summary.type_and_message(error)}"
            return self._fail_waiting(
                RewardError(text, "unavailable", error_summary.formatted_traceback(error))
            )
        try:
            while await self._wait_for_work(process):
                await (self._serve_all(process) if process.concurrent else self._serve(process))
        except LostError:
            # The lost job has failed; jobs that were not at fault are back in the queue.
            pass
        except Exception as error:  # otherwise the jobs of this process would never be answered
            self._fail_jobs_of(process, error)
        finally:
            await self._end(process)
            self._lives.discard(asyncio.current_task())
            if self._queue:
                self._wake()

    async def _end(self, process: Process) -> None:
        """Kill a process, completely even if the pool is closed meanwhile."""
        end = asyncio.create_task(process.kill())
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        await asyncio.shield(end)

    async def _wait_for_work(self, process: Process) -> bool:
        """Return True once there is a job for this process, False if it is not needed or gone."""
        while not self._queue:
            if len(self._idle) >= self.size:
                return False
            news = asyncio.Event()
            self._idle.append(news)
            await news.wait()
        return process.alive

    def _fail_waiting(self, error: RewardError) -> None:
        """Fail all queued jobs, since no process can be started."""
        # First free the slot: a caller that retries at once needs it.
        self._lives.discard(asyncio.current_task())
        while self._queue:
            self._queue.popleft().fail(error)

    def _fail_jobs_of(self, process: Process, error: Exception) -> None:
        for job in self._open:
            if job.process is process:
                text = f"{self._name(job)}: judging ended: {error_summary.cause(error)}"
                job.fail(RewardError(text, "unavailable", error_summary.formatted_traceback(error)))

    def _give_back(self, jobs: list[_Job]) -> None:
        for job in jobs:
            job.process = None
        self._queue.extendleft(reversed(jobs))
        if jobs:
            self._wake()

    def _take(self, most: int, process: Process) -> list[_Job]:
        jobs = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
        for job in jobs:
            job.process = process
        return [job for job in jobs if not job.done.done()]  # the other jobs were cancelled

    # --- plain functions: one job after the other

    async def _serve(self, process: Process) -> None:
        """Judge a chunk of the queue. Raises LostError if the process must go."""
        jobs = deque(self._take(min(_CHUNK, math.ceil(len(self._queue) / self.size)), process))
        if self._queue:
            self._wake()
        process.send([job.wire() for job in jobs])
        while jobs:
            try:
                for answer in await process.answers(
                    min(MOMENT_SECONDS, self.configuration.timeout_seconds)
                ):
                    _settle(jobs[0] if jobs else None, answer)
                    jobs.popleft()
            except TimeoutError:
                return await self._serve_slow(process, jobs.popleft(), list(jobs))
            except LostError as error:
                self._give_back(list(jobs)[1:])
                if jobs:
                    jobs[0].fail(self._lost(error, jobs[0]))
                raise

    async def _serve_slow(self, process: Process, job: _Job, rest: list[_Job]) -> None:
        """Wait for a slow job, while other processes take the rest of its chunk."""
        self._slow += 1
        try:
            process.drop()
            self._give_back(rest)
            end = time.monotonic() + self.configuration.timeout_seconds - MOMENT_SECONDS
            # Jobs that it started before it read the drop are judged elsewhere as well.
            while True:
                for answer in await process.answers(max(end - time.monotonic(), 0.0)):
                    if answer.get("id") == job.number:
                        _settle(job, answer)
                        end = time.monotonic() + self.configuration.timeout_seconds
                    elif "dropped" in answer:
                        return
        except TimeoutError:
            seconds = self.configuration.timeout_seconds
            job.fail(RewardError(f"{self._name(job)}: {late(seconds)}", "timeout"))
            raise LostError("it hangs", "timeout") from None
        except LostError as error:
            job.fail(self._lost(error, job))
            raise
        finally:
            self._slow -= 1

    # --- coroutine functions: all at once

    async def _serve_all(self, process: Process) -> None:
        """Judge the queue, many jobs concurrently, until it is empty.

        Raises LostError.
        """
        running: dict[int, _Job] = {}
        answers = asyncio.create_task(process.answers(None))
        news = asyncio.Event()
        try:
            while self._queue or running:
                self._start_more(process, running)
                if self._queue:
                    self._wake()  # this process is full: wake another one
                elif news not in self._idle:
                    news.clear()
                    self._idle.append(news)
                arrival = asyncio.create_task(news.wait())
                await asyncio.wait(
                    {answers, arrival}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED
                )
                arrival.cancel()
                if answers.done():
                    for answer in answers.result():
                        job = running.get(answer.get("id", -1))
                        _settle(job, answer)
                        running.pop(answer["id"])
                    answers = asyncio.create_task(process.answers(None))
                self._look_for_hanging(running)
        except LostError as error:
            self._give_back([job for job in running.values() if not self._gives_up(job, error)])
            raise
        finally:
            if news in self._idle:
                self._idle.remove(news)
            answers.cancel()
            await asyncio.wait({answers})  # `kill` reads the rest of the output

    def _start_more(self, process: Process, running: dict[int, _Job]) -> None:
        """Send as many jobs as fit.

        A job that was running when a process was lost is sent alone, so that the culprit can be
        identified.
        """
        suspects = any(job.tries > 1 for job in running.values()) or (
            self._queue and self._queue[0].tries > 0
        )
        most = (0 if running else 1) if suspects else _AT_ONCE - len(running)
        jobs = self._take(most, process)
        for job in jobs:
            job.started, job.tries = time.monotonic(), job.tries + 1
            running[job.number] = job
        if jobs:
            process.send([job.wire() for job in jobs])

    def _look_for_hanging(self, running: dict[int, _Job]) -> None:
        """Raise LostError if a job is overdue.

        The process ends jobs itself unless one of them blocks it.
        """
        limit = time.monotonic() - self.configuration.timeout_seconds - _GRACE_SECONDS
        if any(job.started < limit for job in running.values()):
            raise LostError(late(self.configuration.timeout_seconds), "timeout")

    def _gives_up(self, job: _Job, error: LostError) -> bool:
        if job.tries < _TRIES:  # one of several jobs ended the process, unknown which
            return False
        job.fail(self._lost(error, job))
        return True

    # --- words

    def _name(self, job: _Job) -> str:
        return self.configuration.function or job.reward

    def _lost(self, error: LostError, job: _Job) -> RewardError:
        how = f"its process died ({error})" if error.reason == "died" else str(error)
        return RewardError(f"{self._name(job)}: {how}", error.reason)


def _settle(job: _Job | None, answer: dict[str, Any]) -> None:
    """Finish a job with its answer. Raises LostError unless the answer is valid.

    A function may write anything to the pipe.
    """
    try:
        outcomes = [_outcome(outcome) for outcome in answer["outcomes"]]
        sound = job is not None and answer["id"] == job.number and len(outcomes) == job.samples
    except (KeyError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound or job is None:
        raise LostError("its answer is not an outcome", "invalid")
    job.finish(outcomes)


def _outcome(value: Any) -> JudgeOutcome:
    if isinstance(value, dict):
        return RewardError(str(value["error"]), str(value["reason"]), str(value.get("details", "")))
    reward, parts = value
    numbers = {name: input_checks.float32(part, name) for name, part in parts.items()}
    return input_checks.reward(reward), numbers
