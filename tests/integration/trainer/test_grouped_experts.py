"""Experts that are computed together give the same as experts one after another."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.megatron.fused_operations import use_fused_clipping
from sluice_trainer.megatron.model.experts import GroupedExperts, _as_one
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.megatron.step.optimizer import gradients
from sluice_trainer.memory.offload import OffloadableMemory
from tests.integration.trainer import tiny

pytestmark = pytest.mark.usefixtures("process_group")


def make(model: Path, moments: str = "fp32", **more: Any) -> MegatronPolicy:
    trainer = {
        **more,
        "gpusPerNode": int(DEVICE.type == "cuda"),
        "precision": "bf16",
        "optimizer": {"lr": 1e-4, "expAvgDtype": moments, "expAvgSqDtype": moments},
    }
    spec = tiny.spec(model, trainer=trainer)
    return MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


def mixtures(policy: MegatronPolicy) -> list[GroupedExperts]:
    layers = policy._learner.chunks[0].module.decoder.layers
    return [layer.mlp.experts for layer in layers]


def sums(policy: MegatronPolicy, seed: int = 0) -> dict[str, Tensor]:
    """Return the sums of the weights' gradients in a step of several micro-batches."""
    shard = tiny.batch(8, seed=seed)
    policy.train([shard], [tiny.totals(shard)])
    return {
        name: weight.main_grad.clone()
        for name, weight in policy._learner.chunks[0].module.named_parameters()
    }


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 0.05) -> None:
    for name, expected in theirs.items():
        assert expected.any() or "experts" in name, name  # an expert may have had no token
        assert (ours[name] - expected).norm() <= tolerance * expected.norm(), name


def test_gradients_equal_those_of_single_experts_and_are_added_in_place(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = make(models["qwen3-moe"])
    ours = sums(together)
    for experts in mixtures(together):
        assert isinstance(experts, GroupedExperts)
        for name, stack in experts._stacks.items():
            assert stack.weights is not None
            assert stack.gradients is not None
            for number, expert in enumerate(experts.local_experts):
                weight = getattr(expert, name).weight
                assert stack.weights[number].data_ptr() == weight.data_ptr()
                assert stack.gradients[number].data_ptr() == weight.main_grad.data_ptr()
    with monkeypatch.context() as one_by_one:
        one_by_one.setattr(GroupedExperts, "forward", SequentialMLP.forward)
        theirs = sums(make(models["qwen3-moe"]))
    close(ours, theirs)


def test_a_mixture_learns_with_moments_in_bf16(models: dict[str, Path]) -> None:
    exact, compact = make(models["qwen3-moe"]), make(models["qwen3-moe"], "bf16")
    for seed in range(3):
        # After a step the weights differ, and with them a token's experts.
        close(sums(compact, seed), sums(exact, seed), tolerance=0.25 if seed else 0.05)


def test_offloaded_memory_is_used_at_its_new_address(models: dict[str, Path]) -> None:
    stays, moves = make(models["qwen3-moe"]), make(models["qwen3-moe"])
    for seed in range(2):
        close(sums(moves, seed), sums(stays, seed))
        weights = OffloadableMemory(lambda: moves._learner.chunks[0].module.parameters())
        room = OffloadableMemory(lambda: gradients(moves._learner.chunks), preserve=False)
        for memory in (weights, room):
            memory.offload()
        # So that the memory gets another address.
        taken = [torch.ones(1000, device=DEVICE) for _ in range(100)]
        for memory in (weights, room):
            memory.restore()
        del taken


def test_weights_that_do_not_learn_need_not_be_adjacent(models: dict[str, Path]) -> None:
    (experts, *_) = mixtures(make(models["qwen3-moe"]))
    hidden, probs = (x.to(DEVICE) for x in (torch.randn(32, 64).bfloat16(), torch.rand(32)))
    counts = torch.tensor([7, 0, 20, 5])
    expected, _ = SequentialMLP.forward(experts, hidden, counts, probs)
    for expert in experts.local_experts:
        for layer in (getattr(expert, name) for name in ("linear_fc1", "linear_fc2")):
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    result, _ = experts(hidden, counts, probs)
    assert (result.float() - expected.float()).norm() < 0.02 * expected.float().norm()


def test_weights_beside_adapters_are_used_in_place(models: dict[str, Path]) -> None:
    adapted, whole = make(models["qwen3-moe"], lora={"rank": 4}), make(models["qwen3-moe"])
    shard = tiny.batch(8, seed=0)
    pairs = zip(adapted.log_probs(shard), whole.log_probs(shard), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    adapted.train([shard], [tiny.totals(shard)])
    for experts in mixtures(adapted):
        for name, stack in experts._stacks.items():
            weights = [getattr(expert, name).weight for expert in experts.local_experts]
            assert stack.weights is not None
            assert stack.stacked().data_ptr() == weights[0].data_ptr()
            assert not any(weight.requires_grad for weight in weights)


def test_only_equally_spaced_tensors_are_viewed_as_one() -> None:
    memory = torch.arange(24.0)
    pieces = [memory[start : start + 4].view(2, 2) for start in (2, 8, 14, 20)]
    together = _as_one(pieces)
    assert together is not None
    assert torch.equal(together, torch.stack(pieces))
    together += 1
    assert memory[20] == 21
    assert _as_one(pieces[::-1]) is None
    assert _as_one([pieces[0], pieces[1], pieces[3]]) is None
    assert _as_one([pieces[0], pieces[0]]) is None
    assert _as_one([pieces[0], pieces[1].clone()]) is None
    assert _as_one([piece.t() for piece in pieces]) is None


def test_all_gradients_are_clipped_by_their_norm_together() -> None:
    tensors = [torch.full((3,), 2.0), torch.full((2, 2), -1.0)]
    use_fused_clipping()
    total, _ = clip_grads.l2_norm_impl(1, torch.zeros(1), [tensors], False)
    assert total.tolist() == [4.0]
    clip_grads.multi_tensor_scale_impl(1, torch.zeros(1), [tensors, tensors], 0.5)
    assert tensors[0].tolist() == [1.0] * 3
    assert tensors[1].flatten().tolist() == [-0.5] * 4
