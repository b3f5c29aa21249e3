"""`sluice render`: the objects of a job, and warnings about files that pods will not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools import ROOT
from tests.unit.cli.conftest import Sluice


def test_render_prints_the_objects_of_a_job(sluice: Sluice, job_file: Path) -> None:
    from ruamel.yaml import YAML

    result = sluice("render", job_file, "--set", "rollout.replicas=2")
    assert result.exit_code == 0
    objects = list(YAML(typ="safe").load_all(result.stdout))
    pods = sorted(o["metadata"]["name"] for o in objects if o["kind"] == "Pod")
    assert pods == [
        "tiny-buffer-0-1-0",
        "tiny-rendezvous-0-1-0",
        "tiny-rollout-0-1-0",
        "tiny-rollout-1-1-0",
        "tiny-trainer-0-1-0",
    ]


def test_render_prints_the_objects_of_a_pool(sluice: Sluice) -> None:
    from ruamel.yaml import YAML

    done = sluice("render", ROOT / "examples/lora/pool.yaml", "--set", "replicas=3")
    kinds = {document["kind"]: document for document in YAML(typ="safe").load_all(done.stdout)}
    assert list(kinds) == ["Secret", "Service", "StatefulSet"]
    assert kinds["StatefulSet"]["spec"]["replicas"] == 3
    assert done.stderr == ""


def test_the_workers_of_a_pool_are_announced(sluice: Sluice, job_file: Path) -> None:
    changes = (
        "rollout.pool=shared",
        "trainer.lora={}",
        "model.init=pretrained",
        "weightSync={lora: adapter, pauseMode: versions}",
    )
    result = sluice("render", job_file, *(word for c in changes for word in ("--set", c)))
    assert result.exit_code == 0
    assert "warning: spec.rollout.pool: a cluster makes one worker for each engine of shared" in (
        result.stderr
    )


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        pytest.param([], ["model.path", "data.prompts[0].path", "reward.function"], id="relative"),
        pytest.param(
            [
                "model.volume={nfs: {server: s, path: /}}",
                "data.volume={nfs: {server: s, path: /}}",
                "reward.function=lab.rewards.score",
            ],
            [],
            id="in volumes and packages",
        ),
        pytest.param(
            [
                "model.path=/in/the/image",
                "data.prompts=[{path: /in/the/image.jsonl}]",
                "reward={type: math}",
            ],
            [],
            id="of the images",
        ),
        pytest.param(
            ["data.prompts=[{path: HERE/rows.jsonl}]", "reward={type: math}"],
            ["model.path", "data.prompts[0].path"],
            id="absolute, of this machine",
        ),
        pytest.param(
            [
                "model.path=/in/the/image",
                "data.prompts=[{path: /mnt/x.jsonl}]",
                "rollout.environment={command: [python, judge.py, --fast]}",
                "reward.function=/mnt/code/judge.py:score",
            ],
            ["rollout.environment.command[1]"],
            id="a word of a command",
        ),
    ],
)
def test_render_warns_of_files_that_pods_will_not_have(
    sluice: Sluice, job_file: Path, changes: list[str], warned: list[str]
) -> None:
    words = [
        word for text in changes for word in ("--set", text.replace("HERE", str(job_file.parent)))
    ]
    result = sluice("render", job_file, *words)
    assert result.exit_code == 0, result.output
    assert "warning: " not in result.stdout
    fields = [line.split(": ")[1] for line in result.stderr.splitlines()]
    assert sorted(fields) == sorted(f"spec.{field}" for field in warned)


def test_render_does_not_warn_about_a_mounted_file(sluice: Sluice, job_file: Path) -> None:
    mount = {"name": "mine", "mountPath": str(job_file.parent)}
    template = {"spec": {"containers": [{"name": "trainer", "volumeMounts": [mount]}]}}
    changes = [
        f"model.path={job_file.parent}/model",
        "data.prompts=[{path: /mnt/x.jsonl}]",
        "reward={type: math}",
        f"trainer.template={json.dumps(template)}",
    ]
    words = [word for text in changes for word in ("--set", text)]
    assert sluice("render", job_file, *words).stderr == ""
