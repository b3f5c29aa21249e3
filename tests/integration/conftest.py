"""Fixtures that several rooms share: one SGLang server for the whole session, started when the
first test asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from sluice import model_support
from tests.integration import support_cells
from tests.integration.engines import Sglang, save_model
from tests.integration.rendezvous_server import Rendezvous
from tests.integration.transformers_engine import TransformersServer
from tests.integration.vllm_engine import PYTHON, VllmServer
from tests.s3 import S3Server, clean_clients, serve_s3
from tests.tools import missing

Server = Sglang | VllmServer | TransformersServer
_SHOWN = pytest.StashKey[support_cells.Shown]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tested = {cell for item in items for cell in support_cells.cells(item)}
    config.stash[_SHOWN] = support_cells.Shown(tested)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not report.skipped and (report.when == "call" or report.failed):
        shown = support_cells.outcome(item) if report.passed else ""
        for cell in support_cells.cells(item):
            item.config.stash[_SHOWN].outcomes.setdefault(cell, []).append(shown)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if support_cells.UPDATES and _SHOWN in session.config.stash:
        whole = "tests/integration" in session.config.args
        shown = session.config.stash[_SHOWN]
        support_cells.write(support_cells.updated(model_support.table(), shown, whole=whole))


@pytest.fixture(autouse=True)
def _check_support(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare what a test of the table shows with the table."""
    yield
    if not support_cells.UPDATES:
        for cell in support_cells.cells(request.node):
            written = model_support.outcome(cell.model_type, cell.part, cell.use)
            shown = support_cells.outcome(request.node)
            assert written == shown, f"{cell}: {support_cells.HINT}"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "model", seed=1)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    return save_model(tmp_path_factory.mktemp("other") / "model", seed=2)


@pytest.fixture(scope="session")
def _sglang(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    passes = {"SLUICE_PREFILL_PASSES": "8"}  # as engines on GPUs have it
    server = Sglang(model, tmp_path_factory.mktemp("sglang") / "log", **passes)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture
def sglang(_sglang: Sglang) -> Sglang:
    """The server with the weights of `model`, as version 0."""
    _sglang.reset()
    return _sglang


@pytest.fixture(scope="session")
def _vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    if not PYTHON.exists():
        missing("needs vLLM: make vllm")
    server = VllmServer(model, tmp_path_factory.mktemp("vllm") / "log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def _transformers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TransformersServer]:
    server = TransformersServer(model, tmp_path_factory.mktemp("transformers") / "log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(params=["sglang", "transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of the engines, with the weights of `model`, as version 0."""
    served: Server = request.getfixturevalue(f"_{request.param}")
    served.reset()
    return served


@pytest.fixture
async def rendezvous() -> AsyncIterator[Rendezvous]:
    """A rendezvous service in this process, on a free port of the loopback."""
    async with Rendezvous() as service:
        yield service


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serve_s3("rclone", tmp_path_factory.mktemp("rclone") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serve_s3("moto", tmp_path_factory.mktemp("moto") / "server") as server:
        yield server


@pytest.fixture
def s3(rclone: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A real S3 server, of which the environment tells."""
    with clean_clients():
        for name, value in rclone.environment.items():
            monkeypatch.setenv(name, value)
        yield rclone
