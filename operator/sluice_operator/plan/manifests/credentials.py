"""Tokens of other services, by reference, in the containers that use them and in no other."""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice.api.groups.lifecycle import SecretKey

_HUB = ("trainer", "engine", "worker", "rows")
_OFFLINE = "HF_HUB_OFFLINE"


def with_credentials(job: RLJob, container: dict[str, Any]) -> dict[str, Any]:
    """The container with HF_TOKEN, WANDB_API_KEY and keys of other models, as far as the job has
    them and it uses them.

    A job that brings a token for the hub wants the hub to be asked.
    """
    secrets, name = job.spec.secrets, container["name"]
    env: list[dict[str, Any]] = container["env"]
    if secrets.hugging_face is not None and name in _HUB:
        env = [
            {"name": _OFFLINE, "value": "0"} if each["name"] == _OFFLINE else each for each in env
        ]
        env = [*env, _from(secrets.hugging_face, "HF_TOKEN")]
    if secrets.wandb is not None and name == "trainer":
        env = [*env, _from(secrets.wandb, "WANDB_API_KEY")]
    if name == "worker":
        env = [*env, *(_from(m.key, m.key_variable) for m in job.spec.rollout.models if m.key)]
    return container | {"env": env}


def _from(secret: SecretKey, name: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}
