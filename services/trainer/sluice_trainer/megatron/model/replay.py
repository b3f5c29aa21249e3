"""Routing replay: a mixture sends tokens to experts that were chosen earlier, not by its router.

Rollout routing replay (R3: Ma et al. 2025, arXiv 2510.11370) replays the experts of the engine that
sampled the tokens. Rounding alone sends some tokens to other experts in trainer and engine, and
then their log-probs have little in common.

Routing replay (R2: Zheng et al. 2025, arXiv 2507.18071) replays the experts of the trainer's pass
before the first optimizer step of a batch, so that a policy ratio compares weights and not experts.

The weights of the chosen experts are still those of the present router, which learns through them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

# (scores [tokens, experts], experts per token, groups, groups per token) -> (their scores, their
# numbers), [tokens, experts per token] each.
TopK = Callable[..., tuple[Tensor, Tensor]]


class ExpertReplay:
    """The experts of one router's current tokens, with the interface of Megatron's `RouterReplay`.

    Attributes
    ----------
    chosen
        [tokens, experts per token] int64. The router decides for tokens with invalid or duplicate
        numbers; None: for all tokens.
    record
        Collects the experts of the tokens, in the same shape; None: not recorded.

    """

    chosen: Tensor | None = None
    record: list[Tensor] | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        best, experts = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.chosen is not None:
            experts = torch.where(
                _valid(self.chosen, scores.shape[1])[:, None], self.chosen, experts
            )
            best = scores.gather(1, experts)
        if self.record is not None:
            self.record.append(experts)
        return best, experts


def _valid(chosen: Tensor, experts: int) -> Tensor:
    """Return [tokens] bool, true for tokens whose experts are distinct and exist.

    Other numbers have undefined behaviour in Megatron, which relies on tokens x experts rows.
    """
    ordered = chosen.sort(-1).values
    different = (ordered[:, 1:] > ordered[:, :-1]).all(-1)
    sound: Tensor = (ordered[:, 0] >= 0) & (ordered[:, -1] < experts) & different
    return sound


def install(chunks: list[Any], by: Literal["trainer", "rollout"]) -> None:
    """Have a policy's mixtures read their experts from the packing of the row that they are given.

    They are not kept in a state of the model, because a layer that is recomputed in the backward
    pass is given its own row again, whichever rows have come since.

    Parameters
    ----------
    chunks
        Chunks of the model.
    by
        Source of the experts. An engine reports those of all layers; a trainer process knows only
        its own mixtures, in order.

    """
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    mixtures = [layer for layer in layers if getattr(layer.mlp, "router", None)]
    for number, layer in enumerate(mixtures):
        router = layer.mlp.router
        router.router_replay = ExpertReplay()
        place = (number, len(mixtures))
        if by == "rollout":
            place = (layer.layer_number - 1, router.config.num_layers)
        hook = partial(_set_experts, replay=router.router_replay, place=place, topk=router.topk)
        layer.register_forward_pre_hook(hook, with_kwargs=True)
        if layer.mlp.moe_layer_recompute:
            layer.mlp.moe_layer_recompute = False
            layer.mlp.forward = partial(
                _recompute_with_same_experts, layer.mlp.forward, router.router_replay
            )


def _recompute_with_same_experts(
    forward: Any, replay: ExpertReplay, hidden: Tensor, **options: Any
) -> Any:
    """Run a mixture that is recomputed without its layer (`recomputeModules: [moe]`).

    The layer's hook does not run then, and on a pipeline stage it has run for other rows since.
    """
    chosen = replay.chosen

    def run(hidden: Tensor) -> Any:
        replay.chosen = chosen
        return forward(hidden, **options)

    return tensor_parallel.checkpoint(run, False, hidden)


def _set_experts(
    layer: Any,
    _: Any,
    options: dict[str, Any],
    *,
    replay: ExpertReplay,
    place: tuple[int, int],
    topk: int,
) -> None:
    row = options["packed_seq_params"]
    replay.chosen = None if row.experts is None else _layer_experts(row.experts, place, topk)
    replay.record = row.record


def _layer_experts(experts: Tensor, place: tuple[int, int], topk: int) -> Tensor:
    """Return the experts of one layer for this tensor-parallel rank's tokens.

    Parameters
    ----------
    experts
        [tokens, layers x experts per token].
    place
        Number of the layer, and the number of layers.
    topk
        Experts per token.

    Raises
    ------
    ValueError
        If the engine's model has another shape.

    """
    number, layers = place
    if experts.shape[1] != layers * topk:
        raise ValueError(
            f"an engine reported {experts.shape[1]} experts per token; expected {layers} layers x "
            f"{topk}: does it serve the model that is trained?"
        )
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    held: Tensor = experts.view(-1, layers, topk).chunk(ranks)[rank]
    return held[:, number].long()
