"""The API server's checks of RLJobs: rules, transitions, lists, defaults and unknown fields."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.api import RLJob
from sluice.api.schema.base import API_VERSION
from sluice.api.schema.mutability import MUTABLE
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from tests.cluster.conftest import without_rules
from tests.cluster.world import SPEC, Object, now

JOBS = f"/apis/{API_VERSION}/namespaces/default/rljobs"
TEMPLATE = {"spec": {"nodeSelector": {"zone": "a"}}}
FULL: Object = {
    **SPEC,
    "model": {"path": "m", "volume": {"nfs": {"server": "s", "path": "/"}}},
    "podTemplateOverrides": [{"roles": ["trainer"], "template": TEMPLATE}],
}


class Job:
    """An RLJob at an API server without an operator; the test writes its status."""

    def __init__(self, api: Api, stored: Object) -> None:
        self.api, self.stored = api, stored
        self.path = f"{JOBS}/{stored['metadata']['name']}"

    async def change(self, spec: Object) -> Object:
        return await self.api.merge(self.path, {"spec": spec})

    async def report(self, status: Object) -> Object:
        return await self.api.merge(f"{self.path}/status", {"status": status})

    async def start(self) -> None:
        """Write the status that an operator writes before it makes the first pod."""
        await self.report(
            {"roles": [{"name": "trainer", "attempt": 1, "gangs": [{"replica": 0, "attempt": 1}]}]}
        )


async def create(api: Api, spec: Object) -> Job:
    metadata = {"name": f"rules-{uuid.uuid4().hex[:8]}", "namespace": "default"}
    body = {"apiVersion": API_VERSION, "kind": "RLJob", "metadata": metadata, "spec": spec}
    return Job(api, await api.create(JOBS, body))


@pytest.fixture
async def job(rules: Api) -> AsyncIterator[Job]:
    created = await create(rules, FULL)
    yield created
    await rules.delete(created.path, {})


# -- transitions
# --------------------------------------------------------------------------------------------------

FROZEN: dict[str, Object] = {
    "spec.model": {"model": {"path": "other"}},
    "spec.data": {"data": {"seed": 7}},
    "spec.rollout.batchSize": {"rollout": {"batchSize": 16}},
    "spec.rollout.engineArgs": {"rollout": {"engineArgs": {"tp": 2}}},
    "spec.rollout.function": {"rollout": {"function": "package.play"}},
    "spec.reward": {"reward": {"type": "gsm8k"}},
    "spec.algorithm": {"algorithm": {"kl": {"coef": 0.1}}},
    "spec.trainer": {"trainer": {"steps": 11}},
    "spec.weightSync": {"weightSync": {"verify": False}},
    "spec.buffer": {"buffer": {"storage": {"size": "30Gi"}}},
    "spec.checkpoint": {"checkpoint": {"everySteps": 5}},
    "spec.evaluation": {"evaluation": {"datasets": [{"path": "test.jsonl"}]}},
    "spec.telemetry": {"telemetry": {"trackers": [{"type": "wandb"}]}},
    "spec.debug": {"debug": {"dumpRollouts": True}},
    "spec.podGroupPolicy": {"podGroupPolicy": {"kueue": {"queueName": "q"}}},
    "spec.secrets": {"secrets": {"wandb": {"name": "w", "key": "k"}}},
    "spec.tls": {"tls": {"enabled": True}},
    "spec.podTemplateOverrides": {
        "podTemplateOverrides": [
            {"roles": ["trainer"], "template": {"spec": {"nodeSelector": {"zone": "b"}}}}
        ]
    },
}
FREE: dict[str, Object] = {
    "suspend": {"suspend": True},
    "rollout.replicas": {"rollout": {"replicas": 5}},
    "activeDeadlineSeconds": {"activeDeadlineSeconds": 9},
    "startupDeadlineSeconds": {"startupDeadlineSeconds": 9},
    "queueTimeoutSeconds": {"queueTimeoutSeconds": 9},
    "progressDeadlineSeconds": {"progressDeadlineSeconds": 9},
    "ttlSecondsAfterFinished": {"ttlSecondsAfterFinished": 9},
    "failurePolicy": {"failurePolicy": {"maxRestarts": 9}},
    "networkPolicy": {"networkPolicy": {"enabled": False}},
    "podDisruptionBudget": {"podDisruptionBudget": {"enabled": False}},
}


async def test_what_may_not_change_once_pods_were_started_is_refused_by_name(job: Job) -> None:
    await job.start()
    for field, change in FROZEN.items():
        with pytest.raises(errors.InvalidError) as refused:
            await job.change(change)
        assert f"{field}: Forbidden: cannot be changed once pods were started" in str(
            refused.value
        ), field


async def test_parts_of_a_volume_that_the_schema_does_not_describe_are_compared_too(
    job: Job,
) -> None:
    await job.start()
    with pytest.raises(errors.InvalidError, match=r"spec\.model: Forbidden"):
        await job.change({"model": {"volume": {"nfs": {"path": "/other"}}}})


async def test_before_that_it_may_change(job: Job) -> None:
    for change in FROZEN.values():
        await job.change(change)


async def test_what_may_change_does(job: Job) -> None:
    await job.start()
    assert FREE.keys() >= {*MUTABLE}
    for change in FREE.values():
        await job.change(change)


async def test_a_default_that_is_written_out_is_no_change(job: Job) -> None:
    await job.start()
    await job.change(
        {"trainer": {"stepsPerBatch": 1}, "tls": {"enabled": False}, "checkpoint": {"keep": 2}}
    )


async def test_the_status_of_a_started_job_is_written_as_ever(job: Job) -> None:
    await job.start()
    assert (await job.report({"step": 3}))["status"]["step"] == 3


async def test_the_controller_of_a_job_never_changes(job: Job) -> None:
    with pytest.raises(errors.InvalidError, match=r"spec\.managedBy: Forbidden: cannot be changed"):
        await job.change({"managedBy": "example.com/other"})


async def test_a_server_without_the_rules_takes_what_they_refuse_until_they_are_back(
    rules: Api,
) -> None:
    """Tests of the operator's judgement rely on it."""
    senseless = {**SPEC, "trainer": {"steps": 1, "gpusPerNode": 0, "stepsPerBatch": 7}}
    async with without_rules(rules):
        created = await create(rules, senseless)
        await created.start()
        await created.change({"trainer": {"steps": 2}})
        await rules.delete(created.path, {})
    with pytest.raises(errors.InvalidError, match="cannot be split"):
        await create(rules, senseless)


