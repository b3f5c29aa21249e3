"""Control calls of a weight update to the server, over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sluice.engines.http.control import HttpControl
from sluice.engines.protocol import EngineRefusedError


@dataclass(slots=True)
class Control(HttpControl):
    """An engine, by its HTTP address (host:port)."""

    passes_on: bool = field(default=False, init=False)
    in_order: bool = field(default=False, init=False)
    # Version that the present update brings.
    _coming: str | None = field(default=None)

    async def learn(self) -> None:
        await self.version()

    async def init_group(
        self,
        group: str,
        host: str,
        port: int,
        world_size: int,
        backend: str,
        *,
        first_rank: int = 1,
    ) -> None:
        """Join the communicator; return once the engine has joined."""
        if first_rank != 1:
            raise EngineRefusedError("the engine transformers passes no weights on to other ones")
        body = {
            "group": group,
            "host": host,
            "port": port,
            "world_size": world_size,
            "backend": backend,
            "seconds": self.timeout,
        }
        await self.call("POST", "/join", body)

    async def pause(self, mode: str) -> None:
        await self.call("POST", "/pause", {"mode": mode})

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def begin(self) -> None:
        """Open an update. The engine drops one that is open already."""
        self._coming = None
        await self.call("POST", "/begin")

    async def end(self) -> None:
        """Close the update. Only then the weights get the name of their version."""
        await self.call("POST", "/end", {"version": self._coming})
        self._coming = None

    def may_flush(self, pause_mode: str) -> bool:
        """Return True: there is no prefix cache."""
        return True

    async def try_flush(self) -> bool:
        return True

    async def rest(self) -> None:
        raise EngineRefusedError("the engine transformers cannot share GPUs: trainer.colocate")

    async def wake(self) -> None:
        raise EngineRefusedError("the engine transformers cannot share GPUs: trainer.colocate")

    async def wake_cache(self) -> None:
        raise EngineRefusedError("the engine transformers cannot share GPUs: trainer.colocate")

    async def open(self, handles: list[str], *, version: int | None, flush: bool) -> None:
        raise EngineRefusedError("the engine transformers cannot share GPUs: trainer.colocate")

    async def receive(
        self, group: str, names: Any, dtypes: Any, shapes: Any, *, version: int | None, flush: bool
    ) -> None:
        """Take part in one broadcast of a bucket."""
        body = {
            "group": group,
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
        }
        await self.call("POST", "/receive", body)
        if version is not None:
            self._coming = str(version)

    async def load_from_disk(self, path: str, version: int, *, flush: bool) -> None:
        """Load a Hugging Face checkpoint."""
        await self.call("POST", "/load", {"path": path, "version": str(version)})

    async def name_version(self, version: int | str) -> None:
        """Rename the version of the engine's weights."""
        await self.call("POST", "/version", {"version": str(version)})

    async def version(self) -> str:
        return await self.ask("/info", "version", str)
