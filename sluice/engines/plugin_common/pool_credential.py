"""Credentials with which the jobs of a pool call its engines.

A credential is `NAMESPACE/JOB:WEIGHT:CREATED:SIGNATURE`. The pool's key signs the rest, so an
engine needs the key alone to know who calls, and no list of jobs. What a job names in an engine (a
request, a communicator) begins with its tag, `NAMESPACE/JOB:WEIGHT:CREATED!`.

CREATED tells jobs of one name apart. Processes of a deleted job may still run on a node that is cut
off, and an engine refuses them once a later job of the name has called.

This file also runs in the processes of engines, linked from the plugin, and imports the standard
library only.
"""

import hashlib
import hmac

# Variable of a worker or trainer with the credential of its job; unset if its engines are its own.
VARIABLE = "SLUICE_POOL_CREDENTIAL"
# Path of an engine. A worker that ends calls it, and the engine forgets the job.
LEAVE = "/sluice_leave"
# Ends the tag in a name.
TAG_END = "!"


def credential(key: str, job: str, weight: int, created: int) -> str:
    """Return the credential of a job.

    Parameters
    ----------
    key
        The pool's key, in hexadecimal digits.
    job
        Namespace and name, as `default/math`.
    weight
        Share of the pool's tokens relative to other jobs.
    created
        When the job was created, in seconds since 1970.

    """
    tag = f"{job}:{weight}:{created}"
    return f"{tag}:{_signature(key, tag)}"


def verified_tag(key: str, text: str) -> str:
    """Return the tag of a credential; empty if the pool's key did not sign it."""
    tag, _, signature = text.rpartition(":")
    expected = _signature(key, tag)
    return tag if tag and hmac.compare_digest(signature.encode(), expected.encode()) else ""


def tag_of(name: str) -> str:
    """Return the tag that a name begins with; empty if it has none."""
    tag, ends, _ = name.partition(TAG_END)
    return tag if ends else ""


def name_start(text: str) -> str:
    """Return the tag of a credential as the start of names; empty without a credential."""
    tag = text.rpartition(":")[0]
    return tag + TAG_END if tag else ""


def job_of(tag: str) -> str:
    """Return namespace and name of the job."""
    return tag.partition(":")[0]


def weight_of(tag: str) -> int:
    """Return the weight of the job; 1 if the tag has none."""
    return max(_number(tag, 1), 1)


def created_of(tag: str) -> int:
    """Return when the job was created, in seconds since 1970; 0 if the tag does not say."""
    return _number(tag, 2)


def _number(tag: str, place: int) -> int:
    parts = tag.split(":")
    return int(parts[place]) if len(parts) > place and parts[place].isdecimal() else 0


def _signature(key: str, tag: str) -> str:
    return hmac.new(bytes.fromhex(key), tag.encode(), hashlib.sha256).hexdigest()
