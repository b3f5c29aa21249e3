"""Keys of verl are translated one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.migrate.import_tools import check, run, spec_of, unwrapped, verl

OPTIMIZER = "actor_rollout_ref.actor.optim.override_optimizer_config"


def test_verls_teacher_is_translated(tmp_path: Path) -> None:
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
    supervised = verl(f"{common} {loss}.loss_mode=k3")
    assert "distillation" not in spec_of(supervised)["algorithm"]
    assert "use_policy_gradient with loss_mode k1" in unwrapped(supervised)
    words = verl(
        f"{common} {loss}.loss_mode=forward_kl_topk {loss}.topk=64 {loss}.use_policy_gradient=False"
    )
    expected = {"coef": 0.3, "divergence": "forward_kl", "teacher": {"path": "/m/large"}}
    assert spec_of(words)["algorithm"]["distillation"] == expected
    assert "over the whole vocabulary, not over the teacher's top k" in unwrapped(words)
    mixed = spec_of(verl(f"{common} {loss}.loss_mode=jsd_topk {loss}.jsd_beta=0.2"))["algorithm"][
        "distillation"
    ]
    assert (mixed["divergence"], mixed["beta"]) == ("jsd", 0.2)
    cut = verl(f"{common} {loss}.loss_mode=forward_kl_topk {loss}.use_policy_gradient=True")
    assert "distillation" not in spec_of(cut)["algorithm"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            {"algorithm": {"estimator": "gspo", "loss": None}},
        ),
        (
            "algorithm.adv_estimator=gpg actor_rollout_ref.rollout.n=4 "
            "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            {"algorithm": {"estimator": "gpg", "loss": {"type": "reinforce"}}},
        ),
        (
            "algorithm.adv_estimator=opo actor_rollout_ref.rollout.n=4",
            {"algorithm": {"estimator": "opo"}},
        ),
        (
            "algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4 "
            "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            {"algorithm": {"estimator": "rloo", "loss": {"type": "reinforce"}}},
        ),
        (
            "algorithm.adv_estimator=gae critic.optim.lr=2e-5 trainer.critic_warmup=3",
            {
                "algorithm": {
                    "estimator": "ppo",
                    "critic": {"lr": 2e-5, "warmupSteps": 2, "clip": 0.5},
                }
            },
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive "
            "algorithm.kl_ctrl.target_kl=0.05 algorithm.kl_ctrl.horizon=5000",
            {"algorithm": {"kl": {"adaptive": {"target": 0.05, "horizon": 5000}}}},
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
            {"algorithm": {"loss": {"clip": {"low": 0.1, "dual": 3.0}}}},
        ),
        (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            {"algorithm": {"aggregation": "token_sum_norm"}},
        ),
        (
            "algorithm.rollout_correction.rollout_is=sequence "
            "algorithm.rollout_correction.rollout_is_threshold=3.0",
            {"algorithm": {"offPolicy": {"method": "tis", "level": "sequence", "high": 3.0}}},
        ),
        (
            "algorithm.rollout_correction.rollout_is=token "
            "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
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
            "algorithm.rollout_correction.rollout_rs=geometric "
            "algorithm.rollout_correction.rollout_rs_threshold=1.001",
            {"algorithm": {"offPolicy": {"reject": [{"over": "sequence_mean", "high": 1.001}]}}},
        ),
        (
            "algorithm.rollout_correction.bypass_mode=True "
            "algorithm.rollout_correction.loss_type=reinforce "
            "algorithm.rollout_correction.rollout_is=sequence",
            {
                "algorithm": {
                    "offPolicy": {"method": "tis", "oldLogProbs": None},
                    "loss": {"type": "reinforce"},
                }
            },
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=sapo "
            "actor_rollout_ref.actor.tau_neg=1.2",
            {"algorithm": {"loss": {"type": "sapo", "clip": None, "gate": {"negative": 1.2}}}},
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov "
            "actor_rollout_ref.actor.clip_ratio_high=1.0 "
            "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.02 "
            "actor_rollout_ref.actor.policy_loss.clip_cov_lb=0.5 "
            "actor_rollout_ref.actor.policy_loss.clip_cov_ub=9.0",
            {
                "algorithm": {
                    "loss": {
                        "type": "clip_cov",
                        "covariance": {"ratio": 0.02, "lower": 0.5, "upper": 9.0},
                    }
                }
            },
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov "
            "actor_rollout_ref.actor.policy_loss.ppo_kl_coef=0.5 "
            "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.02 "
            "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16",
            {"algorithm": {"loss": {"type": "kl_cov", "covariance": None}}},
        ),
        (
            "algorithm.rollout_correction.rollout_is=sequence "
            "algorithm.rollout_correction.rollout_is_batch_normalize=True",
            {"algorithm": {"offPolicy": {"method": "tis", "level": "sequence", "normalize": True}}},
        ),
        (
            "algorithm.rollout_correction.rollout_is_batch_normalize=True",
            {"algorithm": {"offPolicy": None}},
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv "
            "actor_rollout_ref.actor.clip_ratio_c=20.0",
            {"algorithm": {"loss": {"type": "dppo_tv", "clip": {"dual": 20.0}}}},
        ),
        (
            "data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=64",
            {"trainer": {"stepsPerBatch": 8}},
        ),
        (
            "custom_reward_function.path=my/reward.py",
            {"reward": {"function": "my/reward.py:compute_score", "type": None}},
        ),
        (
            "custom_reward_function.path=r.py custom_reward_function.name=f",
            {"reward": {"function": "r.py:f"}},
        ),
        (
            "trainer.total_training_steps=100 trainer.total_epochs=3",
            {"trainer": {"steps": 100, "epochs": None}},
        ),
        (
            "'actor_rollout_ref.actor.optim.betas=[0.8,0.9]'",
            {"trainer": {"optimizer": {"beta1": 0.8, "beta2": 0.9, "weightDecay": 0.01}}},
        ),
        (
            "data.gen_batch_size=1536 algorithm.filter_groups.enable=True",
            {"rollout": {"overSampling": 1.5, "dynamicFilter": "nonzero_std"}},
        ),
        (
            "actor_rollout_ref.actor.strategy=megatron "
            "actor_rollout_ref.actor.megatron.router_replay.mode=R3 "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            {"trainer": {"routingReplay": "rollout"}},
        ),
        (
            "actor_rollout_ref.actor.strategy=megatron "
            "actor_rollout_ref.actor.megatron.router_replay.mode=R2 "
            "data.train_batch_size=512",
            {"trainer": {"routingReplay": "trainer", "stepsPerBatch": 2}},
        ),
        (
            "actor_rollout_ref.actor.strategy=megatron "
            "actor_rollout_ref.actor.megatron.router_replay.mode=R2 "
            "data.train_batch_size=256",
            {"trainer": {"routingReplay": None, "stepsPerBatch": 1}},
        ),
        (
            "actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.actor.router_replay.mode=R3",
            {"trainer": {"routingReplay": None, "backend": "fsdp"}},
        ),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_fp32_lm_head=True",
            {"model": {"fp32LmHead": True}, "rollout": {"engineArgs": None}},
        ),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
            {"rollout": {"engineArgs": {"attention-backend": "fa3"}}},
        ),
        (
            "actor_rollout_ref.rollout.name=vllm "
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6 "
            "actor_rollout_ref.rollout.enforce_eager=True "
            "actor_rollout_ref.rollout.max_num_batched_tokens=8192 "
            "actor_rollout_ref.rollout.max_model_len=4096 "
            "actor_rollout_ref.rollout.expert_parallel_size=8 "
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
            {
                "rollout": {
                    "engine": "vllm",
                    "engineArgs": {
                        "gpu-memory-utilization": 0.6,
                        "enforce-eager": True,
                        "max-num-batched-tokens": 8192,
                        "max-model-len": 4096,
                        "enable-expert-parallel": True,
                        "swap-space": 4,
                    },
                }
            },
        ),
        ("actor_rollout_ref.rollout.name=sglang", {"rollout": {"engine": None}}),
        ("actor_rollout_ref.rollout.name=hf", {"rollout": {"engine": "transformers"}}),
        (
            "data.train_max_samples=100",
            {"data": {"prompts": [{"path": "/d/train.parquet@[0:100]"}]}},
        ),
        ("data.val_files=/d/test.parquet trainer.test_freq=5", {"evaluation": {"everySteps": 5}}),
        ("data.val_files=/d/test.parquet", {"evaluation": None}),
        (
            "trainer.nnodes=2 actor_rollout_ref.rollout.tensor_model_parallel_size=4",
            {
                "rollout": {"gpusPerReplica": 4, "replicas": None},
                "trainer": {"colocate": True, "offload": None},
            },
        ),
        (
            "actor_rollout_ref.actor.megatron.optimizer_offload=True",
            {"trainer": {"offload": "optimizer"}},
        ),
        pytest.param(
            f"+{OPTIMIZER}.optimizer_cpu_offload=True +{OPTIMIZER}.optimizer_offload_fraction=1.0 "
            f"+{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=True "
            f"+{OPTIMIZER}.use_precision_aware_optimizer=True",
            {"trainer": {"cpuOffload": "optimizer", "cpuOffloadFraction": None}},
            id="optimizer on the CPU",
        ),
        pytest.param(
            f"+{OPTIMIZER}.optimizer_cpu_offload=True +{OPTIMIZER}.optimizer_offload_fraction=0.5",
            {"trainer": {"cpuOffload": "optimizer", "cpuOffloadFraction": 0.5}},
            id="half of the optimizer on the CPU",
        ),
        pytest.param(
            f"+{OPTIMIZER}.exp_avg_dtype=bfloat16 +{OPTIMIZER}.exp_avg_sq_dtype=fp32",
            {"trainer": {"optimizer": {"expAvgDtype": "bf16", "expAvgSqDtype": "fp32"}}},
            id="moments of two types",
        ),
        pytest.param(
            f"+{OPTIMIZER}.optimizer_cpu_offload=True",
            {"trainer": {"cpuOffload": None}},
            id="none of the optimizer on the CPU",
        ),
        (
            "actor_rollout_ref.actor.strategy=fsdp "
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
            {"trainer": {"backend": "fsdp", "colocate": True, "offload": "optimizer"}},
        ),
        (
            "actor_rollout_ref.actor.strategy=fsdp2 "
            "actor_rollout_ref.actor.fsdp_config.offload_policy=True",
            {"trainer": {"backend": "fsdp", "cpuOffload": "all"}},
        ),
        (
            "actor_rollout_ref.actor.strategy=fsdp2 "
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
            {"trainer": {"backend": "fsdp", "parallelism": {"context": 4}}},
        ),
        (
            "actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.quantization=fp8",
            {"rollout": {"precision": "fp8_block"}},
        ),
        (
            "actor_rollout_ref.rollout.name=sglang actor_rollout_ref.model.mtp.enable=True "
            "actor_rollout_ref.model.mtp.enable_rollout=True "
            "actor_rollout_ref.model.mtp.speculative_num_steps=2",
            {"rollout": {"speculative": {"algorithm": "mtp", "steps": 2}}},
        ),
        ("actor_rollout_ref.actor.strategy=megatron", {"trainer": {"backend": "megatron"}}),
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
def test_keys_of_verl_become_fields(arguments: str, expected: dict[str, Any]) -> None:
    check(spec_of(verl(arguments)), expected)


def test_reward_parts_of_verls_gdpo_are_translated() -> None:
    result = verl(
        "algorithm.adv_estimator=gdpo actor_rollout_ref.rollout.n=4 "
        "reward.reward_manager.name=gdpo "
        "+algorithm.gdpo_reward_keys='[accuracy,format]' +algorithm.gdpo_reward_weights='[1.0,0.5]'"
    )
    algorithm = spec_of(result)["algorithm"]
    assert algorithm["estimator"] == "gdpo"
    assert algorithm["rewardParts"] == [
        {"name": "accuracy", "weight": 1.0},
        {"name": "format", "weight": 0.5},
    ]
    assert "gdpo_reward" not in unwrapped(result)


OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"


def test_verls_overlong_penalty_is_translated() -> None:
    result = verl(
        f"reward.reward_manager.name=dapo +{OVERLONG}.enable=True +{OVERLONG}.len=4096 "
        f"+{OVERLONG}.penalty_factor=0.5 +{OVERLONG}.log=False data.max_response_length=8192 "
        "+reward.reward_kwargs.max_resp_len=8192"
    )
    assert spec_of(result)["algorithm"]["overlong"] == {"buffer": 4096, "penalty": 0.5}
    assert "max_resp_len" not in unwrapped(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            "", "it has no effect in verl without the reward manager dapo", id="another manager"
        ),
        pytest.param(
            "reward.reward_manager.name=dapo data.max_response_length=9000 "
            "+reward.reward_kwargs.max_resp_len=8000",
            "verl from max_resp_len (8000)",
            id="another limit",
        ),
    ],
)
def test_an_overlong_penalty_with_another_meaning_is_reported(arguments: str, said: str) -> None:
    overlong = f"+{OVERLONG}.enable=True +{OVERLONG}.len=4096"
    assert said in unwrapped(verl(f"{overlong} {arguments}"))


def test_an_overlong_penalty_that_is_off_stays_off() -> None:
    result = verl(
        f"reward.reward_manager.name=dapo +{OVERLONG}.enable=False +{OVERLONG}.len=128 "
        f"+{OVERLONG}.penalty_factor=1.0"
    )
    assert "overlong" not in spec_of(result)["algorithm"]
    assert "overlong" not in result.stdout


def test_verls_fully_async_trainer_has_separate_engines() -> None:
    words = "rollout.nnodes=2 rollout.n_gpus_per_node=4 async_training.staleness_threshold=1.5"
    entry = "verl.experimental.fully_async_policy.fully_async_main"
    rollout = spec_of(verl(words, entry=entry))["rollout"]
    assert (rollout["mode"], rollout["maxStaleness"], rollout["replicas"]) == ("async", 2, 4)


def test_a_command_overrides_its_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(
        "data: {train_batch_size: 64}\ntrainer: {total_epochs: 2}\nx: ${trainer.total_epochs}\n"
    )
    spec = spec_of(verl("--config-name=mine trainer.total_epochs=5", "--config", str(config)))
    assert (spec["rollout"]["batchSize"], spec["trainer"]["epochs"]) == (64, 5)
    assert "mine is not read; pass its file with --config" in verl("--config-name=mine").stdout


def test_unknown_keys_of_a_configuration_file_are_one_note(tmp_path: Path) -> None:
    """Hydra files contain every default, so only settings of the command get a note each."""
    config = tmp_path / "config.yaml"
    others = "".join(f"  {name}: 1\n" for name in ("one", "two", "three"))
    config.write_text(
        f"data:\n  train_files: /d/a.parquet\nactor_rollout_ref: {{model: {{path: "
        f"/m}}}}\nnew:\n{others}"
    )
    notes = json.loads(run("verl", config, "--json").stdout)["notes"]
    lost = [(note["subject"], note["text"]) for note in notes if note["kind"] == "not translated"]
    assert lost == [("3 other keys", "sluice has no counterpart: new.one, new.two, new.three")]
    assert "new.one 1 (line 1): sluice does not know this setting" in verl("+new.one=1").stdout


def test_validation_is_greedy_if_verls_is() -> None:
    files = (
        "data.val_files=/d/test.parquet trainer.test_freq=5 "
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.6"
    )
    assert spec_of(verl(files))["evaluation"]["sampling"] == {"temperature": 0}
    sampled = f"{files} actor_rollout_ref.rollout.val_kwargs.do_sample=True"
    assert spec_of(verl(sampled))["evaluation"]["sampling"] == {"temperature": 0.6}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "algorithm.rollout_correction.rollout_rs=token_k9",
            "algorithm.offPolicy.reject has no counterpart of 'token_k9'",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov data.train_batch_size=64 "
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
            "with one optimizer step per batch",
        ),
    ],
)
def test_corrections_without_a_counterpart_are_reported(arguments: str, said: str) -> None:
    assert said in " ".join(verl(arguments).stdout.replace("#", " ").split())


@pytest.mark.parametrize(
    ("side", "field"), [("left", "left"), ("right", "right"), ("error", None)], ids=str
)
def test_sft_of_verl_truncates_rows(side: str, field: str | None) -> None:
    result = run(
        "verl",
        "torchrun --nproc_per_node=2 -m verl.trainer.sft_trainer data.train_files=/d/a.parquet "
        f"model.path=/m data.truncation={side} data.max_length=512",
    )
    assert spec_of(result)["data"].get("truncation") == field


def test_sft_of_verl_with_questions_and_answers() -> None:
    command = (
        "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer "
        "data.prompt_key=q data.train_files=/d/train.parquet data.train_max_samples=100 "
        "data.response_dict_keys=['answer'] model.partial_pretrain=/m model.lora_rank=32 "
        "optim.lr=1e-4"
    )
    result = run("verl", command)
    spec = spec_of(result)
    assert spec["data"]["prompts"] == [
        {
            "path": "/d/train.parquet@[0:100]",
            "promptKey": "q",
            "labelKey": "answer",
            "applyChatTemplate": True,
        }
    ]
    assert spec["trainer"]["gpusPerNode"] == 8
    assert spec["trainer"]["epochs"] == 4
    assert spec["trainer"]["backend"] == "fsdp"
    assert spec["trainer"]["lora"] == {"rank": 32, "alpha": 16}
    assert "rewrite the rows with the text in a column" in " ".join(result.stderr.split())


LORA = (
    "actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.lora_alpha=32 "
    "actor_rollout_ref.model.exclude_modules=[gate_proj]"
)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        pytest.param("all-linear", {}, id="all-linear"),
        pytest.param("[q_proj,v_proj]", {"targetModules": ["q_proj", "v_proj"]}, id="names"),
    ],
)
def test_adapters_of_fsdp_are_translated(targets: str, expected: dict[str, Any]) -> None:
    done = verl(
        f"actor_rollout_ref.actor.strategy=fsdp2 {LORA} "
        f"actor_rollout_ref.model.target_modules={targets}"
    )
    adapter = {"rank": 16, "alpha": 32, "excludeModules": ["gate_proj"]}
    assert spec_of(done)["trainer"]["lora"] == adapter | expected


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        pytest.param("all-linear", ["all-linear", "experts"], id="all-linear"),
        pytest.param("[q_proj]", ["q_proj", "experts"], id="names"),
    ],
)
def test_adapters_of_experts_are_translated(targets: str, expected: list[str]) -> None:
    done = verl(
        f"actor_rollout_ref.actor.strategy=fsdp2 {LORA} "
        f"actor_rollout_ref.model.target_modules={targets} "
        "actor_rollout_ref.model.target_parameters="
        "[mlp.experts.gate_up_proj,mlp.experts.down_proj]"
    )
    assert spec_of(done)["trainer"]["lora"]["targetModules"] == expected


def test_a_pattern_of_layers_is_not_translated() -> None:
    done = verl(
        f"actor_rollout_ref.actor.strategy=fsdp {LORA} "
        "actor_rollout_ref.model.target_modules='.*proj'"
    )
    assert "targetModules" not in spec_of(done)["trainer"]["lora"]
    assert "it takes no patterns" in unwrapped(done)


def test_adapters_of_megatron_are_translated() -> None:
    done = verl(f"actor_rollout_ref.actor.strategy=megatron {LORA}")
    adapter = {"rank": 16, "alpha": 32, "excludeModules": ["gate_proj"]}
    assert spec_of(done)["trainer"]["lora"] == adapter


def test_a_rank_of_0_trains_all_weights() -> None:
    done = verl("actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.model.lora_rank=0")
    assert "lora" not in spec_of(done)["trainer"]
    assert "lora" not in unwrapped(done)


def test_loggers_become_trackers() -> None:
    loggers = '["console","wandb","mlflow","clearml"]'
    result = verl(
        f"trainer.logger='{loggers}' trainer.project_name=math trainer.experiment_name=first"
    )
    named = {"project": "math", "name": "first"}
    assert spec_of(result)["telemetry"]["trackers"] == [
        {"type": "wandb", **named},
        {"type": "mlflow", **named},
    ]
    assert "trainer.logger: clearml" in unwrapped(result)


def test_the_console_is_no_tracker() -> None:
    assert "telemetry" not in spec_of(verl("trainer.logger=console trainer.project_name=a"))


@pytest.mark.parametrize("home", ["$HOME", "${HOME}"])
def test_paths_in_the_home_stay_in_the_home_of_whoever_runs_the_job(home: str) -> None:
    result = verl(
        f"data.train_files=\"['{home}/a.parquet','{home}/b.parquet']\" "
        f"actor_rollout_ref.model.path={home}/models/m"
    )
    spec = spec_of(result)
    assert [source["path"] for source in spec["data"]["prompts"]] == ["~/a.parquet", "~/b.parquet"]
    assert spec["model"]["path"] == "~/models/m"
    assert "$HOME" not in result.stdout


def test_a_home_inside_a_path_is_not_known() -> None:
    result = verl("actor_rollout_ref.model.path=/nfs$HOME/m")
    assert spec_of(result)["model"]["path"] == "/nfs${HOME}/m"
    assert "set $HOME with --var" in unwrapped(result)
