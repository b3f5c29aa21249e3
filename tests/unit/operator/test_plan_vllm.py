"""The pods of a job whose engine is vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.engines.vllm.launch import render_args
from sluice_operator.plan.decide.gangs import desired_gangs
from sluice_operator.plan.facts.model import Images
from sluice_operator.plan.manifests.pods import gang_pods
from tests.unit.operator.world import make_job

NFS = {"nfs": {"server": "s", "path": "/"}}


def rollout_pod(**changes: Any) -> dict[str, Any]:
    """The one of the first engine."""
    job = make_job(**changes | {"rollout": {"engine": "vllm", **changes.get("rollout", {})}})
    gang = next(g for g in desired_gangs(job) if g.role == "rollout")
    [pod] = gang_pods(job, gang, 1, "rendezvous:1", Images())
    return dict(pod)


def engine(**changes: Any) -> dict[str, Any]:
    containers = {c["name"]: c for c in rollout_pod(**changes)["spec"]["containers"]}
    return dict(containers["engine"])


def value(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param({"max-model-len": 4096}, ["--max-model-len", "4096"], id="value"),
        pytest.param({"enforce-eager": True}, ["--enforce-eager"], id="true"),
        pytest.param({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"], id="false"),
        pytest.param(
            {"served-model-name": ["a", "b"]}, ["--served-model-name", "a", "b"], id="list"
        ),
        pytest.param(
            {"middleware": ["a", "b"]}, ["--middleware", "a", "--middleware", "b"], id="middleware"
        ),
    ],
)
def test_arguments_are_vllms(args: dict[str, Any], words: list[str]) -> None:
    assert render_args(args) == words


def test_the_engine_is_vllms_own_image_with_our_plugin() -> None:
    pod = rollout_pod()
    container = engine()
    assert container["image"] == Images().vllm
    assert container["command"] == ["python3", "/sluice/vllm/launch_server.py"]
    assert value(container["args"], "--worker-extension-cls") == "sluice_vllm.worker.Weights"
    assert value(container["args"], "--logprobs-mode") == "processed_logprobs"
    [init] = [c for c in pod["spec"]["initContainers"] if c["name"] == "plugin"]
    assert init["command"] == ["python", "-m", "sluice.engines.vllm.plugin", "/sluice/vllm"]


def test_gpus_are_tensor_parallel_and_sleep_where_they_are_shared() -> None:
    args = engine(rollout={"gpusPerReplica": 2})["args"]
    assert value(args, "--tensor-parallel-size") == "2"
    assert "--enable-sleep-mode" not in args
    shared = engine(
        rollout={"gpusPerReplica": 1},
        trainer={"gpusPerNode": 1, "colocate": True},
        checkpoint={"volume": NFS},
    )
    assert "--enable-sleep-mode" in shared["args"]


@pytest.mark.parametrize(
    ("lora", "changes", "rank", "adapters"),
    [
        pytest.param({"rank": 9}, {}, "16", "1", id="in place"),
        pytest.param({"rank": 4, "initialise": "pissa"}, {}, "8", "1", id="of twice the rank"),
        pytest.param(
            {"rank": 32},
            {
                "weightSync": {"lora": "adapter", "pauseMode": "versions"},
                "rollout": {"mode": "async", "maxStaleness": 2},
            },
            "32",
            "4",
            id="side by side",
        ),
    ],
)
def test_an_engine_that_gets_adapters_reads_the_model(
    lora: dict[str, Any], changes: dict[str, Any], rank: str, adapters: str
) -> None:
    trainer = {"steps": 4, "backend": "fsdp", "lora": lora}
    container = engine(**{"trainer": trainer, "weightSync": {"lora": "adapter"}, **changes})
    assert "--load-format" not in container["args"]
    assert value(container["args"], "--max-lora-rank") == rank
    assert value(container["args"], "--max-loras") == adapters
    variables = {e["name"]: e.get("value") for e in container["env"]}
    versions = 3 if changes else 0
    assert json.loads(variables["SLUICE_LORA"])["versions"] == versions
    merged = engine(trainer=trainer)
    assert "--enable-lora" not in merged["args"]
    assert "SLUICE_LORA" not in {e["name"] for e in merged["env"]}


def test_without_gpus_it_stays_small() -> None:
    container = engine()
    variables = {e["name"]: e.get("value") for e in container["env"]}
    assert (variables["VLLM_CPU_KVCACHE_SPACE"], variables["OMP_NUM_THREADS"]) == ("1", "1")
    assert "--enforce-eager" in container["args"]
    assert value(container["args"], "--dtype") == "float32"


@pytest.mark.parametrize("name", ["maxModelLen", "max_model_len", "max-model-len", "contextLength"])
def test_the_users_arguments_win_in_any_spelling(name: str) -> None:
    args = engine(rollout={"engineArgs": {name: 512, "logprobsMode": "raw_logprobs"}})["args"]
    assert value(args, "--max-model-len") == "512"
    assert value(args, "--logprobs-mode") == "raw_logprobs"


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        pytest.param({"temperature": 0.7}, "processed_logprobs", id="temperature"),
        pytest.param({"topP": 0.9}, "raw_logprobs", id="top-p"),
        pytest.param({"topK": 20}, "raw_logprobs", id="top-k"),
    ],
)
def test_log_probs_are_those_that_the_trainer_computes(sampling: dict[str, Any], mode: str) -> None:
    assert value(engine(rollout={"sampling": sampling})["args"], "--logprobs-mode") == mode


def test_weights_that_the_trainer_brings_are_not_read() -> None:
    assert value(engine()["args"], "--load-format") == "dummy"
    assert "--load-format" not in engine(debug={"rolloutOnly": True})["args"]


def test_a_float32_head_is_the_engines_too() -> None:
    args = engine(model={"fp32LmHead": True})["args"]
    assert value(args, "--hf-overrides.head_dtype") == "float32"
    assert "--hf-overrides.head_dtype" not in engine()["args"]
