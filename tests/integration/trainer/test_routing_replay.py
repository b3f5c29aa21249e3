"""`trainer.routingReplay: rollout`: the trainer sends tokens to the experts that SGLang chose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.samples.sample import Sample, WeightSpan
from sluice_trainer.batch.sequences import Sequence, TrainSequence
from sluice_trainer.megatron.policy import MegatronPolicy
from tests.cases import quick
from tests.integration.engines import Sglang, gpus, save_model
from tests.integration.trainer import tiny
from tests.integration.trainer.test_layouts import Run, alone, compare

pytestmark = pytest.mark.usefixtures("process_group")
LAYERS, EXPERTS, EACH = 2, 8, 2
RESPONSES = 16
__all__ = ["alone"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("mixture") / "model",
        5,
        "Qwen3Moe",
        num_experts=EXPERTS,
        num_experts_per_tok=EACH,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def server(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    log = tmp_path_factory.mktemp("sglang") / "log"
    engine = Sglang(mixture, log, "--enable-return-routed-experts")
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.kill()


async def answered(server: Sglang, prompt: list[int], tokens: int) -> Sample:
    """Return a response of the engine in the form in which a worker stores it."""
    async with server.engine.client(server.url) as client:
        await client.wait_ready(60)
        answer = await client.generate("one", prompt, {"max_new_tokens": tokens, "temperature": 1})
    sample = Sample(0)
    sample.append_prompt(prompt)
    # The engine has no weight version from a trainer.
    spans = [WeightSpan(0, 0, len(answer.tokens))]
    sample.append(answer.tokens, answer.log_probs, spans)
    sample.routed_experts = answer.experts
    return sample


def policy(model: Path, routing_replay: str) -> MegatronPolicy:
    spec = tiny.spec(model, trainer={"routingReplay": routing_replay, "maxTokensPerGpu": 512})
    return MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


@pytest.mark.skipif(gpus() > 0, reason="trainer and engine would be on different devices")
async def test_experts_of_the_engine_make_a_wrong_router_right(
    server: Sglang, mixture: Path
) -> None:
    """The trainer's router would choose other experts, but its log-probs equal the engine's."""
    prompt = np.random.default_rng(3).integers(8, 2040, 30).tolist()
    sample = await answered(server, prompt, 40)
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.uint8
    assert sample.routed_experts.shape == (len(sample.tokens) - 1, LAYERS * EACH)
    sample.check_tokens()
    whole = Sequence(sample.tokens, sample.response_length, experts=sample.routed_experts)
    turned = np.roll(np.arange(EXPERTS), 1)[sample.routed_experts].astype(np.uint8)
    said = torch.from_numpy(sample.rollout_log_probs)
    own = distance(policy(mixture, "none"), whole, said)
    replayed = distance(policy(mixture, "rollout"), whole, said)
    elsewhere = distance(policy(mixture, "rollout"), replace(whole, experts=turned), said)
    assert own < 1e-4
    assert replayed < 1e-4
    assert elsewhere > 0.01


@pytest.mark.skipif(gpus() > 0, reason="trainer and engine would be on different devices")
async def test_experts_of_the_engine_help_if_routers_differ(
    server: Sglang, mixture: Path, tmp_path: Path
) -> None:
    """Most of the difference comes from a few tokens, so several responses are needed to see it."""
    shaken = shaken_routers(mixture, tmp_path / "model")
    without, replaying = policy(shaken, "none"), policy(shaken, "rollout")
    prompt = np.random.default_rng(3).integers(8, 2040, 30).tolist()
    own, replayed = [], []
    for _ in range(RESPONSES):
        sample = await answered(server, prompt, 40)
        whole = Sequence(sample.tokens, sample.response_length, experts=sample.routed_experts)
        said = torch.from_numpy(sample.rollout_log_probs)
        own.append(distance(without, whole, said))
        replayed.append(distance(replaying, whole, said))
    assert fmean(own) > 0.01
    assert fmean(replayed) < fmean(own) / 3


def distance(policy: MegatronPolicy, sequence: Sequence, said: torch.Tensor) -> float:
    (values,) = policy.log_probs([sequence])
    return float((values - said).abs().mean())


def shaken_routers(model: Path, directory: Path) -> Path:
    """Save the model with some noise in its routers, so that near ties are resolved differently."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    torch.manual_seed(4)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor += 0.02 * torch.randn_like(tensor)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


JOB: dict[str, Any] = {
    "steps": 3,
    "algorithm": {"kl": {"lossCoef": 0.05, "type": "k3"}},
    "trainer": {"routingReplay": "rollout"},
}


@pytest.mark.parametrize("layout", ["tensor", "context", "pipeline", "expert"])
@pytest.mark.parametrize("family", quick(("qwen3-moe", "deepseek-v3"), "qwen3-moe"))
def test_two_ranks_send_tokens_to_the_same_experts_as_one(
    models: dict[str, Path], alone: Callable[..., Run], tmp_path: Path, layout: str, family: str
) -> None:
    compare(models[family], alone(family, **JOB), tmp_path / "w", JOB, {layout: 2}, 2)


def test_recomputed_layers_send_tokens_to_the_same_experts(
    models: dict[str, Path], alone: Callable[..., Run]
) -> None:
    """Rows are small, so that other rows come between a layer's pass and its recomputation."""
    again = {**JOB, "trainer": {**JOB["trainer"], "recompute": "full"}}
    expected, result = alone("qwen3-moe", **JOB)[0], alone("qwen3-moe", **again)[0]
    for ours, theirs in zip(result["history"], expected["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    other = alone("qwen3-moe", **{**JOB, "trainer": {}})[0]
    assert json.dumps(other["history"]) != json.dumps(expected["history"])


def test_experts_of_another_model_are_refused(models: dict[str, Path]) -> None:
    shard: list[TrainSequence] = [
        replace(s, experts=np.zeros((len(s.tokens) - 1, 3), np.uint8))
        for s in tiny.batch(2, seed=1)
    ]
    with pytest.raises(
        ValueError, match=r"an engine reported 3 experts per token; expected 2 layers"
    ):
        policy(models["qwen3-moe"], "rollout").log_probs(shard)