# -- lists
# --------------------------------------------------------------------------------------------------


def condition(kind: str, status: str = "True") -> Object:
    return {"type": kind, "status": status, "reason": "Because", "lastTransitionTime": now()}


@pytest.mark.parametrize(
    ("status", "field"),
    [
        (
            {"conditions": [condition("Running"), condition("Running", "False")]},
            "status.conditions[1]",
        ),
        ({"roles": [{"name": "trainer"}, {"name": "trainer"}]}, "status.roles[1]"),
        (
            {
                "roles": [
                    {
                        "name": "rollout",
                        "gangs": [{"replica": 0, "attempt": 1}, {"replica": 0, "attempt": 2}],
                    }
                ]
            },
            "status.roles[0].gangs[1]",
        ),
    ],
    ids=["conditions", "roles", "gangs"],
)
async def test_each_name_stands_once_in_a_list_of_the_status(
    job: Job, status: Object, field: str
) -> None:
    with pytest.raises(errors.InvalidError) as refused:
        await job.report(status)
    assert f"{field}: Duplicate value" in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"podTemplateOverrides": [{"roles": ["trainer", "trainer"], "template": {}}]}, "roles[1]"),
        (
            {"checkpoint": {"storage": {"accessModes": ["ReadWriteOnce", "ReadWriteOnce"]}}},
            "accessModes[1]",
        ),
        (
            {
                "algorithm": {
                    "distillation": {
                        "teacher": {"url": "http://a"},
                        "teachers": [
                            {"dataSource": "x", "url": "http://b"},
                            {"dataSource": "x", "url": "http://c"},
                        ],
                    }
                }
            },
            "teachers[1]",
        ),
        ({"rollout": {"models": 2 * [{"name": "judge", "url": "http://j:1/v1"}]}}, "models[1]"),
    ],
    ids=["roles", "accessModes", "teachers", "models"],
)
async def test_each_name_stands_once_in_a_list_of_the_spec(
    rules: Api, spec: Object, field: str
) -> None:
    with pytest.raises(errors.InvalidError) as refused:
        await create(rules, SPEC | spec)
    assert f"{field}: Duplicate value" in str(refused.value)


