"""The trainer on a GPU computes the same: NCCL, variable-length attention, no adaptations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from sluice_trainer.backend_registry import backend_class
from sluice_trainer.kernels import flash_attention, norm_rotary
from sluice_trainer.megatron.model import attention, layout, rotary
from sluice_trainer.megatron.model.experts import GroupedExperts
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.step import head
from sluice_trainer.step.head import Head, score_tokens
from sluice_trainer.step.logits import log_probs_and_entropies
from tests.integration.trainer import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("process_group"),
]


def make(model: Path, precision: str, **changes: Any) -> MegatronPolicy:
    spec = tiny.spec(
        model, trainer={"gpusPerNode": 1, "precision": precision, "maxTokensPerGpu": 150}, **changes
    )
    return MegatronPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


DENSE = [family for family in tiny.FAMILIES if family not in tiny.MIXTURES]


@pytest.mark.parametrize(
    ("family", "precision", "tolerance"),
    [
        *((family, "fp32", 1e-3) for family in tiny.FAMILIES),
        *((family, "bf16", 0.15) for family in DENSE),
        # Rounding sends some tokens to other experts.
        *((family, "bf16", 1.0) for family in tiny.MIXTURES),
    ],
)
def test_log_probs_equal_transformers_on_the_cpu(
    models: dict[str, Path], family: str, precision: str, tolerance: float
) -> None:
    shard = tiny.batch(12, seed=1)
    reference = tiny.hf_model(models[family]).requires_grad_(False)
    for sequence, values in zip(
        shard, make(models[family], precision).log_probs(shard), strict=True
    ):
        assert (values - tiny.hf_log_probs(reference, sequence)[0]).abs().max() < tolerance


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-3), ("bf16", 0.05)])
def test_training_steps_equal_transformers_with_adamw(
    qwen3: Path, precision: str, tolerance: float
) -> None:
    policy, plain = make(qwen3, precision), tiny.hf_model(qwen3)
    adam = torch.optim.AdamW(
        plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=tiny.EPS, weight_decay=0.0
    )
    for step in range(3):
        shard = tiny.batch(8, seed=step)
        metrics = policy.train([shard], [tiny.totals(shard)])
        loss = tiny.plain_loss(plain, shard, tiny.totals(shard))
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=tolerance)
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=10 * tolerance)
        assert metrics["train/ppo_kl"] == 0


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_micro_batches_grow_if_the_gpu_has_room(qwen3: Path, backend: str) -> None:
    """The model is tiny, so the GPU has room."""
    trainer = {"gpusPerNode": 1, "precision": "bf16", "backend": backend, "maxTokensPerGpu": None}
    spec = tiny.spec(qwen3, trainer=trainer)
    timeout = timedelta(seconds=tiny.TIMEOUT)
    policy = backend_class(spec)(spec, model_dir=qwen3, timeout=timeout)
    shard = tiny.batch(1700, seed=0)  # 36,000 tokens
    history = [policy.train([shard], [tiny.totals(shard)]) for _ in range(5)]
    sizes = [metrics["perf/micro_batch_tokens"] for metrics in history]
    assert sizes == [8192, 8192, 16_384, 32_768, 32_768]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_a_critic_equals_transformers_and_learns(
    qwen3: Path, reward_model: Path, precision: str, tolerance: float
) -> None:
    critic = {"modelPath": str(reward_model), "lr": 1e-3}
    policy = make(qwen3, precision, algorithm={"estimator": "ppo", "critic": critic})
    plain = tiny.hf_reward_model(reward_model).requires_grad_(False)
    assert policy.critic is not None
    shard, losses = tiny.batch(12, seed=1), []
    for step in range(10):
        values = policy.critic.values(shard)
        if step == 0:
            for sequence, actual in zip(shard, values, strict=True):
                assert (actual - tiny.hf_values(plain, sequence)).abs().max() < tolerance
        goals = [
            replace(s, values=v, returns=torch.ones(len(v)))
            for s, v in zip(shard, values, strict=True)
        ]
        losses.append(policy.train([goals], [tiny.totals(goals)])["critic/vf_loss"])
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_resumes(qwen3: Path, tmp_path: Path, precision: str) -> None:
    policy = make(qwen3, precision)
    shard = tiny.batch(8, seed=0)
    policy.train([shard], [tiny.totals(shard)])
    tiny.save(policy, tmp_path, 1)
    resumed = make(qwen3, precision)
    assert resumed.load_latest(tmp_path) == 1
    saved, loaded = dict(policy.hf_tensors()), dict(resumed.hf_tensors())
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    expected = policy.train([shard], [tiny.totals(shard)])
    assert resumed.train([shard], [tiny.totals(shard)]) == pytest.approx(
        expected, rel=1e-3, abs=1e-4
    )


@pytest.mark.parametrize(
    "widths", [(4, 2, 64, 64), (4, 4, 192, 128)], ids=["grouped queries", "latent"]
)
@pytest.mark.parametrize("context", [2, 4])
def test_context_shares_attend_as_the_whole_row_does(
    context: int, widths: tuple[int, int, int, int]
) -> None:
    """FlashAttention over a share of the queries aligns them with the end of their keys."""
    heads, kv_heads, dim, value_dim = widths
    lengths = [100, 3, 250, 31, 128]
    lengths.append(-sum(lengths) % (2 * context) or 2 * context)
    row = sum(lengths)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = draw(row, heads, dim), draw(row, kv_heads, dim), draw(row, kv_heads, value_dim)
    whole = attention._half_on_gpu(q, k, v, layout.packing(lengths, q.device), 0.1)
    padded = layout.packing(lengths, q.device).dense
    dense = attention._padded_attention(q.float(), k.float(), v.float(), padded, 0.1)
    assert (whole.float() - dense).abs().max() < 0.05
    for rank in range(context):
        split = layout.RowSplit(context=context, rank=rank)
        held = split.local(row).cuda()
        share = attention._half_on_gpu(q[held], k, v, layout.packing(lengths, q.device, split), 0.1)
        assert (share.float() - whole[held].float()).abs().max() < 0.02


@pytest.mark.parametrize("installed", [True, False], ids=["FlashAttention 4", "without it"])
@pytest.mark.parametrize("width", [64, 128])
def test_long_sequences_attend_as_packed_ones_do_and_so_do_their_gradients(
    monkeypatch: pytest.MonkeyPatch, installed: bool, width: int
) -> None:
    """Compare FlashAttention 4, or cuDNN over padded sequences, with dense float32.

    FlashAttention 2 over the packed row is compared too.
    """
    if not installed:
        monkeypatch.setattr(flash_attention, "flash4_fits", lambda width: False)
    elif not flash_attention.flash4_fits(width):
        pytest.skip("flash-attn-4 is not installed")
    lengths = [700, 30, 512, 5, 1000]
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [
        torch.randn(sum(lengths), heads, width, generator=generator, device="cuda")
        for heads in (4, 2, 2)
    ]

    def outcome(
        long: int, attend: Callable[..., torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        monkeypatch.setattr(layout, "LONG", long)
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in drawn)
        packed = layout.packing(lengths, q.device)
        out = attend(
            q, k, v, packed.dense if attend is attention._padded_attention else packed, 0.1
        )
        out.float().square().sum().backward()
        return [out.detach().float(), *(x.grad.float() for x in (q, k, v) if x.grad is not None)]

    exact = outcome(10**9, attention._padded_attention, torch.float32)
    for long in (500, 10**9):
        for actual, expected in zip(
            outcome(long, attention._half_on_gpu, torch.bfloat16), exact, strict=True
        ):
            assert (actual - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("normed", [True, False], ids=["normalised", "as they are"])
def test_heads_are_rotated_as_by_torch_and_so_are_their_gradients(normed: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    mixed = torch.randn(777, 6, 3 * 128, generator=generator, device="cuda").bfloat16()
    weight = torch.rand(128, generator=generator, device="cuda").bfloat16() + 0.5
    angles = torch.rand(777, 64, generator=generator, device="cuda") * 6
    grad = torch.randn(777, 6, 128, generator=generator, device="cuda")

    def outcome(dtype: torch.dtype, fused: bool) -> list[torch.Tensor]:
        x = mixed.to(dtype)[..., 128:256].detach().requires_grad_()
        gain = weight.to(dtype).detach().requires_grad_()
        turns = angles.cos(), angles.sin()
        if fused:
            out = norm_rotary.norm_and_rotate(x, gain if normed else None, 1e-6, *turns)
        else:
            plain = torch.nn.functional.rms_norm(x, (128,), gain, 1e-6) if normed else x
            out = rotary.rotate(plain, *turns, False)
        out.backward(grad.to(dtype))
        return [value.float() for value in (out.detach(), x.grad, gain.grad) if value is not None]

    pairs = zip(outcome(torch.bfloat16, True), outcome(torch.float32, False), strict=True)
    assert all((a - b).norm() / b.norm() < 0.005 for a, b in pairs)


@pytest.mark.parametrize("context", [2, 4])
def test_long_shares_attend_as_the_whole_row_does_and_so_do_their_gradients(
    monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """Compare cuDNN's rectangle and square, joined, with dense float32.

    Gradients of ranks add up.
    """
    monkeypatch.setattr(layout, "LONG", 500)
    lengths = [5000, 40, 2000]
    lengths.append(-sum(lengths) % (2 * context) or 2 * context)
    row = sum(lengths)
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [torch.randn(row, heads, 64, generator=generator, device="cuda") for heads in (4, 2, 2)]
    whole = [x.clone().requires_grad_() for x in drawn]
    padded = layout.packing(lengths, torch.device("cuda")).dense
    expected = attention._padded_attention(whole[0], whole[1], whole[2], padded, 0.1)
    expected.square().sum().backward()
    q, k, v = (x.bfloat16().requires_grad_() for x in drawn)
    for rank in range(context):
        split = layout.RowSplit(context=context, rank=rank)
        held, packed = split.local(row).cuda(), layout.packing(lengths, q.device, split)
        assert any(span.long and span.longest[1] > span.longest[0] for span in packed.spans)
        share = attention._half_on_gpu(q[held], k, v, packed, 0.1)
        assert (share.float() - expected[held]).norm() / expected[held].norm() < 0.01
        share.float().square().sum().backward()
    for actual, other in zip((q, k, v), whole, strict=True):
        assert actual.grad is not None
        assert other.grad is not None
        assert (actual.grad.float() - other.grad).norm() / other.grad.norm() < 0.01


def test_grouped_experts_compute_what_one_after_another_do(models: dict[str, Path]) -> None:
    policy = make(models["qwen3-moe"], "bf16")
    (experts,) = {
        type(layer.mlp.experts) for layer in policy._learner.chunks[0].module.decoder.layers
    }
    assert experts is GroupedExperts
    layer = policy._learner.chunks[0].module.decoder.layers[0].mlp.experts
    counts = torch.tensor([7, 0, 20, 5])
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(32, 64, generator=generator, device="cuda").bfloat16()
    probs = torch.rand(32, generator=generator, device="cuda")
    together, _ = layer(hidden, counts, probs)
    one_by_one, _ = SequentialMLP.forward(layer, hidden, counts, probs)
    assert (together.float() - one_by_one.float()).norm() / one_by_one.float().norm() < 0.02


@pytest.mark.parametrize("tokens", [7, 100], ids=["many chunks", "one chunk"])
def test_a_float32_head_rounds_no_logit(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Log-probs equal those in float64, and gradients up to the rounding of the factors."""
    words, hidden_size = 1000, 64
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", tokens * words)
    torch.manual_seed(0)
    hidden = torch.randn(50, hidden_size, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(words, hidden_size, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(words, (50,), device="cuda")

    def score(logits: torch.Tensor, chosen: torch.Tensor, _: Any) -> torch.Tensor:
        return torch.stack(log_probs_and_entropies(logits, chosen, scale=1.0))

    log_probs = score_tokens(score, hidden, Head(weight, float32=True), targets)[0]
    log_probs.sum().backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    expected.sum().backward()
    assert (log_probs - expected).abs().max() < 1e-4
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm() < 2**-7
