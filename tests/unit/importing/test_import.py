"""Launch scripts of slime and verl, written as their users do -> manifests that `sluice validate` takes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from sluice.cli.main import app

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = {
    "run-qwen3-4b.sh": ["slime"],
    "run-ppo-async.sh": ["slime"],
    "run-qwen2.5-7b-megatron.sh": ["verl", "--var", "HOME=/home/me"],
    "run-ppo-fsdp.sh": ["verl"],
    "trainer.yaml": ["verl"],
    "run-qwen3-4b-sft.sh": ["slime"],
    "run-sft-multiturn.sh": ["verl"],
}


def run(*words: Any) -> Result:
    return CliRunner().invoke(app, ["import", *map(str, words)])


def spec_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    spec: dict[str, Any] = YAML(typ="safe").load(result.stdout)["spec"]
    return spec


def slime(tmp_path: Path, arguments: str, *options: str, entry: str = "train.py") -> Result:
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 {entry} --hf-checkpoint /m --prompt-data /d/rows.jsonl --num-rollout 9 --rollout-batch-size 8 "
        f"--n-samples-per-prompt 4 --rm-type math {arguments}\n"
    )
    return run("slime", script, *options)


def verl(arguments: str, *options: str, entry: str = "verl.trainer.main_ppo") -> Result:
    command = f"python3 -m {entry} data.train_files=/d/train.parquet actor_rollout_ref.model.path=/m {arguments}"
    return run("verl", command, *options)


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
    """With the files where the manifest says: `sluice validate` looks for them."""
    project, *options = SCRIPTS[name]
    target = tmp_path / "job.yaml"
    assert run(project, GOLDEN / name, *options, "-o", target).exit_code == 0
    yaml = YAML()
    document = yaml.load(target.read_text())
    spec = document["spec"]
    for source in [*spec["data"]["prompts"], *spec.get("evaluation", {}).get("datasets", [])]:
        path, at, part = source["path"].partition("@")
        local = tmp_path / path.replace("/", "_")
        local.write_text('{"prompt": "x"}\n')
        source["path"] = f"{local.name}{at}{part}"
    model = tmp_path / "model"
    model.mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / file).write_text("{}")
    spec["model"]["path"] = "model"
    if "function" in spec.get("reward", {}):
        (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1\n")
        spec["reward"]["function"] = "reward.py:compute_score"
    yaml.dump(document, target)
    result = CliRunner().invoke(app, ["validate", str(target)])
    assert result.exit_code == 0, result.output


def test_what_is_lost_stands_above_the_manifest_and_on_stderr(tmp_path: Path) -> None:
    result = slime(tmp_path, "--brand-new-flag 3 --optimizer sgd")
    assert "# Not translated:\n#   --brand-new-flag 3 (line 1): sluice knows no such argument" in result.stdout
    assert "#   --optimizer sgd (line 1): sluice has AdamW" in result.stdout
    assert "--brand-new-flag 3" in result.stderr


def test_notes_are_for_machines_too(tmp_path: Path) -> None:
    found = json.loads(slime(tmp_path, "--brand-new-flag 3", "--json").stdout)
    assert {"kind": "not translated", "subject": "--brand-new-flag 3", "line": 1,
            "text": "sluice knows no such argument"} in found["notes"]  # fmt: skip
    assert YAML(typ="safe").load(found["manifest"])["spec"]["rollout"]["batchSize"] == 8


def test_a_key_in_a_script_never_gets_into_the_manifest(tmp_path: Path) -> None:
    result = slime(tmp_path, "--use-wandb --wandb-key 0123abc")
    assert "--wandb-key" in result.stdout
    assert "0123abc" not in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--global-batch-size 16", {"trainer": {"stepsPerBatch": 2}}),
        ("--num-steps-per-rollout 4", {"trainer": {"stepsPerBatch": 4}}),
        ("--rm-type dapo --reward-key score", {"reward": {"type": "dapo", "key": "score"}}),
        ("--rm-type remote_rm --rm-url http://rm:80/x", {"reward": {"url": "http://rm:80/x"}}),
        ("--custom-rm-path my.rewards.score --group-rm", {"reward": {"function": "my.rewards.score", "group": True}}),
        ("--rm-type mystery", {"reward": {"type": "data_source"}}),
        ("--kl-loss-coef 0.1", {"algorithm": None}),
        (
            "--use-kl-loss --kl-loss-coef 0.1 --use-unbiased-kl",
            {"algorithm": {"kl": {"lossCoef": 0.1, "unbiased": True}}},
        ),
        ("--tis-clip 3", {"algorithm": None}),
        ("--use-tis --tis-clip 3", {"algorithm": {"offPolicy": {"method": "tis", "high": 3.0}}}),
        (
            "--use-opsm --use-rollout-logprobs",
            {"algorithm": {"offPolicy": {"opsmDelta": 1e-4, "oldLogProbs": "rollout"}}},
        ),
        (
            "--advantage-estimator ppo --lr 2e-6 --num-critic-only-steps 2",
            {"algorithm": {"estimator": "ppo", "critic": {"lr": 2e-6, "warmupSteps": 2}}},
        ),
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2", {"rollout": {"replicas": 4, "gpusPerReplica": 2}}),
        (
            "--rollout-num-gpus 32 --rollout-num-gpus-per-engine 16",
            {"rollout": {"replicas": 2, "gpusPerReplica": 8, "nodesPerReplica": 2}},
        ),
        ("--sglang-cuda-graph-bs 1 2", {"rollout": {"engineArgs": {"cuda-graph-bs": ["1", "2"]}}}),
        ("--sglang-max-running-requests 64", {"rollout": {"engineArgs": {"max-running-requests": 64}}}),
        ("--dynamic-sampling-filter-path my.keep", {"rollout": {"dynamicFilter": "my.keep"}}),
        ("--lr=3e-6 --lr 4e-6", {"trainer": {"optimizer": {"lr": 4e-6}}}),
        ("--update-weight-buffer-size $((256 * 1024 * 1024))", {"weightSync": {"bucketMiB": 256}}),
        ("--eval-top-p 0.7", {"evaluation": None}),
        ("--custom-generate-function-path my.play", {"rollout": {"function": "my.play"}}),
    ],
)
def test_arguments_of_slime(tmp_path: Path, arguments: str, expected: dict[str, Any]) -> None:
    _has(spec_of(slime(tmp_path, arguments)), expected)


def unwrapped(result: Result) -> str:
    """What stands above the manifest, in one line."""
    return " ".join(result.stdout.partition("apiVersion")[0].replace("#", "").split())


TAUGHT = "--use-opd --opd-kl-coef 0.5"
BY_TEACHER = (
    "--opd-type sglang --custom-rm-path slime.rollout.on_policy_distillation.reward_func --rm-url http://t:1/generate "
    "--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards"
)


def test_a_teacher_behind_slimes_remote_reward_is_all_that_there_is(tmp_path: Path) -> None:
    result = slime(tmp_path, f"{TAUGHT} {BY_TEACHER} --n-samples-per-prompt 1")
    spec = spec_of(result)
    assert spec["algorithm"]["distillation"] == {"coef": 0.5, "teacher": {"url": "http://t:1"}}
    assert "reward" not in spec
    assert "opd" not in result.stdout.partition("apiVersion")[0]


def test_slimes_teacher_in_the_trainer_stands_beside_the_reward(tmp_path: Path) -> None:
    result = slime(tmp_path, f"{TAUGHT} --opd-type megatron --opd-teacher-load /m/teacher --rollout-temperature 0.8")
    spec = spec_of(result)
    assert spec["algorithm"]["distillation"] == {"coef": 0.5, "teacher": {"path": "/m/teacher"}}
    assert spec["reward"] == {"type": "math_prm800k"}
    assert "name the teacher's Hugging Face directory" in unwrapped(result)
    assert "algorithm" not in spec_of(slime(tmp_path, "--opd-type megatron --opd-teacher-load /m/t"))


def test_what_slimes_teacher_cannot_be_here_is_said(tmp_path: Path) -> None:
    hot = slime(tmp_path, f"{TAUGHT} {BY_TEACHER} --rollout-temperature 0.8")
    assert hot.exit_code == 1
    assert "spec.algorithm.distillation.teacher.url: SGLang scores given tokens at temperature 1" in hot.output
    itself = slime(tmp_path, f"{TAUGHT} --opd-type self --opd-teacher-load /m/t")
    assert "--opd-type self (line 1): sluice distils from an SGLang server" in unwrapped(itself)
    evaluated = slime(tmp_path, f"{TAUGHT} {BY_TEACHER} --eval-interval 5 --eval-prompt-data aime /d/aime.jsonl")
    assert "evaluation" not in spec_of(evaluated)
    assert "sluice wants a reward: evaluation.datasets[].reward" in unwrapped(evaluated)


def test_verls_teacher(tmp_path: Path) -> None:
    loss = "distillation.distillation_loss"
    common = (
        "distillation.enabled=True distillation.teacher_models.teacher_model.model_path=/m/large "
        f"{loss}.distillation_loss_coef=0.3 data.val_files=/d/test.parquet trainer.test_freq=5"
    )
    gradient = f"{common} {loss}.use_policy_gradient=True {loss}.loss_mode=k1"
    both = spec_of(verl(gradient))
    assert both["algorithm"]["distillation"] == {"coef": 0.3, "teacher": {"path": "/m/large"}}
    assert both["reward"] == {"type": "data_source"}
    alone = verl(f"{gradient} {loss}.use_task_rewards=False algorithm.adv_estimator=grpo")
    assert "reward" not in spec_of(alone)
    assert spec_of(alone)["evaluation"]["datasets"][0]["reward"] == {"type": "data_source"}
    supervised = verl(common)
    assert "distillation" not in spec_of(supervised)["algorithm"]
    assert "use_policy_gradient with loss_mode k1" in unwrapped(supervised)


def _has(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All that is expected is there; what is expected to be None or empty is not."""
    for key, value in expected.items():
        if isinstance(value, dict) and value:
            _has(found[key], value)
        else:
            assert found.get(key) == (value or None)


