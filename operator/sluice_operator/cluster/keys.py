"""Credentials of a job's processes: its token and, with spec.tls, its certificates; keys of pools.

They are derived (HKDF, RFC 5869) from one key of the operator and the identity of the job, so they
never have to be read back: the operator may create Secrets and needs no right to read them. All
replicas of the operator, also after a restart, derive the same credentials. A job's token reveals
neither the key nor another job's token.
"""

from __future__ import annotations

import base64
import secrets
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sluice.api import RLJob
from sluice.engines.plugin_common.pool_credential import credential
from sluice_operator.plan.facts import clock, names
from sluice_operator.plan.facts.model import KubeObject

KEY_BYTES = 32
VALID = timedelta(days=3650)
CLOCK_SKEW = timedelta(days=1)
_CURVE = ec.SECP256R1()
# Number of points of P-256; private keys are 1 to _ORDER - 1.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class JobKeys:
    """Derives the credentials of jobs from the operator's key.

    key: at least 32 random bytes that only the operator knows. Methods identify a job by its uid,
    so that a job shares no credentials with a deleted namesake. On a laptop each run has another
    key, and the identity is "namespace/name".
    """

    def __init__(self, key: bytes) -> None:
        if len(key) < KEY_BYTES:
            raise ValueError(
                f"a key of {len(key)} bytes is too short; expected at least {KEY_BYTES} random ones"
            )
        self._key = key
        self.authority = lru_cache(maxsize=4096)(self._authority)

    def token(self, job: str, purpose: str = names.GENERATE_TOKEN) -> str:
        return base64.urlsafe_b64encode(self._derive(purpose, job, 32)).rstrip(b"=").decode()

    def pool_key(self, pool: str) -> str:
        """Return the key with which a pool's engines check the credentials of jobs, as hex.

        pool: "namespace/name", so that a pool that was deleted and made again serves its jobs.
        """
        return self._derive(names.GENERATE_POOL_KEY, pool, 32).hex()

    def _authority(self, job: str) -> str:
        """Return the certificate of the job's CA, as PEM.

        Two certificates of one job differ only in their dates, and either of them verifies.
        """
        return _pem(self._ca(job, datetime.now(UTC)))

    def certificates(self, job: str, server_name: str) -> dict[str, str]:
        """Return a job's TLS files, as PEM: its CA, and its servers' certificate with its key."""
        now = datetime.now(UTC)
        ca, ca_key, key = (
            self._ca(job, now),
            self._private("tls-ca", job),
            self._private("tls-server", job),
        )
        server = (
            _certificate(ca.subject, "sluice server", key.public_key(), now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
                critical=False,
            )
            .sign(ca_key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return {
            names.TLS_CA: _pem(ca),
            names.TLS_CERTIFICATE: _pem(server),
            names.TLS_KEY: private.decode(),
        }

    def filled(self, owner: names.Owner, manifest: KubeObject, pool_key: str = "") -> KubeObject:
        """Fill a Secret that asks for its content (names.GENERATE); return others unchanged.

        pool_key: the key of a job's pool, if it is not derived from the operator's.
        """
        purpose = manifest["metadata"].get("annotations", {}).get(names.GENERATE)
        if manifest["kind"] != "Secret" or purpose is None:
            return manifest
        identity = owner.metadata.uid or owner.key
        if purpose == names.GENERATE_POOL_KEY:
            return {**manifest, "stringData": {names.POOL_KEY: self.pool_key(owner.key)}}
        if purpose == names.GENERATE_TLS:
            metadata = owner.metadata
            server = names.server_name(metadata.name, metadata.namespace)
            return {**manifest, "stringData": self.certificates(identity, server)}
        if purpose == names.GENERATE_POOL_CREDENTIAL and isinstance(owner, RLJob):
            rollout = owner.spec.rollout
            key = pool_key or self.pool_key(f"{owner.metadata.namespace}/{rollout.pool}")
            created = clock.parse_optional(owner.metadata.creation_timestamp)
            seconds = int(created.timestamp()) if created else 0
            text = credential(key, owner.key, rollout.pool_weight, seconds)
            return {**manifest, "stringData": {names.TOKEN_KEY: text}}
        return {**manifest, "stringData": {names.TOKEN_KEY: self.token(identity, purpose)}}

    def _ca(self, job: str, now: datetime) -> x509.Certificate:
        key = self._private("tls-ca", job)
        text = f"sluice job CA {job}"[:64]  # the longest name in X.509
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
        return (
            _certificate(name, text, key.public_key(), now)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_SIGNS_CERTIFICATES, critical=True)
            .sign(key, hashes.SHA256())
        )

    def _private(self, purpose: str, job: str) -> ec.EllipticCurvePrivateKey:
        # 64 bits more than the order has, so that the bias is negligible (FIPS 186-5, A.2.1).
        number = int.from_bytes(self._derive(purpose, job, 40)) % (_ORDER - 1) + 1
        return ec.derive_private_key(number, _CURVE)

    def _derive(self, purpose: str, job: str, length: int) -> bytes:
        info = f"sluice.dev/{purpose}/{job}".encode()
        return HKDF(algorithm=hashes.SHA256(), length=length, salt=None, info=info).derive(
            self._key
        )


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def _certificate(
    issuer: x509.Name, name: str, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
