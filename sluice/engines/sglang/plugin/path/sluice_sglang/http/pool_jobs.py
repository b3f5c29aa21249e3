"""Several jobs share an engine, and none of them reaches what belongs to another.

Each call has the credential of a job. Names that the job gives to requests and communicators begin
with its tag, by which the scheduler knows whose adapter to use (weights/adapter.py) and how much
the job has had (fair_shares.py). The engine's version is that of the job's adapter. Calls that
would touch other jobs are answered here or refused, as are those of a deleted job whose name a
later one has.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..pool_credential import LEAVE, TAG_END, created_of, job_of, verified_tag
from ..startup import base_model
from ..weights.transfer import GROUP_PREFIX
from . import attempt_fence, ordered_buckets
from .asgi import App, Receive, Scope, Send, answer, whole
from .request_batching import PATH as GENERATE_BATCH

TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
# Everybody may ask these.
PUBLIC_PATHS = frozenset({"/health", "/health_generate", "/metrics"})
ABORT, VERSION, RENAME = "/abort_request", "/model_info", "/update_weight_version"
# Answered by the engine for a job.
FORWARDED_PATHS = frozenset(
    {
        "/generate",
        GENERATE_BATCH,
        base_model.PATH,
        "/freeze_gc",
        "/init_weights_update_group",
        "/openapi.json",
        "/server_info",
        "/update_weights_from_distributed",
    }
)
# The name of an engine's weights before any update, as SGLang has it.
FIRST_VERSION = "default"
# Key of the tag in the scope of a request.
TAG = "sluice_tag"
# A job that has not called for this time has ended: a worker that lives asks every few seconds.
SILENT_SECONDS = 900.0
# Headers of a trainer that name something, which other jobs may name likewise.
NAMING_HEADERS = (attempt_fence.HEADER, ordered_buckets.HEADER)
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """A job that uses the engine. created: as in its credential."""

    created: int
    version: str = FIRST_VERSION
    last_call: float = field(default_factory=time.monotonic)


class PoolJobs:
    """Middleware of an engine's HTTP application, which keeps the jobs of a pool apart."""

    def __init__(
        self,
        app: App,
        key: str,
        max_jobs: int,
        silent_seconds: float,
        jobs: dict[str, Job],
        engine: Callable[[], Any],
    ) -> None:
        """Wrap an application.

        Parameters
        ----------
        app
            The application.
        key
            The pool's key, with which credentials are signed.
        max_jobs
            Number of jobs that the engine has memory for.
        silent_seconds
            Time after which a job that does not call has ended.
        jobs
            The jobs that use the engine, by namespace and name.
        engine
            Returns SGLang's TokenizerManager.

        """
        self.app, self.key, self.jobs, self.engine = app, key, jobs, engine
        self.max_jobs, self.silent_seconds = max_jobs, silent_seconds
        # When the newest job of each name was created. Kept when a job is forgotten.
        self._newest: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self.app(scope, receive, send)
            return
        tag = verified_tag(self.key, _bearer(scope))
        if not tag:
            await answer(send, 401, {"message": "expected the credential of a job of this pool"})
            return
        name = job_of(tag)
        if created_of(tag) < self._newest.get(name, 0):
            await attempt_fence.refuse(scope, send, f"{name}: a later job of this name is here")
            return
        self._newest[name] = created_of(tag)
        if scope["path"] == LEAVE:
            await self._forget([name])
            await answer(send, 200, {"success": True})
        elif job := await self._job(name, created_of(tag)):
            await self._serve(job, tag, scope, receive, send)
        else:
            message = f"this pool has {self.max_jobs} jobs already: raise its maxAdapters"
            await answer(send, 429, {"success": False, "message": message})

    async def _job(self, name: str, created: int) -> Job | None:
        """Return the job that calls; None if the engine has no memory for it."""
        if name not in self.jobs and len(self.jobs) >= self.max_jobs:
            await self._forget_silent()
        if name not in self.jobs and len(self.jobs) >= self.max_jobs:
            return None
        job = self.jobs.setdefault(name, Job(created))
        if job.created < created:
            # Its adapter has to come. The scheduler drops the older one then.
            job = self.jobs[name] = Job(created)
        job.last_call = time.monotonic()
        return job

    async def _serve(self, job: Job, tag: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call for its job, or let the engine answer."""
        path = scope["path"]
        if path == VERSION:
            await answer(send, 200, {"weight_version": job.version})
        elif path == RENAME:
            job.version = str((await _object(receive)).get("new_version", job.version))
            await answer(send, 200, {"success": True, "message": "renamed"})
        elif path == ABORT:
            self._abort(tag, await _object(receive))
            await answer(send, 200, {"success": True})
        elif path not in FORWARDED_PATHS:
            message = f"an engine of a pool does not do {path} for one job"
            await answer(send, 403, {"success": False, "message": message})
        else:
            await self.app(_tagged(scope, tag), receive, send)

    async def _forget_silent(self) -> None:
        """Forget jobs that do not call any more."""
        end = time.monotonic() - self.silent_seconds
        silent = [name for name, job in self.jobs.items() if job.last_call < end]
        if silent:
            log.info("%s: silent for %.0f s", ", ".join(silent), self.silent_seconds)
            await self._forget(silent)

    async def _forget(self, names: Iterable[str]) -> None:
        """Free the memory of jobs."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        for name in names:
            if self.jobs.pop(name, None):
                await self.engine().update_lora_adapter_communicator(
                    UnloadLoRAAdapterReqInput(lora_name=name, lora_id=name)
                )

    def _abort(self, tag: str, body: dict[str, Any]) -> None:
        """Abort one request of the job, or all of them."""
        engine, start = self.engine(), tag + TAG_END
        rids = [rid for rid in engine.rid_to_state if rid.startswith(start)]
        if not body.get("abort_all"):
            rids = [rid for rid in rids if rid == start + str(body.get("rid"))]
        for rid in rids:
            engine.abort_request(rid=rid)


def register(
    app: Any, key: str, max_jobs: int, silent_seconds: float, engine: Callable[[], Any]
) -> None:
    """Add the middleware, and what tells the scheduler whose a request is."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    jobs: dict[str, Job] = {}
    app.add_middleware(
        PoolJobs,
        key=key,
        max_jobs=max_jobs,
        silent_seconds=silent_seconds,
        jobs=jobs,
        engine=engine,
    )

    def name_request(manager: Any, obj: Any, request: Any = None, *_: Any, **__: Any) -> None:
        """Let a request's name begin with the tag of its job."""
        if request is not None and TAG in request.scope:  # SGLang's health checks have none
            obj.rid = tagged_name(jobs, request.scope[TAG], obj.rid)

    HookRegistry.register(f"{TOKENIZER}.generate_request", name_request, HookType.BEFORE)
    HookRegistry.register(f"{TOKENIZER}.init_weights_update_group", check_group, HookType.BEFORE)

    async def update(original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
        check_group(manager, obj, request)
        success, message = await original(manager, obj, request)
        if success and obj.weight_version is not None and request is not None:
            tag = request.scope[TAG]
            job = jobs.get(job_of(tag))
            # A job that has left or was replaced in the middle of an update does not get it.
            if job is not None and job.created == created_of(tag):
                job.version = str(obj.weight_version)
        return success, message

    HookRegistry.register(f"{TOKENIZER}.update_weights_from_distributed", update, HookType.AROUND)


def tagged_name(jobs: dict[str, Job], tag: str, rid: Any) -> str:
    """Return the name of a request, with the tag of its job.

    Raises HTTPException if the job has no adapter here, as after a start of the engine: SGLang
    would answer with the model alone.
    """
    from fastapi import HTTPException

    if jobs[job_of(tag)].version == FIRST_VERSION:
        detail = f"{job_of(tag)} has no adapter in this engine: its trainer has to send it"
        raise HTTPException(410, detail)
    if isinstance(rid, list):
        raise HTTPException(400, "an engine of a pool takes one request in each body")
    return f"{tag}{TAG_END}{rid or uuid.uuid4().hex}"


def check_group(manager: Any, obj: Any, request: Any = None, *_: Any, **__: Any) -> None:
    """Raise HTTPException if a job names a communicator that is not its own."""
    if request is None:
        return
    from fastapi import HTTPException

    start = f"{GROUP_PREFIX}{request.scope[TAG]}{TAG_END}"
    if not obj.group_name.startswith(start):
        expected = f"expected a name that begins with {start}"
        raise HTTPException(403, f"group_name {obj.group_name!r}: {expected}")


def _bearer(scope: Scope) -> str:
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, credential = header.decode("latin-1").partition(" ")
    return credential if scheme.lower() == "bearer" else ""


def _tagged(scope: Scope, tag: str) -> Scope:
    """Return the scope with the job's tag, also before the names in the trainer's headers."""
    start = (tag + TAG_END).encode()
    headers = [
        (name, start + value if name in NAMING_HEADERS else value)
        for name, value in scope["headers"]
    ]
    return {**scope, TAG: tag, "headers": headers}


async def _object(receive: Receive) -> dict[str, Any]:
    try:
        body = json.loads(await whole(receive))
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
