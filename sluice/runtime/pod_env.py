"""The environment of a pod (docs/contracts.md), read once at the start of a process."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sluice.api import RLJob
from sluice.api.schema.problems import describe

# First port and the one after the last. The kernel takes the ports of connections, and of servers
# that let it choose, from a range above.
_PORTS = 20000, 32000
_TRIES = 400
# Processes that draw the same numbers, as tests do, must not choose the same ports.
_draws = random.SystemRandom()


class ConfigurationError(RuntimeError):
    """An error of configuration, which no restart cures.

    The process ends with exit code 2, and the job fails with this message.
    """


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of this process: its name, its addresses, its rendezvous."""

    role: str
    name: str
    attempt: int
    replica: int
    index: int
    bind: str
    advertise: str
    rendezvous: str
    variables: Mapping[str, str]

    def port(self, name: str) -> int:
        """Return the number of the container port `name`; 0, a free port, if it is not set."""
        return _integer(self.variables, f"SLUICE_PORT_{name.upper()}", 0)

    def directory(self, name: str) -> Path:
        """Return a writable directory, such as `storage` or `checkpoint_dir`, and create it."""
        value = self.variables.get(f"SLUICE_{name.upper()}", "")
        if not value:
            raise ConfigurationError(f"SLUICE_{name.upper()} is not set: expected a directory")
        path = Path(value)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"{path}: cannot make this directory: {error.strerror}"
            ) from error
        if not os.access(path, os.W_OK):
            raise ConfigurationError(
                f"{path}: user {os.getuid()} cannot write here: it is mounted read-only, or "
                "belongs to another user. Give a directory of a hostPath or an NFS export to that "
                "user or its group; other volumes get the right group automatically"
            )
        return path

    def job(self) -> RLJob:
        """Return the manifest that this pod works for."""
        path = self.variables.get("SLUICE_JOB_FILE", "")
        if not path:
            raise ConfigurationError(
                "SLUICE_JOB_FILE is not set: expected the job's manifest as JSON"
            )
        return read_job(Path(path))


def read_job(path: Path) -> RLJob:
    """Read a manifest as JSON. Raises ConfigurationError."""
    try:
        document = json.loads(path.read_text())
        return RLJob.model_validate(document)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: not valid JSON: {error}") from error
    except ValidationError as error:
        raise ConfigurationError(describe(error, document, str(path))) from error


def read(role: str, variables: Mapping[str, str] | None = None) -> Environment:
    variables = os.environ if variables is None else variables
    return Environment(
        role=variables.get("SLUICE_ROLE", role),
        name=variables.get("SLUICE_NAME", f"{role}-0"),
        attempt=_integer(variables, "SLUICE_ATTEMPT", 1),
        replica=_integer(variables, "SLUICE_REPLICA", 0),
        index=_integer(variables, "SLUICE_INDEX", 0),
        bind=variables.get("SLUICE_BIND", "127.0.0.1"),
        advertise=variables.get("SLUICE_ADVERTISE") or "127.0.0.1",
        rendezvous=variables.get("SLUICE_RENDEZVOUS", ""),
        variables=dict(variables),
    )


def _integer(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ConfigurationError(f"{name}: {text!r} is not a number")
    return int(text)


def free_port(host: str = "127.0.0.1", taken: Container[int] = ()) -> int:
    """Return a port that is free now and not in `taken`.

    Raises OSError if there is none. A server may bind the port many seconds later, when its imports
    are done; a port that the kernel chooses could belong to a connection by then.
    """
    for _ in range(_TRIES):
        port = _draws.randrange(*_PORTS)
        if port not in taken and is_free(port, host):
            return port
    first, last = _PORTS
    raise OSError(errno.EADDRINUSE, f"no free port between {first} and {last} on {host}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return True if a server could bind the port now."""
    with socket.socket() as probe:
        # Connections of an earlier server in TIME_WAIT do not keep the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True
