"""The API server refuses the same algorithms as pydantic, by the CEL of the same rules."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from sluice.api.schema.base import API_VERSION
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.spec_acceptance import accept
from tests.algorithm_cases import ALONE, SENSIBLE, TOGETHER, manifest

JOBS = f"/apis/{API_VERSION}/namespaces/default/rljobs"
NONSENSE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (algorithm, {}, reason) for algorithm, _, reason in ALONE
]
NONSENSE += [(algorithm, groups, reason) for algorithm, groups, _, reason in TOGETHER]


async def stored(api: Api, algorithm: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    """Return a job with this algorithm as the API server would store it (a dry run)."""
    document = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": f"rules-{uuid.uuid4().hex[:8]}", "namespace": "default"},
        "spec": manifest(algorithm, groups),
    }
    job = await api.create(JOBS, document)
    await api.delete(f"{JOBS}/{job['metadata']['name']}", {})
    return job


async def test_what_makes_no_sense_is_refused_with_the_reason(rules: Api) -> None:
    for algorithm, groups, reason in NONSENSE:
        with pytest.raises(errors.InvalidError) as refused:
            await stored(rules, algorithm, groups)
        assert reason in str(refused.value), algorithm


async def test_what_makes_sense_is_accepted_and_so_by_the_operator_with_all_defaults(
    rules: Api,
) -> None:
    for algorithm, groups in SENSIBLE:
        accept(await stored(rules, algorithm, groups), None)
