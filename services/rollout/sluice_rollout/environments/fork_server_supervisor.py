"""Plays episodes in children of one interpreter, which has loaded what they share.

It knows nothing of what is loaded: that is a play module's, which another interpreter imports
(fork_server.py says what it has).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sluice.runtime.single_thread_env import ONE_THREAD
from sluice.telemetry import logs
from sluice_rollout.environments import inputs, orphan_reaper
from sluice_rollout.environments import process as programs
from sluice_rollout.environments.fork_server_process import ForkServerLostError, ForkServerProcess
from sluice_rollout.environments.process import ProgramExit

Run = Callable[[str, Mapping[str, str]], Awaitable[ProgramExit]]
"""Runs a program in an episode's directory, with these variables, as process.run does."""
LOAD_SECONDS = 300.0
_PROGRAM = Path(__file__).with_name("fork_server.py")
_PADDING = "/" * 128
"""Behind the process's directory in its own mark: a child's directory is written in its place."""
_LONGEST_PAUSE = 60.0


def pause(deaths: int) -> float:
    """Seconds to wait before an interpreter is started that died so often in a row."""
    return min(2.0 ** (deaths - 2), _LONGEST_PAUSE) if deaths > 1 else 0.0


@dataclass(slots=True)
class ForkServerSupervisor:
    """The interpreter of a job's episodes, which is started anew where it has died.

    name: for messages. python: the interpreter. module: the play module. config: for it, as JSON.
    variables: of every episode, and of the interpreter.
    """

    name: str
    python: str
    module: Path
    config: str
    variables: Mapping[str, str]
    _process: ForkServerProcess | None = None
    _starting: asyncio.Task[Run] | None = None
    _deaths: int = 0

    @property
    def single_episode_command(self) -> list[str]:
        """The words that play one episode in an interpreter of its own."""
        # -P: what lies beside the module has the names of other modules.
        return [self.python, "-P", str(self.module), "play", self.config]

    async def ready(self, root: str) -> Run:
        """The way to play an episode: as a child of the interpreter; or, where that cannot be
        forked, in an interpreter of its own. root: the directory of the worker's episodes.

        Raises ForkServerLostError where it cannot be loaded.
        """
        task = self._starting
        if task is None or (task.done() and (task.cancelled() or task.exception() or self._lost)):
            task = self._starting = asyncio.create_task(self._start(root))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    @property
    def _lost(self) -> bool:
        return self._process is not None and self._process.lost

    def close(self) -> None:
        """End it."""
        if self._starting:
            self._starting.cancel()
        if self._process:
            self._process.kill()

    async def _start(self, root: str) -> Run:
        if before := self._process:
            self._deaths = 1 + self._deaths * (time.monotonic() - before.started < _LONGEST_PAUSE)
            seconds = pause(self._deaths)
            logs.get().warning(
                "the interpreter that episodes are forked from has died; it is started anew",
                environment=self.name, how=(await before.end()).how, after_seconds=seconds,
            )  # fmt: skip
            await asyncio.sleep(seconds)
        process = self._process = await self._begin(root)
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await asyncio.wait([process.ready])
        except TimeoutError:
            process.kill()
            raise ForkServerLostError(f"{self.name} did not load in {LOAD_SECONDS:g} s") from None
        if process.ready.cancelled():
            words = (await process.end()).failure
            raise ForkServerLostError(f"{self.name} cannot be loaded: {words}")
        if not (reason := process.ready.result()):
            return process.run
        logs.get().warning(
            "each episode starts an interpreter: what it loads cannot be shared",
            environment=self.name, reason=reason,
        )  # fmt: skip
        process.kill()
        await process.end()
        self._process = None
        return partial(programs.run, self.single_episode_command)

    async def _begin(self, root: str) -> ForkServerProcess:
        directory = tempfile.mkdtemp(prefix="fork-server-", dir=root)
        os.mkdir(f"{directory}/{inputs.TEMPORARY}")
        place = inputs.directory_variables(directory) | {orphan_reaper.MARK: directory + _PADDING}
        words = [self.python, "-P", str(_PROGRAM), str(self.module), self.config]
        try:
            return await ForkServerProcess.start(
                words, directory, ONE_THREAD | {**self.variables} | place
            )
        except OSError as error:
            raise ForkServerLostError(f"{self.name} cannot be run here: {error}") from error
