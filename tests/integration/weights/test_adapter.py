"""SGLang serves an adapter whose tensors come with weight updates, like merged weights."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.engines.protocol import BaseModel
from sluice.model_digest import model_digest
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.weights.disk import AdapterFile, VersionDirectories
from sluice_trainer.weights.ipc import Ipc
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import (
    Sglang,
    distance,
    gpus,
    log_probs,
    save_model,
    tolerance,
)
from tests.integration.rendezvous_server import Rendezvous
from tests.integration.weights import tools
from tests.integration.weights.adapters import (
    ALL_LAYERS,
    ATTENTION,
    RANK,
    adapter,
    buckets_of,
    job_metrics,
    merged,
    publish_adapter,
    send_adapter,
    serves_adapters,
)
from tests.integration.weights.tools import PROMPT, SGLANG, Tensors, begin, serves

MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]
TOKENS = 400  # of a response that lasts for several updates
MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model", 1)


def serving(
    base: Path, log: Path, *arguments: str, versions: int = 0, cores: str = ""
) -> AbstractContextManager[Sglang]:
    """Start an engine that takes adapters."""
    settings = {"rank": RANK, "versions": versions, "layers": ["all-linear"]}
    several = ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", "all"]
    several += ["--max-loras-per-batch", str(versions + 1)]
    several += [] if gpus() else ["--lora-backend", "torch_native"]
    return tools.serving(
        base,
        log,
        *(several if versions else []),
        *arguments,
        SLUICE_LORA=json.dumps(settings),
        **({"SGLANG_CPU_OMP_THREADS_BIND": cores} if cores else {}),
    )


@pytest.fixture(scope="module")
def in_place(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """Start an engine with one adapter, which each update replaces."""
    with serving(base, tmp_path_factory.mktemp("engine") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def side_by_side(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """Start an engine that keeps two versions, and older ones while requests use them."""
    with serving(base, tmp_path_factory.mktemp("engine") / "log", versions=2) as server:
        yield server


def of_other_layers(tensors: Tensors) -> Tensors:
    """Return an adapter with layers that the engine's model does not have."""
    return [(name.replace("down_proj", "middle_proj"), tensor) for name, tensor in tensors]


def over_directory(make_sender: MakeSender, directory: Path, **sync: object) -> WeightSender:
    transport = AdapterFile(VersionDirectories(directory, 1))
    return make_sender(transport, lora="adapter", transport="disk", **sync)


