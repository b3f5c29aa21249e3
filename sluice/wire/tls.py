"""TLS between a job's processes: files in a directory,
named by the environment (docs/contracts.md).

All servers of a job share one certificate, which the job's own CA has signed for one name. Clients
check that name instead of the address they called: addresses come and go, and whose server it is is
the question. Who the client is, its token says. Where the environment asks for TLS nothing ever
falls back to plain text.
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
    """ca: certificate of the job's CA; empty: plain text. name: what the servers' certificate says.

    certificate, key: a server's own. All but the name as PEM.
    """

    ca: bytes = b""
    name: str = ""
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)

    def __bool__(self) -> bool:
        return bool(self.ca)

    def channel_credentials(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Credentials of a client, and the options that go with them."""
        return grpc.ssl_channel_credentials(self.ca), [("grpc.ssl_target_name_override", self.name)]

    def server_credentials(self) -> grpc.ServerCredentials:
        if not (self.certificate and self.key):
            raise ConfigurationError(
                f"{DIRECTORY_ENV} has no {CERTIFICATE} and {KEY}: a server needs both"
            )
        return grpc.ssl_server_credentials([(self.key, self.certificate)])


PLAIN = Tls()


def from_environment(variables: Mapping[str, str] | None = None) -> Tls:
    """The TLS material of this process's pod; PLAIN where it has none."""
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
    """Why no call can ever reach this peer, from the details of a failed one; empty: it may be just
    not there.
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
