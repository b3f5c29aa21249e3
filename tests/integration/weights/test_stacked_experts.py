"""All experts of a layer as one tensor.

SGLang with sluice's plugin loads it like single experts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from sluice.engines.sglang.client import Client
from sluice.runtime.pod_env import free_port
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import Sglang, engine_environment, gpus, save_model, with_us
from tests.integration.weights.conftest import ROOT
from tests.integration.weights.tools import PROMPT, Tensors, on_device, publish, serves, serving

MakeSender = Callable[..., WeightSender]
JoinEngine = Callable[..., Any]
EXPERTS = 8
SHAPE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "head_dim": 64,  # SGLang 0.5.17 does not rotate smaller heads on GPUs
}
one_gpu = pytest.mark.skipif(gpus() > 0, reason="the engine has one GPU")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixture") / "model", 1, "Qwen3Moe", **SHAPE)


@pytest.fixture(scope="module")
def other_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("other") / "model", 2, "Qwen3Moe", **SHAPE)


def stacked(weights: Path) -> Tensors:
    """Return the checkpoint's tensors, with experts stacked as the trainer sends them."""
    singles = dict(on_device(weights))
    stacks = []
    for layer in sorted(
        {name.partition(".experts.")[0] for name in singles if ".experts." in name}
    ):
        gate, up, down = (
            torch.stack(
                [singles.pop(f"{layer}.experts.{i}.{kind}_proj.weight") for i in range(EXPERTS)]
            )
            for kind in ("gate", "up", "down")
        )
        stacks += [
            (f"{layer}.experts.w13_weight", torch.cat([gate, up], 1)),
            (f"{layer}.experts.w2_weight", down),
        ]
    assert stacks
    assert not [name for name in singles if ".experts." in name]
    return [*singles.items(), *stacks]


def cores(ranks: int) -> dict[str, str]:
    """Return variables without which SGLang needs a NUMA node for each rank."""
    return {} if gpus() else {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}


async def answer(engine: Sglang) -> tuple[list[int], list[float]]:
    """Return the likeliest response to a prompt, and its log-probs."""
    async with Client(engine.url) as client:
        await client.wait_ready(30.0)
        generation = await client.generate(
            "x", PROMPT, {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0}
        )
    return list(generation.tokens), list(generation.log_probs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[one_gpu, pytest.mark.long])])
async def test_stacks_give_the_engine_the_weights_that_single_experts_give(
    mixture: Path,
    other_mixture: Path,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    tmp_path: Path,
    ranks: int,
) -> None:
    """Ranks that divide the experts are tested below, with single layers.

    On a CPU SGLang cannot generate with them.
    """
    with serving(mixture, tmp_path / "log", "--tp-size", str(ranks), **cores(ranks)) as engine:
        await join_engine("rollout-0", engine.address, ranks)
        sender = make_sender(timeoutSeconds=60)
        await publish(sender, 1, other_mixture)
        expected = await answer(engine)
        await publish(sender, 2, mixture)
        assert await answer(engine) != expected
        update = await publish(sender, 3, stacked(other_mixture))
        assert (list(update.engines), update.failed) == (["rollout-0"], {})
        assert await answer(engine) == expected
        assert await serves(engine.url, other_mixture, 3)
        log = engine.log.read_text()
        assert "weights are received into one buffer" in log
        assert "stacked experts are copied at once" in log
        assert "buckets are announced to the scheduler while it loads earlier ones" in log


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_an_engine_without_the_plugin_says_so_and_takes_single_experts(
    mixture: Path,
    other_mixture: Path,
    join_engine: JoinEngine,
    make_sender: MakeSender,
    tmp_path: Path,
) -> None:
    with serving(mixture, tmp_path / "log", SGLANG_PLUGINS="none-of-ours") as engine:
        await join_engine("rollout-0", engine.address)
        sender = make_sender(timeoutSeconds=60)
        update = await publish(sender, 1, stacked(other_mixture))
        assert update.engines == ()
        assert "Set weightSync.enginePlugin: false" in update.failed["rollout-0"]
        update = await publish(sender, 1, other_mixture, joiners_only=True)
        assert (list(update.engines), update.failed) == (["rollout-0"], {})
        assert await serves(engine.url, other_mixture, 1)


@pytest.mark.timeout(600)
@pytest.mark.skipif(gpus() > 0, reason="its set-up is SGLang 0.5.21's")
@pytest.mark.parametrize(
    ("ranks", "expert_ranks"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(2, 1, marks=pytest.mark.long),
        (2, 2),
    ],
)
def test_layers_in_any_layout_load_stacks_and_only_plain_ones_at_once(
    mixture: Path, ranks: int, expert_ranks: int
) -> None:
    """If a layer's layout differs from the checkpoint's, SGLang loads it expert by expert."""
    command = [sys.executable, "-m", "tests.integration.weights.fused_layer", str(mixture)]
    port, environment = free_port(), engine_environment() | cores(ranks)
    processes = [
        subprocess.Popen(
            with_us(*command, rank, ranks, expert_ranks, port),
            cwd=ROOT,
            env=environment,
            stdout=PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0
        assert json.loads(output.splitlines()[-1]) == {
            "as in the checkpoint": {"same": True, "at once": True},
            "up above gate": {"same": True, "at once": False},
            "moved": {"same": True, "at once": False},
        }