@pytest.mark.support("sglang", "lora", "qwen3")
@pytest.mark.parametrize(
    "layers",
    [ALL_LAYERS, ATTENTION, ("k_proj", "down_proj")],
    ids=["all layers", "attention", "two layers"],
)
async def test_an_engine_with_an_adapter_computes_as_one_with_merged_weights(
    layers: tuple[str, ...],
    in_place: Sglang,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    await join_engine("engine-0", in_place.address)
    sender = make_sender(lora="adapter")
    updates = dict.fromkeys((1, 2, 3), layers)
    await serves_adapters(sender, in_place.url, base, tmp_path, updates)
    assert "an adapter is added to the weights of the model" in in_place.log.read_text()


async def test_an_engine_that_holds_versions_computes_so_too(
    side_by_side: Sglang,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    await join_engine("engine-0", side_by_side.address)
    sender = make_sender(lora="adapter", pauseMode="versions")
    updates = {1: ALL_LAYERS, 2: ATTENTION, 3: ALL_LAYERS}
    await serves_adapters(sender, side_by_side.url, base, tmp_path, updates)
    assert "loaded in place, at once" in side_by_side.log.read_text()


async def test_layers_that_the_engine_does_not_have_are_refused(
    in_place: Sglang, base: Path, tmp_path: Path, make_sender: MakeSender, join_engine: JoinEngine
) -> None:
    await join_engine("engine-0", in_place.address)
    sender = make_sender(lora="adapter")
    outcome = await publish_adapter(sender, 1, of_other_layers(adapter(base, 1)))
    (refusal,) = outcome.refused.values()
    assert "no such layer for model.layers.0.mlp.middle_proj.weight" in refusal
    assert "set weightSync.lora: merged" in refusal
    await serves_adapters(sender, in_place.url, base, tmp_path, {2: ALL_LAYERS})


@pytest.mark.long
@pytest.mark.support("sglang", "lora", "qwen3_moe")
async def test_a_mixture_has_adapters_in_its_attention(
    tmp_path: Path, make_sender: MakeSender, join_engine: JoinEngine
) -> None:
    mixture = save_model(tmp_path / "mixture", 1, "Qwen3Moe", **MIXTURE)
    with serving(mixture, tmp_path / "log") as server:
        await join_engine("engine-0", server.address)
        tensors = adapter(mixture, 1, ATTENTION)
        await publish_adapter(make_sender(lora="adapter"), 1, tensors)
        assert await serves(server.url, merged(mixture, tensors, tmp_path / "1"), 1)


@pytest.mark.long
async def test_an_engine_of_two_ranks_cuts_the_adapter(
    base: Path, tmp_path: Path, make_sender: MakeSender, join_engine: JoinEngine
) -> None:
    if gpus() == 1:
        pytest.skip("needs two GPUs")
    with serving(base, tmp_path / "log", "--tp", "2", cores="" if gpus() else "0|1") as server:
        await join_engine("engine-0", server.address, 2)
        tensors = adapter(base, 1)
        assert await serves(server.url, base, -1)
        sender = make_sender(lora="adapter")
        await publish_adapter(sender, 1, adapter(base, 2))
        await publish_adapter(sender, 2, tensors)
        assert await serves(server.url, merged(base, tensors, tmp_path / "2"), 2)
        assert "added to the weights of the model" in (tmp_path / "log").read_text()
        tensors = adapter(base, 3)
        await publish_adapter(over_directory(make_sender, tmp_path / "weights"), 3, tensors)
        assert await serves(server.url, merged(base, tensors, tmp_path / "3"), 3)


async def test_versions_of_layers_that_sglang_joins_must_come_together(
    side_by_side: Sglang,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    await join_engine("engine-0", side_by_side.address)
    sender = make_sender(lora="adapter", pauseMode="versions")
    outcome = await publish_adapter(sender, 4, adapter(base, 4, ("k_proj", "o_proj", "down_proj")))
    assert not outcome.engines
    (refusal,) = outcome.refused.values()
    assert "an adapter of k_proj needs one of q_proj" in refusal
    assert "add it to trainer.lora.targetModules" in refusal
    await serves_adapters(sender, side_by_side.url, base, tmp_path, {5: ALL_LAYERS})


async def test_an_adapter_also_comes_over_a_directory(
    in_place: Sglang, base: Path, tmp_path: Path, make_sender: MakeSender, join_engine: JoinEngine
) -> None:
    await join_engine("engine-0", in_place.address)
    sender = over_directory(make_sender, tmp_path / "weights")
    updates = {1: ALL_LAYERS, 2: ALL_LAYERS, 3: ATTENTION}
    tensors, model = await serves_adapters(sender, in_place.url, base, tmp_path, updates)
    assert [file.name for file in (tmp_path / "weights").iterdir()] == ["version_0000003.attempt1"]
    outcome = await publish_adapter(sender, 4, of_other_layers(adapter(base, 4)))
    (refusal,) = outcome.refused.values()
    assert "no such layer for model.layers.0.mlp.middle_proj.weight" in refusal
    await publish_adapter(sender, 5, tensors)
    assert await serves(in_place.url, model, 5), "it lives on"


@pytest.mark.skipif(gpus() > 0, reason="its memory is another GPU's; tests/gpu has one GPU")
async def test_an_engine_that_rests_keeps_its_model_and_copies_an_adapter_from_the_trainer(
    in_place: Sglang,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
    rendezvous: Rendezvous,
) -> None:
    await join_engine("engine-0", in_place.address)
    sender = make_sender(
        Ipc(), colocated=True, lora="adapter", transport="ipc", pauseMode="abort", timeoutSeconds=20
    )
    for version, layers in ((1, ALL_LAYERS), (2, ALL_LAYERS), (3, ATTENTION)):
        tensors, model = await serves_adapters(
            sender, in_place.url, base, tmp_path, {version: layers}
        )
        ledger = await rendezvous.ledger()
        await sender.rest(
            version,
            [pb.EngineMember(member=e.member, generation=e.generation) for e in ledger.values()],
        )
    outcome = await publish_adapter(sender, 4, [("model.norm.weight", torch.ones(4000))])
    (refusal,) = outcome.refused.values()
    assert "this engine takes adapters, and these are tensors of a model" in refusal
    await publish_adapter(sender, 5, tensors)
    assert await serves(in_place.url, model, 5), "it lives on"


async def test_an_engine_with_another_model_gets_no_adapter(
    in_place: Sglang,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    await join_engine("engine-0", in_place.address)
    sender, other = make_sender(lora="adapter"), save_model(tmp_path / "other", 2)
    sender.base = BaseModel(str(other), model_digest(other))
    plan = await sender.plan(1, joiners_only=False)
    await sender.prepare(1, plan.engines)
    assert sender.current
    assert not sender.current.peers
    (refusal,) = sender.current.refused.values()
    assert re.fullmatch(
        rf"prepare: the adapter is of the model {other} \(digest \w{{12}}\), and the engine has "
        rf"read other tensors from {base} \(digest \w{{12}}\): give both the same files, or set "
        "weightSync.lora: merged",
        refusal,
    )
    copy = shutil.copytree(base, tmp_path / "copy")
    sender.base = BaseModel(str(copy), model_digest(copy))
    await serves_adapters(sender, in_place.url, base, tmp_path, {2: ALL_LAYERS})


@pytest.mark.parametrize(("over", "first"), [("communicator", 11), ("directory", 21)])
async def test_a_request_ends_with_the_version_that_it_began_with(
    over: str,
    first: int,
    side_by_side: Sglang,
    base: Path,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    """Three versions generate in one batch, and none of them is paused."""
    await join_engine("engine-0", side_by_side.address)
    if over == "directory":
        sender = over_directory(make_sender, tmp_path / "weights", pauseMode="versions")
    else:
        sender = make_sender(lora="adapter", pauseMode="versions")
    models, running = {}, {}
    async with SGLANG.client(side_by_side.url) as engine:
        await engine.wait_ready(30.0)
        for version in range(first, first + 3):
            tensors = adapter(base, version)
            await publish_adapter(sender, version, tensors)
            models[version] = merged(base, tensors, tmp_path / str(version))
            sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
            running[version] = asyncio.create_task(
                engine.generate(f"of {version}", PROMPT, sampling)
            )
            await asyncio.sleep(0.3)
        await begin(sender, first + 3, joiners_only=False)
        assert not running[first].done(), "its response was too short for this test"
        # All of them end in the middle of an update.
        for version, task in running.items():
            generation = await task
            assert [span.version for span in generation.spans] == [version]
            expected = log_probs(models[version], PROMPT + generation.tokens, TOKENS)
            assert distance(generation.log_probs, expected) < tolerance()
    names = {f"sluice@{version}" for version in models}
    assert not names & dropped(side_by_side), "all are in use"
    await send_adapter(sender, adapter(base, first + 3))
    assert names & dropped(side_by_side) == {f"sluice@{first}", f"sluice@{first + 1}"}
    shown = job_metrics(side_by_side)
    assert shown["sluice_adapter_versions"] == 2
    assert shown["sluice_adapter_loads_total"] - shown["sluice_adapter_drops_total"] == 2
    tensors = adapter(base, first)
    size = sum(tensor.nbytes for _, tensor in tensors)
    assert 2 * size <= shown["sluice_adapter_bytes"] <= 4 * size, "and memory for the next"


MOMENTS = ["prepared", "paused", "half way", "transferred", "verified"]
QUICK = {("retract", "half way"), ("versions", "verified")}


@pytest.mark.parametrize(
    ("mode", "left"),
    [
        pytest.param(mode, left, marks=[] if (mode, left) in QUICK else pytest.mark.long)
        for mode in ("retract", "versions")
        for left in MOMENTS
    ],
)
async def test_an_adapter_whose_trainer_dies_in_an_update_is_replaced_by_that_of_the_next(
    mode: str,
    left: str,
    base: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make_sender: MakeSender,
    join_engine: JoinEngine,
) -> None:
    """The next trainer computes the same step again, and its version has other numbers."""
    server: Sglang = request.getfixturevalue("in_place" if mode == "retract" else "side_by_side")
    await join_engine("engine-0", server.address)
    first, lost, last = (adapter(base, seed) for seed in (31, 32, 33))
    before, after = (merged(base, sent, tmp_path / str(i)) for i, sent in enumerate((first, last)))
    dead = make_sender(lora="adapter", pauseMode=mode)
    await publish_adapter(dead, 31, first)
    async with SGLANG.client(server.url) as engine:
        await engine.wait_ready(30.0)
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
        running = asyncio.create_task(
            engine.generate(f"{mode}-{left}", PROMPT, sampling, cache="31")
        )
        await server.generated(40)
        await leave(dead, 32, lost, MOMENTS.index(left))
        next_one = make_sender(attempt=2, lora="adapter", pauseMode=mode)
        outcome = await publish_adapter(next_one, 32, last)
        assert (outcome.engines, outcome.failed) == (("engine-0",), {})
        generation = await running
    assert generation.finish == "length"
    # No token has the version of the trainer that died: it has resumed no engine.
    versions = [span.version for span in generation.spans]
    if mode == "versions":
        assert versions == [31]
        begun = TOKENS
    else:
        assert versions in ([31], [31, 32])
        begun = generation.spans[0].end
    tokens = PROMPT + generation.tokens
    expected = log_probs(before, tokens, TOKENS)[:begun] + log_probs(after, tokens, TOKENS)[begun:]
    assert distance(generation.log_probs, expected) < tolerance()
    assert await serves(server.url, after, 32)


async def leave(sender: WeightSender, version: int, adapter: Tensors, moment: int) -> None:
    """Begin an update, and stop at one of MOMENTS."""
    plan = await sender.plan(version, joiners_only=False)
    await sender.prepare(version, plan.engines)
    assert sender.current
    (peer,) = sender.current.peers.values()
    if moment > 0:
        await sender.pause()
    parts = buckets_of(adapter)
    for bucket in (parts[:1] if moment == 2 else parts) if moment > 1 else ():
        await sender.send(bucket)
    if moment > 3:
        await sender._verify(peer)


def dropped(engine: Sglang) -> set[str]:
    """Return the versions that the engine does not hold any more."""
    return set(re.findall(r"the adapter (\S+) is not used any more", engine.log.read_text()))
