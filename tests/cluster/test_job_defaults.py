"""Cluster-wide defaults on a real API server: pods, claims, and what users see of them."""

from __future__ import annotations

import json
from pathlib import Path

from sluice_operator.cluster.kube.paths import collection, path
from tests.cluster.conftest import StartOperator
from tests.cluster.world import World

DEFAULTS = {
    "storageClassName": "fast",
    "trainer": {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
}


async def test_a_job_gets_what_it_does_not_say_and_its_user_is_told(
    start: StartOperator, world: World, tmp_path: Path
) -> None:
    file = tmp_path / "defaults.json"
    file.write_text(json.dumps(DEFAULTS))
    await start(SLUICE_JOB_DEFAULTS=str(file))
    await world.create(buffer={"storage": {"size": "1Gi", "storageClassName": "mine"}})
    await world.until_pods(5)
    (trainer,) = (await world.pods("trainer")).values()
    assert {"key": "gpu", "operator": "Exists"} in trainer["spec"]["tolerations"]
    claims = {
        stored["metadata"]["name"]: stored["spec"]
        for stored in await world.objects("PersistentVolumeClaim")
    }
    assert claims.pop("demo-buffer")["storageClassName"] == "mine"
    assert [claim["storageClassName"] for claim in claims.values()] == ["fast"]
    config = await world.api.get(path("ConfigMap", world.namespace, "demo-config"))
    assert json.loads(config["data"]["defaults.json"]) == DEFAULTS

    async def is_reported() -> bool:
        events = (await world.api.get(collection("Event", world.namespace)))["items"]
        return any(
            "spec.checkpoint.storage" in event["note"]
            for event in events
            if event["reason"] == "DefaultsApplied"
        )

    await world.until(is_reported)
    await world.change({"suspend": True})
    await world.until_pods(0)
    assert "SpecChangeRefused" not in await world.reasons()
