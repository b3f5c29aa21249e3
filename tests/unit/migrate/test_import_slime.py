"""Arguments of slime are translated one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.migrate.import_tools import check, slime, spec_of, unwrapped


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--global-batch-size 16", {"trainer": {"stepsPerBatch": 2}}),
        ("--num-steps-per-rollout 4", {"trainer": {"stepsPerBatch": 4}}),
        ("--rm-type dapo --reward-key score", {"reward": {"type": "dapo", "key": "score"}}),
        ("--rm-type remote_rm --rm-url http://rm:80/x", {"reward": {"url": "http://rm:80/x"}}),
        (
            "--custom-rm-path my.rewards.score --group-rm",
            {"reward": {"function": "my.rewards.score", "group": True}},
        ),
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
        (
            "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2",
            {"rollout": {"replicas": 4, "gpusPerReplica": 2}},
        ),
        (
            "--rollout-num-gpus 32 --rollout-num-gpus-per-engine 16",
            {"rollout": {"replicas": 2, "gpusPerReplica": 8, "nodesPerReplica": 2}},
        ),
        ("--deterministic-mode", {"trainer": {"deterministic": True}}),
        ("--use-rollout-routing-replay", {"trainer": {"routingReplay": "rollout"}}),
        (
            "--use-routing-replay --num-steps-per-rollout 2",
            {"trainer": {"routingReplay": "trainer", "stepsPerBatch": 2}},
        ),
        (
            "--use-rollout-routing-replay --use-routing-replay --num-steps-per-rollout 2",
            {"trainer": {"routingReplay": "rollout"}},
        ),
        (
            "--sglang-enable-fp32-lm-head",
            {"model": {"path": "/m", "fp32LmHead": True}, "rollout": {"engineArgs": None}},
        ),
        (
            "--sglang-quantization w8a8_int8 --sglang-kv-cache-dtype fp8_e4m3",
            {
                "rollout": {
                    "precision": "int8",
                    "kvCacheDtype": "fp8_e4m3",
                    "engineArgs": None,
                }
            },
        ),
        (
            "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 "
            "--sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 3",
            {
                "rollout": {
                    "speculative": {"algorithm": "mtp", "steps": 2, "topK": 1},
                    "engineArgs": None,
                }
            },
        ),
        (
            "--sglang-speculative-algorithm EAGLE3 --sglang-speculative-draft-model-path /e",
            {"rollout": {"speculative": {"algorithm": "eagle3", "model": "/e"}}},
        ),
        ("--sglang-cuda-graph-bs 1 2", {"rollout": {"engineArgs": {"cuda-graph-bs": ["1", "2"]}}}),
        (
            "--sglang-max-running-requests 64",
            {"rollout": {"engineArgs": {"max-running-requests": 64}}},
        ),
        ("--dynamic-sampling-filter-path my.keep", {"rollout": {"dynamicFilter": "my.keep"}}),
        ("--lr=3e-6 --lr 4e-6", {"trainer": {"optimizer": {"lr": 4e-6}}}),
        ("--update-weight-buffer-size $((256 * 1024 * 1024))", {"weightSync": {"bucketMiB": 256}}),
        (
            "--update-weight-mode delta --update-weight-transport disk "
            "--update-weight-disk-dir /shared/weights --update-weight-delta-encoding xor",
            {
                "weightSync": {
                    "transport": "store",
                    "store": {"uri": "/shared/weights"},
                }
            },
        ),
        (
            "--update-weight-mode full --update-weight-transport disk",
            {"weightSync": {"transport": "disk", "store": None}},
        ),
        ("--eval-top-p 0.7", {"evaluation": None}),
        ("--custom-generate-function-path my.play", {"rollout": {"function": "my.play"}}),
        (
            "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
            "--use-precision-aware-optimizer",
            {"trainer": {"cpuOffload": "optimizer", "cpuOffloadFraction": None}},
        ),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.75",
            {"trainer": {"cpuOffload": "optimizer", "cpuOffloadFraction": 0.75}},
        ),
        ("--optimizer-offload-fraction 0.75", {"trainer": {"cpuOffload": None}}),
        (
            "--lora-rank 32 --lora-dropout 0.1 --target-modules q_proj,v_proj,linear_fc1 "
            "--lora-adapter-path /a",
            {
                "trainer": {
                    "lora": {
                        "rank": 32,
                        "alpha": 16,
                        "dropout": 0.1,
                        "targetModules": ["q_proj", "v_proj", "gate_proj", "up_proj"],
                        "from": "/a",
                    }
                }
            },
        ),
        (
            "--lora-rank 8 --lora-alpha 32 --target-modules all-linear --exclude-modules o_proj",
            {"trainer": {"lora": {"rank": 8, "alpha": 32, "excludeModules": ["o_proj"]}}},
        ),
        ("--lora-rank 0", {"trainer": {"lora": None}}),
        (
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
            {"trainer": {"optimizer": {"expAvgDtype": "bf16", "expAvgSqDtype": "bf16"}}},
        ),
    ],
)
def test_arguments_of_slime_become_fields(
    tmp_path: Path, arguments: str, expected: dict[str, Any]
) -> None:
    check(spec_of(slime(tmp_path, arguments)), expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            "--optimizer-cpu-offload --optimizer-offload-fraction 0",
            "--optimizer-offload-fraction is 0, so the optimizer stays on the GPU",
            id="a fraction of nothing",
        ),
        pytest.param(
            "--optimizer-cpu-offload --optimizer-offload-fraction most",
            "expected a number, found 'most'",
            id="no number",
        ),
        pytest.param(
            "--use-precision-aware-optimizer --exp-avg-dtype fp8",
            "--exp-avg-dtype fp8 (line 1): Adam's moments are fp32 or bf16",
            id="moments in fp8",
        ),
        pytest.param(
            "--use-precision-aware-optimizer --main-grads-dtype bf16",
            "--main-grads-dtype bf16 (line 1): gradients and the optimizer's copy of the weights "
            "are always fp32",
            id="gradients in bf16",
        ),
    ],
)
def test_unsupported_options_of_slimes_optimizer_are_reported(
    tmp_path: Path, arguments: str, said: str
) -> None:
    result = slime(tmp_path, arguments)
    assert said in unwrapped(result)
    assert "cpuOffload" not in spec_of(result)["trainer"]


def test_routing_is_not_replayed_if_there_is_no_other_pass(tmp_path: Path) -> None:
    result = slime(tmp_path, "--use-routing-replay --num-steps-per-rollout 1")
    assert "routingReplay" not in spec_of(result)["trainer"]
    assert "--use-routing-replay: with one optimizer step per batch the old log-probs" in unwrapped(
        result
    )


def test_types_that_sluice_always_has_are_not_reported(tmp_path: Path) -> None:
    arguments = " ".join(f"--{kind} fp32" for kind in ("main-grads-dtype", "main-params-dtype"))
    assert "dtype" not in slime(tmp_path, f"--use-precision-aware-optimizer {arguments}").stdout


TAUGHT = "--use-opd --opd-kl-coef 0.5"
BY_TEACHER = (
    "--opd-type sglang --custom-rm-path slime.rollout.on_policy_distillation.reward_func --rm-url "
    "http://t:1/generate "
    "--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards"
)


def test_a_teacher_behind_slimes_remote_reward_replaces_the_reward(tmp_path: Path) -> None:
    result = slime(tmp_path, f"{TAUGHT} {BY_TEACHER} --n-samples-per-prompt 1")
    spec = spec_of(result)
    assert spec["algorithm"]["distillation"] == {"coef": 0.5, "teacher": {"url": "http://t:1"}}
    assert "reward" not in spec
    assert "opd" not in result.stdout.partition("apiVersion")[0]


def test_slimes_teacher_in_the_trainer_keeps_the_reward(tmp_path: Path) -> None:
    result = slime(
        tmp_path,
        f"{TAUGHT} --opd-type megatron --opd-teacher-load /m/teacher --rollout-temperature 0.8",
    )
    spec = spec_of(result)
    assert spec["algorithm"]["distillation"] == {"coef": 0.5, "teacher": {"path": "/m/teacher"}}
    assert spec["reward"] == {"type": "math_prm800k"}
    assert "name its Hugging Face directory" in unwrapped(result)
    assert "algorithm" not in spec_of(
        slime(tmp_path, "--opd-type megatron --opd-teacher-load /m/t")
    )


def test_unsupported_teachers_of_slime_are_reported(tmp_path: Path) -> None:
    hot = slime(tmp_path, f"{TAUGHT} {BY_TEACHER} --rollout-temperature 0.8")
    assert hot.exit_code == 1
    assert (
        "spec.algorithm.distillation.teacher.url: SGLang scores given tokens at temperature 1"
        in hot.output
    )
    itself = slime(tmp_path, f"{TAUGHT} --opd-type self --opd-teacher-load /m/t")
    assert "--opd-type self (line 1): sluice distills from an SGLang server" in unwrapped(itself)
    evaluated = slime(
        tmp_path, f"{TAUGHT} {BY_TEACHER} --eval-interval 5 --eval-prompt-data aime /d/aime.jsonl"
    )
    assert "evaluation" not in spec_of(evaluated)
    assert "sluice needs a reward: evaluation.datasets[].reward" in unwrapped(evaluated)


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        pytest.param(
            "--eval-prompt-data aime /d/aime.jsonl --n-samples-per-eval-prompt 16 --eval-top-p 0.7",
            [
                "--eval-prompt-data aime /d/aime.jsonl (line 1): slime does not evaluate without "
                "--eval-interval (evaluation.everySteps)",
                "--n-samples-per-eval-prompt 16 (line 1): slime does not evaluate without",
                "--eval-top-p 0.7 (line 1): slime does not evaluate without",
            ],
            id="evaluation without an interval",
        ),
        pytest.param(
            "--eval-interval 5 --eval-max-response-len 99",
            [
                "--eval-max-response-len 99 (line 1): slime does not evaluate without "
                "--eval-prompt-data"
            ],
            id="evaluation without data",
        ),
        pytest.param(
            "--tis-clip 3", ["--tis-clip 3 (line 1): slime uses importance sampling"], id="TIS"
        ),
        pytest.param("--opsm-delta 1e-3", ["--opsm-delta 1e-3 (line 1): slime masks"], id="OPSM"),
        pytest.param(
            "--kl-loss-coef 0.1",
            ["--kl-loss-coef 0.1 (line 1): slime adds the KL to the loss only with"],
            id="KL",
        ),
        pytest.param(
            "--opd-kl-coef 0.5", ["--opd-kl-coef 0.5 (line 1): slime distills only with"], id="OPD"
        ),
        pytest.param(
            "--use-tis --custom-tis-function-path mis.py:f --custom-config-path mis.yaml",
            [
                "--custom-config-path mis.yaml (line 1): the file is not read. Put its thresholds "
                "of TIS and MIS into algorithm.offPolicy: method, low, high, reject, veto",
            ],
            id="thresholds of MIS",
        ),
        pytest.param(
            "--custom-config-path own.yaml",
            [
                "Put settings of a generate function into rollout.functionArgs, and thresholds of "
                "TIS and MIS into algorithm.offPolicy"
            ],
            id="a configuration of one's own",
        ),
    ],
)
def test_settings_without_an_effect_are_reported(
    tmp_path: Path, arguments: str, notes: list[str]
) -> None:
    result = slime(tmp_path, arguments)
    for note in notes:
        assert note in unwrapped(result)
    assert "evaluation" not in spec_of(result)


def test_slimes_async_trainer_is_one_step_off(tmp_path: Path) -> None:
    rollout = spec_of(slime(tmp_path, "", entry="train_async.py"))["rollout"]
    assert (rollout["mode"], rollout["maxStaleness"]) == ("async", 1)


def test_a_value_that_is_not_in_the_script_is_reported(tmp_path: Path) -> None:
    result = slime(tmp_path, "--lr $LR --save-interval ${EVERY:-7}")
    assert (
        "--lr ${LR} (line 1): the value is not in the script: set $LR with --var" in result.stdout
    )
    assert "$(nproc) is not run" in slime(tmp_path, "--lr $(nproc)").stdout
    assert spec_of(result)["checkpoint"]["everySteps"] == 7
    assert (
        spec_of(slime(tmp_path, "--lr $LR", "--var", "LR=1e-5"))["trainer"]["optimizer"]["lr"]
        == 1e-5
    )


def test_sft_of_slime_needs_neither_reward_nor_engines(tmp_path: Path) -> None:
    spec = spec_of(
        slime(tmp_path, "--loss-type sft_loss --global-batch-size 8", entry="train_async.py")
    )
    assert spec["algorithm"] == {"loss": {"type": "sft"}, "aggregation": "sequence_mean"}, (
        "slime's default, written out"
    )
    assert "reward" not in spec
    assert spec["rollout"] == {"batchSize": 8}


def test_wandb_becomes_a_tracker_without_its_key(tmp_path: Path) -> None:
    result = slime(
        tmp_path,
        "--use-wandb --wandb-project math --wandb-group first --wandb-team us --wandb-dir /tmp "
        "--wandb-host https://wandb.local",
    )
    assert spec_of(result)["telemetry"]["trackers"] == [
        {"type": "wandb", "project": "math", "args": {"entity": "us", "group": "first"}}
    ]
    assert "set WANDB_API_KEY by secrets.wandb" in unwrapped(result)
    assert "--wandb-host https://wandb.local" in unwrapped(result)


def test_arguments_of_wandb_without_use_wandb_have_no_effect(tmp_path: Path) -> None:
    assert "telemetry" not in spec_of(slime(tmp_path, "--wandb-project math"))
