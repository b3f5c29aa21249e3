"""A layer of SGLang's experts on this machine's CPU, as one of several ranks holds it.

    python -m tests.integration.weights.fused_layer MODEL RANK RANKS EXPERT_RANKS PORT

It loads the same weights stacked and expert by expert, in several layouts, and prints for each
layout whether both results are equal, and whether the stack was copied at once. MODEL: a directory
with a mixture's config. EXPERT_RANKS: number of ranks that divide the experts. PORT: port of the
ranks' store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins import load_plugins

from sluice.engines.sglang.plugin.__main__ import PATH

EXPERTS, HIDDEN, WIDTH = 8, 32, 64


def start(model: str, rank: int, ranks: int, expert_ranks: int, port: int) -> None:
    """Initialize arguments, groups and settings of SGLang, so that a layer can be built."""
    from sglang.benchmark import one_batch
    from sglang.srt.distributed import bootstrap
    from sglang.srt.server_args import ServerArgs

    sys.path.append(str(PATH))
    load_plugins()
    args = ServerArgs(
        model_path=model,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        tp_size=ranks,
        ep_size=expert_ranks,
    )
    args.resolve_once()
    place = one_batch.spawn_world_rank(args, tp_rank=rank, pp_rank=0)
    one_batch.publish(
        args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=place, gpu_id=rank)
    )
    one_batch.initialize_moe_config()
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)


def layer() -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    moe = FusedMoE(EXPERTS, HIDDEN, WIDTH, layer_id=0, top_k=2, prefix="model.layers.0.mlp.experts")
    for parameter in moe.parameters():
        parameter.data.zero_()
    return moe


def up_first(moe: Any) -> None:
    """Use the layout of FlashInfer's CUTLASS kernels."""
    moe.quant_method.use_flashinfer_cutlass = True


def moved(moe: Any) -> None:
    """Swap two experts, as SGLang's load balancer may."""
    from sglang.srt.eplb.expert_location import (
        ExpertLocationMetadata,
        set_global_expert_location_metadata,
    )

    experts = torch.arange(EXPERTS)
    experts[[0, 5]] = experts[[5, 0]]
    places = torch.full((1, EXPERTS, EXPERTS), -1)
    places[0, :, 0] = experts.argsort()
    row, counts = experts[None], torch.ones(1, EXPERTS, dtype=torch.long)
    metadata = ExpertLocationMetadata(row, row, places, places, counts, 1, None)
    set_global_expert_location_metadata(metadata, allow_overwrite=True)


LAYOUTS: dict[str, Callable[[Any], None]] = {
    "as in the checkpoint": lambda moe: None,
    "up above gate": up_first,
    "moved": moved,
}


def load_single(moe: Any, kind: str, stack: torch.Tensor) -> None:
    """Load expert by expert, as a model's `load_weights` does."""
    parameter, name = getattr(moe, kind), f"model.layers.0.mlp.experts.{kind}"
    for expert, tensor in enumerate(stack):
        shards = (
            {"w2": tensor}
            if kind == "w2_weight"
            else dict(zip(("w1", "w3"), tensor.chunk(2), strict=True))
        )
        for shard, weights in shards.items():
            parameter.weight_loader(parameter, weights, name, shard_id=shard, expert_id=expert)


def load_stack(moe: Any, kind: str, stack: torch.Tensor) -> None:
    parameter = getattr(moe, kind)
    parameter.weight_loader(parameter, stack)


def load_parts(moe: Any, kind: str, stack: torch.Tensor) -> None:
    for number, part in enumerate(stack.chunk(4)):
        load_stack(moe, kind, part.reshape((1,) * number + part.shape))


def compare(change: Callable[[Any], None]) -> dict[str, bool]:
    import sluice_sglang.weights.stacked_experts as plugin

    copies: list[str] = []
    copy = plugin._copy

    def noted(layer: Any, kind: str, target: Any, stack: Any, first: int) -> None:
        copies.append(kind)
        copy(layer, kind, target, stack, first)

    plugin._copy = noted
    torch.manual_seed(1)
    stacks = {
        "w13_weight": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN),
        "w2_weight": torch.randn(EXPERTS, HIDDEN, WIDTH),
    }
    loaded = []
    for load in (load_single, load_stack, load_parts):
        moe = layer()
        change(moe)
        for kind, stack in stacks.items():
            load(moe, kind, stack)
        loaded.append([getattr(moe, kind).data for kind in stacks])
    plugin._copy = copy
    single, *others = loaded
    filled = all(bool(parameter.any()) for parameter in single)
    same = all(torch.equal(a, b) for other in others for a, b in zip(single, other, strict=True))
    return {"same": same and filled, "at once": bool(copies)}


if __name__ == "__main__":
    start(sys.argv[1], *map(int, sys.argv[2:]))
    print(json.dumps({name: compare(change) for name, change in LAYOUTS.items()}), flush=True)
    torch.distributed.barrier()  # rank 0 serves addresses until the last rank has its groups
    os._exit(0)  # skips the exit of process groups, which would wait for other ranks
