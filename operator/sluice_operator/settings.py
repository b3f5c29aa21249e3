"""The operator's settings, read from environment variables that the chart sets."""

from __future__ import annotations

import json
import os
import socket
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sluice.api.schema.problems import describe
from sluice.runtime.pod_env import ConfigurationError
from sluice_operator.plan import Images
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# Settings that may also be command-line arguments.
ARGUMENTS = (
    "watch-namespaces",
    "lease-name",
    "lease-seconds",
    "key-secret",
    "workers",
    "probe-seconds",
    "resync-seconds",
    "http-port",
    "job-defaults",
)


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """The settings of one operator process."""

    namespaces: tuple[str, ...]  # to watch; all if empty
    namespace: str  # the operator's own, with its lease and its key
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
    job_defaults: JobDefaults = NO_DEFAULTS


def read(
    variables: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> OperatorSettings:
    """Read the settings.

    Parameters
    ----------
    variables
        Environment variables; None for those of this process.
    arguments
        Arguments that override them, such as `--probe-seconds=5` for SLUICE_PROBE_SECONDS.

    Raises
    ------
    ConfigurationError
        A setting is not valid.

    """
    values = ChainMap(_parsed(arguments), os.environ if variables is None else variables)  # type: ignore[arg-type]
    watched = [
        name.strip()
        for name in values.get("SLUICE_WATCH_NAMESPACES", "").split(",")
        if name.strip()
    ]
    defaults = Images()
    settings = OperatorSettings(
        namespaces=tuple(dict.fromkeys(watched)),
        namespace=values.get("SLUICE_NAMESPACE") or _own_namespace(),
        identity=values.get("SLUICE_IDENTITY") or f"{socket.gethostname()}-{os.getpid()}",
        lease_name=values.get("SLUICE_LEASE_NAME", "sluice-operator"),
        lease_seconds=_number(values, "SLUICE_LEASE_SECONDS", 15),
        key_secret=values.get("SLUICE_KEY_SECRET") or "sluice-operator-key",
        workers=int(_number(values, "SLUICE_WORKERS", 8)),
        probe_seconds=_number(values, "SLUICE_PROBE_SECONDS", 10),
        resync_seconds=_number(values, "SLUICE_RESYNC_SECONDS", 120),
        http_port=int(_number(values, "SLUICE_HTTP_PORT", 8080)),
        bind=values.get("SLUICE_BIND", "0.0.0.0"),  # noqa: S104 - a pod's own network
        images=Images(
            trainer=values.get("SLUICE_IMAGE_TRAINER") or defaults.trainer,
            engine=values.get("SLUICE_IMAGE_ENGINE") or defaults.engine,
            vllm=values.get("SLUICE_IMAGE_VLLM") or defaults.vllm,
            rollout=values.get("SLUICE_IMAGE_ROLLOUT") or defaults.rollout,
            buffer=values.get("SLUICE_IMAGE_BUFFER") or defaults.buffer,
            rendezvous=values.get("SLUICE_IMAGE_RENDEZVOUS")
            or values.get("SLUICE_IMAGE_BUFFER")
            or defaults.rendezvous,
        ),
        job_defaults=_job_defaults(values.get("SLUICE_JOB_DEFAULTS", "")),
    )
    if settings.lease_seconds < 3 or settings.workers < 1:
        raise ConfigurationError(
            "SLUICE_LEASE_SECONDS must be at least 3, and SLUICE_WORKERS at least 1"
        )
    return settings


def _parsed(arguments: Sequence[str]) -> dict[str, str]:
    """Return the arguments as environment variables."""
    values = {}
    for argument in arguments:
        name, is_set, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not is_set or name not in ARGUMENTS:
            expected = ", ".join(f"--{name}=..." for name in ARGUMENTS)
            raise ConfigurationError(f"argument {argument!r}: expected one of {expected}")
        values[f"SLUICE_{name.upper().replace('-', '_')}"] = value
    return values


def _job_defaults(file: str) -> JobDefaults:
    """Read the defaults from a JSON file; without a file there are none."""
    if not file:
        return NO_DEFAULTS
    try:
        document = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"SLUICE_JOB_DEFAULTS: {file}: {error}") from error
    try:
        return JobDefaults.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ConfigurationError(
            f"SLUICE_JOB_DEFAULTS: {describe(error, document, file)}"
        ) from error


def _own_namespace() -> str:
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"


def _number(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name) or str(default)
    try:
        return float(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {text!r} is not a number") from error
