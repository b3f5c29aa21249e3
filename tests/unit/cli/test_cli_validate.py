"""`sluice validate`: every fault that would end a run, with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file

from tests.unit.cli.conftest import Sluice

Break = Callable[[Path], None]


def row(task: Path, number: int, text: str) -> None:
    """Replace a line of train.jsonl, counted from 1."""
    file = task / "train.jsonl"
    lines = file.read_text().splitlines()
    lines[number - 1] = text
    file.write_text("\n".join(lines) + "\n")


def reward(task: Path, before: str) -> None:
    file = task / "reward.py"
    file.write_text(before + file.read_text())


def config(task: Path, **changes: object) -> None:
    file = task / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without(task: Path, key: str) -> None:
    file = task / "model/config.json"
    config = json.loads(file.read_text())
    del config[key]
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        pytest.param(
            lambda t: row(t, 700, '{"prompt": "max 1 2 3 ='),
            "spec.data.prompts[0].path: {task}/train.jsonl:700:24: not valid JSON: Invalid control",
            id="broken JSON",
        ),
        pytest.param(
            lambda t: row(t, 3, '{"question": "max 1 2 3 =", "label": "3"}'),
            "train.jsonl:3: no column 'prompt' or 'input'; the row has 'question', 'label'; did "
            "you mean promptKey: question?",
            id="missing column",
        ),
        pytest.param(
            lambda t: row(t, 105, r'{"prompt": "max \ud83d 3 =", "label": "7"}'),
            "train.jsonl:105: prompt: half of a surrogate pair, \\ud83d, at character 4",
            id="half a surrogate pair",
        ),
        pytest.param(
            lambda t: row(t, 4, '{"prompt": "max 1 =", "label": ' + "[" * 70 + "]" * 70 + "}"),
            "train.jsonl:4: label[0][0]",
            id="nested too deep",
        ),
        pytest.param(
            lambda t: row(t, 9, '{"prompt": [{"role": "user", "content": "max"}], "label": "3"}'),
            "spec.data.prompts[0].path: {task}/train.jsonl:9: the model has no chat template, "
            "which a prompt of chat messages (or applyChatTemplate) needs; put the model's "
            "chat_template.jinja into",
            id="messages without a chat template",
        ),
        pytest.param(
            lambda t: (t / "train.jsonl").write_text("\n"),
            "spec.data.prompts[0].path: {task}/train.jsonl: no rows",
            id="empty file",
        ),
        pytest.param(
            lambda t: (t / "eval.jsonl").write_text(""),
            "spec.evaluation.datasets[0].path: {task}/eval.jsonl: no rows",
            id="empty evaluation",
        ),
        pytest.param(
            lambda t: reward(t, "import no_such_package\n"),
            "spec.reward.function: {task}/reward.py:score: cannot import {task}/reward.py: "
            "ModuleNotFoundError: No module named 'no_such_package'",
            id="reward that cannot be imported",
        ),
        pytest.param(
            lambda t: reward(t, "raise SystemExit(3)\n"),
            "spec.reward.function: the import ended Python with exit code 3",
            id="reward that ends Python",
        ),
        pytest.param(
            lambda t: config(t, model_type="mamba"),
            "spec.model.path: {task}/model/config.json: model_type 'mamba' cannot be trained "
            "with trainer.backend: megatron, which supports llama, qwen2, qwen3",
            id="unknown family",
        ),
        pytest.param(
            lambda t: config(t, hidden_act="gelu"),
            "activations other than silu are not supported",
            id="unsupported part of a family",
        ),
        pytest.param(
            lambda t: without(t, "vocab_size"),
            "spec.model.path: {task}/model/config.json: 'vocab_size' is missing",
            id="config without a field",
        ),
        pytest.param(
            lambda t: config(t, max_position_embeddings=4),
            "spec.rollout.sampling.maxResponseTokens: 4 tokens and a prompt do not fit into the "
            "context of 4 tokens (config.json of the model): expected at most 3",
            id="response beyond the context",
        ),
        pytest.param(
            lambda t: config(t, max_position_embeddings=8),
            "spec.data.prompts[0]: 100 of the first 100 prompts have more than 4 tokens (up "
            "to 5), the most that data.maxPromptTokens allows or that "
            "maxResponseTokens leaves in the context",
            id="prompts beyond the context",
        ),
        pytest.param(
            lambda t: (t / "model/tokenizer.json").write_text("{}"),
            "spec.model.path: {task}/model/tokenizer.json: not a tokenizer: ",
            id="broken tokenizer",
        ),
    ],
)
def test_validate_reports_what_would_end_a_run(
    task: Path, sluice: Sluice, harm: Break, message: str
) -> None:
    harm(task)
    result = sluice("validate", task / "job.yaml")
    assert result.exit_code == 2, result.output
    assert message.format(task=task) in result.output
    assert "is valid" not in result.output


def test_some_prompts_that_are_too_long_are_a_note(task: Path, sluice: Sluice) -> None:
    row(task, 2, json.dumps({"prompt": "max " + "1 " * 70 + "=", "label": "1"}))
    result = sluice("validate", task / "job.yaml")
    assert result.exit_code == 0, result.output
    assert "note: spec.data.prompts[0]: 1 of the first 100 prompts have more than 60" in (
        result.output
    )
    assert "such prompts are skipped" in result.output


def test_a_source_with_one_prompt_that_fits_is_valid(task: Path, sluice: Sluice) -> None:
    config(task, max_position_embeddings=8)
    row(task, 1000, '{"prompt": "max 1", "label": "1"}')
    result = sluice("validate", task / "job.yaml")
    assert result.exit_code == 0, result.output
    assert "note: spec.data.prompts[0]: 100 of the first 100 prompts" in result.output


def test_a_model_that_only_generates_may_be_of_any_family(task: Path, sluice: Sluice) -> None:
    config(task, model_type="mamba")
    (task / "model/model.safetensors").touch()
    words = ("--set", "model.init=pretrained", "--set", "debug.rolloutOnly=true")
    assert sluice("validate", task / "job.yaml", *words).exit_code == 0


def test_a_package_that_only_the_pods_have_is_noted(task: Path, sluice: Sluice) -> None:
    result = sluice("validate", task / "job.yaml", "--set", "reward.function=my_lab.rewards.score")
    assert result.exit_code == 0, result.output
    assert "note: spec.reward.function: not checked: package my_lab is not installed" in (
        result.output
    )


def test_a_model_of_transformers_is_enough_for_fsdp(task: Path, sluice: Sluice) -> None:
    config(task, model_type="gpt_neox")
    words = ("validate", task / "job.yaml", "--set", "trainer.backend=fsdp")
    assert sluice(*words).exit_code == 0
    config(task, model_type="no_such_family")
    assert "model_type 'no_such_family' is no language model of transformers" in (
        sluice(*words).output
    )


@pytest.mark.parametrize(
    ("rate", "noted"), [pytest.param("1e-6", True, id="low"), pytest.param("1e-5", False, id="fit")]
)
def test_a_low_learning_rate_of_an_adapter_is_a_note(
    task: Path, sluice: Sluice, rate: str, noted: bool
) -> None:
    changes = ["trainer.backend=fsdp", "trainer.lora.rank=8", f"trainer.optimizer.lr={rate}"]
    words = [word for change in changes for word in ("--set", change)]
    result = sluice("validate", task / "job.yaml", *words)
    assert result.exit_code == 0, result.output
    assert ("is low for an adapter" in result.output) == noted


def test_deep_shows_prompts_and_a_reward(task: Path, sluice: Sluice) -> None:
    result = sluice("validate", task / "job.yaml", "--deep", "-o", "json")
    assert result.exit_code == 0, result.output
    [answer] = json.loads(result.stdout)
    assert answer["valid"] is True
    assert answer["job"]["steps"] == 20
    trial = answer["trial"]
    assert [prompt["text"] for prompt in trial["prompts"][:2]] == ["max 0 0 0 =", "max 1 0 1 ="]
    assert len(trial["prompts"]) == 10
    assert trial["prompts"][0]["tokens"] == 5
    assert trial["prompts"][0]["where"] == f"{task}/train.jsonl:1"
    assert (trial["reward"]["label"], trial["reward"]["reward"]) == ("0", 1.0)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_a_note(
    task: Path, sluice: Sluice
) -> None:
    config(task, vocab_size=7)
    result = sluice("validate", task / "job.yaml")
    assert "note: spec.model.path: " in result.output
    assert "tokens, the model's embedding 7: rows with a token id of 7 or more are refused" in (
        result.output
    )
    result = sluice("validate", task / "job.yaml", "--deep")
    assert result.exit_code == 2
    assert "train.jsonl:1: token 0 is 'max', id " in result.output
    assert "and the model's embedding has 7 tokens (vocab_size of its config.json)" in result.output


def test_deep_reports_what_the_reward_raised(task: Path, sluice: Sluice) -> None:
    (task / "reward.py").write_text("def score(sample):\n    return sample.labell\n")
    result = sluice("validate", task / "job.yaml", "--deep")
    assert result.exit_code == 2
    assert "spec.reward: " in result.output
    assert "AttributeError: 'RewardInput' object has no attribute 'labell' (reward.py:2)" in (
        result.output
    )


@pytest.mark.parametrize(
    ("code", "harm", "message"),
    [
        pytest.param(
            "def score(sample):\n    return 1 / (sample.label != '9999')\n",
            lambda task: row_of(task / "eval.jsonl", '{"prompt": "max 1 =", "label": "9999"}'),
            "spec.reward: {task}/reward.py:score raised ZeroDivisionError: division by zero "
            "(reward.py:2) (the label of {task}/eval.jsonl:1 as the answer)",
            id="a row of the evaluation",
        ),
        pytest.param(
            "def score(sample):\n    return 1\n"
            "def evaluated(sample):\n    return sample.metadata['key']\n",
            lambda task: own_reward(task, "evaluated"),
            "spec.evaluation.datasets[0].reward: {task}/reward.py:evaluated raised KeyError: 'key'",
            id="a reward of the evaluation",
        ),
        pytest.param(
            "def score(samples):\n    assert len(samples) == 1\n    return [1.0]\n",
            lambda task: grouped(task),
            "spec.reward: {task}/reward.py:score raised AssertionError",
            id="a reward of a whole group",
        ),
    ],
)
def test_deep_calls_every_reward(
    task: Path, sluice: Sluice, code: str, harm: Break, message: str
) -> None:
    (task / "reward.py").write_text(code)
    harm(task)
    result = sluice("validate", task / "job.yaml", "--deep")
    assert result.exit_code == 2, result.output
    assert message.format(task=task) in result.output


def row_of(file: Path, text: str) -> None:
    file.write_text(text + "\n")


def own_reward(task: Path, function: str) -> None:
    document = YAML(typ="safe").load((task / "job.yaml").read_text())
    document["spec"]["evaluation"]["datasets"][0]["reward"] = {"function": f"reward.py:{function}"}
    YAML().dump(document, task / "job.yaml")


def grouped(task: Path) -> None:
    document = YAML(typ="safe").load((task / "job.yaml").read_text())
    document["spec"]["reward"]["group"] = True
    YAML().dump(document, task / "job.yaml")


def test_errors_are_printed_last(task: Path, sluice: Sluice) -> None:
    row(task, 2, json.dumps({"prompt": "max " + "1 " * 70 + "=", "label": "1"}))
    (task / "reward.py").write_text("def score(sample):\n    return sample.labell\n")
    broken = task / "broken.yaml"
    broken.write_text("kind: RLJob\n")
    result = sluice("validate", broken, task / "job.yaml", "--deep")
    assert result.exit_code == 2
    lines = result.output.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    assert errors == [len(lines) - 2, len(lines) - 1], result.output
    assert lines[-1].startswith(f"error: {task / 'job.yaml'}: spec.reward: ")


def test_json_includes_invalid_files(task: Path, sluice: Sluice) -> None:
    result = sluice("validate", "/no/such.yaml", task / "job.yaml", "-o", "yaml")
    assert result.exit_code == 2
    bad, good = YAML(typ="safe").load(result.stdout)
    assert (bad["valid"], bad["job"]) == (False, None)
    assert bad["problems"] == ["/no/such.yaml: No such file or directory"]
    assert (good["valid"], good["job"]["name"], good["problems"]) == (True, "digits", [])


def test_run_refuses_an_invalid_task_before_it_starts(
    task: Path, sluice: Sluice, tmp_path: Path
) -> None:
    row(task, 3, "{")
    result = sluice("run", task / "job.yaml", "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert "train.jsonl:3:1: not valid JSON" in result.output
    assert not (tmp_path / "run").exists()


def test_validate_describes_a_valid_job(job_file: Path, sluice: Sluice) -> None:
    result = sluice("validate", job_file)
    assert result.exit_code == 0
    assert "RLJob default/tiny is valid: grpo, 3 steps of 32 x 8 samples" in result.output


def test_validate_goes_on_after_a_missing_file(job_file: Path, sluice: Sluice) -> None:
    result = sluice("validate", "/no/such.yaml", job_file)
    assert result.exit_code == 2
    assert "/no/such.yaml: No such file" in result.output
    assert "is valid" in result.output


def test_a_damaged_model_is_a_problem(task: Path, sluice: Sluice) -> None:
    (task / "model/model.safetensors").touch()
    result = sluice("validate", task / "job.yaml", "--set", "model.init=pretrained")
    assert result.exit_code == 2
    message = " ".join(result.output.split())
    assert "is damaged or no safetensors file (0 bytes): download the model again" in message


def test_parts_that_are_not_trained_are_noted(task: Path, sluice: Sluice) -> None:
    names = ["model.norm.weight", "mtp.fc.weight", "mtp.norm.weight"]
    save_file({name: np.zeros(2) for name in names}, task / "model/model.safetensors")
    assert "kept" not in sluice("validate", task / "job.yaml").output
    result = sluice("validate", task / "job.yaml", "--set", "spec.model.init=pretrained")
    assert (
        f"note: spec.model.path: {task}/model: the language model is trained; kept and exported as "
        "they are: mtp (2 tensors)"
    ) in result.output
    settings = ("spec.trainer.backend=fsdp", "spec.trainer.mtp={}", "spec.model.init=pretrained")
    options = [word for setting in settings for word in ("--set", setting)]
    assert "kept" not in sluice("validate", task / "job.yaml", *options).output


IN_PLACE = "weightSync.pauseMode=in_place"


@pytest.mark.parametrize(
    ("lora", "refused"),
    [
        pytest.param("{targetModules: [q_proj, o_proj]}", True, id="q alone"),
        pytest.param("{targetModules: [k_proj]}", True, id="k alone"),
        pytest.param("{excludeModules: [v_proj]}", True, id="all but v"),
        pytest.param("{targetModules: [q_proj, v_proj]}", False, id="q and v"),
        pytest.param("{excludeModules: [q_proj, k_proj, v_proj]}", False, id="none of them"),
        pytest.param("{targetModules: [self_attn.k_proj]}", False, id="an unknown name"),
    ],
)
def test_layers_of_an_adapter_that_sglang_cannot_join_are_refused(
    task: Path, sluice: Sluice, lora: str, refused: bool
) -> None:
    changes = ["trainer.backend=fsdp", f"trainer.lora={lora}"]
    changes += ["weightSync={lora: adapter, pauseMode: versions}"]
    changes += ["model.init=pretrained", "trainer.optimizer.lr=1e-4"]
    save_file({"w": np.zeros(1)}, task / "model" / "model.safetensors")
    words = [word for change in changes for word in ("--set", change)]
    result = sluice("validate", task / "job.yaml", *words)
    assert (
        "trainer.lora.targetModules: with pauseMode: versions SGLang joins" in result.output
    ) == refused
    if refused:
        assert result.exit_code == 2
        vllm = sluice("validate", task / "job.yaml", *words, "--set", "rollout.engine=vllm")
        assert "joins q_proj" not in vllm.output
        in_place = sluice("validate", task / "job.yaml", *words, "--set", IN_PLACE)
        assert "joins q_proj" not in in_place.output
