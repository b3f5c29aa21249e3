"""The operator's settings, from its environment; the chart writes them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.environment import ConfigurationError
from sluice_operator.plan import Images

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Settings:
    """namespaces: those to watch; empty: all. namespace: our own, where the lease and the key are kept."""

    namespaces: tuple[str, ...]
    namespace: str
    identity: str
    lease_name: str
    lease_seconds: float
    key_secret: str
    workers: int
    probe_seconds: float
    resync_seconds: float
    http_port: int
    bind: str
    images: Images


def read(variables: Mapping[str, str] | None = None) -> Settings:
    found = os.environ if variables is None else variables
    watched = [name.strip() for name in found.get("SLUICE_WATCH_NAMESPACES", "").split(",") if name.strip()]
    defaults = Images()
    settings = Settings(
        namespaces=tuple(dict.fromkeys(watched)),
        namespace=found.get("SLUICE_NAMESPACE") or _own_namespace(),
        identity=found.get("SLUICE_IDENTITY") or f"{socket.gethostname()}-{os.getpid()}",
        lease_name=found.get("SLUICE_LEASE_NAME", "sluice-operator"),
        lease_seconds=_number(found, "SLUICE_LEASE_SECONDS", 15),
        key_secret=found.get("SLUICE_KEY_SECRET") or "sluice-operator-key",
        workers=int(_number(found, "SLUICE_WORKERS", 8)),
        probe_seconds=_number(found, "SLUICE_PROBE_SECONDS", 10),
        resync_seconds=_number(found, "SLUICE_RESYNC_SECONDS", 120),
        http_port=int(_number(found, "SLUICE_HTTP_PORT", 8080)),
        bind=found.get("SLUICE_BIND", "0.0.0.0"),  # noqa: S104 - a pod's own network
        images=Images(
            trainer=found.get("SLUICE_IMAGE_TRAINER") or defaults.trainer,
            engine=found.get("SLUICE_IMAGE_ENGINE") or defaults.engine,
            rollout=found.get("SLUICE_IMAGE_ROLLOUT") or defaults.rollout,
            buffer=found.get("SLUICE_IMAGE_BUFFER") or defaults.buffer,
            rendezvous=found.get("SLUICE_IMAGE_RENDEZVOUS") or found.get("SLUICE_IMAGE_BUFFER") or defaults.rendezvous,
        ),
    )
    if settings.lease_seconds < 3 or settings.workers < 1:
        raise ConfigurationError("SLUICE_LEASE_SECONDS must be at least 3, and SLUICE_WORKERS at least 1")
    return settings


def _own_namespace() -> str:
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"


def _number(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name) or str(default)
    try:
        return float(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {text!r} is not a number") from error
