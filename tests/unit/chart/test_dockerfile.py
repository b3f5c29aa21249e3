"""The images install what pyproject.toml and the Makefile say; they run as the chart and the plan
expect."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

from sluice.api import RLJob
from sluice_operator.plan.manifests.render import render_all
from tests.helm import CHART, load
from tests.tools import ROOT

TARGETS = ("operator", "buffer", "rollout", "trainer", "cpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ACCOUNT = "65532:65532"


@dataclass
class Stage:
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


def dockerfile() -> tuple[dict[str, str], dict[str, Stage]]:
    """Arguments with their defaults, and stages by their name."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = shlex.split(default)[0] if default.strip('"') else ""
        elif instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = stage = Stage(base)
        if instruction and stages and instruction != "FROM":
            stage.steps.append((instruction, rest))
    return arguments, stages


ARGUMENTS, STAGES = dockerfile()


def environment(target: str) -> Stage:
    """The stage that a target's Python environment comes from."""
    (copied,) = [rest for rest in STAGES[target].all("COPY") if rest.startswith("--from")]
    return STAGES[copied.removeprefix("--from=").split()[0]]


def extras(target: str) -> set[str]:
    (listed,) = re.findall(r"sluice-rl\[([a-z0-9,]+)\]", " ".join(environment(target).all("RUN")))
    return set(listed.split(","))


def test_images_install_the_extras_of_their_roles() -> None:
    stores = {"s3", "gcs", "azure"}
    assert {target: extras(target) for target in TARGETS} == {
        "operator": {"operator", "tracing"},
        "buffer": {"buffer", "tracing"} | stores,
        "rollout": {"rollout", "mcp", "tracing"} | stores,
        "trainer": {"trainer", "gpu", "flash", "tracing", "wandb", "mlflow"} | stores,
        "cpu": EXTRAS.keys() - {"dev", "docs", "flash", "gpu"},
    }


def test_images_that_run_user_functions_adapt_those_of_other_projects() -> None:
    assert {
        target for target in TARGETS if "${MIGRATE}" in " ".join(environment(target).all("RUN"))
    } == {"rollout", "trainer", "cpu"}
    migrate = tomllib.loads((ROOT / "migrate" / "pyproject.toml").read_text())["project"]
    assert migrate["version"] == PROJECT["version"]
    assert f"sluice-rl=={PROJECT['version']}" in migrate["dependencies"]


def test_pins_outside_of_the_requirements_agree_with_the_others() -> None:
    makefile = dict(
        re.findall(r"^([A-Z]+) +[:?]= +(\S.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    assert ARGUMENTS["VERSION"] == makefile["TAG"] == PROJECT["version"]
    assert {*pins("torch-cpu"), ARGUMENTS["TORCHVISION"]} <= set(EXTRAS["local"])


def test_images_install_our_wheel_and_pinned_requirements_only() -> None:
    allowed = {"${MIGRATE}", "${TORCHVISION}", "${TORCH_CPU_INDEX}"}
    for target in TARGETS:
        for command in " && ".join(environment(target).all("RUN")).split("&&"):
            words = shlex.split(command)
            if "pip" not in words:
                continue
            arguments = [word for word in words[4:] if not word.startswith("--")]
            files = {word for word in arguments if word.startswith("/requirements/")}
            assert all(pins(Path(file).stem) for file in files)
            others = {word for word in arguments if not word.endswith(" @ file://${WHEEL}")} - files
            assert others <= allowed, command


def pins(name: str) -> list[str]:
    """The requirements of a file, each with its exact version."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in lines), f"requirements/{name}.txt has a version left open"
    return lines


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_an_account_without_rights(target: str) -> None:
    stage = STAGES[target]
    assert stage.all("USER") == [ACCOUNT]
    assert stage.steps[-1][0] == "CMD"
    compiler = re.search(r"gcc|build-essential|-dev\b|compiler", " ".join(stage.all("RUN")))
    assert bool(compiler) == (target == "trainer"), (
        "Triton compiles in the trainer, nobody else anywhere"
    )
    labels = " ".join(stage.all("LABEL") + STAGES.get(stage.base, Stage("")).all("LABEL"))
    for label in ("title", "description", "source", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


def test_the_account_is_that_of_the_chart_and_of_the_plan() -> None:
    user = int(ACCOUNT.partition(":")[0])
    assert load((CHART / "values.yaml").read_text())["podSecurityContext"]["runAsUser"] == user
    job = RLJob.model_validate(
        {
            "metadata": {"name": "demo"},
            "spec": {
                "model": {"path": "m"},
                "data": {"prompts": [{"path": "p"}]},
                "reward": {"type": "exact_match"},
                "trainer": {"steps": 1},
            },
        }
    )
    pods = {
        manifest["metadata"]["labels"]["sluice.dev/role"]: manifest
        for manifest in render_all(job)
        if manifest["kind"] == "Pod"
    }
    for role in ("buffer", "rendezvous"):
        assert pods[role]["spec"]["securityContext"]["runAsUser"] == user
    assert pods["trainer"]["spec"]["securityContext"]["fsGroup"] == user, (
        "else it cannot write its checkpoints"
    )


def test_every_image_of_ours_in_the_chart_has_a_target() -> None:
    images = load((CHART / "values.yaml").read_text())["images"]
    repositories = {image["repository"] for image in images.values() if isinstance(image, dict)}
    ours = {
        repository.removeprefix("sluice-dev/sluice-")
        for repository in repositories
        if repository.startswith("sluice-dev/")
    }
    assert ours == set(TARGETS) - {"cpu"}


def test_bases_are_exact_versions_that_the_package_supports() -> None:
    lowest, below = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    for name in ("PYTHON", "PYTHON_CPU"):
        minor = re.search(r":3\.(\d+)\.\d+-", ARGUMENTS[name])
        assert minor, ARGUMENTS[name]
        assert int(lowest) <= int(minor[1]) < int(below)
        assert ARGUMENTS[f"{name}_DIGEST"] == ""
    assert re.search(r":3\.12\.", ARGUMENTS["PYTHON"]), "whose torch is that of the GPU images"
    assert ":3.11." in ARGUMENTS["PYTHON_CPU"], "whose torch is TORCH_CPU"


def test_what_is_copied_is_not_ignored() -> None:
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    for source in [word for rest in STAGES["wheel"].all("COPY") for word in rest.split()[:-1]]:
        assert (ROOT / source).exists()
        (last,) = [rule for rule in rules if fnmatch(source, rule.lstrip("!"))][-1:]
        assert last.startswith("!"), source
