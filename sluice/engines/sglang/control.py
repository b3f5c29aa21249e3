"""Control calls of a weight update to an SGLang server, over HTTP.

Traps of SGLang 0.5.17 to 0.5.23 that this file avoids:

- An update runs inside begin/end if the server has these calls, and must not otherwise.
- A flush with running requests kills the server in an `in_place` pause, and before 0.5.21 in a
  `retract` pause too.
- An engine that refuses answers HTTP 400 at once and leaves the sender alone in its collective.
- A server ends if it has to release its memory while requests run, or to allocate memory that it
  has not released.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sluice.engines.http.control import HttpControl
from sluice.engines.protocol import RESTING, WAKING, EngineRefusedError

_FLUSH_POLL_SECONDS = 0.02
# Path that the plugin adds to a server whose engine can pass weights on.
_PASSES_ON = "/sluice_passes_on"
# Communicator of a bucket, and the bucket's number there. An engine with the plugin takes buckets
# in this order.
BUCKET_HEADER = "x-sluice-bucket"
# A bucket that is requested ahead may wait for this many buckets, including itself.
_TURNS = 3
# Error of SGLang's loader of single experts when it gets a tensor of all of them.
_WITHOUT_PLUGIN = "missing 3 required positional arguments: 'weight_name'"


@dataclass(slots=True)
class Control(HttpControl):
    """An engine, by its HTTP address (host:port)."""

    has_session: bool | None = field(default=None)
    passes_on: bool = field(default=False)
    _numbers: dict[str, int] = field(default_factory=dict)
    _cacheless: bool = field(default=False)

    @property
    def in_order(self) -> bool:
        return self.passes_on  # the plugin does both

    async def learn(self) -> None:
        """Find out whether the server has update sessions, and whether it passes weights on."""
        if self.has_session is None:
            paths = await self.ask("/openapi.json", "paths", dict)
            self.passes_on = _PASSES_ON in paths
            self.has_session = "/begin_weight_update" in paths

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
        """Join the communicator; return once every rank of it has joined.

        For a link, return at once: the plugin makes links afterwards.
        """
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self.call("POST", "/init_weights_update_group", body)

    async def pause(self, mode: str) -> None:
        await self.call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Resume generation. The engine keeps the memory that the buckets took.

        Releasing it would cost milliseconds, now and in the next update.
        """
        await self.call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def begin(self) -> None:
        """Open a session, and close one that a failed update or a dead trainer has left open."""
        if not self.has_session:
            return
        try:
            await self.call("POST", "/begin_weight_update", {})
        except EngineRefusedError as error:
            if "already open" not in str(error):
                raise
            await self.end()
            await self.call("POST", "/begin_weight_update", {})

    async def end(self) -> None:
        if self.has_session:
            await self.call("POST", "/end_weight_update", {})

    def may_flush(self, pause_mode: str) -> bool:
        """Return True if flushing the prefix cache inside the update is always safe."""
        return pause_mode == "abort" or (pause_mode == "retract" and bool(self.has_session))

    async def try_flush(self) -> bool:
        """Empty the prefix cache, whose entries were computed with the old weights.

        Returns False if requests are running. Outside of an update this call is safe: a server with
        running requests refuses, and old entries stay, as the pause mode says. If no request runs,
        as in synchronous training, no old entry may survive an update.
        """
        try:
            async with self.request("POST", "/flush_cache") as answer:
                await answer.read()
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise EngineRefusedError(f"/flush_cache: {type(error).__name__} {error}") from error

    async def rest(self) -> None:
        """End running requests, and release the memory of weights and cache.

        The trainer sends no requests until the engine wakes.
        """
        state = await self.version()
        if state == RESTING:
            return
        await self.pause("abort")
        end = time.monotonic() + self.timeout
        # A flush succeeds once no request is running, and in a pause no request begins.
        while not await self.try_flush():
            if time.monotonic() > end:
                raise EngineRefusedError(
                    f"requests are still running {self.timeout:g} s after they were aborted"
                )
            await asyncio.sleep(_FLUSH_POLL_SECONDS)
        await self.name_version(RESTING)
        tags = ["weights"] if state == WAKING else ["kv_cache", "weights"]
        await self.call("POST", "/release_memory_occupation", {"tags": tags})

    async def wake(self) -> None:
        """Allocate the memory of the weights again. Its content is undefined.

        An engine that has just joined has never released it.
        """
        state = await self.version()
        if state == RESTING:
            await self.call("POST", "/resume_memory_occupation", {"tags": ["weights"]})
            await self.name_version(WAKING)
        self._cacheless = state in (RESTING, WAKING)

    async def wake_cache(self) -> None:
        if self._cacheless:
            await self.call("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})
            self._cacheless = False

    async def open(self, handles: list[str], *, version: int | None, flush: bool) -> None:
        """Load a bucket from the trainer's memory (ipc.py), by one handle for each rank."""
        body: dict[str, Any] = {
            "serialized_named_tensors": handles,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        await self.call("POST", "/update_weights_from_tensor", body)

    async def receive(
        self, group: str, names: Any, dtypes: Any, shapes: Any, *, version: int | None, flush: bool
    ) -> None:
        """Take part in one broadcast of a flattened bucket. Only the last bucket has a version."""
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        source = group.partition("|")[0]
        number = self._numbers.get(source, 0)
        self._numbers[source] = number + 1
        headers = {BUCKET_HEADER: f"{source}/{number}"}
        await self.call(
            "POST", "/update_weights_from_distributed", body, headers, self.timeout * _TURNS
        )

    async def load_from_disk(self, path: str, version: int, *, flush: bool) -> None:
        """Load a Hugging Face checkpoint, or with the plugin the file of an adapter."""
        body = {
            "model_path": path,
            # The engine may have been started with dummy weights.
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": flush,
        }
        await self.call("POST", "/update_weights_from_disk", body)

    async def name_version(self, version: int | str) -> None:
        """Rename the version of the engine's weights."""
        await self.call(
            "POST",
            "/update_weight_version",
            {"new_version": str(version), "abort_all_requests": False},
        )

    async def version(self) -> str:
        return await self.ask("/model_info", "weight_version", str)

    def explained(self, refusal: str) -> str:
        if _WITHOUT_PLUGIN not in refusal:
            return refusal
        return (
            "the engine has not loaded the plugin sluice_sglang, which takes all experts of a "
            "layer as one tensor. See the engine's log: rollout.template may set another command "
            "or SGLANG_PLUGINS, or its SGLang may have no plugins. Set weightSync.enginePlugin: "
            f"false to send single experts. {refusal}"
        )