def test_slimes_async_trainer_is_one_step_off(tmp_path: Path) -> None:
    rollout = spec_of(slime(tmp_path, "", entry="train_async.py"))["rollout"]
    assert (rollout["mode"], rollout["maxStaleness"]) == ("async", 1)


def test_a_value_that_is_not_known_is_asked_for(tmp_path: Path) -> None:
    result = slime(tmp_path, "--lr $LR --save-interval ${EVERY:-7}")
    assert "--lr ${LR} (line 1): the script does not say it: --var gives $LR" in result.stdout
    assert "$(nproc) would have to be run" in slime(tmp_path, "--lr $(nproc)").stdout
    assert spec_of(result)["checkpoint"]["everySteps"] == 7
    assert spec_of(slime(tmp_path, "--lr $LR", "--var", "LR=1e-5"))["trainer"]["optimizer"]["lr"] == 1e-5


def test_what_the_rules_of_the_api_refuse_is_left_out_and_said(tmp_path: Path) -> None:
    result = slime(tmp_path, "--use-kl-loss --kl-loss-coef 0.1 --kl-coef 0.1 --gamma 0.9 --global-batch-size 5")
    spec = spec_of(result)
    assert spec["algorithm"]["kl"] == {"coef": 0.1}
    assert (
        "--kl-loss-coef: algorithm.kl.lossCoef: coef (in the reward) and lossCoef (in the loss) cannot both"
        in result.stdout
    )
    assert "gamma" not in spec["algorithm"]
    assert "32 samples of a batch cannot be split into optimizer steps of 5" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            {"algorithm": {"estimator": "gspo", "clip": None}},
        ),
        (
            "algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4 "
            "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            {"algorithm": {"estimator": "rloo", "loss": "reinforce"}},
        ),
        (
            "algorithm.adv_estimator=gae critic.optim.lr=2e-5 trainer.critic_warmup=3",
            {"algorithm": {"estimator": "ppo", "critic": {"lr": 2e-5, "warmupSteps": 3, "clip": 0.5}}},
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_penalty=mse",
            {"algorithm": {"kl": {"coef": 0.001, "type": "k2"}}},
        ),
        (
            "actor_rollout_ref.actor.kl_loss_coef=0.5",
            {"algorithm": {"kl": None}},
        ),
        (
            "actor_rollout_ref.actor.clip_ratio_low=0.1 actor_rollout_ref.actor.clip_ratio=0.3",
            {"algorithm": {"clip": {"low": 0.1, "dual": 3.0}}},
        ),
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            {"algorithm": {"aggregation": "token_sum_norm"}},
        ),
        (
            "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=3.0",
            {"algorithm": {"offPolicy": {"method": "tis", "level": "sequence", "high": 3.0}}},
        ),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
            {"algorithm": {"offPolicy": {"method": "icepop", "low": 0.5, "high": 5.0}}},
        ),
        (
            "'algorithm.rollout_correction.rollout_rs=\"token_k1,seq_max_k3,binary_kl\"' "
            "'algorithm.rollout_correction.rollout_rs_threshold=\"0.25_2,0.1,0.01\"' "
            "algorithm.rollout_correction.rollout_token_veto_threshold=1e-4",
            {
                "algorithm": {
                    "offPolicy": {
                        "reject": [
                            {"over": "token", "low": 0.5, "high": 4.0},
                            {"measure": "k3", "over": "sequence_max", "high": 0.1},
                            {"measure": "binary_kl", "high": 0.01},
                        ],
                        "veto": 1e-4,
                    }
                }
            },
        ),
        (
            "algorithm.rollout_correction.rollout_rs=geometric algorithm.rollout_correction.rollout_rs_threshold=1.001",
            {"algorithm": {"offPolicy": {"reject": [{"over": "sequence_mean", "high": 1.001}]}}},
        ),
        (
            "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce "
            "algorithm.rollout_correction.rollout_is=sequence",
            {"algorithm": {"loss": "reinforce", "offPolicy": {"method": "tis", "oldLogProbs": None}}},
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=sapo actor_rollout_ref.actor.tau_neg=1.2",
            {"algorithm": {"loss": "sapo", "gate": {"negative": 1.2}, "clip": None}},
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv actor_rollout_ref.actor.clip_ratio_c=20.0",
            {"algorithm": {"loss": "dppo_tv", "clip": {"dual": 20.0}}},
        ),
        ("data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=64", {"trainer": {"stepsPerBatch": 8}}),
        (
            "custom_reward_function.path=my/reward.py",
            {"reward": {"function": "my/reward.py:compute_score", "type": None}},
        ),
        ("custom_reward_function.path=r.py custom_reward_function.name=f", {"reward": {"function": "r.py:f"}}),
        ("trainer.total_training_steps=100 trainer.total_epochs=3", {"trainer": {"steps": 100, "epochs": None}}),
        (
            "'actor_rollout_ref.actor.optim.betas=[0.8,0.9]'",
            {"trainer": {"optimizer": {"beta1": 0.8, "beta2": 0.9, "weightDecay": 0.01}}},
        ),
        (
            "data.gen_batch_size=1536 algorithm.filter_groups.enable=True",
            {"rollout": {"overSampling": 1.5, "dynamicFilter": "nonzero_std"}},
        ),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
            {"rollout": {"engineArgs": {"attention-backend": "fa3"}}},
        ),
        ("data.train_max_samples=100", {"data": {"prompts": [{"path": "/d/train.parquet@[0:100]"}]}}),
        ("data.val_files=/d/test.parquet trainer.test_freq=5", {"evaluation": {"everySteps": 5}}),
        ("data.val_files=/d/test.parquet", {"evaluation": None}),
        (
            "trainer.nnodes=2 actor_rollout_ref.rollout.tensor_model_parallel_size=4",
            {"rollout": {"gpusPerReplica": 4, "replicas": None}, "trainer": {"colocate": True, "offload": None}},
        ),
        ("actor_rollout_ref.actor.megatron.optimizer_offload=True", {"trainer": {"offload": "optimizer"}}),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload=True "
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
            {"trainer": {"colocate": True, "offload": None}},
        ),
        (
            "trainer.n_gpus_per_node=3 actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            {"rollout": {"replicas": 1}, "trainer": {"colocate": None}},
        ),
    ],
)
def test_keys_of_verl(arguments: str, expected: dict[str, Any]) -> None:
    _has(spec_of(verl(arguments)), expected)


