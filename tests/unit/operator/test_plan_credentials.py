"""Tokens by reference, in the containers that use them and in no other."""

from typing import Any

import pytest

from sluice_operator.plan.facts.model import Gang, Images
from sluice_operator.plan.manifests.pods import pod
from tests.unit.operator.world import make_job

SECRETS = {
    "huggingFace": {"name": "hf", "key": "token"},
    "wandb": {"name": "wandb", "key": "api-key"},
}
HF = {"secretKeyRef": {"name": "hf", "key": "token"}}
WANDB = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}


def variables(role: Any, **spec: Any) -> dict[str, dict[str, Any]]:
    """Container -> variables."""
    rendered = pod(make_job(**spec), Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())
    return {
        container["name"]: {
            entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]
        }
        for container in rendered["spec"]["containers"]
    }


@pytest.mark.parametrize(
    ("role", "container", "hub", "wandb"),
    [
        ("trainer", "trainer", HF, WANDB),
        ("rollout", "engine", HF, None),
        ("rollout", "worker", HF, None),
        ("buffer", "buffer", None, None),
        ("rendezvous", "rendezvous", None, None),
    ],
)
def test_who_gets_which_token(role: str, container: str, hub: Any, wandb: Any) -> None:
    variables_of = variables(role, secrets=SECRETS)[container]
    assert (variables_of.get("HF_TOKEN"), variables_of.get("WANDB_API_KEY")) == (hub, wandb)
    assert variables_of["HF_HUB_OFFLINE"] == ("0" if hub else "1")


def test_without_secrets_nothing_is_referred_to() -> None:
    variables_of = variables("trainer")["trainer"]
    assert not {"HF_TOKEN", "WANDB_API_KEY"} & set(variables_of)
    assert variables_of["HF_HUB_OFFLINE"] == "1"


def test_only_the_worker_has_the_keys_of_other_models() -> None:
    models = [
        {"name": "big-judge", "url": "http://judge/v1", "key": {"name": "keys", "key": "judge"}},
        {"name": "free", "url": "http://free/v1"},
    ]
    environments = variables("rollout", rollout={"gpusPerReplica": 0, "models": models})
    assert environments["worker"]["BIG_JUDGE_API_KEY"] == {
        "secretKeyRef": {"name": "keys", "key": "judge"}
    }
    assert "FREE_API_KEY" not in environments["worker"]
    assert "BIG_JUDGE_API_KEY" not in environments["engine"]


def test_only_the_trainer_has_the_secrets_of_trackers() -> None:
    secret = {"secretRef": {"name": "tracking"}}
    trackers = [{"type": "mlflow", **secret}, {"type": "wandb", **secret}, {"type": "swanlab"}]
    job = make_job(telemetry={"trackers": trackers})
    for role in ("trainer", "rollout", "buffer"):
        rendered = pod(job, Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())
        sources = [container.get("envFrom", []) for container in rendered["spec"]["containers"]]
        assert [secret in source for source in sources].count(True) == (role == "trainer")
        assert all(source.count(secret) <= 1 for source in sources)


def test_trainer_and_worker_have_the_secret_and_the_directory_of_a_weight_store() -> None:
    secret = {"secretRef": {"name": "bucket"}}
    store = {"uri": "s3://bucket/weights", "secretRef": {"name": "bucket"}}
    job = make_job(weightSync={"transport": "store", "store": store})
    directory, users = {"name": "SLUICE_WEIGHTS_DIR", "value": "/sluice/weights"}, set()
    for role in ("trainer", "rollout", "buffer", "rendezvous"):
        rendered = pod(job, Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())["spec"]
        for container in rendered["containers"]:
            reads = secret in container.get("envFrom", [])
            assert (directory in container["env"]) == reads
            users |= {container["name"]} if reads else set()
            # The engine loads what the worker has fetched.
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert ("/sluice/weights" in paths) == (role in ("trainer", "rollout"))
    assert users == {"trainer", "worker"}


def test_only_the_trainer_has_the_secret_of_the_checkpoints_store() -> None:
    secret = {"secretRef": {"name": "bucket"}}
    job = make_job(checkpoint={"to": "s3://bucket/demo", "secretRef": {"name": "bucket"}})
    users = {
        container["name"]
        for role in ("trainer", "rollout", "buffer", "rendezvous")
        for container in pod(job, Gang(role, 0, 1), 1, 0, "10.0.0.1:7700", Images())["spec"][
            "containers"
        ]
        if secret in container.get("envFrom", [])
    }
    assert users == {"trainer"}
