import json
from typing import Any

import pytest

from sluice.api import RLJob
from sluice.engines.sglang.launch import Launch, normalized, render_args
from sluice_operator.plan.decide.gangs import desired_gangs
from sluice_operator.plan.facts.model import Images
from sluice_operator.plan.manifests.pods import gang_pods
from tests.unit.operator.world import make_job


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"mem-fraction-static": 0.8}, ["--mem-fraction-static", "0.8"]),
        ({"enable-metrics": True}, ["--enable-metrics"]),
        ({"enable-metrics": False}, []),
        ({"cuda-graph-bs": ["1", "2"]}, ["--cuda-graph-bs", "1", "2"]),
        ({"cuda-graph-bs": [1, 2]}, ["--cuda-graph-bs", "1", "2"]),
        ({"context-length": 4096}, ["--context-length", "4096"]),
    ],
    ids=str,
)
def test_render_args(args: dict[str, Any], expected: list[str]) -> None:
    assert render_args(args) == expected


def test_a_list_of_numbers_needs_no_quotes() -> None:
    args = engine_args(make_job(rollout={"engineArgs": {"cudaGraphBs": [1, 2, 256]}}))
    at = args.index("--cuda-graph-bs")
    assert args[at : at + 4] == ["--cuda-graph-bs", "1", "2", "256"]
    with pytest.raises(ValueError, match="cudaGraphBs"):
        make_job(rollout={"engineArgs": {"cudaGraphBs": [True]}})


@pytest.mark.parametrize(
    "name",
    ["memFractionStatic", "mem_fraction_static", "mem-fraction-static", "--mem-fraction-static"],
)
def test_all_spellings_are_one_argument(name: str) -> None:
    assert normalized({name: 0.5}) == {"mem-fraction-static": 0.5}


@pytest.mark.parametrize(
    ("name", "canonical"), [("tp", "tp-size"), ("tensorParallelSize", "tp-size"), ("dp", "dp")]
)
def test_aliases(name: str, canonical: str) -> None:
    assert normalized({name: 2}) == {canonical: 2}


def engine_args(job: RLJob) -> list[str]:
    """Return the arguments of the first engine's first pod."""
    gang = next(gang for gang in desired_gangs(job) if gang.role == "rollout")
    containers = gang_pods(job, gang, 1, "rendezvous:1", Images())[0]["spec"]["containers"]
    return list(
        next(container["args"] for container in containers if container["name"] == "engine")
    )


def value(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def test_cpu_engine() -> None:
    args = engine_args(make_job())
    assert value(args, "--device") == "cpu"
    assert value(args, "--host") == "$(SLUICE_BIND)"
    assert "--sleep-on-idle" in args


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="pretrained"),
        pytest.param({"model": {"init": "random"}}, id="random"),
    ],
)
def test_weights_that_the_trainer_brings_are_not_read(spec: dict[str, Any]) -> None:
    assert value(engine_args(make_job(**spec)), "--load-format") == "dummy"


def test_weights_that_nobody_brings_are_read() -> None:
    assert "--load-format" not in engine_args(make_job(debug={"rolloutOnly": True}))


def test_a_user_may_have_weights_read() -> None:
    args = engine_args(make_job(rollout={"engineArgs": {"loadFormat": "auto"}}))
    assert value(args, "--load-format") == "auto"


def test_an_engine_reads_its_draft_model_from_the_volume() -> None:
    speculative = {"algorithm": "draft", "model": "small", "steps": 4, "topK": 2}
    rollout = {"speculative": speculative, "concurrency": 32}
    job = make_job(model={"path": "m", "volume": {"emptyDir": {}}}, rollout=rollout)
    args = engine_args(job)
    expected = {
        "algorithm": "STANDALONE",
        "num-steps": "4",
        "eagle-topk": "2",
        "num-draft-tokens": "9",
        "draft-model-path": "/sluice/model/small",
        "draft-load-format": "auto",
    }
    for name, setting in expected.items():
        assert value(args, f"--speculative-{name}") == setting
    assert value(args, "--load-format") == "dummy", "the trainer sends the model, not the draft"
    assert value(args, "--max-running-requests") == "32"
    assert Launch().env(job.spec)["SLUICE_SPECULATIVE"] == "draft"


