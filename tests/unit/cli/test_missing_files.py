"""Paths of a manifest: relative to its directory, and checked before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.api import ManifestError, load_job
from sluice_cli.validate.missing_files import check_files
from sluice_client.resolve import resolve
from tests.unit.cli.conftest import JOB


def test_paths_are_relative_to_the_directory_of_the_manifest(job_file: Path) -> None:
    spec = resolve(load_job(job_file), job_file.parent).spec
    assert spec.model.path == str(job_file.parent / "model")
    assert spec.data.prompts[0].path == str(job_file.parent / "rows.jsonl@[0:2]")
    assert spec.reward is not None
    assert spec.reward.function == str(job_file.parent / "judge.py:score")


def test_words_of_a_command_that_name_files_become_absolute(job_file: Path) -> None:
    command = "rollout.environment.command=[python, judge.py, --fast, elsewhere.py]"
    resolved = resolve(load_job(job_file, [command]), job_file.parent)
    check_files(resolved)
    assert resolved.spec.rollout.environment
    expected = ["python", str(job_file.parent / "judge.py"), "--fast", "elsewhere.py"]
    assert resolved.spec.rollout.environment.command == expected


def test_paths_in_a_volume_stay_relative_to_its_root(job_file: Path) -> None:
    changes = [
        "model.volume={hostPath: {path: /models}}",
        "debug.replay=dump",
        "rollout.replicas=0",
    ]
    resolved = resolve(load_job(job_file, changes), job_file.parent)
    assert resolved.spec.model.path == "model"
    assert resolved.spec.data.prompts[0].path == f"{job_file.parent.resolve()}/rows.jsonl@[0:2]"
    with pytest.raises(ManifestError) as raised:
        check_files(resolved)
    assert "spec.model" not in str(raised.value)  # it may be in the volume
    assert "spec.debug.replay" in str(raised.value)


def test_paths_of_hooks_and_of_evaluation_rewards_are_resolved_and_checked(job_file: Path) -> None:
    changes = [
        "rollout.hooks={beforeReward: a.py:f, afterReward: pkg.g}",
        "rollout.function=b.py:play",
    ]
    changes += [
        "evaluation={datasets: [{path: train.jsonl, reward: {function: c.py:h}}]}",
        "debug.replay=dump",
    ]
    resolved = resolve(load_job(job_file, [*changes, "rollout.replicas=0"]), job_file.parent)
    base, spec = job_file.parent.resolve(), resolved.spec
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


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model/config.json", "has no config.json"),
        ("model", "has no tokenizer"),
        ("rows.jsonl", "rows.jsonl: no such prompt file"),
        ("judge.py", "spec.reward.function: there is no file"),
    ],
    ids=["config", "tokenizer", "prompts", "function"],
)
def test_a_missing_file_is_an_error_with_its_field(
    job_file: Path, missing: str, message: str
) -> None:
    for path in job_file.parent.glob("model/tokenizer*" if missing == "model" else missing):
        path.unlink()
    with pytest.raises(ManifestError) as raised:
        check_files(resolve(load_job(job_file), job_file.parent))
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
    ids=[
        "misspelt",
        "no function named",
        "not Python",
        "bound in a branch",
        "star import",
        "of a package",
    ],
)
def test_a_function_must_be_in_its_file(job_file: Path, function: str, message: str | None) -> None:
    (job_file.parent / "broken.py").write_text("\ndef f(:\n")
    (job_file.parent / "partial.py").write_text(
        "if True:\n    graded, other = print, print\nraise SystemExit\n"
    )
    (job_file.parent / "star.py").write_text("from elsewhere import *\n")
    resolved = resolve(load_job(job_file, [f"reward.function={function}"]), job_file.parent)
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
    ids=[
        "slice of letters",
        "slice of signs",
        "slice without brackets",
        "another ending",
        "empty directory",
    ],
)
def test_prompt_files_that_cannot_be_read_are_errors(
    job_file: Path, path: str, message: str
) -> None:
    (job_file.parent / "empty").mkdir()
    with pytest.raises(ManifestError) as raised:
        check_files(resolve(load_job(job_file, [f"data.prompts[0].path={path}"]), job_file.parent))
    assert str(raised.value).startswith("spec.data.prompts[0].path: ")
    assert message in str(raised.value)


def test_a_teacher_must_exist_with_weights(job_file: Path) -> None:
    job_file.write_text(
        JOB.replace("trainer:", "algorithm: {distillation: {teacher: {path: teacher}}}\n  trainer:")
    )
    with pytest.raises(
        ManifestError,
        match=r"spec.algorithm.distillation.teacher.path: there is no directory .*/teacher",
    ):
        check_files(resolve(load_job(job_file), job_file.parent))
    (job_file.parent / "teacher").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (job_file.parent / "teacher" / name).write_text("{}")
    with pytest.raises(
        ManifestError,
        match=r"teacher has no weights .*; this field needs a model with trained weights",
    ):
        check_files(resolve(load_job(job_file), job_file.parent))
    (job_file.parent / "teacher/model.safetensors").touch()
    check_files(resolve(load_job(job_file), job_file.parent))


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
        (
            "trainer={steps: 3, gpusPerNode: 0, backend: fsdp, lora: {from: there}}",
            "spec.trainer.lora.from: {base}/there has no adapter_config.json; expected a PEFT",
        ),
    ],
    ids=["reference", "critic", "reward tokenizer", "adapter"],
)
def test_every_other_model_must_exist(job_file: Path, change: str, message: str) -> None:
    with pytest.raises(ManifestError) as raised:
        check_files(resolve(load_job(job_file, [change]), job_file.parent))
    assert str(raised.value).startswith(message.format(base=job_file.parent.resolve()))


def test_a_job_that_only_distils_needs_no_reward(job_file: Path) -> None:
    job_file.write_text(
        JOB.replace(
            'reward: {function: "judge.py:score"}',
            "algorithm: {distillation: {teacher: {url: http://t}}}",
        )
    )
    check_files(resolve(load_job(job_file), job_file.parent))
