"""Control calls of a weight update to a vLLM server, over HTTP.

Traps of vLLM 0.32 that this file avoids:

- A pause that clears caches puts running requests back, and computes them again with the new
  weights; `keep` without clearing leaves them as they are.
- vLLM's transfer engines support NCCL only, and pack a bucket in another way. So the calls that
  bring weights are `collective_rpc` to sluice's worker extension.
- An engine that allocates its last memory again resumes generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sluice.engines.http.control import HttpControl
from sluice.engines.plugin_common.adapter_tensors import is_adapter
from sluice.engines.protocol import RESTING, WAKING, EngineRefusedError

_PAUSES = {
    "in_place": "mode=keep&clear_cache=false",
    "retract": "mode=keep&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}
# Path that the plugin adds: all tensors of an adapter have come.
_ADAPTER = "/sluice_adapter"
_WITHOUT_PLUGIN = "has no attribute 'sluice_"
_WITHOUT_DEVELOPMENT = "/collective_rpc answered 404"


@dataclass(slots=True)
class Control(HttpControl):
    """An engine, by its HTTP address (host:port)."""

    passes_on: bool = field(default=False, init=False)
    in_order: bool = field(default=False, init=False)
    _sleeps: bool | None = field(default=None)
    _has_adapters: bool = field(default=False)
    _cacheless: bool = field(default=False)
    # Version that the present update brings.
    _coming: str | None = field(default=None)

    async def learn(self) -> None:
        """Learn whether the engine can release its memory. Fails if the plugin is missing."""
        if self._sleeps is None:
            [state, *_] = await self._rpc("sluice_state")
            self._sleeps = bool(state["sleeps"])
            self._has_adapters = bool(state["adapters"])

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
        """Join the communicator; return once every rank of the engine has joined."""
        if first_rank != 1:
            raise EngineRefusedError("vLLM passes no weights on to other engines")
        await self._rpc(
            "sluice_join",
            group=group,
            host=host,
            port=port,
            world_size=world_size,
            backend=backend,
            seconds=self.timeout,
        )

    async def pause(self, mode: str) -> None:
        """Pause until a resume.

        An engine that rests is paused already, and keeps the requests that have come since.
        """
        if mode == "abort" and await self.version() in (RESTING, WAKING):
            return
        await self.call("POST", f"/pause?{_PAUSES[mode]}")

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def begin(self) -> None:
        """Open an update. The plugin drops an update that is open already."""
        self._coming = None
        await self._rpc("sluice_begin")

    async def end(self) -> None:
        """Close the update. Only then the weights get the name of their version."""
        await self._rpc("sluice_end")
        if self._coming is not None:
            await self.name_version(self._coming)
            self._coming = None

    def may_flush(self, pause_mode: str) -> bool:
        """Return True if the pause has emptied the prefix cache."""
        return pause_mode != "in_place"

    async def try_flush(self) -> bool:
        """Empty the prefix cache, with its old entries. Returns False if requests are running."""
        answer = await self.call("POST", "/reset_prefix_cache")
        return bool(answer["success"])

    async def rest(self) -> None:
        """End running requests, and release the memory of weights and cache."""
        await self.learn()
        if await self.version() == RESTING:
            return
        await self.pause("abort")
        await self.name_version(RESTING)
        if self._sleeps:
            # Level 1 keeps the weights in host memory: an update brings an adapter alone.
            level = 1 if self._has_adapters else 2
            await self.call("POST", f"/sleep?level={level}&mode=abort")

    async def wake(self) -> None:
        """Allocate the memory of the weights again. An engine that has just joined never slept."""
        await self.learn()
        state = await self.version()
        if state == RESTING:
            if self._sleeps:
                await self.call("POST", "/wake_up?tags=weights")
            await self.name_version(WAKING)
        self._cacheless = state in (RESTING, WAKING)

    async def wake_cache(self) -> None:
        if self._cacheless and self._sleeps:
            await self.call("POST", "/wake_up?tags=kv_cache")
        self._cacheless = False

    async def open(self, handles: list[str], *, version: int | None, flush: bool) -> None:
        """Load a bucket from the trainer's memory, by one handle for each rank of the engine."""
        await self._rpc("sluice_open", handles=handles)
        await self._taken(version, adapter=self._has_adapters)

    async def receive(
        self,
        group: str,
        names: Any,
        dtypes: Any,
        shapes: Any,
        *,
        version: int | None,
        flush: bool,
    ) -> None:
        """Take part in one broadcast of a bucket."""
        await self._rpc(
            "sluice_receive",
            group=group,
            names=list(names),
            dtypes=list(dtypes),
            shapes=[list(shape) for shape in shapes],
        )
        await self._taken(version, adapter=is_adapter(names))

    async def _taken(self, version: int | None, *, adapter: bool) -> None:
        """Use an adapter that has come; remember the version of a model until the update ends.

        Only the last bucket has a version.
        """
        if version is None:
            return
        if adapter:
            await self.call("POST", _ADAPTER, {"version": str(version)})
        else:
            self._coming = str(version)

    async def load_from_disk(self, path: str, version: int, *, flush: bool) -> None:
        """Load a Hugging Face checkpoint, or the file of an adapter."""
        if path.endswith(".safetensors"):
            await self._rpc("sluice_load_adapter", path=path)
            await self._taken(version, adapter=True)
            return
        await self._rpc("sluice_load", path=path)
        await self.name_version(version)

    async def name_version(self, version: int | str) -> None:
        """Rename the version of the engine's weights."""
        await self.call("POST", "/update_weight_version", {"new_version": str(version)})

    async def version(self) -> str:
        return await self.ask("/weight_info", "weight_version", str)

    async def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of sluice's extension on all ranks, and return their answers."""
        body = {"method": method, "kwargs": arguments}
        answer = await self.call("POST", "/collective_rpc", body)
        results: list[Any] = answer["results"]
        return results

    def explained(self, refusal: str) -> str:
        if _WITHOUT_PLUGIN in refusal:
            return (
                "the engine has not loaded sluice's plugin (rollout.template may give it another "
                f"command, or rollout.engineArgs another worker-extension-cls): {refusal}"
            )
        if refusal.startswith(_WITHOUT_DEVELOPMENT):
            return f"the engine needs VLLM_SERVER_DEV_MODE=1; see rollout.template: {refusal}"
        return refusal
