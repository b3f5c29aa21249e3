"""The command line's pure parts, and its answers to bad input."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.api import ManifestError, load_job
from sluice.api.schema.mutability import differences
from sluice_cli.init.tiny_model import write_model
from sluice_cli.main import app
from sluice_cli.run.start_from import model_of
from sluice_cli.run.view import sparkline
from sluice_cli.validate.missing_files import check_files
from sluice_client.resolve import resolve
from sluice_client.resume_changes import change_notes
from sluice_client.status_view import duration
from sluice_operator.cluster.local import run_state
from tests.unit.cli.conftest import prepare

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
    write_model(tmp_path / "model", (), unit="bytes", context=2048)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "judge.py").write_text("def score(sample): return 1\n")
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_paths_are_taken_from_the_manifests_directory(job: Path) -> None:
    spec = resolve(load_job(job), job.parent).spec
    assert spec.model.path == str(job.parent / "model")
    assert spec.data.prompts[0].path == str(job.parent / "rows.jsonl@[0:2]")
    assert spec.reward is not None
    assert spec.reward.function == str(job.parent / "judge.py:score")


def test_words_of_a_command_are_files_beside_the_manifest(job: Path) -> None:
    command = "rollout.environment.command=[python, judge.py, --fast, elsewhere.py]"
    resolved = resolve(load_job(job, [command]), job.parent)
    check_files(resolved)
    assert resolved.spec.rollout.environment
    expected = ["python", str(job.parent / "judge.py"), "--fast", "elsewhere.py"]
    assert resolved.spec.rollout.environment.command == expected


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model/config.json", "has no config.json"),
        ("model", "has no tokenizer"),
        ("rows.jsonl", "rows.jsonl: no such prompt file"),
        ("judge.py", "spec.reward.function: there is no file"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    job: Path, missing: str, message: str
) -> None:
    for path in job.parent.glob("model/tokenizer*" if missing == "model" else missing):
        path.unlink()
    with pytest.raises(ManifestError) as raised:
        check_files(resolve(load_job(job), job.parent))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("judge.py:scroe", "judge.py has no function 'scroe'; did you mean score?"),
        ("judge.py", "names no function; expected judge.py:name"),
        ("broken.py:f", "broken.py:2: not valid Python: "),
        ("partial.py:graded", None),
        ("star.py:anything", None),
        ("package.of.mine.f", None),
    ],
)
def test_a_function_is_looked_for_in_its_file(
    job: Path, function: str, message: str | None
) -> None:
    (job.parent / "broken.py").write_text("\ndef f(:\n")
    (job.parent / "partial.py").write_text(
        "if True:\n    graded, other = print, print\nraise SystemExit\n"
    )
    (job.parent / "star.py").write_text("from elsewhere import *\n")
    resolved = resolve(load_job(job, [f"reward.function={function}"]), job.parent)
    if message is None:
        return check_files(resolved)
    with pytest.raises(ManifestError) as raised:
        check_files(resolved)
    assert message in str(raised.value)
    assert str(raised.value).startswith("spec.reward.function: ")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "rows.jsonl@[0:x]",
            "rows.jsonl: a slice is written @[a:b] with whole numbers, found @[0:x]",
        ),
        ("rows.jsonl@[-:1]", "found @[-:1]"),
        ("rows.jsonl@0:1", "found @0:1"),
        ("judge.py", "judge.py: expected a file that ends with .jsonl, .json, .parquet"),
        ("empty", "no .jsonl, .json, .parquet file in this directory"),
    ],
)
def test_prompts_that_cannot_be_read_are_told_before_anything_starts(
    job: Path, path: str, message: str
) -> None:
    (job.parent / "empty").mkdir()
    with pytest.raises(ManifestError) as raised:
        check_files(resolve(load_job(job, [f"data.prompts[0].path={path}"]), job.parent))
    assert str(raised.value).startswith("spec.data.prompts[0].path: ")
    assert message in str(raised.value)


def test_a_teacher_is_looked_for_too(job: Path) -> None:
    job.write_text(
        JOB.replace("trainer:", "algorithm: {distillation: {teacher: {path: teacher}}}\n  trainer:")
    )
    with pytest.raises(
        ManifestError,
        match=r"spec.algorithm.distillation.teacher.path: there is no directory .*/teacher",
    ):
        check_files(resolve(load_job(job), job.parent))
    (job.parent / "teacher").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (job.parent / "teacher" / name).write_text("{}")
    with pytest.raises(
        ManifestError,
        match=r"teacher has no weights .*; this field needs a model with trained weights",
    ):
        check_files(resolve(load_job(job), job.parent))
    (job.parent / "teacher/model.safetensors").touch()
    check_files(resolve(load_job(job), job.parent))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "model.referencePath=there",
            "spec.model.referencePath: there is no directory {base}/there",
        ),
        (
            "algorithm={estimator: ppo, critic: {modelPath: there}}",
            "spec.algorithm.critic.modelPath: there is no directory {base}/there",
        ),
        (
            "reward={model: {url: 'http://rm', tokenizer: there}}",
            "spec.reward.model.tokenizer: {base}/there has no tokenizer (tokenizer.json",
        ),
    ],
)
def test_so_is_every_other_model(job: Path, change: str, message: str) -> None:
    with pytest.raises(ManifestError) as raised:
        check_files(resolve(load_job(job, [change]), job.parent))
    assert str(raised.value).startswith(message.format(base=job.parent.resolve()))


def test_paths_in_a_volume_stay_relative_to_its_root(job: Path) -> None:
    changes = [
        "model.volume={hostPath: {path: /models}}",
        "debug.replay=dump",
        "rollout.replicas=0",
    ]
    resolved = resolve(load_job(job, changes), job.parent)
    assert resolved.spec.model.path == "model"
    assert resolved.spec.data.prompts[0].path == f"{job.parent.resolve()}/rows.jsonl@[0:2]"
    with pytest.raises(ManifestError) as raised:
        check_files(resolved)
    assert "spec.model" not in str(raised.value)  # it may be in the volume
    assert "spec.debug.replay" in str(raised.value)


def test_a_job_that_only_distils_needs_no_reward(job: Path) -> None:
    job.write_text(
        JOB.replace(
            'reward: {function: "judge.py:score"}',
            "algorithm: {distillation: {teacher: {url: http://t}}}",
        )
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
    objects = list(YAML(typ="safe").load_all(result.stdout))
    pods = sorted(o["metadata"]["name"] for o in objects if o["kind"] == "Pod")
    assert pods == [
        "tiny-buffer-0-1-0",
        "tiny-rendezvous-0-1-0",
        "tiny-rollout-0-1-0",
        "tiny-rollout-1-1-0",
        "tiny-trainer-0-1-0",
    ]


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
    job: Path, changes: list[str], warned: list[str]
) -> None:
    words = [word for text in changes for word in ("--set", text.replace("HERE", str(job.parent)))]
    result = CliRunner().invoke(app, ["render", str(job), *words])
    assert result.exit_code == 0, result.output
    assert "warning: " not in result.stdout
    fields = [line.split(": ")[1] for line in result.stderr.splitlines()]
    assert sorted(fields) == sorted(f"spec.{field}" for field in warned)


def test_a_mounted_file_is_no_local_one(job: Path) -> None:
    mount = {"name": "mine", "mountPath": str(job.parent)}
    template = {"spec": {"containers": [{"name": "trainer", "volumeMounts": [mount]}]}}
    changes = [
        f"model.path={job.parent}/model",
        "data.prompts=[{path: /mnt/x.jsonl}]",
        "reward={type: math}",
        f"trainer.template={json.dumps(template)}",
    ]
    words = [word for text in changes for word in ("--set", text)]
    assert CliRunner().invoke(app, ["render", str(job), *words]).stderr == ""


def test_a_run_goes_on_only_with_its_own_manifest(job: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job), fresh=False)
    prepare(run, load_job(job, ["rollout.replicas=2", "failurePolicy.maxRestarts=9"]), fresh=False)
    with pytest.raises(ManifestError, match=r"spec\.data\.seed: None -> 4: a run that goes on"):
        prepare(run, load_job(job, ["data.seed=4"]), fresh=False)
    prepare(run, load_job(job, ["data.seed=4"]), fresh=True)
    assert json.loads((run / "job.json").read_text())["spec"]["data"]["seed"] == 4


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "Not a directory"), ("/proc/no/run", "No such file or directory")],
)
def test_a_run_directory_that_cannot_be_made_is_told_in_a_line(
    job: Path, place: str, message: str
) -> None:
    (job.parent / "file").touch()
    result = CliRunner().invoke(app, ["run", str(job), "--run-dir", str(job.parent / place)])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "--run-dir" in result.output


def test_a_job_that_wants_more_gpus_than_there_are_does_not_start(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    changes = ["--set", "trainer.gpusPerNode=1", "--set", "rollout.gpusPerReplica=1"]
    result = CliRunner().invoke(
        app, ["run", str(job), "--run-dir", str(tmp_path / "run"), *changes]
    )
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)
    assert "need 2 GPU(s), and this machine shows 1" in result.output


def test_a_job_whose_engine_is_not_on_this_machine_does_not_start(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_VLLM_PYTHON", str(tmp_path / "python"))
    words = ["run", str(job), "--run-dir", str(tmp_path / "run"), "--set", "rollout.engine=vllm"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)
    sentence = f"needs vLLM at {tmp_path / 'python'}: run `make vllm`, or set SLUICE_VLLM_PYTHON"
    assert sentence in " ".join(result.output.split())


def test_where_there_is_neither_run_nor_cluster_both_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = CliRunner().invoke(app, ["status", "mine"])
    assert result.exit_code == 1
    assert "error: there is no run in runs/mine, and no API server is known" in result.output
    assert "Config not found" not in result.output


@pytest.mark.parametrize("changes", [["--fresh"], ["--set", "trainer.steps=999"]], ids=str)
async def test_a_start_that_is_refused_changes_nothing_of_the_run_that_goes_on(
    job: Path, tmp_path: Path, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_client.run_dir.LOCK_SECONDS", 0.1)
    monkeypatch.setattr("sluice_cli.run.command.check_engine", lambda _: None)
    directory = tmp_path / "run"
    await asyncio.to_thread(prepare, directory, load_job(job), fresh=False)
    # The run succeeded once, was made longer, and goes on.
    run_state.StateFile(directory).save(run_state.State(status={"state": "Running"}))
    (directory / "summary.json").write_text('{"state": "Succeeded"}')
    held = await run_state.lock(directory, 0)
    before = {path.name: path.read_text() for path in directory.iterdir()}
    command = ["run", str(job), "--run-dir", str(directory), *changes]
    try:
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
    finally:
        os.close(held)
    assert result.exit_code == 2, result.output
    assert f"is in use by process {os.getpid()}" in result.output
    assert "already succeeded" not in result.output
    assert {path.name: path.read_text() for path in directory.iterdir()} == before


@pytest.mark.parametrize("state", ["Succeeded", "Restarting"])
def test_a_run_is_over_by_its_state_not_by_an_old_summary(
    job: Path, tmp_path: Path, state: str
) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job), fresh=False)
    (run / "summary.json").write_text('{"state": "Succeeded"}')
    run_state.StateFile(run).save(run_state.State(status={"state": state}))
    assert prepare(run, load_job(job), fresh=False).succeeded == (state == "Succeeded")


def test_a_state_that_cannot_be_read_keeps_the_record(job: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job), fresh=False)
    (run / "state.json").write_text("{")
    with pytest.raises(run_state.RunDirectoryError, match="not a state file"):
        prepare(run, load_job(job, ["trainer.steps=9"]), fresh=False)
    assert json.loads((run / "job.json").read_text())["spec"]["trainer"]["steps"] == 3


async def test_fresh_never_deletes_a_run_that_goes_on(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_client.run_dir.LOCK_SECONDS", 0.1)
    directory = tmp_path / "run"
    await asyncio.to_thread(prepare, directory, load_job(job), fresh=False)
    held = await run_state.lock(directory, 0)
    try:
        with pytest.raises(
            run_state.RunDirectoryError, match=f"{directory} is in use by process {os.getpid()}"
        ):
            await asyncio.to_thread(prepare, directory, load_job(job), fresh=True)
    finally:
        os.close(held)
    assert (directory / "job.json").exists()
    await asyncio.to_thread(prepare, directory, load_job(job), fresh=True)
    assert sorted(path.name for path in directory.iterdir()) == ["job.json", "run.lock"]


def test_a_full_disk_is_told_in_a_line(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sluice_cli.run.command._run", full)
    result = CliRunner().invoke(app, ["run", str(job), "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 2
    message = "the run cannot go on: [Errno 28] No space left on device; once this is fixed, the"
    assert message in result.output


def test_a_run_whose_manifest_is_broken_is_told_in_a_line(job: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "run", load_job(job), fresh=False)
    (tmp_path / "run/job.json").write_text("{")
    for command in (["run", str(job)], ["status"]):
        result = CliRunner().invoke(app, [*command, "--run-dir", str(tmp_path / "run")])
        assert result.exit_code in (1, 2), result.output
        assert "job.json: not valid JSON" in result.output


def test_fresh_never_deletes_what_is_no_run(job: Path, tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter1.tex").write_text("...")
    with pytest.raises(ManifestError, match="is not empty and holds no run"):
        prepare(mine, load_job(job), fresh=True)
    assert (mine / "chapter1.tex").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param(
            ["trainer.steps=9"],
            ["changed from the last checkpoint on: spec.trainer.steps: 3 -> 9"],
            id="longer",
        ),
        pytest.param(
            ["trainer.steps=9", "trainer.optimizer={lr: 1e-4, schedule: cosine}"],
            [
                "changed from the last checkpoint on: spec.trainer.optimizer.lr: None -> 0.0001",
                "changed from the last checkpoint on: spec.trainer.optimizer.schedule: "
                "None -> 'cosine'",
                "changed from the last checkpoint on: spec.trainer.steps: 3 -> 9",
                "the learning rate now reaches minLr at the new end of the run; to keep the old "
                "schedule, set trainer.optimizer.decaySteps to the old number of steps",
            ],
            id="longer, with a schedule",
        ),
        pytest.param(["rollout.replicas=2"], [], id="what may change at any time"),
    ],
)
def test_a_run_goes_on_changed_with_a_word_on_it(
    job: Path, tmp_path: Path, changes: list[str], told: list[str]
) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job), fresh=False)
    (run / "metrics.jsonl").write_text('{"step": 5}\n')
    changed = load_job(job, changes)
    assert [*change_notes(prepare(run, changed, fresh=False).changed, changed)] == told
    assert prepare(run, changed, fresh=False).changed == [], "what is accepted is the run's own"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(
            "trainer.steps=4",
            "spec.trainer.steps: 3 -> 4: 5 steps are trained already; expected at least as many",
            id="shorter than it is",
        ),
        pytest.param(
            "rollout.samplesPerPrompt=4",
            "spec.rollout.samplesPerPrompt: None -> 4: a run that goes on cannot change it, "
            "because its stored samples were generated with it",
            id="stored samples",
        ),
        pytest.param(
            "trainer.optimizer.weightDecay=0.5",
            "spec.trainer.optimizer.weightDecay: None -> 0.5: a run that goes on cannot "
            "change it, because the optimizer state in its checkpoints depends on it",
            id="optimizer's state",
        ),
        pytest.param(
            "tls.enabled=true",
            "spec.tls.enabled: None -> True: a run that goes on cannot change it, because it "
            "was started with it",
            id="anything else",
        ),
    ],
)
def test_what_a_run_does_not_survive_is_refused_with_a_reason(
    job: Path, tmp_path: Path, change: str, told: str
) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job), fresh=False)
    (run / "metrics.jsonl").write_text('{"step": 5}\n')
    with pytest.raises(ManifestError) as raised:
        prepare(run, load_job(job, [change]), fresh=False)
    assert f"  {told}\nuse another --run-dir" in str(raised.value)
    assert json.loads((run / "job.json").read_text())["spec"]["trainer"]["steps"] == 3


def test_a_run_starts_from_another_ones_model(job: Path, tmp_path: Path) -> None:
    other = tmp_path / "first"
    prepare(other, load_job(job), fresh=False)
    with pytest.raises(ManifestError, match="the run has no model and no checkpoint yet"):
        model_of(other)
    write_model(other / "checkpoints/hf", (), unit="bytes", context=2048)
    spec = load_job(job, model_of(other)).spec
    assert (spec.model.path, spec.model.init) == (str(other / "checkpoints/hf"), "pretrained")
    with pytest.raises(ManifestError, match=r"--from nowhere: runs/nowhere has no job\.json"):
        model_of(Path("nowhere"))


def test_differences_name_the_path() -> None:
    old = {"a": {"b": 1, "c": [1]}, "suspend": False}
    assert differences(old, {"a": {"b": 2, "c": [1]}, "suspend": True}) == ["spec.a.b: 1 -> 2"]
    assert differences(old, {"a": {"c": [1]}}) == ["spec.a.b: 1 -> None"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], ""), ([1.0], ""), ([0.0, 1.0], "▁█"), ([2.0, 2.0], "▁▁"), ([0.0, 0.5, 1.0], "▁▅█")],
    ids=str,
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


def test_a_long_sparkline_keeps_its_width() -> None:
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3700, "1:01:40")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--rollout-only", "--set", "model.init=pretrained"],
            ["model.init=pretrained", "debug.rolloutOnly=true"],
        ),
        (
            ["--set", "trainer.steps=2", "--train-from", "dump"],
            ["trainer.steps=2", "debug.replay={here}/dump", "rollout.replicas=0"],
        ),
    ],
    ids=str,
)
def test_one_half_of_the_loop_alone_is_a_change_of_the_manifest(
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    expected: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = []

    def run_local(path: Path, overrides: list[str], run_dir: Path | None, **_: bool) -> int:
        changes.extend(overrides)
        return 0

    monkeypatch.setattr("sluice_cli.run.command.run_local", run_local)
    assert CliRunner().invoke(app, ["run", str(job), *options]).exit_code == 0
    assert changes == [change.format(here=tmp_path) for change in expected]
    load_job(job, changes)


def test_paths_of_hooks_and_rewards_of_data_sets_are_the_manifests_too(job: Path) -> None:
    changes = [
        "rollout.hooks={beforeReward: a.py:f, afterReward: pkg.g}",
        "rollout.function=b.py:play",
    ]
    changes += [
        "evaluation={datasets: [{path: train.jsonl, reward: {function: c.py:h}}]}",
        "debug.replay=dump",
    ]
    resolved = resolve(load_job(job, [*changes, "rollout.replicas=0"]), job.parent)
    base, spec = job.parent.resolve(), resolved.spec
    assert spec.rollout.hooks.before_reward == f"{base}/a.py:f"
    assert spec.rollout.hooks.after_reward == "pkg.g"
    assert (spec.rollout.function, spec.debug.replay) == (f"{base}/b.py:play", f"{base}/dump")
    with pytest.raises(ManifestError) as error:
        check_files(resolved)
    for path in (
        "rollout.hooks.beforeReward",
        "rollout.function",
        "evaluation.datasets[0].reward.function",
    ):
        assert f"spec.{path}: there is no file {base}/" in str(error.value)
    assert f"spec.debug.replay: there is no file or directory {base}/dump" in str(error.value)
