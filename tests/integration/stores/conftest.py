"""Each of the two S3 servers in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3 import KINDS, S3Server, clean_clients


@pytest.fixture(params=KINDS)
def any_s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server, of which the environment tells."""
    server: S3Server = request.getfixturevalue(request.param)
    with clean_clients():
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
