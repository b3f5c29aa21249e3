"""Manifests of RLEnginePools are checked as those of RLJobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.api import ManifestError, RLEnginePool, load_job, load_pool, manifest

MANIFEST = """\
apiVersion: sluice.dev/v1alpha1
kind: RLEnginePool
metadata:
  name: qwen
spec:
  model: {path: model}
  replicas: 2
  maxRank: 16
  template:
    spec:
      nodeSelector: {gpu: h200}
"""
JOB = "---\napiVersion: sluice.dev/v1alpha1\nkind: RLJob\nmetadata: {name: a}\nspec: {}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(MANIFEST)
    return path


def test_a_pool_is_loaded_with_overrides(file: Path) -> None:
    spec = load_pool(file, ["replicas=3", "engineArgs.mem-fraction-static=0.8"]).spec
    assert (spec.replicas, spec.max_rank, spec.engine_args) == (3, 16, {"mem-fraction-static": 0.8})


def test_a_pool_survives_the_round_trip(file: Path) -> None:
    pool = load_pool(file)
    assert RLEnginePool.model_validate(manifest(pool)) == pool


def test_a_pool_is_found_among_other_objects(file: Path) -> None:
    file.write_text(MANIFEST + JOB)
    assert load_pool(file).metadata.name == "qwen"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "maxRank: 16",
            "maxRnak: 16",
            ":8: spec.maxRnak: unknown field; did you mean maxRank?",
        ),
        ("replicas: 2", "replicas: -1", ":7: spec.replicas: expected at least 0, found -1"),
        (
            "nodeSelector: {gpu: h200}",
            "nodeSelektor: {gpu: h200}",
            ":11: spec.template.spec.nodeSelektor: no such field of a pod's spec; did you mean "
            "nodeSelector?",
        ),
        (
            "nodeSelector: {gpu: h200}",
            "containers: [{name: worker}]",
            ":11: spec.template.spec.containers[0].name: no container of engine pods is named "
            "'worker' (engine); give it an image to add one",
        ),
        (
            "maxRank: 16",
            "engineArgs: {enable-lora: true}",
            ":8: spec.engineArgs: LoRA adapters (enable-lora) are not supported, because those of "
            "a pool come from its jobs: leave them out and set maxAdapters, maxRank and "
            "targetModules",
        ),
        (
            "kind: RLEnginePool",
            "kind: RLJob",
            ": expected apiVersion sluice.dev/v1alpha1, kind RLEnginePool; found apiVersion "
            "'sluice.dev/v1alpha1', kind 'RLJob'",
        ),
    ],
    ids=["unknown-field", "out-of-range", "template", "container", "rule", "kind"],
)
def test_one_message_names_line_and_field(file: Path, old: str, new: str, message: str) -> None:
    file.write_text(MANIFEST.replace(old, new))
    with pytest.raises(ManifestError) as raised:
        load_pool(file)
    assert str(raised.value) == f"{file}{message}"


def test_a_file_with_two_pools_is_refused(file: Path) -> None:
    file.write_text(f"{MANIFEST}---\n{MANIFEST}")
    with pytest.raises(ManifestError, match="2 RLEnginePools in one file \\(qwen, qwen\\)"):
        load_pool(file)


def test_a_pool_is_no_job(file: Path) -> None:
    with pytest.raises(ManifestError, match=r"expected .* kind RLJob; found .* 'RLEnginePool'"):
        load_job(file)
