"""Tokens of a mixture go where they were sent before, not where the router would send them now.

By the engine that sampled them (rollout routing replay, R3: Ma et al. 2025, arXiv 2510.11370):
rounding alone sends some tokens to other experts in trainer and engine, and then their log-probs
have little in common. Or by the trainer's own pass before the first optimizer step of a batch
(routing replay, R2: Zheng et al. 2025, arXiv 2507.18071), so that a policy ratio compares weights
and not experts. Weights of the chosen experts are still the present router's, and it learns by
them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

TopK = Callable[..., tuple[Tensor, Tensor]]
"""(scores [tokens, experts], experts of a token, groups, groups of a token) -> (their scores,
numbers), [tokens, experts of a token] each."""


class Replay:
    """The experts of the tokens under way, of one router: Megatron asks it where it would ask its
    own `RouterReplay`.

    chosen: [tokens, experts of a token] int64. The router itself says where a token goes that has
    no such numbers, or not as many different ones; None: where all go. record: takes where they
    went, the same shape; None: nobody asks.
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
    """[tokens] true where the numbers of a token are different ones of so many experts.

    What Megatron does with others is undefined: it counts on as many rows as tokens x experts.
    """
    ordered = chosen.sort(-1).values
    different = (ordered[:, 1:] > ordered[:, :-1]).all(-1)
    sound: Tensor = (ordered[:, 0] >= 0) & (ordered[:, -1] < experts) & different
    return sound


def install(chunks: list[Any], by: Literal["trainer", "rollout"]) -> None:
    """Have the mixtures of a policy look for experts in the packing of the row that they are given.

    There, and not in a state of the model: a layer that is computed again in the backward pass is
    given its own row again, whatever rows have come since. by: who chose them. An engine tells
    those of all layers; a trainer process knows its own mixtures, in their order.
    """
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    mixtures = [layer for layer in layers if getattr(layer.mlp, "router", None)]
    for number, layer in enumerate(mixtures):
        router = layer.mlp.router
        router.router_replay = Replay()
        place = (number, len(mixtures))
        if by == "rollout":
            place = (layer.layer_number - 1, router.config.num_layers)
        look = partial(_set_experts, replay=router.router_replay, place=place, each=router.topk)
        layer.register_forward_pre_hook(look, with_kwargs=True)
        if layer.mlp.moe_layer_recompute:
            layer.mlp.moe_layer_recompute = False
            layer.mlp.forward = partial(
                _recompute_with_same_experts, layer.mlp.forward, router.router_replay
            )


def _recompute_with_same_experts(
    forward: Any, replay: Replay, hidden: Tensor, **options: Any
) -> Any:
    """A mixture that alone is computed again (`recomputeModules: [moe]`).

    Its layer does not look then; on a pipeline stage it has looked for other rows since.
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
    replay: Replay,
    place: tuple[int, int],
    each: int,
) -> None:
    row = options["packed_seq_params"]
    replay.chosen = None if row.experts is None else _of_layer(row.experts, place, each)
    replay.record = row.record


def _of_layer(experts: Tensor, place: tuple[int, int], each: int) -> Tensor:
    """This tensor-parallel rank's tokens of one layer.

    experts: [tokens, layers x experts of a token]; place: (number of the layer, of how many); each:
    experts of a token. Raises ValueError where the engine's model has another shape.
    """
    number, layers = place
    if experts.shape[1] != layers * each:
        raise ValueError(
            f"an engine told {experts.shape[1]} experts of a token; expected {layers} layers x "
            f"{each}: does it serve the model that is trained?"
        )
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    held: Tensor = experts.view(-1, layers, each).chunk(ranks)[rank]
    return held[:, number].long()
