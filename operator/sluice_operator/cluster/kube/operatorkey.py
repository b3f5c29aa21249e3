"""The operator's key: a Secret in its namespace, which the first replica creates."""

from __future__ import annotations

import base64
import binascii
import contextlib

from sluice.runtime.pod_env import ConfigurationError
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import KEY_BYTES, JobKeys, new_key
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan.facts.model import KubeObject

ENTRY = "key"


async def read_or_make(api: Api, namespace: str, name: str) -> JobKeys:
    """Read the key from the Secret, or create it.

    Raises
    ------
    ConfigurationError
        The Secret exists but holds no valid key.

    """
    try:
        stored = await api.get(path("Secret", namespace, name))
    except errors.NotFoundError:
        # If another replica was faster, its key is used.
        with contextlib.suppress(errors.AlreadyExistsError):
            await api.create(collection("Secret", namespace), _secret(name, new_key()))
        stored = await api.get(path("Secret", namespace, name))
    return _keys(stored, f"Secret {namespace}/{name}")


def _secret(name: str, key: bytes) -> KubeObject:
    labels = {"app.kubernetes.io/part-of": "sluice", "app.kubernetes.io/component": "operator"}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": labels},
        "type": "Opaque",
        "immutable": True,
        "data": {ENTRY: base64.b64encode(key).decode()},
    }


def _keys(stored: KubeObject, where: str) -> JobKeys:
    try:
        return JobKeys(base64.b64decode((stored.get("data") or {}).get(ENTRY, ""), validate=True))
    except (ValueError, binascii.Error) as error:
        text = (
            f"expected at least {KEY_BYTES} random bytes under {ENTRY!r}; delete it to have one "
            "made"
        )
        raise ConfigurationError(f"{where}: {error}; {text}") from error
