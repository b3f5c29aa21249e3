"""Keys derived from the operator's: the same for all of its replicas, others for every job."""

from __future__ import annotations

import base64

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from sluice_operator.cluster.keys import VALID, JobKeys, new_key
from sluice_operator.plan.manifests.objects import config_map, tls_secret, token_secret
from tests.unit.operator.world import make_job

KEY = bytes(range(32))
NAME = "demo.default.sluice"


def test_two_replicas_derive_the_same_token() -> None:
    assert JobKeys(KEY).token("u1") == JobKeys(KEY).token("u1")


def test_another_job_or_another_key_has_another_token() -> None:
    assert (
        len({JobKeys(KEY).token("u1"), JobKeys(KEY).token("u2"), JobKeys(new_key()).token("u1")})
        == 3
    )


def test_a_token_does_not_change_between_versions() -> None:
    """The derivation is fixed, because running jobs must outlive an upgrade.

    It is HKDF-SHA256 of the key, without salt, with info "sluice.dev/token/u1".
    """
    assert JobKeys(KEY).token("u1") == "swQnv9bsItHBXo_MKILFc18pUIPDodBHCDZPwQcWsB8"


def test_a_token_has_the_strength_of_the_key() -> None:
    assert len(base64.urlsafe_b64decode(JobKeys(KEY).token("u1") + "=")) == 32


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="a key of 3 bytes is too short; expected at least 32"):
        JobKeys(b"abc")


def verify(authority: str, certificate: str, name: str = NAME) -> None:
    store = Store([x509.load_pem_x509_certificate(authority.encode())])
    server = x509.load_pem_x509_certificate(certificate.encode())
    PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name)).verify(server, [])


def test_a_certificate_is_verified_by_the_authority_that_another_replica_derives() -> None:
    verify(JobKeys(KEY).authority("u1"), JobKeys(KEY).certificates("u1", NAME)["tls.crt"])


@pytest.mark.parametrize(
    ("authority", "name"),
    [
        (JobKeys(KEY).authority("u2"), NAME),
        (JobKeys(new_key()).authority("u1"), NAME),
        (JobKeys(KEY).authority("u1"), "other.default.sluice"),
    ],
    ids=["another uid", "another key", "another name"],
)
def test_another_jobs_authority_or_name_does_not_verify(authority: str, name: str) -> None:
    with pytest.raises(VerificationError):
        verify(authority, JobKeys(KEY).certificates("u1", NAME)["tls.crt"], name)


def test_the_servers_key_belongs_to_its_certificate_and_is_not_the_authoritys() -> None:
    files = JobKeys(KEY).certificates("u1", NAME)
    server, authority = (
        x509.load_pem_x509_certificate(files[name].encode()) for name in ("tls.crt", "ca.crt")
    )
    private = serialization.load_pem_private_key(files["tls.key"].encode(), None)
    assert private.public_key() == server.public_key()
    assert private.public_key() != authority.public_key()


def test_a_certificate_outlives_any_job_and_a_clock_that_is_behind() -> None:
    files = JobKeys(KEY).certificates("u1", NAME)
    server = x509.load_pem_x509_certificate(files["tls.crt"].encode())
    assert server.not_valid_after_utc - server.not_valid_before_utc >= VALID


def test_secrets_are_filled_as_they_ask() -> None:
    job, keys = make_job(tls={"enabled": True}), JobKeys(KEY)
    assert keys.filled(job, token_secret(job))["stringData"] == {"token": keys.token("1234")}
    assert set(keys.filled(job, tls_secret(job))["stringData"]) == {"ca.crt", "tls.crt", "tls.key"}
    assert "stringData" not in token_secret(job)


def test_the_key_of_a_pool_does_not_change_between_versions() -> None:
    """Credentials of running jobs are signed with it.

    It is HKDF-SHA256 of the key, without salt, with info "sluice.dev/pool-key/u1".
    """
    assert (
        JobKeys(KEY).pool_key("u1")
        == "2df07e5b5f4ea221298772797dbae55490dbdf49a866c2da18372621554405bd"
    )


def test_another_pool_has_another_key() -> None:
    assert JobKeys(KEY).pool_key("u1") != JobKeys(KEY).pool_key("u2")


def test_other_objects_are_left_alone_whatever_they_are_annotated_with() -> None:
    config = config_map(make_job())
    config["metadata"]["annotations"] = {"sluice.dev/generate": "token"}
    assert JobKeys(KEY).filled(make_job(), config) == config
