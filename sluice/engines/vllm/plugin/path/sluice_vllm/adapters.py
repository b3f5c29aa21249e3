"""Serves LoRA adapters whose tensors come with weight updates.

The workers have the tensors (worker_adapters.py). The HTTP process gives each request the newest
adapter, whatever its sender says. vLLM's prefix cache goes by the adapter's name, so a replaced
adapter gets another name, and nothing that the old one has computed is found.

This file runs in the HTTP process. The launch script calls `begin` there.
"""

import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from .asgi import App, Receive, Scope, Send, answer, whole
from .base_model import BaseModel, BaseModelAnswer
from .pauses import PAUSE

# Path at which a trainer says that all tensors of an adapter have come.
PATH = "/sluice_adapter"
# Start of the names of adapters. Those of versions that are held side by side end in @ and version.
NAME = "sluice+"
# A request may just have got its adapter when the next one comes.
_LEAST_HELD = 2
log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows its own loggers only
# An error of a worker, as vLLM passes it on.
_WORKERS_ERROR = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
_base: list[BaseModel] = []


def settings() -> dict[str, Any] | None:
    """Return how this engine serves adapters; None if it serves none.

    versions: number of versions that are held at least; 0: an update changes the only one.
    """
    text = os.environ.get("SLUICE_LORA")
    return json.loads(text) if text else None


def begin(arguments: Sequence[str]) -> None:
    """Begin to compute the digest of the model in these arguments, if adapters are served."""
    if settings() is not None and "--model" in arguments[:-1]:
        _base.append(BaseModel(arguments[arguments.index("--model") + 1]))


class Adapters:
    """Middleware of vLLM's HTTP application; it does nothing if the engine serves no adapters."""

    def __init__(self, app: App) -> None:
        self.app = BaseModelAnswer(app, _base[0]) if _base else app
        self.versions = (settings() or {}).get("versions", 0)
        # Numbers of the adapters that the workers hold, the newest last.
        self.held: list[int] = []
        # Number of names that have been given.
        self.names = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == PATH:
            await self._commit(scope["app"].state, receive, send)
            return
        if path == PAUSE and self.held and not self.versions:
            # Requests that come in the pause compute with the next adapter.
            self._use(scope["app"].state, self.held[-1])
        await self.app(scope, receive, send)

    async def _commit(self, state: Any, receive: Receive, send: Send) -> None:
        """Use the adapter whose tensors have come."""
        try:
            version = str(json.loads(await whole(receive))["version"])
            await self._hold(state, version)
        except Exception as error:  # a bad update must not end the engine
            log.exception("an adapter has not come")
            await answer(send, 400, {"success": False, "message": _reason(error)})
            return
        await answer(send, 200, {"success": True})

    async def _hold(self, state: Any, version: str) -> None:
        number = (self.held[-1] if self.held else 0) + 1 if self.versions else 1
        kept = [number]
        if self.versions:
            used = _in_use(state.engine_client)
            newest = self.held[-max(self.versions - 1, _LEAST_HELD - 1) :]
            kept = [*(n for n in self.held if n in used or n in newest), number]
        await state.engine_client.collective_rpc(
            "sluice_use_adapter", kwargs={"number": number, "kept": kept}
        )
        for unused in set(self.held) - set(kept):
            log.info("the adapter %d is not used any more", unused)
        self.held = kept
        self._use(state, number, version)
        await state.engine_client.update_weight_version(version)

    def _use(self, state: Any, number: int, version: str = "") -> None:
        """Give an adapter to the requests that come from now on, under a new name."""
        from vllm.lora.request import LoRARequest

        self.names += 1
        suffix = f"@{version}" if self.versions else ""
        request = LoRARequest(f"{NAME}{self.names}{suffix}", number, NAME)
        models = state.openai_serving_models
        # None: of requests that name no model, as those of sluice.
        for name in (None, *(model.name for model in models.base_model_paths)):
            models.lora_requests[name] = request


def _in_use(engine: Any) -> set[int]:
    """Return the numbers of the adapters that running and waiting requests use."""
    requests = engine.output_processor.request_states.values()
    return {r.lora_request.lora_int_id for r in requests if r.lora_request is not None}


def _reason(error: Exception) -> str:
    """Return what a worker has said."""
    match = _WORKERS_ERROR.search(str(error))
    return match[1] if match else str(error) or type(error).__name__
