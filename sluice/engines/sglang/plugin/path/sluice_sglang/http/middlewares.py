"""Adds the middlewares of this package, and what they need, to SGLang's HTTP application."""

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from ..startup import arguments
from ..startup.base_model import BaseModel, BaseModelAnswer
from ..weights import adapter, pipelined_receive, receive
from . import pool_jobs
from .asgi import Receive, Scope
from .attempt_fence import Fence
from .control_priority import ControlPriority, RequestQueue
from .ordered_buckets import OrderedBuckets
from .request_batching import Generate, RequestBatching

log = logging.getLogger(__name__)


def register() -> None:
    if multiprocessing.parent_process() is not None:  # HTTP is served by the first process
        return
    chosen = adapter.settings() or {}
    try:
        from sglang.srt.entrypoints.http_server import app, generate_request, get_global_state
        from sglang.srt.managers.io_struct import GenerateReqInput
    except ImportError as error:
        if chosen.get("jobs"):  # the jobs of a pool would not be kept apart
            raise
        log.warning(
            "this SGLang serves HTTP in an unknown way, so it does not refuse a trainer that was "
            "replaced: %s",
            error,
        )
        return
    queue = RequestQueue(paused=lambda: get_global_state().tokenizer_manager.is_pause)
    if chosen:
        model = BaseModel(arguments.last(sys.argv, "--model-path", "--model"))
        app.add_middleware(BaseModelAnswer, model=model)
    app.add_middleware(OrderedBuckets)
    app.add_middleware(Fence)
    app.add_middleware(ControlPriority, queue=queue)
    app.add_middleware(
        RequestBatching, queue=queue, generate=_by(generate_request, GenerateReqInput)
    )
    if max_jobs := chosen.get("jobs", 0):
        # Last, so that it is the first to see a request.
        pool_jobs.register(
            app,
            os.environ["SLUICE_POOL_KEY"],
            max_jobs,
            chosen.get("silent_seconds", pool_jobs.SILENT_SECONDS),
            lambda: get_global_state().tokenizer_manager,
        )
    elif receive.updater_hooks():
        app.add_api_route(receive.PASSES_ON, lambda: {"passes_on": True})
        pipelined_receive.register()


def _by(answer: Callable[[Any, Any], Awaitable[Any]], request: Callable[..., Any]) -> Generate:
    """Return a function that answers one of many requests with SGLang's handler of `/generate`."""
    from fastapi import HTTPException, Request

    async def generate(fields: dict[str, Any], scope: Scope, receive: Receive) -> tuple[int, bytes]:
        try:
            response = await answer(request(**fields), Request(scope, receive))
        except HTTPException as error:
            return error.status_code, json.dumps({"error": {"message": error.detail}}).encode()
        return response.status_code, bytes(response.body)

    return generate
