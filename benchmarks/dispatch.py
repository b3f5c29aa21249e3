"""Tokens of a mixture's layer to their experts and back, forward and backward, beside Megatron's
own dispatcher.

    python benchmarks/dispatch.py [--gpus 4] [--tokens 8192]

The experts do nothing but weigh, so that what is left is the moving. Both dispatchers get the same
tokens and choices (uniformly random ones, as a balanced router makes), in turns. The limit is
memory: a token has to be read, sent, written for each of its experts, read again there and summed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from benchmarks.processes import on_ranks
from sluice.api import Parallelism
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.megatron import parallel
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.model.expert_dispatch import Dispatcher

T = TypeVar("T")
WARM_UP = 3
GPUS = torch.cuda.device_count()
if not GPUS:
    # Sizes of what is sent must be numbers. Megatron makes them from tensors on a GPU only.
    def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and tensor is not None else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_numpy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=int, default=GPUS or 2, help="ranks, with equally many experts each"
    )
    parser.add_argument("--tokens", type=int, default=8192 if GPUS else 512, help="of a rank")
    parser.add_argument("--hidden", type=int, default=2048, help="these three are Qwen3-30B-A3B's")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20 if GPUS else 5)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options)
        return
    sys.exit(on_ranks(__file__, options.gpus))


def rank(options: argparse.Namespace) -> None:
    parallel.initialize(Parallelism(expert=options.gpus), seed=0, timeout=timedelta(seconds=120))
    with megatron_device():
        config = TransformerConfig(
            num_layers=1,
            hidden_size=options.hidden,
            num_attention_heads=8,
            num_moe_experts=options.experts,
            moe_router_topk=options.per_token,
            expert_model_parallel_size=options.gpus,
            add_bias_linear=False,
            moe_token_dispatcher_type="alltoall",
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        local = options.experts // options.gpus
        own = list(range(dist.get_rank() * local, (dist.get_rank() + 1) * local))
        peers = {
            "Megatron": token_dispatcher.MoEAlltoAllTokenDispatcher(
                local, own, config=config, pg_collection=groups
            ),
            "sluice": Dispatcher(local, config, groups),
        }
        tokens, chosen, probs = drawn(options)
        outcomes: dict[str, Any] = {}
        milliseconds: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(options.rounds + WARM_UP):
            for name, dispatcher in peers.items():
                outcomes[name], took = timed(
                    partial(there_and_back, dispatcher, tokens, chosen, probs)
                )
                milliseconds[name].append(took)
        medians = {name: statistics.median(times[WARM_UP:]) for name, times in milliseconds.items()}
        apart = [distance(a, b) for a, b in zip(*outcomes.values(), strict=True)]
        copy = copied(tokens, options)
    if dist.get_rank() == 0:
        machine = torch.cuda.get_device_name() if GPUS else "CPU"
        sent = int(chosen.view(len(chosen), options.gpus, -1).any(2).sum())
        print(
            f"{options.gpus} x {machine}, {options.tokens} tokens of {options.hidden}, "
            f"{options.per_token} of {options.experts} experts: Megatron {medians['Megatron']:.2f} "
            f"ms, sluice {medians['sluice']:.2f} ms ({medians['Megatron'] / medians['sluice']:.1f} "
            f"times); a plain copy of all experts' rows there and back, twice: {copy:.2f} ms; rows "
            f"sent: {len(chosen) * options.per_token} and {sent}; outputs and gradients apart by "
            f"{max(apart):.1e}"
        )
    parallel.shutdown()


def drawn(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [n, h] bf16; chosen [n, experts] bool; weights of the chosen experts [n, experts]
    float32."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randn(options.tokens, options.hidden, generator=generator).bfloat16()
    scores = torch.rand(options.tokens, options.experts, generator=generator)
    best = scores.topk(options.per_token).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    probs = (scores * chosen) / (scores * chosen).sum(1, keepdim=True)
    return tokens.to(DEVICE), chosen.to(DEVICE), probs.to(DEVICE)


def there_and_back(
    dispatcher: Dispatcher, tokens: Tensor, chosen: Tensor, probs: Tensor
) -> tuple[Tensor, ...]:
    """The weighted tokens, and the gradients of tokens and weights."""
    tokens, probs = tokens.detach().requires_grad_(), probs.detach().requires_grad_()
    rows, weights = dispatcher.dispatch_preprocess(tokens, chosen, probs)
    rows, _, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, weights))
    rows = (rows * weights[:, None]).to(tokens.dtype)
    out = dispatcher.combine_postprocess(
        dispatcher.token_combine(dispatcher.combine_preprocess(rows))
    )
    out.backward(tokens.detach())
    assert tokens.grad is not None
    assert probs.grad is not None
    return out.detach(), tokens.grad, probs.grad


def copied(tokens: Tensor, options: argparse.Namespace) -> float:
    """Milliseconds that the memory needs for as many rows as the experts have, four times."""
    rows = tokens.repeat(options.per_token, 1)
    other = torch.empty_like(rows)
    took = [timed(lambda: other.copy_(rows))[1] for _ in range(options.rounds + WARM_UP)]
    return 4 * statistics.median(took[WARM_UP:])


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """Its result, and the milliseconds that it took."""
    wait()
    started = time.perf_counter()
    result = function()
    wait()
    return result, (time.perf_counter() - started) * 1e3


def distance(a: Tensor, b: Tensor) -> float:
    """Of two results, relative to their size."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def wait() -> None:
    if GPUS:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
