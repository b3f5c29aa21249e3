"""With SLUICE_LOG_FORMAT=json every line of the operator's log is one JSON object."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.cluster.conftest import StartOperator
from tests.cluster.control_plane import ControlPlane
from tests.cluster.world import World


@pytest.mark.usefixtures("unruled")
async def test_our_lines_name_the_job_and_none_comes_twice(
    start: StartOperator, world: World
) -> None:
    operator = await start(SLUICE_LOG_FORMAT="json")
    await world.create(name="broken", trainer={"stepsPerBatch": 7})
    await world.until_state("Failed", "broken")
    assert await asyncio.to_thread(operator.end) == 0
    records = operator.records()
    assert {(record["role"], record["identity"]) for record in records} == {("operator", "one")}
    (refusal,) = [record for record in records if record["event"] == "invalid spec"]
    assert (refusal["job"], refusal["level"]) == (f"{world.namespace}/broken", "warning")
    assert "stepsPerBatch" in refusal["message"]
    counts = Counter((record["event"], record["timestamp"]) for record in records)
    assert max(counts.values()) == 1


async def test_what_kopf_and_the_client_say_is_json_too(
    plane: ControlPlane, start: StartOperator, world: World
) -> None:
    """An API server that is away makes both talk."""
    if plane.directory is None:
        pytest.skip("the API server of KUBECONFIG is not ours to restart")
    operator = await start(SLUICE_LOG_FORMAT="json", SLUICE_LEASE_SECONDS="60")
    command = await plane.stop_api_server()
    await asyncio.sleep(3)
    plane.start_api_server(command)

    async def is_there() -> bool:
        return operator.get("/readyz")[0] == 200 and bool(await world.objects("RLJob")) is False

    await world.until(lambda: _answers(world), 60)
    await world.until(is_there)
    loggers = {record.get("logger", "").partition(".")[0] for record in operator.records()}
    assert "kopf" in loggers


async def _answers(world: World) -> bool:
    try:
        await world.objects("RLJob")
    except Exception:
        return False
    return True
