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
from . import answer_parts, pool_jobs
from .asgi import Receive, Scope
from .attempt_fence import Fence
from .control_priority import ControlPriority, RequestQueue
from .ordered_buckets import OrderedBuckets
from .request_batching import Generate, RequestBatching, SendPart

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


def _by(answer: Callable[[Any, Any], Awaitable[Any]], fields_of: Callable[..., Any]) -> Generate:
    """Return a function that answers one of many requests as SGLang's handler of `/generate`."""
    from fastapi import HTTPException, Request

    async def generate(
        fields: dict[str, Any], scope: Scope, receive: Receive, send_part: SendPart
    ) -> tuple[int, bytes]:
        try:
            obj, request = fields_of(**fields), Request(scope, receive)
            if obj.stream:
                return await _streamed(obj, request, send_part)
            response = await answer(obj, request)
        except HTTPException as error:
            return error.status_code, _error(error.detail)
        return response.status_code, bytes(response.body)

    return generate


async def _streamed(obj: Any, request: Any, send_part: SendPart) -> tuple[int, bytes]:
    """Answer a request by parts, and at the end as the handler of `/generate` does."""
    import orjson
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    outputs = manager.generate_request(obj, request)
    try:
        output = await answer_parts.last_output(outputs, send_part, request.is_disconnected)
    except ConnectionError as error:
        manager.abort_request(obj.rid)
        return 400, _error(str(error))
    except ValueError as error:
        return int(getattr(error, "status_code", 400)), _error(str(error))
    if refused := answer_parts.refusal(output):
        status, message = refused
        return status, _error(message)
    return 200, orjson.dumps(output, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _error(message: Any) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()
