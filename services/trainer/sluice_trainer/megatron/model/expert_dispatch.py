"""Dispatch of a mixture's tokens to the ranks of their experts and back."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from sluice_trainer.megatron.model.token_routes import Routes, combine, pick, routes, spread

# Marks an expert that a token does not go to, in place of a weight. No weight has this value, not
# even in a diverged model.
_ELSEWHERE = -1.0


class Dispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Sends a token once to each rank with chosen experts, and there to each of these experts.

    DeepSeek's DeepEP works the same way. Megatron's dispatcher sends a token once for each of its
    experts: with eight experts on four ranks that is 2.2 times as much. The sum over a rank's
    experts comes back. A layer's forward pass waits for the GPU once, for the sizes of what is
    sent; with all experts on one rank it never waits. An expert is never split over tensor-parallel
    ranks.
    """

    def __init__(
        self, local_experts: int, config: TransformerConfig, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config, pg_collection=groups)
        assert self.tp_size == 1
        self._local = local_experts
        self._per_token: int = config.moe_router_topk
        self._shape = torch.Size()
        self._ranks: Routes | None = None
        self._experts: Routes | None = None
        self._sent: list[int] = []
        self._received: list[int] = []
        self._rows = 0

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Prepare what goes to other ranks, rank by rank.

        Parameters
        ----------
        tokens
            [..., h].
        routing_map
            [n, experts] bool.
        probs
            [n, experts].

        Returns
        -------
        Rows [rows, h], and the weights of each row's experts on the target rank, [rows, local
        experts]; unchosen experts are marked.

        """
        self._shape = tokens.shape
        tokens, probs = (
            tokens.reshape(-1, tokens.shape[-1]),
            torch.where(routing_map, probs, _ELSEWHERE),
        )
        if self.ep_size == 1:
            self._rows = len(tokens) * self._per_token
            return tokens, probs
        by_rank = routing_map.view(-1, self.ep_size, self._local)
        reached = by_rank.any(2)
        self._agree(reached.sum(0), by_rank.sum((0, 2)))
        self._ranks = routes(reached, sum(self._sent), min(self._per_token, self.ep_size))
        return spread(tokens, self._ranks), pick(probs.view(by_rank.shape), self._ranks)

    def _agree(self, tokens: Tensor, rows: Tensor) -> None:
        """Exchange the number of rows that each rank sends to each, and receives in all.

        tokens, rows: [ranks], how many of this rank's tokens go to each rank, and how many rows to
        all of its experts together.
        """
        counts = torch.cat([tokens, rows])
        all_counts = (
            gather_from_sequence_parallel_region(counts, group=self.ep_group)
            .view(self.ep_size, -1)
            .tolist()
        )
        self._sent = all_counts[self.ep_rank][: self.ep_size]
        self._received = [counts[self.ep_rank] for counts in all_counts]
        self._rows = sum(counts[self.ep_size + self.ep_rank] for counts in all_counts)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        sizes = (self._received, self._sent)
        return all_to_all(self.ep_group, hidden_states, *sizes), all_to_all(
            self.ep_group, probs, *sizes
        )

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows sorted by local expert [m, h], rows per expert, and the rows' weights [m]."""
        self._experts = routes(probs != _ELSEWHERE, self._rows, min(self._per_token, self._local))
        return (
            spread(hidden_states, self._experts),
            self._experts.counts,
            pick(probs, self._experts),
        )

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        assert self._experts
        return combine(hidden_states, self._experts)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        back: Tensor = all_to_all(self.ep_group, hidden_states, self._sent, self._received)
        return back

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        tokens = combine(hidden_states, self._ranks) if self._ranks else hidden_states
        return tokens.view(self._shape)


class Mixture(MoELayer):  # type: ignore[misc]
    """Megatron's mixture layer with this module's dispatcher."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection,
        **options: Any,
    ):
        super().__init__(config, *args, pg_collection=pg_collection, **options)
        self.token_dispatcher = Dispatcher(self.num_local_experts, self.config, pg_collection)