def test_a_head_is_in_the_checkpoint_of_the_model() -> None:
    args = engine_args(make_job(rollout={"speculative": {"algorithm": "mtp"}}))
    assert value(args, "--speculative-draft-model-path") == value(args, "--model-path")
    args = engine_args(make_job(rollout={"speculative": {"algorithm": "ngram", "topK": 2}}))
    assert value(args, "--speculative-ngram-max-bfs-breadth") == "2"
    assert value(args, "--speculative-num-draft-tokens") == "7"
    assert "--speculative-draft-model-path" not in args


def test_a_draft_is_kept_while_the_trainer_has_the_gpu() -> None:
    rollout = {"gpusPerReplica": 1, "speculative": {"algorithm": "draft", "model": "small"}}
    apart = engine_args(make_job(rollout=rollout, trainer={"steps": 1, "gpusPerNode": 1}))
    trainer = {"steps": 1, "gpusPerNode": 1, "colocate": True}
    shared = engine_args(make_job(rollout=rollout, trainer=trainer))
    assert "--enable-draft-weights-cpu-backup" in shared
    assert "--enable-draft-weights-cpu-backup" not in apart


LORA = {"rank": 8, "alpha": 64}


@pytest.mark.parametrize(
    ("lora", "layers"),
    [
        pytest.param(LORA, ["all"], id="all layers"),
        pytest.param(
            {**LORA, "rankStabilized": True, "targetModules": ["q_proj", "v_proj", "o_proj"],
             "excludeModules": ["o_proj"]}, ["q_proj", "v_proj"], id="attention",
        ),
    ],
)  # fmt: skip
def test_an_engine_that_gets_adapters_reads_the_model(
    lora: dict[str, Any], layers: list[str]
) -> None:
    trainer = {"steps": 4, "backend": "fsdp", "lora": lora}
    job = make_job(trainer=trainer, weightSync={"lora": "adapter"})
    args = engine_args(job)
    assert "--load-format" not in args
    assert "--enable-lora" not in args, "an adapter is added to the model's weights"
    settings = json.loads(Launch().env(job.spec)["SLUICE_LORA"])
    added = ["all-linear"] if layers == ["all"] else layers
    assert settings == {"rank": 8, "versions": 0, "layers": added}
    job = make_job(trainer=trainer, weightSync={"lora": "adapter", "pauseMode": "versions"})
    args = engine_args(job)
    assert "--enable-lora" in args
    assert value(args, "--max-lora-rank") == "8"
    at = args.index("--lora-target-modules")
    assert args[at + 1 : at + 1 + len(layers)] == layers
    assert args[at + 1 + len(layers)].startswith("--")
    assert value(args, "--lora-backend") == "torch_native", "the backend that runs on a CPU"


def test_an_engine_holds_the_first_weights_of_pissa_too() -> None:
    job = make_job(
        trainer={"steps": 4, "backend": "fsdp", "lora": {"rank": 8, "initialise": "pissa"}},
        weightSync={"lora": "adapter", "pauseMode": "versions"},
    )
    assert value(engine_args(job), "--max-lora-rank") == "16"
    assert json.loads(Launch().env(job.spec)["SLUICE_LORA"])["rank"] == 16


def test_an_engine_holds_the_versions_that_samples_may_have() -> None:
    job = make_job(
        trainer={"steps": 4, "backend": "fsdp", "lora": LORA},
        weightSync={"lora": "adapter", "pauseMode": "versions"},
        rollout={"mode": "async", "maxStaleness": 2},
    )
    assert value(engine_args(job), "--max-loras-per-batch") == "4"
    assert json.loads(Launch().env(job.spec)["SLUICE_LORA"])["versions"] == 3


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_an_engine_that_rests_keeps_a_model_that_no_update_brings(sync: str) -> None:
    job = make_job(
        trainer={"steps": 4, "gpusPerNode": 1, "colocate": True, "lora": {"rank": 8}},
        rollout={"gpusPerReplica": 1},
        weightSync={"lora": sync},
    )
    args = engine_args(job)
    assert "--enable-memory-saver" in args
    assert ("--enable-weights-cpu-backup" in args) == (sync == "adapter")


