"""vLLM serves an adapter whose tensors come with weight updates, like merged weights."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.protocol import BaseModel
from sluice.engines.vllm import Vllm
from sluice.model_digest import model_digest
from sluice_trainer.weights.disk import AdapterFile, VersionDirectories
from sluice_trainer.weights.ipc import Ipc
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import distance, log_probs, save_model, tolerance
from tests.integration.vllm_engine import PYTHON, VllmServer
from tests.integration.weights.adapters import (
    ALL_LAYERS,
    ATTENTION,
    RANK,
    adapter,
    merged,
    publish_adapter,
    send_adapter,
    serves_adapters,
)
from tests.integration.weights.tools import PROMPT, begin
from tests.tools import missing

pytestmark = pytest.mark.vllm
MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]
VLLM = Vllm()
TOKENS = 300  # of a response that lasts for several updates
LONG_PROMPT = [20 + i % 50 for i in range(400)]  # several blocks of the prefix cache


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model", 1)


@pytest.fixture(scope="module", params=[0, 2], ids=["in place", "side by side"])
def _server(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """Start an engine that replaces its adapter, and one that keeps two versions."""
    if not PYTHON.exists():
        missing("needs vLLM: make vllm")
    versions = {"pauseMode": "versions"} if request.param else {}
    server = VllmServer(
        base,
        tmp_path_factory.mktemp("engine") / "log",
        groups={
            "trainer": {"backend": "fsdp", "lora": {"rank": RANK}},
            "weightSync": {"lora": "adapter", **versions},
            "rollout": {"mode": "async", "maxStaleness": 1},
        },
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()
        print(server.log.read_text()[-4000:])


@pytest.fixture
def server(_server: VllmServer) -> VllmServer:
    return _server


def keeps_versions(server: VllmServer) -> bool:
    return "--max-loras 3" in server.command


def sync(server: VllmServer, pause: str = "retract") -> dict[str, Any]:
    return {"lora": "adapter", "pauseMode": "versions" if keeps_versions(server) else pause}


@pytest.mark.support("vllm", "lora", "qwen3")
@pytest.mark.parametrize("over", ["communicator", "directory", "memory"])
async def test_an_engine_with_an_adapter_computes_as_one_with_merged_weights(
    over: str,
    server: VllmServer,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    await join_engine("engine-0", server.address)
    if over == "memory":
        if keeps_versions(server):
            pytest.skip("colocated engines pause in any case")
        sender = make_sender(
            Ipc(), colocated=True, lora="adapter", transport="ipc", pauseMode="abort"
        )
    elif over == "directory":
        files = AdapterFile(VersionDirectories(tmp_path / "weights", 1))
        sender = make_sender(files, transport="disk", **sync(server))
    else:
        sender = make_sender(**sync(server))
    sender.base = BaseModel(str(base), model_digest(base))
    updates = {1: ALL_LAYERS, 2: ATTENTION, 3: ("k_proj", "down_proj")}
    await serves_adapters(sender, server.url, base, tmp_path, updates, VLLM)


async def test_an_adapter_that_does_not_fit_is_refused(
    server: VllmServer,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    await join_engine("engine-0", server.address)
    sender = make_sender(**sync(server))
    for tensors, reason in (
        (adapter(base, 1, rank=16), "the adapter has rank 16, and this engine was started for 8"),
        (
            [(name.replace("o_proj", "x_proj"), tensor) for name, tensor in adapter(base, 1)],
            r"this engine adapts .*, not base_model\.model\.model\.layers\.0\.self_attn\.x_proj",
        ),
    ):
        outcome = await publish_adapter(sender, 1, tensors)
        (refusal,) = outcome.refused.values()
        assert re.search(reason, refusal), refusal
    await serves_adapters(sender, server.url, base, tmp_path, {2: ALL_LAYERS}, VLLM)


async def test_an_engine_with_another_model_gets_no_adapter(
    server: VllmServer,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    await join_engine("engine-0", server.address)
    sender, other = make_sender(**sync(server)), save_model(tmp_path / "other", 2)
    sender.base = BaseModel(str(other), model_digest(other))
    plan = await sender.plan(1, joiners_only=False)
    await sender.prepare(1, plan.engines)
    assert sender.current
    (refusal,) = sender.current.refused.values()
    assert f"the engine has read other tensors from {base}" in refusal


async def test_nothing_that_a_replaced_adapter_has_computed_is_found(
    server: VllmServer,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    """The running request keeps the engine from emptying its prefix cache."""
    await join_engine("engine-0", server.address)
    sender = make_sender(**sync(server, pause="in_place"))
    await publish_adapter(sender, 1, adapter(base, 1))
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
    async with VLLM.client(server.url) as engine:
        await engine.wait_ready(30.0)
        running = asyncio.create_task(engine.generate("running", LONG_PROMPT, sampling))
        await server.generated(10)
        newer = adapter(base, 2)
        await begin(sender, 2, joiners_only=False)
        # It has come in the update, and begins with the adapter that it began with, or the next.
        early = asyncio.create_task(
            engine.generate("early", LONG_PROMPT, {"max_new_tokens": 8, "ignore_eos": True})
        )
        await asyncio.sleep(0.2)
        await send_adapter(sender, newer)
        assert not running.done(), "its response was too short for this test"
        late = await engine.generate("late", LONG_PROMPT, {"max_new_tokens": 8, "ignore_eos": True})
        model = merged(base, newer, tmp_path / "2")
        generations = [late, *([] if keeps_versions(server) else [await early])]
        for generation in generations:
            assert [span.version for span in generation.spans] == [2]
            expected = log_probs(model, LONG_PROMPT + generation.tokens, 8)
            assert distance(generation.log_probs, expected) < tolerance()
        versions = [span.version for span in (await running).spans]
        assert versions == ([1] if keeps_versions(server) else [1, 2])


async def test_a_request_ends_with_the_version_that_it_began_with(
    server: VllmServer,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    """Three versions generate in one batch, and none of them is paused."""
    if not keeps_versions(server):
        pytest.skip("this engine replaces its adapter")
    await join_engine("engine-0", server.address)
    sender = make_sender(**sync(server))
    models, running = {}, {}
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
    async with VLLM.client(server.url) as engine:
        await engine.wait_ready(30.0)
        for version in (1, 2, 3):
            tensors = adapter(base, version)
            await publish_adapter(sender, version, tensors)
            models[version] = merged(base, tensors, tmp_path / str(version))
            request = engine.generate(f"of {version}", PROMPT, sampling)
            running[version] = asyncio.create_task(request)
            await server.generated(10)
        await begin(sender, 4, joiners_only=False)
        assert not running[1].done(), "its response was too short for this test"
        before = server.log.read_text()
        for version, task in running.items():
            generation = await task
            assert [span.version for span in generation.spans] == [version]
            expected = log_probs(models[version], PROMPT + generation.tokens, TOKENS)
            assert distance(generation.log_probs, expected) < tolerance()
    await send_adapter(sender, adapter(base, 4))
    log = server.log.read_text().removeprefix(before)
    assert len(re.findall(r"the adapter \d+ is not used any more", log)) == 2
