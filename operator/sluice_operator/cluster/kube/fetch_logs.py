"""How far the pods are that fetch files: only the logs of their init containers tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from sluice.stores.progress import last_progress
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import path
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import KubeObject

# Pods whose logs are read in one pass over a job: its status shows one of them.
MAX_PODS = 4
_DEADLINE_SECONDS = 5.0
_QUERY = {"container": names.FETCH, "tailLines": 5, "limitBytes": 16384}

log = structlog.get_logger(__name__)


async def progress_of(api: Api, namespace: str, pods: Sequence[KubeObject]) -> Mapping[str, str]:
    """Return how far pods are that fetch now, by name; without those whose log does not tell."""
    fetching = [podstate.name(pod) for pod in pods if podstate.runs_init(pod, names.FETCH)]
    read = fetching[:MAX_PODS]
    texts = await asyncio.gather(*(_progress(api, namespace, name) for name in read))
    return {name: text for name, text in zip(read, texts, strict=True) if text}


async def _progress(api: Api, namespace: str, pod: str) -> str:
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            address = f"{path('Pod', namespace, pod)}/log"
            return last_progress("\n".join([line async for line in api.lines(address, _QUERY)]))
    # A job must not stop because its status says less.
    except (TimeoutError, errors.ApiError) as error:
        log.debug("cannot read how far a pod is", pod=pod, error=str(error))
        return ""