def test_an_engine_that_gets_merged_weights_has_no_adapters() -> None:
    job = make_job(trainer={"steps": 4, "backend": "fsdp", "lora": LORA})
    assert "--enable-lora" not in engine_args(job)
    assert "SLUICE_LORA" not in Launch().env(job.spec)


@pytest.mark.parametrize("gpus", [0, 1], ids=["CPU", "GPU"])
def test_an_engine_that_gets_images_scales_them_as_the_trainer_does(gpus: int) -> None:
    trainer = {"backend": "fsdp"}
    job = make_job(data={"images": {}}, rollout={"gpusPerReplica": gpus}, trainer=trainer)
    args = engine_args(job)
    assert {"--enable-multimodal", "--disable-fast-image-processor"} < set(args)
    assert ("--mm-attention-backend" in args) == (not gpus)
    assert Launch().env(job.spec)["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


def test_an_engine_without_images_keeps_its_settings() -> None:
    assert "--enable-multimodal" not in engine_args(make_job())
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in Launch().env(make_job().spec)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_float32_head_is_the_engines_too(enabled: bool) -> None:
    args = engine_args(make_job(model={"fp32LmHead": enabled}))
    assert ("--enable-fp32-lm-head" in args) == enabled


@pytest.mark.parametrize(
    ("engine", "own"), [("sglang", "SGLANG_CACHE_DIR"), ("vllm", "VLLM_CACHE_ROOT")]
)
def test_kernels_are_kept_by_engine_and_trainer_and_not_seen_by_the_users_code(
    engine: str, own: str
) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "kernels"}}
    job = make_job(kernelCache={"volume": claim}, rollout={"engine": engine})
    seen = {}
    for gang in desired_gangs(job):
        spec = gang_pods(job, gang, 1, "rendezvous:1", Images())[0]["spec"]
        for container in spec["containers"]:
            names = {entry["name"] for entry in container["env"]}
            mounts = [m for m in container["volumeMounts"] if m["mountPath"] == "/sluice/cache"]
            seen[container["name"]] = (mounts, {own, "TRITON_CACHE_DIR"} & names)
        held = [volume for volume in spec["volumes"] if volume["name"] == "cache"]
        assert held == ([{"name": "cache", **claim}] if gang.role in ("rollout", "trainer") else [])
    place = {"name": "cache", "mountPath": "/sluice/cache"}
    assert seen.pop("engine") == ([place | {"subPath": "rollout"}], {own, "TRITON_CACHE_DIR"})
    assert seen.pop("trainer") == ([place | {"subPath": "trainer"}], {"TRITON_CACHE_DIR"})
    assert {*seen} == {"worker", "buffer", "rendezvous"}
    assert all(entry == ([], set()) for entry in seen.values())


@pytest.mark.parametrize("gpus", [0, 1], ids=["CPU", "GPU"])
def test_a_deterministic_engine_has_the_attention_that_the_trainer_computes(gpus: int) -> None:
    job = make_job(
        trainer={"deterministic": True, "gpusPerNode": gpus}, rollout={"gpusPerReplica": gpus}
    )
    args = engine_args(job)
    backend = "triton" if gpus else "torch_native"
    assert value(args, "--attention-backend") == backend
    assert Launch().env(job.spec).get("SLUICE_DETERMINISTIC") == ("1" if gpus else None)


@pytest.mark.parametrize(
    ("replay", "expected"), [("none", False), ("trainer", False), ("rollout", True)]
)
def test_an_engine_tells_experts_where_the_trainer_replays_them(
    replay: str, expected: bool
) -> None:
    args = engine_args(make_job(trainer={"routingReplay": replay, "stepsPerBatch": 2}))
    assert ("--enable-return-routed-experts" in args) == expected


