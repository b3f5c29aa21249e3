"""Launch scripts of slime and verl become manifests that `sluice validate` accepts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import save_file
from typer.testing import CliRunner

from sluice.data.writers import Writer
from sluice_cli.init.tiny_model import write_model
from sluice_cli.main import app
from tests.unit.migrate.import_tools import run, slime, spec_of, verl

GOLDEN = Path(__file__).parent / "golden"
CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
SCRIPTS = {
    "run-qwen3-4b.sh": ["slime"],
    "run-ppo-async.sh": ["slime"],
    "run-qwen2.5-7b-megatron.sh": ["verl", "--var", "HOME=/home/me"],
    "run-ppo-fsdp.sh": ["verl"],
    "trainer.yaml": ["verl"],
    "run-qwen3-4b-sft.sh": ["slime"],
    "run-sft-multiturn.sh": ["verl"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_becomes_its_manifest(name: str) -> None:
    project, *options = SCRIPTS[name]
    result = run(project, GOLDEN / name, *options)
    assert result.exit_code == 0, result.output
    golden = GOLDEN / f"{name.rpartition('.')[0]}.rljob.yaml"
    if os.environ.get("SLUICE_UPDATE_GOLDEN"):
        golden.write_text(result.stdout)
    assert result.stdout == golden.read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_manifest_is_valid(name: str, tmp_path: Path) -> None:
    """Create the files that the manifest names, because `sluice validate` checks them."""
    project, *options = SCRIPTS[name]
    target = tmp_path / "job.yaml"
    assert run(project, GOLDEN / name, *options, "-o", target).exit_code == 0
    yaml = YAML()
    document = yaml.load(target.read_text())
    spec = document["spec"]
    for source in [*spec["data"]["prompts"], *spec.get("evaluation", {}).get("datasets", [])]:
        path, at, part = source["path"].partition("@")
        local = tmp_path / path.replace("/", "_")
        with Writer(local, force=True) as writer:
            writer.write({"prompt": "x", "messages": CHAT, "label": "y"})
        source["path"] = f"{local.name}{at}{part}"
    write_model(tmp_path / "model", (), unit="bytes", chats=True, context=65536)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model/model.safetensors")
    spec["model"]["path"] = "model"
    if "modelPath" in spec.get("algorithm", {}).get("critic", {}):
        spec["algorithm"]["critic"]["modelPath"] = "model"
    if "function" in spec.get("reward", {}):
        (tmp_path / "reward.py").write_text(
            "def compute_score(data_source, solution_str, ground_truth): return 1\n"
        )
        spec["reward"]["function"] = "reward.py:compute_score"
    yaml.dump(document, target)
    result = CliRunner().invoke(app, ["validate", str(target)])
    assert result.exit_code == 0, result.output


def test_untranslated_settings_are_listed_in_the_manifest_and_on_stderr(tmp_path: Path) -> None:
    result = slime(tmp_path, "--brand-new-flag 3 --optimizer sgd")
    assert (
        "# Not translated:\n#   --brand-new-flag 3 (line 1): sluice does not know this setting"
        in result.stdout
    )
    assert "#   --optimizer sgd (line 1): sluice trains with AdamW" in result.stdout
    assert "--brand-new-flag 3" in result.stderr


def test_notes_are_written_as_json(tmp_path: Path) -> None:
    report = json.loads(slime(tmp_path, "--brand-new-flag 3", "--json").stdout)
    assert {"kind": "not translated", "subject": "--brand-new-flag 3", "line": 1,
            "text": "sluice does not know this setting"} in report["notes"]  # fmt: skip
    assert YAML(typ="safe").load(report["manifest"])["spec"]["rollout"]["batchSize"] == 8


def test_a_secret_in_a_script_never_gets_into_the_manifest(tmp_path: Path) -> None:
    result = slime(tmp_path, "--use-wandb --wandb-key 0123abc")
    assert "--wandb-key" in result.stdout
    assert "0123abc" not in result.output


def test_fields_that_the_api_refuses_are_removed_and_reported(tmp_path: Path) -> None:
    result = slime(
        tmp_path, "--use-kl-loss --kl-loss-coef 0.1 --kl-coef 0.1 --gamma 0.9 --global-batch-size 5"
    )
    spec = spec_of(result)
    assert spec["algorithm"]["kl"] == {"coef": 0.1}
    assert (
        "--kl-loss-coef: algorithm.kl.lossCoef: coef (in the reward) and lossCoef (in the loss) "
        "cannot both" in result.stdout
    )
    assert "gamma" not in spec["algorithm"]
    assert "a batch of 32 samples cannot be split into optimizer steps of 5" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slime", "/no/such.sh"], "/no/such.sh: No such file or directory"),
        (["slime", "{empty}"], "no command that runs train.py or train_async.py"),
        (["slime", "{open}"], "line 1: ' is opened here and never closed"),
        (["slime", "{bare}"], "no --prompt-data: the script names no prompts to train on"),
        (["slime", "{bare}", "--var", "x"], "--var x: expected NAME=VALUE"),
        (["verl", "no-such-file"], "no-such-file: No such file or directory"),
        (["verl", "{other}"], "no command that runs verl.trainer.main_ppo or another trainer"),
        (["verl", "{wraps}"], "it starts run_it.sh: import that script"),
        (["verl", "python -m verl.trainer.main_ppo x=1"], "no data.train_files: the configuration"),
        (["verl", "{list}"], "expected a configuration"),
    ],
)  # fmt: skip
def test_an_input_that_cannot_be_imported_is_refused_with_the_reason(
    tmp_path: Path, words: list[str], message: str
) -> None:
    texts = {
        "empty": "",
        "open": "x 'y",
        "bare": "python train.py --lr 1",
        "list": "- a",
        "other": "python -m verl.trainer.main_eval a=1",
        "wraps": "bash run_it.sh 3",
    }
    paths = {}
    for name, text in texts.items():
        paths[name] = tmp_path / f"{name}.{'yaml' if name == 'list' else 'sh'}"
        paths[name].write_text(text)
    result = run(*(word.format(**paths) for word in words))
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_a_file_is_overwritten_only_with_force(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    assert slime(tmp_path, "", "-o", str(tmp_path / "job.yaml")).exit_code == 2
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert slime(tmp_path, "", "-o", str(tmp_path / "job.yaml"), "--force").exit_code == 0
    assert (tmp_path / "job.yaml").read_text().startswith("# Imported from run.sh.")


def test_a_job_that_is_not_valid_yet_is_written_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python train.py --prompt-data /d/rows.jsonl --rm-type f1 --num-rollout 3\n"
    )
    result = run("slime", tmp_path / "run.sh")
    assert result.exit_code == 1
    assert "the job is not valid yet" in result.output
    assert "spec.model: required field is missing" in result.output


def test_an_estimator_is_never_exchanged_for_another() -> None:
    result = verl("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1")
    assert result.exit_code == 1
    assert (
        "spec.algorithm.estimator: this estimator compares the responses to a prompt"
        in result.output
    )
    assert "estimator: grpo # algorithm.adv_estimator" in result.stdout


def test_profiling_names_the_field_for_it(tmp_path: Path) -> None:
    words = "debug.profile: [steps]"
    assert words in slime(tmp_path, "--use-pytorch-profiler --profile-step-start 5").stdout
    assert words in verl("global_profiler.steps=[1,2]").stdout
    assert words in verl("trainer.profile_steps=[1,2]").stdout
    assert words not in verl("global_profiler.steps=null").stdout
