"""Tokens of a mixture go where the engine sent them, not where the trainer's router would.

Rounding alone sends some tokens to other experts in trainer and engine, and then their log-probs
have little in common (rollout routing replay, R3: Ma et al. 2025, arXiv 2510.11370). Weights of the
chosen experts are still the trainer's router's, and it learns by them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

TopK = Callable[..., tuple[Tensor, Tensor]]
"""(scores [tokens, experts], experts of a token, groups, groups of a token) -> (their scores,
numbers), [tokens, experts of a token] each."""


class Replay:
    """The experts of the tokens under way, of one router: Megatron asks it where it would ask its
    own `RouterReplay`.

    chosen: [tokens, experts of a token] int64. The router itself says where a token goes that has
    no such numbers, or not as many different ones; None: where all go.
    """

    chosen: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        own_scores, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.chosen is None:
            return own_scores, own
        experts = torch.where(_sound(self.chosen, scores.shape[1])[:, None], self.chosen, own)
        return scores.gather(1, experts), experts


def _sound(chosen: Tensor, experts: int) -> Tensor:
    """[tokens] true where the numbers of a token are different ones of so many experts.

    What Megatron does with others is undefined: it counts on as many rows as tokens x experts.
    """
    ordered = chosen.sort(-1).values
    different = (ordered[:, 1:] > ordered[:, :-1]).all(-1)
    sound: Tensor = (ordered[:, 0] >= 0) & (ordered[:, -1] < experts) & different
    return sound


def install(chunks: list[Any]) -> None:
    """Have the mixtures of a policy look for experts in the packing of the row that they are given.

    There, and not in a state of the model: a layer that is computed again in the backward pass is
    given its own row again, whatever rows have come since.
    """
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if router := getattr(layer.mlp, "router", None):
                router.router_replay = Replay()
                layers, experts = router.config.num_layers, router.topk
                look = partial(_look, replay=router.router_replay, shape=(layers, experts))
                layer.register_forward_pre_hook(look, with_kwargs=True)


def _look(
    layer: Any, _: Any, options: dict[str, Any], *, replay: Replay, shape: tuple[int, int]
) -> None:
    experts = options["packed_seq_params"].experts
    replay.chosen = None if experts is None else _of_layer(experts, layer.layer_number - 1, shape)


def _of_layer(experts: Tensor, layer: int, shape: tuple[int, int]) -> Tensor:
    """This tensor-parallel rank's tokens of one layer.

    experts: [tokens, layers x experts of a token]; shape: (layers, experts of a token). Raises
    ValueError where the engine's model has another.
    """
    if experts.shape[1] != shape[0] * shape[1]:
        raise ValueError(
            f"an engine told {experts.shape[1]} experts of a token; expected {shape[0]} layers x "
            f"{shape[1]}: does it serve the model that is trained?"
        )
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    held: Tensor = experts.view(-1, *shape).chunk(ranks)[rank]
    return held[:, layer].long()
