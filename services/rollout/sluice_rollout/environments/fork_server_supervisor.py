"""Starts the fork server of a job, and starts it again when it has died.

The fork server loads a play module, in the interpreter that the job names (fork_server.py describes
such modules).
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

from sluice.runtime.cpu_threads import ONE_THREAD
from sluice.telemetry import logs
from sluice_rollout.environments import inputs, orphan_reaper
from sluice_rollout.environments import process as programs
from sluice_rollout.environments.fork_server_process import ForkServerLostError, ForkServerProcess
from sluice_rollout.environments.process import ProgramExit

# Runs a program in an episode's directory with the episode's variables, as process.run does.
Run = Callable[[str, Mapping[str, str]], Awaitable[ProgramExit]]
LOAD_SECONDS = 300.0
_PROGRAM = Path(__file__).with_name("fork_server.py")
# Follows the fork server's directory in its mark, so that a child's longer directory fits.
_PADDING = "/" * 128
_LONGEST_PAUSE = 60.0


def pause(deaths: int) -> float:
    """Return the seconds to wait before a restart, after a number of deaths in a row."""
    return min(2.0 ** (deaths - 2), _LONGEST_PAUSE) if deaths > 1 else 0.0


@dataclass(slots=True)
class ForkServerSupervisor:
    """Keeps the fork server of a job running.

    Parameters
    ----------
    name
        Name of the environment in messages.
    python
        The interpreter.
    module
        Path of the play module.
    config
        Configuration of the play module, as JSON.
    variables
        Environment variables of every episode and of the fork server.

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
        """The command that plays one episode without the fork server."""
        # -P: modules in the script's folder must not shadow others.
        return [self.python, "-P", str(self.module), "play", self.config]

    async def ready(self, root: str) -> Run:
        """Start the fork server if necessary, and return the function that plays an episode.

        If the play module cannot be forked, the function starts an interpreter for each episode.

        Parameters
        ----------
        root
            The directory of the worker's episodes.

        Raises
        ------
        ForkServerLostError
            The play module cannot be loaded.

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
        """End the fork server."""
        if self._starting:
            self._starting.cancel()
        if self._process:
            self._process.kill()

    async def _start(self, root: str) -> Run:
        if before := self._process:
            self._deaths = 1 + self._deaths * (time.monotonic() - before.started < _LONGEST_PAUSE)
            seconds = pause(self._deaths)
            logs.get().warning(
                "the fork server has died and is started again",
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
            "the environment cannot be forked, so each episode starts an interpreter",
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
