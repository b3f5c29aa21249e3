"""verl's asynchronous trainers, rows with images, and agent loops are translated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.migrate.import_tools import check, run, spec_of, unwrapped, verl

FULLY = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GROUP = f"algorithm.adv_estimator=grpo {ROLLOUT}.n=4"
STREAM = (
    f"{GROUP} data.train_batch_size=0 data.gen_batch_size=1 {ACTOR}.ppo_mini_batch_size=16 "
    "async_training.require_batches=2 async_training.trigger_parameter_sync_step=3 "
    "rollout.total_rollout_steps=960 rollout.nnodes=2 rollout.n_gpus_per_node=4 "
    f"{ROLLOUT}.tensor_model_parallel_size=2 trainer.n_gpus_per_node=4"
)


def test_a_batch_has_the_prompts_between_two_weight_updates() -> None:
    spec = spec_of(verl(STREAM, entry=FULLY))
    check(
        spec,
        {
            "rollout": {
                "batchSize": 96,
                "mode": "async",
                "maxStaleness": 1,
                "replicas": 4,
                "gpusPerReplica": 2,
                "partial": {"enabled": True},
                "overSampling": None,
            },
            "trainer": {"stepsPerBatch": 6, "steps": 10, "epochs": None, "colocate": None},
            "algorithm": {"offPolicy": {"oldLogProbs": "rollout"}},
        },
    )


@pytest.mark.parametrize(
    ("threshold", "mode", "staleness"),
    [("0", None, None), ("0.5", "async", 1), ("1", "async", 1), ("2.5", "async", 3)],
    ids=["synchronous", "a share", "one step", "several steps"],
)
def test_staleness_is_rounded_up_to_whole_steps(
    threshold: str, mode: str | None, staleness: int | None
) -> None:
    result = verl(f"{STREAM} async_training.staleness_threshold={threshold}", entry=FULLY)
    rollout = spec_of(result)["rollout"]
    assert (rollout.get("mode"), rollout.get("maxStaleness")) == (mode, staleness)
    assert (f"{threshold}, verl's share of a batch" in unwrapped(result)) == ("." in threshold)


def test_defaults_of_the_asynchronous_configuration_are_used() -> None:
    result = verl(f"{GROUP} data.train_batch_size=0", entry=FULLY)
    rollout = spec_of(result)["rollout"]
    assert (rollout["batchSize"], rollout["replicas"]) == (256 * 4, 4)
    assert spec_of(result)["trainer"]["epochs"] == 30
    assert "by default 100" in unwrapped(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rollout.total_rollout_steps=50", "50 prompts are fewer than one batch of 96"),
        (f"{ACTOR}.ppo_mini_batch_size=0", "expected a positive number, found 0"),
        (f"{ACTOR}.ppo_mini_batch_size=\\$MINI", "expected a number, found '$MINI'"),
        (f"{ACTOR}.ppo_mini_batch_size=$MINI", "set $MINI with --var"),
        (
            "rollout.n_gpus_per_node=$GPUS",
            "rollout.n_gpus_per_node: the value is not in the script",
        ),
    ],
    ids=["too short", "no mini-batch", "no number", "not known", "engines not known"],
)
def test_missing_values_of_an_asynchronous_run_are_reported(change: str, message: str) -> None:
    assert message in unwrapped(verl(f"{STREAM} {change}", entry=FULLY))


def test_a_configuration_without_a_command_is_asynchronous_by_its_keys(tmp_path: Path) -> None:
    (tmp_path / "trainer.yaml").write_text(
        "data: {train_files: /d/a.parquet, train_batch_size: 0}\n"
        "actor_rollout_ref: {model: {path: /m}, rollout: {n: 4}, actor: {ppo_mini_batch_size: 8}}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "async_training: {trigger_parameter_sync_step: 2, staleness_threshold: 1}\n"
    )
    rollout = spec_of(run("verl", tmp_path / "trainer.yaml"))["rollout"]
    assert (rollout["mode"], rollout["batchSize"]) == ("async", 16)


def test_one_step_off_is_asynchronous_with_separate_engines() -> None:
    words = f"{GROUP} data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=32"
    spec = spec_of(verl(f"{words} rollout.n_gpus_per_node=2 rollout.nnodes=3", entry=ONE_STEP))
    check(
        spec,
        {
            "rollout": {"mode": "async", "maxStaleness": 1, "batchSize": 64, "replicas": 3},
            "trainer": {"stepsPerBatch": 2, "colocate": None},
            "algorithm": {"offPolicy": {"oldLogProbs": "rollout"}},
        },
    )
    assert spec_of(verl(words))["trainer"]["colocate"] is True


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sync", {"mode": None, "replicas": None}),
        ("separate_async", {"mode": "async", "maxStaleness": 4, "replicas": 2}),
        ("colocate_async", {"mode": None, "replicas": None}),
    ],
)
def test_modes_of_trainer_v1_are_translated(mode: str, expected: dict[str, Any]) -> None:
    result = verl(
        f"{GROUP} trainer.v1.trainer_mode={mode} trainer.v1.sampler.max_off_policy_threshold=5 "
        f"data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=16 data.gen_batch_size=1 "
        f"{ROLLOUT}.n_gpus_per_node=4 {ROLLOUT}.tensor_model_parallel_size=2"
    )
    check(spec_of(result)["rollout"], expected)
    assert ("so the job is synchronous" in unwrapped(result)) == (mode == "colocate_async")


def test_an_engine_wider_than_a_host_spans_several_hosts() -> None:
    words = f"{GROUP} {ROLLOUT}.tensor_model_parallel_size=16 trainer.nnodes=4"
    rollout = spec_of(verl(words))["rollout"]
    assert (rollout["gpusPerReplica"], rollout["nodesPerReplica"]) == (8, 2)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (f"{ROLLOUT}.agent.agent_loop_config_path=loop.yaml", "rollout.function names its class"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent", "sluice_rollout.tools.ToolLoop"),
        (f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent", ""),
        (f"{ROLLOUT}.agent.num_workers=8", ""),
    ],
    ids=["no such file", "tools", "one turn", "workers"],
)
def test_an_agent_loop_whose_class_is_not_known_is_reported(setting: str, said: str) -> None:
    result = unwrapped(verl(f"{GROUP} {setting}"))
    assert said in result
    assert ("rollout.function" in result) == bool(said)


@pytest.mark.parametrize(
    ("default", "text", "function", "arguments"),
    [
        ("", "[{name: a, _target_: my.Loop}]", "my.Loop", None),
        ("b", "[{name: a, _target_: my.A}, {name: b, _target_: my.B, n: 3}]", "my.B", {"n": 3}),
    ],
    ids=["the only one", "by its name, with arguments"],
)
def test_an_agent_loop_becomes_the_rollout_function(
    default: str, text: str, function: str, arguments: dict[str, Any] | None, tmp_path: Path
) -> None:
    (tmp_path / "loops.yaml").write_text(text)
    named = f"{ROLLOUT}.agent.default_agent_loop={default}" if default else ""
    words = f"{GROUP} {ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml {named}"
    rollout = spec_of(verl(words))["rollout"]
    assert (rollout["function"], rollout.get("functionArgs")) == (function, arguments)


def test_settings_of_other_hardware_do_not_get_into_the_job() -> None:
    result = verl(
        f"{GROUP} {ROLLOUT}.name=sglang trainer.device=npu "
        f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=ascend "
        f"+{ROLLOUT}.engine_kwargs.sglang.watchdog_timeout=9"
    )
    assert spec_of(result)["rollout"]["engineArgs"] == {"watchdog-timeout": 9}
    assert unwrapped(result).count("sluice runs on NVIDIA GPUs") == 2


def test_an_engine_argument_of_several_words_is_a_list() -> None:
    words = f"{GROUP} {ROLLOUT}.name=vllm +{ROLLOUT}.engine_kwargs.vllm.cudagraph_capture_sizes"
    arguments = spec_of(verl(f"{words}=[4,8]"))["rollout"]["engineArgs"]
    assert arguments["cudagraph-capture-sizes"] == ["4", "8"]


def test_fsdp_is_recognized_by_its_group() -> None:
    spec = spec_of(verl(f"{GROUP} {ACTOR}.fsdp_config.strategy=fsdp2"))
    assert spec["trainer"]["backend"] == "fsdp"
    group = f"{ACTOR}.fsdp_config"
    result = verl(f"{GROUP} {group}.strategy=fsdp2 {group}.ulysses_sequence_parallel_size=4")
    assert spec_of(result)["trainer"]["parallelism"] == {"context": 4}
