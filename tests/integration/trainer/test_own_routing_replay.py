"""`trainer.routingReplay.

Trainer`: optimizer steps use the experts of the preceding log-prob pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.samples.sample import Experts
from sluice_trainer.batch.sequences import Sequence, TrainSequence
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.megatron.step.learner import micro_batch
from sluice_trainer.megatron.step.routing_recorder import RoutingRecorder
from sluice_trainer.model.unsupported import UnsupportedModelError
from sluice_trainer.step.packing import MicroBatch
from tests.integration.trainer import tiny
from tests.integration.trainer.test_layouts import Run, alone, compare
from tests.integration.trainer.train_steps import train

pytestmark = pytest.mark.usefixtures("process_group")
__all__ = ["alone"]
OWN = {"routingReplay": "trainer", "stepsPerBatch": 2}
JOB: dict[str, Any] = {
    "steps": 2,
    "algorithm": {"kl": {"lossCoef": 0.05, "type": "k3"}},
    "trainer": OWN,
}


def policy(model: Path, *, kl: float = 0, tokens: int = 64) -> MegatronPolicy:
    algorithm = {"kl": {"coef": kl}} if kl else {}
    spec = tiny.spec(model, algorithm=algorithm, trainer={**OWN, "maxTokensPerGpu": tokens})
    return MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


def experts_of(shard: Iterable[Sequence]) -> list[Experts]:
    return [s.experts for s in shard if s.experts is not None]


def same(some: list[Experts], others: list[Experts]) -> list[bool]:
    return [np.array_equal(a, b) for a, b in zip(some, others, strict=True)]


@pytest.mark.parametrize("kl", [0, 0.1], ids=["a pass of its own", "KL inside the reward"])
def test_all_optimizer_steps_of_a_batch_have_the_experts_of_the_pass_before_them(
    models: dict[str, Path], kl: float
) -> None:
    """The experts of their forward passes are read in the steps themselves."""
    learning = policy(models["qwen3-moe"], kl=kl)
    shard = tiny.batch(16, seed=0)
    before = experts_of(policy(models["qwen3-moe"])._with_old_log_probs(shard))
    assert [e.shape for e in before] == [(len(s.tokens) - 1, 2 * 2) for s in shard]
    assert {e.dtype for e in before} == {np.dtype(np.uint8)}
    in_steps: list[Experts] = []
    plain_step = learning._learner.step

    def step(batches: list[MicroBatch], forward: Any, loss: Any) -> Any:
        recorder = RoutingRecorder(forward, experts=4)
        result = plain_step(batches, recorder, loss)
        in_steps.extend(e for e in recorder.experts(8) if e is not None)
        return result

    learning._learner.step = step  # type: ignore[method-assign]
    trained, _ = learning.with_kl(shard)
    parts = list(tiny.chunks(trained, 2))
    learning.train(parts, [tiny.totals(part) for part in parts])
    assert all(same(in_steps, before))
    moved = experts_of(learning._with_old_log_probs(shard))
    assert not all(same(moved, before))


def test_another_packing_sends_no_token_elsewhere(models: dict[str, Path], tmp_path: Path) -> None:
    """Without replay the ratio before the first optimizer step differs from 1.

    The routers hardly distinguish experts, and the second pass packs other rows.
    """
    model = undecided(models["qwen3-moe"], tmp_path / "model")
    scored = policy(model)._with_old_log_probs(tiny.batch(16, seed=0))
    unknown = [replace(s, experts=None) for s in scored]
    others = policy(model, tokens=512)
    assert largest_log_ratio(policy(model), scored) == 0
    assert largest_log_ratio(others, scored) < 2e-6  # the last bits of the logits
    assert largest_log_ratio(others, unknown) > 0.01


def largest_log_ratio(policy: MegatronPolicy, shard: list[TrainSequence]) -> float:
    pairs = zip(policy.log_probs(shard), [s.old_log_probs for s in shard], strict=True)
    return max(float((now - old).abs().max()) for now, old in pairs if old is not None)


def undecided(model: Path, directory: Path) -> Path:
    """Save the model with routers that score all experts equally, up to rounding."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    torch.manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[:] = tensor[0]
            tensor += 1e-7 * torch.randn_like(tensor)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tensor": ("qwen3-moe", {"tensor": 2}, {}),
    "context": ("qwen3-moe", {"context": 2}, {}),
    "expert": ("qwen3-moe", {"expert": 2}, {}),
    "layers are computed again": ("qwen3-moe", {"pipeline": 2}, {"recompute": "full"}),
    "mixtures are computed again": (
        "qwen3-moe",
        {"pipeline": 2},
        {"recompute": "selective", "recomputeModules": ["moe"]},
    ),
    "a stage without a mixture": ("deepseek-v3", {"pipeline": 2}, {}),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_two_ranks_send_tokens_to_the_same_experts_as_one(
    models: dict[str, Path], alone: Callable[..., Run], tmp_path: Path, case: str
) -> None:
    family, layout, more = LAYOUTS[case]
    job = {**JOB, "trainer": {**OWN, **more}}
    compare(models[family], alone(family, **JOB), tmp_path / "w", job, layout, 2)


def test_a_rank_without_sequences_takes_part(
    models: dict[str, Path], alone: Callable[..., Run], tmp_path: Path
) -> None:
    job = {**JOB, "share": 0}
    compare(models["qwen3-moe"], alone("qwen3-moe", **JOB), tmp_path / "w", job, {}, 2)


def test_chunks_of_a_virtual_pipeline_keep_their_own_mixtures(tmp_path: Path) -> None:
    """The second rank's first chunk has no mixture."""
    kind, shape = tiny.FAMILIES["qwen3-moe"]
    layers = {"num_hidden_layers": 4, "mlp_only_layers": [1]}
    model = tiny.save_kind(kind, {**shape, **layers}, tmp_path / "model")
    expected = train(str(model), **JOB, dump=str(tmp_path / "alone")), tmp_path / "alone"
    compare(model, expected, tmp_path / "w", JOB, {"pipeline": 2, "virtualPipeline": 2}, 2)


def test_numbers_above_255_are_kept() -> None:
    chosen = torch.tensor([[299, 0], [7, 256], [1, 2]])

    def forward(_: Any, batch: MicroBatch) -> torch.Tensor:
        batch.packing.record.append(chosen)
        return torch.empty(0)

    shard = [Sequence(np.zeros(3, np.int32), 1), Sequence(np.zeros(2, np.int32), 1)]
    recorder = RoutingRecorder(forward, experts=300)
    recorder(None, micro_batch(shard, [1, 0], torch.device("cpu")))
    kept = [e for e in recorder.experts(2) if e is not None]
    assert [e.tolist() for e in kept] == [[[7, 256], [1, 2]], [[299, 0]]]
    assert {e.dtype for e in kept} == {np.dtype(np.uint16)}


def test_a_dense_model_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="routingReplay: qwen3 has no experts"):
        policy(models["qwen3"])
