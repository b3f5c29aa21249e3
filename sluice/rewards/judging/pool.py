"""Judging processes, and the jobs that wait for them.

Jobs that are ready are given to a process in one piece, and come back one by one; each has its own
time limit. A job that takes longer than a moment keeps its process to itself: what was to follow it
goes elsewhere, and another process is started, up to a bound, so that jobs that hang hold up
nobody. A process that must be killed takes with it only the job that it was at. Every job is
answered: one that cannot be sent to a process at once, and whatever ends the work with a process
answers the jobs that the process has.
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
# Processes at most, for each that is wanted: the others are at jobs that take long.
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
    # The pickled argument.
    body: bytes
    done: asyncio.Future[list[JudgeOutcome]]
    # The one that has it; None: it is in the queue.
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
    """`await pool(reward, argument)` -> the outcomes of one job: a sample, or a list of them.

    reward: name of a built-in reward that runs in a pool; "" for the function of the configuration.
    """

    configuration: Configuration
    size: int
    _queue: deque[_Job] = field(default_factory=deque)
    _idle: deque[asyncio.Event] = field(default_factory=deque)
    # By `check`, and whose life has not begun.
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
        except Exception as error:  # pickle raises whatever the objects do, and RecursionError
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
        """Have processes that the first jobs find ready: one now, the others meanwhile.

        What a function imports takes seconds, which a run's first batch would wait for. Raises
        RewardError where no process can be started.
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
        """Have somebody look at the queue."""
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
        except Exception as error:  # no process or file is left, for one
            what = self.configuration.function or "the judge"
            text = f"{what}: no process can be started: {error_summary.type_and_message(error)}"
            return self._fail_waiting(
                RewardError(text, "unavailable", error_summary.formatted_traceback(error))
            )
        try:
            while await self._wait_for_work(process):
                await (self._serve_all(process) if process.concurrent else self._serve(process))
        except LostError:
            # Whoever lost a job has been told; those that were not at fault are back in the queue.
            pass
        except Exception as error:  # nobody else would answer what this process has
            self._fail_jobs_of(process, error)
        finally:
            await self._end(process)
            self._lives.discard(asyncio.current_task())
            if self._queue:
                self._wake()

    async def _end(self, process: Process) -> None:
        """Kill a process.

        It is ended to the last, also where the pool is closed in the middle of it.
        """
        end = asyncio.create_task(process.kill())
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        await asyncio.shield(end)

    async def _wait_for_work(self, process: Process) -> bool:
        """True when there is a job for this process; False when it is not needed, or gone."""
        while not self._queue:
            if len(self._idle) >= self.size:
                return False
            news = asyncio.Event()
            self._idle.append(news)
            await news.wait()
        return process.alive

    def _fail_waiting(self, error: RewardError) -> None:
        """Answer all that wait, since this life has no process for them."""
        # Before they hear of it: who comes back at once needs the place of this life.
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
        return [job for job in jobs if not job.done.done()]  # nobody waits for the others any more

    # --- plain functions: one job after the other

    async def _serve(self, process: Process) -> None:
        """Have a chunk of the queue judged. Raises LostError where the process must go."""
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
        """Wait for a job that takes long, while others take over the rest of its chunk."""
        self._slow += 1
        try:
            process.drop()
            self._give_back(rest)
            end = time.monotonic() + self.configuration.timeout_seconds - MOMENT_SECONDS
            # What it had started of the rest before it heard of the drop is judged elsewhere, too.
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
        """Have the queue judged, many jobs at the same time, until nothing is left.

        Raises LostError.
        """
        running: dict[int, _Job] = {}
        answers = asyncio.create_task(process.answers(None))
        news = asyncio.Event()
        try:
            while self._queue or running:
                self._start_more(process, running)
                if self._queue:
                    self._wake()  # this process is full: is there another?
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
            await asyncio.wait({answers})  # whoever ends the process reads the rest of its output

    def _start_more(self, process: Process, running: dict[int, _Job]) -> None:
        """Start what fits. A job that was there when a process was lost runs alone: then it is
        clear who did it.
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
        """The process ends jobs itself, unless one of them blocks it: then it must go."""
        limit = time.monotonic() - self.configuration.timeout_seconds - _GRACE_SECONDS
        if any(job.started < limit for job in running.values()):
            raise LostError(late(self.configuration.timeout_seconds), "timeout")

    def _gives_up(self, job: _Job, error: LostError) -> bool:
        if job.tries < _TRIES:  # one of many ended the process: nobody knows which
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
    """Finish a job with its answer. Raises LostError where it is no such answer: a function can
    write what it likes.
    """
    try:
        outcomes = [_outcome(outcome) for outcome in answer["outcomes"]]
        sound = job is not None and answer["id"] == job.number and len(outcomes) == job.samples
    except (KeyError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound or job is None:
        raise LostError("its answer is no outcome", "invalid")
    job.finish(outcomes)


def _outcome(value: Any) -> JudgeOutcome:
    if isinstance(value, dict):
        return RewardError(str(value["error"]), str(value["reason"]), str(value.get("details", "")))
    reward, parts = value
    numbers = {name: input_checks.float32(part, name) for name, part in parts.items()}
    return input_checks.reward(reward), numbers
