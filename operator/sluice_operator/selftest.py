"""Checks whether this cluster runs RLJobs, for `helm test`.

    python -m sluice_operator.selftest [URL]

It prints one line for each check that succeeds: the API server serves RLJobs in the operator's
namespaces, an operator renews its lease, and the URL (of the operator's /readyz) answers. It exits
with code 1 and a message about the first check that fails.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.error
import urllib.request

from sluice.telemetry import logs
from sluice_operator import settings
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.settings import OperatorSettings

LOOK_SECONDS = 1.0
# Lease durations to wait for a renewal. By then a new leader would have taken over.
PATIENCE = 4


class FailedError(Exception):
    """A check failed. The message says what is wrong and what to do."""


async def main() -> int:
    config = settings.read()
    try:
        async with await Api.connect() as api:
            print(await _served(api, config))
            print(await _led(api, config))
        for url in sys.argv[1:]:
            print(await asyncio.to_thread(_answers, url))
    except FailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _served(api: Api, config: OperatorSettings) -> str:
    """Check that the CRD is installed and that the operator may read it."""
    for namespace in config.namespaces or (None,):
        try:
            await api.get(collection("RLJob", namespace), {"limit": 1})
        except errors.NotFoundError as error:
            raise FailedError(
                "this cluster does not know RLJobs: install the CRD (crds.install=true)"
            ) from error
        except errors.ApiError as error:
            raise FailedError(f"the operator cannot list RLJobs: {error}") from error
    return (
        "RLJobs are served "
        f"{'in ' + ', '.join(config.namespaces) if config.namespaces else 'in all namespaces'}"
    )


async def _led(api: Api, config: OperatorSettings) -> str:
    """Check that the lease is renewed, which means that an operator leads."""
    first, waited = "", 0.0
    while waited < PATIENCE * config.lease_seconds:
        try:
            spec = (await api.get(path("Lease", config.namespace, config.lease_name))).get(
                "spec"
            ) or {}
        except errors.NotFoundError:
            spec = {}
        holder, renewed = spec.get("holderIdentity") or "", spec.get("renewTime") or ""
        if holder and first and renewed != first:
            return f"{holder} leads"
        first = first or renewed
        await asyncio.sleep(LOOK_SECONDS)
        waited += LOOK_SECONDS
    name = f"{config.namespace}/{config.lease_name}"
    raise FailedError(f"no operator renews the lease {name}: read the logs of the operator's pods")


def _answers(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - the chart's own address
            return f"{url} answers {answer.status}"
    except urllib.error.HTTPError as error:
        raise FailedError(
            f"{url} answers {error.code}: {error.read().decode(errors='replace').strip()}"
        ) from error
    except OSError as error:
        raise FailedError(f"{url} does not answer: {error}") from error


if __name__ == "__main__":
    logs.run("selftest", main)
