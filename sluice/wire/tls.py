"""TLS between a job's processes: files in a directory of the environment (docs/contracts.md).

All servers of a job share one certificate, which the job's CA has signed for one name. Clients
check that name and not the address that they called, because addresses change and the job does not.
The token identifies the client. If the environment asks for TLS, sluice never falls back to plain
text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from sluice.runtime.pod_env import ConfigurationError

DIRECTORY_ENV, NAME_ENV = "SLUICE_TLS_DIR", "SLUICE_TLS_NAME"
CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_FOREIGN = (
    "CERTIFICATE_VERIFY_FAILED",
    "BAD_SIGNATURE",
    "certificate signature failure",
    "Verification Check failed",
)
_DATES = {
    "certificate is not yet valid": "not valid yet",
    "certificate has expired": "no longer valid",
}
_PLAIN = ("WRONG_VERSION_NUMBER",)


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS material; all but the name as PEM.

    Parameters
    ----------
    ca
        Certificate of the job's CA; empty for plain text.
    name
        Name in the certificate of the job's servers.
    certificate, key
        Certificate and key of this server; empty for clients.

    """

    ca: bytes = b""
    name: str = ""
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)

    def __bool__(self) -> bool:
        return bool(self.ca)

    def channel_credentials(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Return credentials of a client, and the channel options that they need."""
        return grpc.ssl_channel_credentials(self.ca), [("grpc.ssl_target_name_override", self.name)]

    def server_credentials(self) -> grpc.ServerCredentials:
        if not (self.certificate and self.key):
            raise ConfigurationError(
                f"{DIRECTORY_ENV} has no {CERTIFICATE} and {KEY}: a server needs both"
            )
        return grpc.ssl_server_credentials([(self.key, self.certificate)])


PLAIN = Tls()


def from_environment(variables: Mapping[str, str] | None = None) -> Tls:
    """Return the TLS material of this process's pod; PLAIN if it has none."""
    environment = os.environ if variables is None else variables
    directory, name = environment.get(DIRECTORY_ENV, ""), environment.get(NAME_ENV, "")
    if not directory:
        return PLAIN
    if not name:
        raise ConfigurationError(
            f"{NAME_ENV} is not set: expected the name in the certificate of the job's servers"
        )
    ca = _read(Path(directory) / CA)
    if not ca:
        raise ConfigurationError(
            f"{Path(directory) / CA}: expected the certificate of the job's CA ({DIRECTORY_ENV})"
        )
    return Tls(ca, name, _read(Path(directory) / CERTIFICATE), _read(Path(directory) / KEY))


def refusal(details: str | None) -> str:
    """Return why no call can ever reach this peer, from the details of a failed one.

    Empty if the peer may only be away.
    """
    for words, text in _DATES.items():
        if words in (details or ""):
            return f"the peer's certificate is {text} by this machine's clock: is the clock right?"
    if any(word in (details or "") for word in _FOREIGN):
        return (
            "the peer's certificate is not from this job's CA, or not for its name: it belongs to "
            "another job"
        )
    if any(word in (details or "") for word in _PLAIN):
        return "the peer does not speak TLS, which this job asks for (spec.tls)"
    return ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