def test_verls_fully_async_trainer_has_engines_of_its_own() -> None:
    words = "rollout.nnodes=2 rollout.n_gpus_per_node=4 async_training.staleness_threshold=1.5"
    entry = "verl.experimental.fully_async_policy.fully_async_main"
    rollout = spec_of(verl(words, entry=entry))["rollout"]
    assert (rollout["mode"], rollout["maxStaleness"], rollout["replicas"]) == ("async", 2, 4)


def test_a_configuration_is_the_base_of_a_command(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("data: {train_batch_size: 64}\ntrainer: {total_epochs: 2}\nx: ${trainer.total_epochs}\n")
    spec = spec_of(verl("--config-name=mine trainer.total_epochs=5", "--config", str(config)))
    assert (spec["rollout"]["batchSize"], spec["trainer"]["epochs"]) == (64, 5)
    assert "mine is not read here; give the file with --config" in verl("--config-name=mine").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slime", "/no/such.sh"], "/no/such.sh: No such file or directory"),
        (["slime", "{empty}"], "no command that runs train.py or train_async.py"),
        (["slime", "{open}"], "line 1: ' opens here and is never closed"),
        (["slime", "{bare}"], "no --prompt-data: there is nothing to train on"),
        (["slime", "{bare}", "--var", "x"], "--var x: expected NAME=VALUE"),
        (["verl", "no-such-file"], "no-such-file: no command that runs verl.trainer.main_ppo, and no such file"),
        (["verl", "python -m verl.trainer.main_ppo x=1"], "no data.train_files: there is nothing to train on"),
        (["verl", "{list}"], "expected a configuration"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_said(tmp_path: Path, words: list[str], message: str) -> None:
    texts = {"empty": "", "open": "x 'y", "bare": "python train.py --lr 1", "list": "- a"}
    paths = {}
    for name, text in texts.items():
        paths[name] = tmp_path / f"{name}.{'yaml' if name == 'list' else 'sh'}"
        paths[name].write_text(text)
    result = run(*(word.format(**paths) for word in words))
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_no_file_is_overwritten_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    assert slime(tmp_path, "", "-o", str(tmp_path / "job.yaml")).exit_code == 2
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert slime(tmp_path, "", "-o", str(tmp_path / "job.yaml"), "--force").exit_code == 0
    assert (tmp_path / "job.yaml").read_text().startswith("# Imported from run.sh.")


def test_a_job_that_lacks_something_is_written_and_said(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python train.py --prompt-data /d/rows.jsonl --rm-type f1 --num-rollout 3\n")
    result = run("slime", tmp_path / "run.sh")
    assert result.exit_code == 1
    assert "not a valid job yet" in result.output
    assert "spec.model: required field is missing" in result.output


def test_an_estimator_is_never_exchanged_for_another() -> None:
    result = verl("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1")
    assert result.exit_code == 1
    assert "spec.algorithm.estimator: this estimator compares the responses to a prompt" in result.output
    assert "estimator: grpo # algorithm.adv_estimator" in result.stdout


def test_a_whole_configuration_does_not_drown_what_matters(tmp_path: Path) -> None:
    """Hydra writes out every default; only what a command line says is worth a line for each."""
    config = tmp_path / "config.yaml"
    others = "".join(f"  {name}: 1\n" for name in ("one", "two", "three"))
    config.write_text(f"data:\n  train_files: /d/a.parquet\nactor_rollout_ref: {{model: {{path: /m}}}}\nnew:\n{others}")
    notes = json.loads(run("verl", config, "--json").stdout)["notes"]
    lost = [(note["subject"], note["text"]) for note in notes if note["kind"] == "not translated"]
    assert lost == [("3 other keys", "sluice knows none of them: new.one, new.two, new.three")]
    assert "new.one 1 (line 1): sluice knows no such key" in verl("+new.one=1").stdout


def test_validation_is_greedy_where_verls_is() -> None:
    files = "data.val_files=/d/test.parquet trainer.test_freq=5 actor_rollout_ref.rollout.val_kwargs.temperature=0.6"
    assert spec_of(verl(files))["evaluation"]["sampling"] == {"temperature": 0}
    sampled = f"{files} actor_rollout_ref.rollout.val_kwargs.do_sample=True"
    assert spec_of(verl(sampled))["evaluation"]["sampling"] == {"temperature": 0.6}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "depend on the micro-batch they are in"),
        ("algorithm.rollout_correction.rollout_rs=token_k9", "algorithm.offPolicy.reject knows no 'token_k9'"),
        ("algorithm.rollout_correction.rollout_is_batch_normalize=True", "weights are not divided by their mean"),
    ],
)
def test_corrections_without_a_counterpart_are_said(arguments: str, said: str) -> None:
    assert said in " ".join(verl(arguments).stdout.replace("#", " ").split())


def test_sft_of_slime_needs_neither_reward_nor_engines(tmp_path: Path) -> None:
    spec = spec_of(slime(tmp_path, "--loss-type sft_loss --global-batch-size 8", entry="train_async.py"))
    assert spec["algorithm"] == {"lossFunction": "sft", "aggregation": "sequence_mean"}, "slime's default, written out"
    assert "reward" not in spec
    assert spec["rollout"] == {"batchSize": 8}


def test_sft_of_verl_with_questions_and_answers() -> None:
    command = (
        "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.prompt_key=q "
        "data.train_files=/d/train.parquet data.train_max_samples=100 data.response_dict_keys=['answer'] "
        "model.partial_pretrain=/m model.lora_rank=32 optim.lr=1e-4"
    )
    result = run("verl", command)
    spec = spec_of(result)
    assert spec["data"]["prompts"] == [
        {"path": "/d/train.parquet@[0:100]", "promptKey": "q", "labelKey": "answer", "applyChatTemplate": True}
    ]
    assert spec["trainer"]["gpusPerNode"] == 8
    assert spec["trainer"]["epochs"] == 4
    assert "sluice trains all weights" in result.stderr
    assert "in a column of its own" in " ".join(result.stderr.split())