async def test_two_writers_each_have_their_own_condition(job: Job) -> None:
    """Server-side apply merges a list by names, so both field managers keep their entries."""
    await job.report({"conditions": [condition("Running")]})
    body = {
        "apiVersion": API_VERSION,
        "kind": "RLJob",
        "metadata": {"name": job.stored["metadata"]["name"]},
        "status": {"conditions": [condition("Suspended")]},
    }
    await job.api.apply(f"{job.path}/status", body)
    stored = await job.api.get(job.path)
    assert [item["type"] for item in stored["status"]["conditions"]] == ["Running", "Suspended"]


async def test_jobs_are_selected_by_their_state(rules: Api, job: Job) -> None:
    """`kubectl get rljobs --field-selector status.state=Running`."""
    await job.report({"state": "Running"})
    name = job.stored["metadata"]["name"]
    for state, is_listed in (("Running", True), ("Failed", False)):
        listed = await rules.get(f"{JOBS}?fieldSelector=status.state%3D{state}")
        assert (name in [item["metadata"]["name"] for item in listed["items"]]) is is_listed


# -- defaults, and words
# ----------------------------------------------------------------------------------------------


async def test_what_is_stored_is_the_whole_spec_that_the_operator_works_with(job: Job) -> None:
    parsed = RLJob.model_validate(job.stored).spec.model_dump(mode="json", by_alias=True)
    assert without_nothing(job.stored["spec"]) == without_nothing(parsed)


async def test_a_rule_over_fields_that_were_left_out_sees_their_defaults(rules: Api) -> None:
    with pytest.raises(
        errors.InvalidError, match=r"spec\.trainer\.stepsPerBatch: Invalid value: .*cannot be split"
    ):
        await create(rules, {**SPEC, "trainer": {"steps": 1, "gpusPerNode": 0, "stepsPerBatch": 7}})


async def test_what_belongs_to_something_else_is_forbidden_and_what_lacks_is_required(
    rules: Api,
) -> None:
    with pytest.raises(
        errors.InvalidError, match=r"spec\.algorithm\.critic: Forbidden: only estimator: ppo"
    ):
        await create(rules, {**SPEC, "algorithm": {"critic": {}}})
    with pytest.raises(
        errors.InvalidError, match=r"spec\.reward: Required value: there is nothing to learn from"
    ):
        await create(rules, {name: value for name, value in SPEC.items() if name != "reward"})


# -- unknown fields
# -----------------------------------------------------------------------------------------


async def test_a_field_that_the_server_does_not_know_is_refused_by_name(rules: Api) -> None:
    with pytest.raises(errors.InvalidError, match=r'unknown field "spec\.trainer\.stpes"'):
        await create(rules, {**SPEC, "trainer": {"steps": 1, "stpes": 2}})


async def test_in_a_change_it_is_warned_of(job: Job) -> None:
    heard: list[str] = []
    await job.api.merge(f"{job.path}/status", {"status": {"mood": "good"}}, heard.append)
    assert heard == ['unknown field "status.mood"']


def without_nothing(value: Any) -> Any:
    """Return the value without null and empty values, which are not stored."""
    if isinstance(value, dict):
        kept = {name: without_nothing(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (None, "", [], {})}
    return [without_nothing(item) for item in value] if isinstance(value, list) else value
