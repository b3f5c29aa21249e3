"""A node, an installed chart, and for each test a namespace with the quickstart's volume.

Everything runs in pods of one image, on this machine's cores: a test's waits are long because
engines start slowly.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from tests.node import image as images
from tests.node.jobs import Quickstart
from tests.node.node import Node, running_node
from tests.tools import ROOT, tool

CHART = ROOT / "charts/sluice"
# Prefix that a node puts before the name of an image that names no registry.
LIBRARY = "docker.io/library/"
RELEASE, OPERATOR_NAMESPACE = "sluice", "sluice-system"
ROWS = pytest.StashKey[list[list[Any]]]()
FAILED = pytest.StashKey[bool]()
Run = TypeVar("Run", bound=Quickstart)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.node)


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    with running_node() as machine:
        yield machine


@pytest.fixture(scope="session")
def image(node: Node, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image of all roles, in the node; made only if these very sources are not there yet."""
    return loaded(node, images.name(), images.write, tmp_path_factory)


def loaded(
    node: Node, name: str, write: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The name that an image has in the node, which gets it in place of older ones of its
    repository, unless it has it."""
    there, repository = node.images(), name.partition(":")[0]
    if f"{LIBRARY}{name}" not in there:
        archive = tmp_path_factory.mktemp("image") / "image.tar"
        name = write(archive)
        older = [image for image in there if image.startswith(f"{LIBRARY}{repository}:")]
        node.load(archive, instead_of=older)
        archive.unlink()
    return f"{LIBRARY}{name}"


@pytest.fixture(scope="session")
def operator(node: Node, image: str) -> Iterator[None]:
    """The chart, as a user would install it. OpenAPI validation is off for API servers that know no
    CEL rules."""
    repository, tag = image.removeprefix("docker.io/").split(":")
    roles = ("operator", "trainer", "engine", "rollout", "buffer", "rendezvous")
    values = {
        "images": {
            "registry": "docker.io",
            **{role: {"repository": repository, "tag": tag} for role in roles},
        },
        "probeSeconds": 2,
        "lease": {"seconds": 5},
        "crds": {"keep": False},
    }
    helm, where = str(tool("helm")), ("--namespace", OPERATOR_NAMESPACE)
    node.call(
        *(helm, "install", RELEASE, str(CHART), *where, "--create-namespace", "--values", "-"),
        *("--disable-openapi-validation", "--wait", "--timeout", "5m"),
        text=json.dumps(values),
        seconds=330,
    )
    yield
    if node.lasts:
        node.call(helm, "uninstall", RELEASE, *where, "--wait", "--timeout", "2m", seconds=150)
        node.kubectl("delete", "namespace", OPERATOR_NAMESPACE, "--timeout=60s", seconds=90)


class Prepared(Protocol):
    def __call__(self, example: type[Run]) -> Run: ...


@pytest.fixture
def prepared(
    node: Node, operator: None, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Prepared]:
    """Prepares an example in a new namespace. If the test fails, prints what became of
    it.
    """
    runs: list[Quickstart] = []

    def prepare(example: type[Run]) -> Run:
        run = example(node, f"t-{uuid.uuid4().hex[:8]}", tmp_path)
        run.prepare()
        runs.append(run)
        return run

    yield prepare
    for run in runs:
        if request.node.stash.get(FAILED, False):
            print(run.story())
            logs = ("logs", "-l", "app.kubernetes.io/name=sluice", "--tail=80")
            print(node.kubectl("-n", OPERATOR_NAMESPACE, *logs, check=False))
        run.remove()


@pytest.fixture
def quickstart(prepared: Prepared) -> Quickstart:
    return prepared(Quickstart)


# -- the table of docs/results/node.md
# --------------------------------------------------------------------------------

COLUMNS = (
    "run",
    "outcome",
    "steps",
    "reward first",
    "reward last",
    "restarts",
    "groups lost",
    "trained twice",
    "seconds",
)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Quickstart], None]:
    """Adds a row about a run that has succeeded to the table that is shown at the end."""
    began = time.monotonic()

    def add(run: Quickstart) -> None:
        status, counters, records = run.status(), run.counters(), run.metrics()
        rewards = [f"{records[i]['rollout/raw_reward']:.3f}" for i in (0, -1)]
        lost, twice = counters["groups_lost"], counters["groups_trained_twice"]
        name = request.node.name.removeprefix("test_").replace("_", " ")
        seconds = f"{time.monotonic() - began:.0f}"
        cells = [
            name,
            status["state"],
            status["step"],
            *rewards,
            status["restarts"],
            lost,
            twice,
            seconds,
        ]
        request.config.stash.setdefault(ROWS, []).append(cells)

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    for row in [COLUMNS, ["---"] * len(COLUMNS), *rows] if rows else []:
        terminalreporter.write_line(f"| {' | '.join(map(str, row))} |")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report
