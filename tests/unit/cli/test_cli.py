"""The command line's pure parts, and its answers to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.api import ManifestError, load_job
from sluice.api.changes import differences
from sluice.cli.main import app
from sluice.cli.resolve import check_files, resolve
from sluice.cli.run import prepare
from sluice.cli.view import duration, sparkline

JOB = """\
apiVersion: sluice.dev/v1alpha1
kind: RLJob
metadata: {name: tiny}
spec:
  model: {path: model, init: random}
  data: {prompts: [{path: "rows.jsonl@[0:2]"}]}
  reward: {function: "judge.py:score"}
  trainer: {steps: 3, gpusPerNode: 0}
  rollout: {gpusPerReplica: 0}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "judge.py").write_text("def score(sample): return 1\n")
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_paths_are_taken_from_the_manifests_directory(job: Path) -> None:
    spec = resolve(load_job(job), job.parent).spec
    assert spec.model.path == str(job.parent / "model")
    assert spec.data.prompts[0].path == str(job.parent / "rows.jsonl@[0:2]")
    assert spec.reward.function == str(job.parent / "judge.py:score")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model/config.json", "has no config.json"),
        ("model/tokenizer.json", "has no tokenizer"),
        ("rows.jsonl", "spec.data.prompts[0].path: there is no file"),
        ("judge.py", "spec.reward.function: there is no file"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(job: Path, missing: str, message: str) -> None:
    (job.parent / missing).unlink()
    with pytest.raises(ManifestError) as raised:
        check_files(resolve(load_job(job), job.parent))
    assert message in str(raised.value)


def test_a_teacher_is_looked_for_too(job: Path) -> None:
    job.write_text(JOB.replace("trainer:", "algorithm: {distillation: {teacher: {path: teacher}}}\n  trainer:"))
    with pytest.raises(
        ManifestError, match=r"spec.algorithm.distillation.teacher.path: there is no directory .*/teacher"
    ):
        check_files(resolve(load_job(job), job.parent))
    (job.parent / "teacher").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (job.parent / "teacher" / name).write_text("{}")
    with pytest.raises(ManifestError, match=r"teacher has no weights .*; only a model that was trained can teach"):
        check_files(resolve(load_job(job), job.parent))
    (job.parent / "teacher/model.safetensors").touch()
    check_files(resolve(load_job(job), job.parent))


def test_a_job_that_only_distils_needs_no_reward(job: Path) -> None:
    job.write_text(
        JOB.replace('reward: {function: "judge.py:score"}', "algorithm: {distillation: {teacher: {url: http://t}}}")
    )
    check_files(resolve(load_job(job), job.parent))


def test_validate_says_what_the_job_is(job: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(job)])
    assert result.exit_code == 0
    assert "RLJob default/tiny is valid: grpo, 3 steps of 32 x 8 samples" in result.output


def test_validate_goes_on_after_a_bad_file(job: Path) -> None:
    result = CliRunner().invoke(app, ["validate", "/no/such.yaml", str(job)])
    assert result.exit_code == 2
    assert "/no/such.yaml: No such file" in result.output
    assert "is valid" in result.output


def test_render_prints_objects_that_kubernetes_would_take(job: Path) -> None:
    from ruamel.yaml import YAML

    result = CliRunner().invoke(app, ["render", str(job), "--set", "rollout.replicas=2"])
    assert result.exit_code == 0
    objects = list(YAML(typ="safe").load_all(result.output))
    pods = sorted(o["metadata"]["name"] for o in objects if o["kind"] == "Pod")
    assert pods == [
        "tiny-buffer-0-1-0",
        "tiny-rendezvous-0-1-0",
        "tiny-rollout-0-1-0",
        "tiny-rollout-1-1-0",
        "tiny-trainer-0-1-0",
    ]


def test_a_run_goes_on_only_with_its_own_manifest(job: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job), fresh=False)
    prepare(run, load_job(job, ["rollout.replicas=2", "failurePolicy.maxRestarts=9"]), fresh=False)
    with pytest.raises(ManifestError, match=r"trainer\.steps: 3 -> 4"):
        prepare(run, load_job(job, ["trainer.steps=4"]), fresh=False)
    prepare(run, load_job(job, ["trainer.steps=4"]), fresh=True)
    assert json.loads((run / "job.json").read_text())["spec"]["trainer"]["steps"] == 4


def test_fresh_never_deletes_what_is_no_run(job: Path, tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter1.tex").write_text("...")
    with pytest.raises(ManifestError, match="is not empty and holds no run"):
        prepare(mine, load_job(job), fresh=True)
    assert (mine / "chapter1.tex").exists()


def test_differences_name_the_path() -> None:
    old = {"a": {"b": 1, "c": [1]}, "suspend": False}
    assert differences(old, {"a": {"b": 2, "c": [1]}, "suspend": True}) == ["spec.a.b: 1 -> 2"]
    assert differences(old, {"a": {"c": [1]}}) == ["spec.a.b: 1 -> None"]


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([1.0], ""), ([0.0, 1.0], "▁█"), ([2.0, 2.0], "▁▁"), ([0.0, 0.5, 1.0], "▁▅█")]
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


def test_a_long_sparkline_keeps_its_width() -> None:
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3700, "1:01:40")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("options", "expected"), [
    (["--rollout-only", "--set", "model.init=pretrained"], ["model.init=pretrained", "debug.rolloutOnly=true"]),
    (["--set", "trainer.steps=2", "--train-from", "dump"],
     ["trainer.steps=2", "debug.replay={here}/dump", "rollout.replicas=0"]),
])  # fmt: skip
def test_one_half_of_the_loop_alone_is_a_change_of_the_manifest(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = []

    def run_here(path: Path, overrides: list[str], run_dir: Path | None, **_: bool) -> int:
        given.extend(overrides)
        return 0

    monkeypatch.setattr("sluice.cli.run.run_here", run_here)
    assert CliRunner().invoke(app, ["run", str(job), *options]).exit_code == 0
    assert given == [change.format(here=tmp_path) for change in expected]
    load_job(job, given)


def test_paths_of_hooks_and_rewards_of_data_sets_are_the_manifests_too(job: Path) -> None:
    changes = ["rollout.hooks={beforeReward: a.py:f, afterReward: pkg.g}", "rollout.function=b.py:play"]
    changes += ["evaluation={datasets: [{path: train.jsonl, reward: {function: c.py:h}}]}", "debug.replay=dump"]
    found = resolve(load_job(job, [*changes, "rollout.replicas=0"]), job.parent)
    base, spec = job.parent.resolve(), found.spec
    assert spec.rollout.hooks.before_reward == f"{base}/a.py:f"
    assert spec.rollout.hooks.after_reward == "pkg.g"
    assert (spec.rollout.function, spec.debug.replay) == (f"{base}/b.py:play", f"{base}/dump")
    with pytest.raises(ManifestError) as error:
        check_files(found)
    for path in ("rollout.hooks.beforeReward", "rollout.function", "evaluation.datasets[0].reward.function"):
        assert f"spec.{path}: there is no file {base}/" in str(error.value)
    assert f"spec.debug.replay: there is no file or directory {base}/dump" in str(error.value)
