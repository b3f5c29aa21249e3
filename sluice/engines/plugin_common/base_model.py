"""An engine tells which model it has read, for a trainer that sends an adapter of a model alone.

The adapter is right for the trainer's model only, and the engine reads the model from its own
files. So a trainer compares the digests of both before it sends anything. Another process computes
the engine's while the engine reads the same files.

This file runs in the HTTP process of engines, linked from the plugins next to `model_digest.py`,
and imports the standard library only.
"""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

from .asgi import App, Receive, Scope, Send, answer

# Path at which the engine tells model and digest.
PATH = "/sluice_base"
log = logging.getLogger(__name__)


class BaseModel:
    """The model that an engine reads, and the process that computes its digest from now on."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        package, _, _ = __name__.rpartition(".")
        root = Path(__file__).absolute().parents[package.count(".") + 1]
        program = (
            f"import sys; sys.path.insert(0, {str(root)!r}); "
            f"from {package}.model_digest import main; main()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._description: asyncio.Task[dict[str, str]] | None = None

    async def describe(self) -> dict[str, str]:
        """Return the directory and its digest, or the problem why there is none."""
        if self._description is None:
            self._description = asyncio.create_task(asyncio.to_thread(self._wait))
        return await asyncio.shield(self._description)

    def _wait(self) -> dict[str, str]:
        digest, errors = (text.strip() for text in self._process.communicate())
        if self._process.returncode == 0:
            log.info("the model %s has the digest %s", self.directory, digest)
            return {"model": self.directory, "digest": digest}
        problem = errors[-500:] or f"the process that reads {self.directory} has ended"
        log.warning("the model has no digest: %s", problem)
        return {"model": self.directory, "problem": problem}


class BaseModelAnswer:
    """Middleware of an engine's HTTP application, which answers `GET /sluice_base`."""

    def __init__(self, app: App, model: BaseModel) -> None:
        self.app, self.model = app, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        await answer(send, 200, await self.model.describe())
