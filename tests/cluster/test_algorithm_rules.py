"""The API server refuses the same algorithms as pydantic, by the CEL of the same rules.

CEL rules came with Kubernetes 1.25. Where the other tests run on an older API server, CEL_KUBECONFIG may name one for
these: it needs to know CRDs and their objects only.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.api.base import API_VERSION
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from tests.algorithm_cases import ALONE, SENSIBLE, TOGETHER, manifest
from tests.cluster.conftest import CRDS, install_crd
from tests.cluster.control_plane import START_SECONDS, ControlPlane

JOBS = f"/apis/{API_VERSION}/namespaces/default/rljobs"
NONSENSE = [(algorithm, {}, reason) for algorithm, _, reason in ALONE]
NONSENSE += [(algorithm, groups, reason) for algorithm, groups, _, reason in TOGETHER]


@pytest.fixture
async def rules(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """An API server that knows RLJobs and their rules."""
    monkeypatch.setenv("KUBECONFIG", os.environ.get("CEL_KUBECONFIG", plane.kubeconfig))
    async with await Api.connect() as api:
        await install_crd(api)
        if "x-kubernetes-validations" not in str(await api.get(f"{CRDS}/rljobs.sluice.dev")):
            pytest.skip("this API server drops CEL rules; set CEL_KUBECONFIG to one that has them")
        async with asyncio.timeout(START_SECONDS):
            while not await served(api):
                await asyncio.sleep(0.1)
        yield api


async def served(api: Api) -> bool:
    try:
        await api.get(JOBS)
    except errors.MissingApiError:  # the CRD came a moment ago
        return False
    return True


async def answer(api: Api, algorithm: dict[str, Any], groups: dict[str, Any]) -> str:
    """What the API server says to a job with this algorithm; empty: it takes it. Nothing stays behind."""
    document = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": f"rules-{uuid.uuid4().hex[:8]}", "namespace": "default"},
        "spec": manifest(algorithm, groups),
    }
    try:
        made = await api.create(JOBS, document)
    except errors.InvalidError as error:
        return str(error)
    await api.delete(f"{JOBS}/{made['metadata']['name']}", {})
    return ""


async def test_what_makes_no_sense_is_refused_with_the_reason(rules: Api) -> None:
    for algorithm, groups, reason in NONSENSE:
        assert reason in await answer(rules, algorithm, groups), algorithm


async def test_what_makes_sense_is_accepted(rules: Api) -> None:
    for algorithm, groups in SENSIBLE:
        assert await answer(rules, algorithm, groups) == "", algorithm