@pytest.mark.parametrize(
    ("rollout", "size"),
    [
        ({"gpusPerReplica": 0}, "1"),
        ({"gpusPerReplica": 4}, "4"),
        ({"gpusPerReplica": 8, "nodesPerReplica": 2}, "16"),
        ({"gpusPerReplica": 8, "engineArgs": {"tp": 4, "dp-size": 2}}, "4"),
    ],
    ids=str,
)
def test_tensor_parallel_size(rollout: dict[str, Any], size: str) -> None:
    assert value(engine_args(make_job(rollout=rollout)), "--tp-size") == size


@pytest.mark.parametrize(
    ("rollout", "limit"),
    [
        pytest.param({"gpusPerReplica": 1, "concurrency": 400}, "400", id="of the concurrency"),
        pytest.param({"gpusPerReplica": 1, "concurrency": 4096}, "512", id="at most"),
        pytest.param(
            {"gpusPerReplica": 4, "concurrency": 400, "engineArgs": {"dpSize": 4}},
            "100",
            id="of each data-parallel part",
        ),
        pytest.param({"gpusPerReplica": 0, "concurrency": 400}, None, id="CPU"),
        pytest.param(
            {"gpusPerReplica": 1, "engineArgs": {"cudaGraphMaxBsDecode": 8}}, None, id="the user's"
        ),
        pytest.param(
            {"gpusPerReplica": 1, "engineArgs": {"disable-cuda-graph": True}}, None, id="no graphs"
        ),
        pytest.param(
            {
                "gpusPerReplica": 1,
                "concurrency": 400,
                "engineArgs": {"disablePiecewiseCudaGraph": True},
            },
            "400",
            id="none for prompts",
        ),
    ],
)
def test_there_are_graphs_for_all_requests_that_a_worker_keeps_open(
    rollout: dict[str, Any], limit: str | None
) -> None:
    variables = engine_variables(make_job(rollout=rollout))
    assert variables.get("SLUICE_CUDA_GRAPH_MAX_BS") == limit


@pytest.mark.parametrize(
    ("rollout", "passes"),
    [
        pytest.param({"gpusPerReplica": 1}, "8", id="GPU"),
        pytest.param({"gpusPerReplica": 0}, None, id="CPU"),
        pytest.param(
            {"gpusPerReplica": 1, "engineArgs": {"enableMixedChunk": True}}, None, id="the user's"
        ),
    ],
)
def test_prompts_wait_for_each_other_on_gpus_unless_the_user_says_how(
    rollout: dict[str, Any], passes: str | None
) -> None:
    assert engine_variables(make_job(rollout=rollout)).get("SLUICE_PREFILL_PASSES") == passes


def engine_variables(job: RLJob) -> dict[str, str | None]:
    """Return the variables of the engine's container, by name."""
    gang = next(gang for gang in desired_gangs(job) if gang.role == "rollout")
    containers = gang_pods(job, gang, 1, "r:1", Images())[0]["spec"]["containers"]
    (engine,) = (container for container in containers if container["name"] == "engine")
    return {variable["name"]: variable.get("value") for variable in engine["env"]}


def test_the_users_arguments_win() -> None:
    args = engine_args(
        make_job(rollout={"engineArgs": {"dtype": "bfloat16", "sleep_on_idle": False}})
    )
    assert value(args, "--dtype") == "bfloat16"
    assert "--sleep-on-idle" not in args
    assert args.count("--dtype") == 1


def test_an_engine_of_several_pods_names_its_first() -> None:
    args = engine_args(make_job(rollout={"gpusPerReplica": 8, "nodesPerReplica": 2}))
    assert value(args, "--dist-init-addr") == "demo-rollout-0-1-0.demo-engines:29500"
    assert value(args, "--node-rank") == "$(SLUICE_INDEX)"
    assert value(args, "--nnodes") == "2"


def test_a_models_volume_is_where_the_engine_looks() -> None:
    job = make_job(model={"path": "qwen/", "volume": {"hostPath": {"path": "/models"}}})
    assert value(engine_args(job), "--model-path") == "/sluice/model/qwen"
