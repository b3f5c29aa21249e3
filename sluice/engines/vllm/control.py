"""The control calls of a vLLM server that a weight update needs, over HTTP.

Traps that this file knows (vLLM 0.32): a pause that clears caches puts running requests back, and
they are computed again with the new weights; `keep` with its caches leaves them as they are. The
calls that bring weights are `collective_rpc` to our worker extension: vLLM's own transfer engines
know NCCL alone, and pack a bucket in another way. An engine that wakes its last memory resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sluice.engines.http.control import HttpControl
from sluice.engines.protocol import RESTING, WAKING, EngineRefusedError

_PAUSES = {
    "in_place": "mode=keep&clear_cache=false",
    "retract": "mode=keep&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}
_WITHOUT_PLUGIN = "has no attribute 'sluice_"
_WITHOUT_DEVELOPMENT = "/collective_rpc answered 404"


@dataclass(slots=True)
class Control(HttpControl):
    """One engine, by its HTTP address (host:port). source: who calls it, as `trainer-0/3`."""

    passes_on: bool = field(default=False, init=False)
    in_order: bool = field(default=False, init=False)
    _sleeps: bool | None = field(default=None)
    _cacheless: bool = field(default=False)
    _coming: str | None = field(default=None)
    """The version that the update on its way brings."""

    async def learn(self) -> None:
        """Learn whether it can give its memory away, and that it has our plugin."""
        if self._sleeps is None:
            [state, *_] = await self._rpc("sluice_state")
            self._sleeps = bool(state["sleeps"])

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
        """Join the communicator; the answer comes once every rank of the engine has joined."""
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
        """Nothing runs until a resume. One that rests is paused, and keeps what has come since."""
        if mode == "abort" and await self.version() in (RESTING, WAKING):
            return
        await self.call("POST", f"/pause?{_PAUSES[mode]}")

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def begin(self) -> None:
        """Open an update. The plugin forgets one that is open."""
        self._coming = None
        await self._rpc("sluice_begin")

    async def end(self) -> None:
        """Close it; only then the weights have another name."""
        await self._rpc("sluice_end")
        if self._coming is not None:
            await self.name_version(self._coming)
            self._coming = None

    def may_flush(self, pause_mode: str) -> bool:
        """True where the pause has emptied the prefix cache."""
        return pause_mode != "in_place"

    async def try_flush(self) -> bool:
        """Empty the prefix cache, with its old entries. False: requests are running."""
        answer = await self.call("POST", "/reset_prefix_cache")
        return bool(answer["success"])

    async def rest(self) -> None:
        """End what is running, and give the memory of weights and cache away."""
        await self.learn()
        if await self.version() == RESTING:
            return
        await self.pause("abort")
        await self.name_version(RESTING)
        if self._sleeps:
            await self.call("POST", "/sleep?level=2&mode=abort")

    async def wake(self) -> None:
        """Take the memory of the weights back. An engine that has joined just now never slept."""
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
        """Load a bucket out of the trainer's memory: a handle for each rank of the engine."""
        await self._rpc("sluice_open", handles=handles)
        self._note(version)

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
        self._note(version)

    def _note(self, version: int | None) -> None:
        """The version comes with the last bucket; it is the weights' own once the update ends."""
        if version is not None:
            self._coming = str(version)

    async def load_from_disk(self, path: str, version: int, *, flush: bool) -> None:
        """Load a Hugging Face checkpoint."""
        await self._rpc("sluice_load", path=path)
        await self.name_version(version)

    async def name_version(self, version: int | str) -> None:
        """Give the weights that the engine has another name."""
        await self.call("POST", "/update_weight_version", {"new_version": str(version)})

    async def version(self) -> str:
        return await self.ask("/weight_info", "weight_version", str)

    async def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of our extension on all ranks; their answers."""
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
