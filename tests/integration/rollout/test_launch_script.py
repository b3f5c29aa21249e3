"""The script that starts SGLang speaks the language of the release that is installed."""

from __future__ import annotations

import inspect
import json
import pkgutil
import runpy
import signal
from ast import literal_eval
from collections import defaultdict
from pathlib import Path
from typing import TypeVar

import pytest

from sluice.engines.protocol import ServerPlacement
from sluice.engines.sglang.client import Client
from sluice.engines.sglang.launch import Launch
from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.runtime.pod_env import free_port
from tests.first_process import started_first
from tests.integration.engines import Sglang, call, engine_environment, save_model
from tests.unit.operator.world import make_job

T = TypeVar("T")
# SGLang as it is started for GPUs. Our script forks its processes on CPUs.
SPAWNING = f"""
import psutil, runpy, sys

if __name__ == "__main__":
    sys.path.append({str(PATH)!r})
    from sluice_sglang.startup import preforked_processes as prepared
    prepared.begin(prepared.parts(sys.argv))
    print("prepared:", [child.pid for child in psutil.Process().children()], flush=True)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


def test_graphs_are_asked_for_as_this_release_spells_it() -> None:
    from sglang.srt.server_args import prepare_server_args

    script = runpy.run_path(str(PATH / "launch_server.py"))
    words = script["graph_arguments"]("400")
    parsed = prepare_server_args(["--model-path", "dummy", "--skip-tokenizer-init", *words])
    name = words[0].removeprefix("--").replace("-", "_")
    assert getattr(parsed, name) == 400


@pytest.mark.parametrize(
    ("family", "words", "expected"),
    [
        ("qwen2_5_vl", ["--enable-multimodal"], 256),
        ("qwen2_5_vl", ["--enable-multimodal", "--mm-preprocess-cache-size-mb=64"], 64),
        ("qwen2_5_vl", [], None),
        ("qwen3_vl", ["--enable-multimodal"], None),
    ],
)
def test_tokens_of_prompts_with_images_are_taken_as_they_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    words: list[str],
    expected: int | None,
) -> None:
    from sglang.srt.server_args import prepare_server_args

    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    script = runpy.run_path(str(PATH / "launch_server.py"))
    monkeypatch.syspath_prepend(PATH)
    added = script["image_arguments"](["--model-path", str(tmp_path), *words])
    common = ["--model-path", "dummy", "--skip-tokenizer-init"]
    assert prepare_server_args([*common, *words, *added]).mm_preprocess_cache_size_mb == expected


@pytest.mark.parametrize(
    ("layers", "on_cpu", "strategy"),
    [
        (["linear_attention", "full_attention"], "1", "no_buffer"),
        (["linear_attention", "full_attention"], "0", "auto"),
        (["full_attention"], "1", "auto"),
    ],
)
def test_a_cpu_serves_linear_attention_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: list[str], on_cpu: str, strategy: str
) -> None:
    from sglang.srt.server_args import prepare_server_args

    config = {"model_type": "qwen3_5", "text_config": {"layer_types": layers}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    script = runpy.run_path(str(PATH / "launch_server.py"))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", on_cpu)
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    monkeypatch.syspath_prepend(PATH)
    added = script["linear_attention_on_cpu"](["--model-path", str(tmp_path)])
    parsed = prepare_server_args(["--model-path", "dummy", "--skip-tokenizer-init", *added])
    assert parsed.mamba_radix_cache_strategy == strategy
    assert parsed.mamba_ssm_dtype == ("float32" if added else None)


@pytest.mark.parametrize(
    ("architecture", "module"),
    [("Qwen3ForCausalLM", "qwen3"), ("Phi3ForCausalLM", "llama"), ("GptOssForCausalLM", "gpt_oss")],
)
def test_models_of_other_families_are_not_imported(
    tmp_path: Path, architecture: str, module: str
) -> None:
    import sglang.srt.models

    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    script = runpy.run_path(str(PATH / "launch_server.py"))
    others = script["other_models"](["--port", "1", "--model-path", str(tmp_path)]).split(",")
    assert script["other_models"]([f"--model-path={tmp_path}"]).split(",") == others
    every = {file.stem for file in Path(sglang.srt.models.__path__[0]).glob("*.py")}
    assert every - set(others) == {module, "transformers"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model-path", "{unknown}"],
        ["--model-path", "Qwen/Qwen3-0.6B"],
        ["--model-path", "{known}", "--speculative-algorithm", "EAGLE"],
        ["--model-path", "{known}", "--json-model-override-args={{}}"],
        ["--port", "1"],
    ],
    ids=["through transformers", "of a hub", "with a draft", "changed", "of another argument"],
)
def test_all_models_are_imported_where_it_is_not_known_which_one_is_served(
    tmp_path: Path, arguments: list[str]
) -> None:
    directories = {}
    for name, architecture in (("known", "Qwen3ForCausalLM"), ("unknown", "MineForCausalLM")):
        directories[name] = tmp_path / name
        directories[name].mkdir()
        text = json.dumps({"architectures": [architecture]})
        (directories[name] / "config.json").write_text(text)
    script = runpy.run_path(str(PATH / "launch_server.py"))
    assert script["other_models"]([word.format(**directories) for word in arguments]) == ""


@pytest.mark.parametrize(
    ("hidden", "variables", "threads"),
    [
        pytest.param(576, {"OMP_NUM_THREADS": "1"}, "7", id="a model of real size"),
        pytest.param(64, {"OMP_NUM_THREADS": "1"}, "1", id="a tiny one"),
        pytest.param(576, {"OMP_NUM_THREADS": "3"}, "3", id="the user's"),
        pytest.param(
            576,
            {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
            "1",
            id="a rank with a core of its own",
        ),
    ],
)
def test_an_engine_on_cpus_has_threads_for_a_model_of_real_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hidden: int,
    variables: dict[str, str],
    threads: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": hidden}))
    monkeypatch.syspath_prepend(str(PATH))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    import sluice_sglang.startup.cpu_threads

    monkeypatch.setattr(sluice_sglang.startup.cpu_threads, "usable_processors", lambda: 7)
    script = runpy.run_path(str(PATH / "launch_server.py"))
    assert script["threads_on_cpu"](["--model-path", str(tmp_path)]) == threads


def test_a_deterministic_engine_is_started_in_words_of_this_release() -> None:
    from sglang.srt.server_args import prepare_server_args

    job = make_job(trainer={"deterministic": True, "gpusPerNode": 1}, rollout={"gpusPerReplica": 1})
    place = ServerPlacement(model="dummy", bind="127.0.0.1", port="30000", index="0")
    words = [*Launch().args(job.spec, place), "--skip-tokenizer-init"]
    assert prepare_server_args(words).attention_backend == "triton"


def test_a_deterministic_engine_has_a_place_for_each_of_our_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under their names in this release, which the plugin would else only log."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.syspath_prepend(str(PATH))
    monkeypatch.setenv("SLUICE_DETERMINISTIC", "1")
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    import sluice_sglang.numerics.deterministic

    sluice_sglang.numerics.deterministic.register()
    targets = [*HookRegistry._hooks]
    assert len(targets) == 10
    assert all(callable(pkgutil.resolve_name(target)) for target in targets)


def test_what_a_bucket_asks_of_a_whole_model_is_asked_in_functions_of_this_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.syspath_prepend(str(PATH))
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    import sluice_sglang.weights.cached_model_scan

    sluice_sglang.weights.cached_model_scan.register()
    targets = [*HookRegistry._hooks]
    assert len(targets) == 6
    assert all(callable(pkgutil.resolve_name(target)) for target in targets)


def test_prompts_wait_at_a_function_of_this_release(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.syspath_prepend(str(PATH))
    monkeypatch.setenv("SLUICE_PREFILL_PASSES", "8")
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    import sluice_sglang.prefill_batching

    sluice_sglang.prefill_batching.register()
    (target,) = HookRegistry._hooks
    function = pkgutil.resolve_name(target)
    assert [*inspect.signature(function).parameters] == ["self", "running_batch"]


def test_a_server_that_starts_as_the_first_process_of_a_container_ends_when_it_is_told_to(
    tmp_path: Path,
) -> None:
    """Run in another process namespace: there, signals without a handler are ignored."""
    model, port = save_model(tmp_path / "model", 0), free_port()
    words = [str(PATH / "launch_server.py"), "--model-path", str(model), "--port", str(port)]
    with started_first(words, engine_environment()) as (outer, first):
        first.terminate()
        assert outer.wait(30) == 128 + signal.SIGTERM


@pytest.mark.long
def test_sglang_s_processes_are_those_that_were_prepared(tmp_path: Path) -> None:
    class Spawning(Sglang):
        script = tmp_path / "serve.py"

    Spawning.script.write_text(SPAWNING)
    engine = Spawning(save_model(tmp_path / "model", 0), tmp_path / "log", "--enable-metrics")
    try:
        engine.wait_ready()
        log = engine.log.read_text()
        line_of_pids = next(line for line in log.splitlines() if line.startswith("prepared: "))
        pids = [engine.part(name).pid for name in ("scheduler", "detokenizer")]
        assert sorted(pids) == sorted(literal_eval(line_of_pids.removeprefix("prepared: ")))
        assert "starts anew" not in log
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        }
        status, answer = call(engine.url + Client.generate_path, body)
        assert (status, len(answer["output_ids"])) == (200, 4)
        assert "sglang:num_running_reqs{" in call(engine.url + "/metrics")[1]
    finally:
        engine.kill()
