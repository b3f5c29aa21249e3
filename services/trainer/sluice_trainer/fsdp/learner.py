"""A transformers model that learns: micro-batches, optimizer step and scoring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sluice.api import Optimizer, RLJobSpec
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.algorithms.objective import Objective
from sluice_trainer.batch.sequences import Sequence, TrainSequence, micro_batch_members
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.fsdp import mtp
from sluice_trainer.fsdp.lora import dropping
from sluice_trainer.fsdp.net import Net
from sluice_trainer.fsdp.row import row
from sluice_trainer.fsdp.sharding import local_shard, reshard
from sluice_trainer.step.learner import Learner, by_sequence
from sluice_trainer.step.micro_batch_size import MicroBatchSize
from sluice_trainer.step.packing import Forward, MicroBatch, packed_row, share_of, with_loss
from sluice_trainer.step.rates import learning_rate
from sluice_trainer.step.results import (
    Loss,
    StepResult,
    check_gradient,
    check_loss,
    largest,
    reduced,
    summed,
)


class ShardedLearner(Learner):
    """A sharded model, its optimizer and its progress."""

    def __init__(
        self,
        net: Net,
        spec: RLJobSpec,
        size: MicroBatchSize,
        ranks: Ranks,
        rates: Optimizer,
        total_steps: int | None,
    ) -> None:
        super().__init__(spec, rates, total_steps)
        self.net = net
        self.optimizer = build_adamw(net, rates)
        self._mtp_rates = _rates_of_mtp(spec, rates)
        self._size, self._ranks = size, ranks

    @property
    def modules(self) -> list[nn.Module]:
        return [self.net.model]

    def micro_batches(self, shard: Seq[TrainSequence], totals: BatchTotals) -> list[MicroBatch]:
        aggregation = self._spec.algorithm.loss_aggregation
        together = self._spec.algorithm.paired
        rows = micro_batches(self.net, shard, self._size, self._ranks, whole_samples=together)
        return [with_loss(batch, shard, totals, aggregation, DEVICE) for batch in rows]

    def compute(self, batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
        return compute(self.net, batches, forward)

    def score(self, shard: Seq[Sequence], forward: Forward) -> list[Tensor]:
        return score(self.net, shard, self._size, self._ranks, forward)

    def _objective(self, batch: MicroBatch, forward: Forward, loss: Loss) -> Objective:
        """Return the objective of a micro-batch.

        In training it has that of the layer for a further token, too.
        """
        assert batch.loss is not None
        scores = forward(self.net, batch)
        if self.net.mtp is None or not torch.is_grad_enabled():
            return loss(scores, batch.loss)
        objective = loss(scores[:-2], batch.loss)
        weights = batch.loss.metric_weights * mtp.predicted(batch)
        log_probs, hits = scores[-2:]
        further = -(log_probs * weights).sum()
        sums = {"mtp_loss": further.detach(), "mtp_accuracy": (hits.detach() * weights).sum()}
        return replace(objective, loss=objective.loss + further, sums={**objective.sums, **sums})

    @torch.no_grad()
    def measure(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> dict[str, float]:
        objectives = [self._objective(batch, forward, loss) for batch in batches]
        reshard(self.net)
        return self._sums(objectives)

    def _sums(self, objectives: Seq[Objective]) -> dict[str, float]:
        own = summed([o.sums for o in objectives])
        if self.net.share.rank:  # all ranks that share a row have the same sums
            own = {name: torch.zeros_like(value) for name, value in own.items()}
        return reduced(own, dist.ReduceOp.SUM)

    def _update(self, batches: list[MicroBatch], forward: Forward, loss: Loss) -> StepResult:
        if self.net.mtp:
            rate = learning_rate(self.optimizer_steps, self._mtp_rates, self._total)
            for group in self.optimizer.param_groups:
                group["lr"] = rate if group["further"] else self.rate
        objectives = []
        with dropping(self.net.model):
            for batch in batches:
                objective = self._objective(batch, forward, loss)
                objective.loss.backward()  # type: ignore[no-untyped-call]
                objectives.append(objective)
        sums = self._sums(objectives)
        maxima = reduced(largest([o.maxima for o in objectives]), dist.ReduceOp.MAX)
        check_loss(sums)
        limit = self._rates.clip_grad or math.inf
        further = list(self.net.mtp.parameters()) if self.net.mtp else []
        norm = clip_gradients(_without(self.net.parameters(), further), limit)
        check_gradient(norm, sums["loss"])
        if further and not math.isfinite(clip_gradients(further, limit)):
            for parameter in further:  # the policy learns all the same
                parameter.grad = None
        self.optimizer.step()
        # Free the gradients now, not before the next step: log-prob passes in between need their
        # memory, and memory allocated before a step stays allocated.
        self.optimizer.zero_grad()
        return StepResult(sums, maxima, norm)


def _rates_of_mtp(spec: RLJobSpec, rates: Optimizer) -> Optimizer:
    """Return the settings of the layer that predicts a further token: its own learning rate."""
    settings = spec.trainer.mtp
    if settings is None or settings.lr is None:
        return rates
    return rates.model_copy(update={"lr": settings.lr})


def _without(parameters: Iterable[nn.Parameter], others: Seq[nn.Parameter]) -> list[nn.Parameter]:
    left_out = {id(parameter) for parameter in others}
    return [parameter for parameter in parameters if id(parameter) not in left_out]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale gradients down to norm `limit` if they exceed it, and return their norm. Collective.

    It differs from torch's function only in the sum over ranks, which torch takes on the device of
    the gradients: with `cpuOffload` that is the CPU, which NCCL does not support.
    """
    shares = [local_shard(p.grad) for p in parameters if p.grad is not None]
    # The norm over all ranks is the root of the sum of the squared norms of their shards.
    square = nn.utils.get_total_norm(shares).to(DEVICE).square()
    dist.all_reduce(square)
    norm = float(square.sqrt())
    factor = min(limit / (norm + 1e-6), 1.0)
    if factor < 1.0:
        for share in shares:
            share.mul_(factor)
    return norm


def build_adamw(net: Net, rates: Optimizer) -> torch.optim.AdamW:
    """Return AdamW over this rank's shards, without weight decay for norms and biases.

    Megatron decays the same parameters. The layer that predicts a further token has groups of its
    own.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay, "further": further}
        for further in (False, True)
        for decay in (rates.weight_decay, 0.0)
    ]
    layer = net.mtp
    of_layer = {id(parameter) for parameter in layer.parameters()} if layer else set()
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        plain = parameter.dim() == 1 or name.endswith(".bias")
        groups[2 * (id(parameter) in of_layer) + plain]["params"].append(parameter)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=rates.lr,
        betas=(rates.beta1, rates.beta2),
        eps=rates.eps,
        fused=DEVICE.type == "cuda",
    )


def micro_batches(
    net: Net,
    shard: Seq[Sequence],
    size: MicroBatchSize,
    ranks: Ranks,
    *,
    whole_samples: bool = False,
) -> list[MicroBatch]:
    """Pack this rank's sequences into rows, the same number on every rank. Collective.

    All ranks gather each layer together, so all need the same number of passes.
    """
    max_tokens = size.tokens * net.share.size if net.packs else 1  # 1: a row per sequence

    def count(own: int) -> int:
        return max(*ranks.gather(own), 1)

    bins = micro_batch_members(shard, max_tokens, count, whole_samples=whole_samples)
    if net.packs or not whole_samples:
        return [micro_batch(net, shard, members) for members in bins]
    most = max(*ranks.gather(max(map(len, bins), default=0)), 1)
    return [_in_rows(net, shard, members, most) for members in bins]


def _in_rows(net: Net, shard: Seq[Sequence], members: Seq[int], count: int) -> MicroBatch:
    """Return a micro-batch whose members are computed in `count` rows, with empty ones if fewer."""
    each = [[index] for index in members]
    each += [[]] * (count - len(each))
    rows = tuple(micro_batch(net, shard, row) for row in each)
    return replace(micro_batch(net, shard, members), rows=rows)


def micro_batch(net: Net, shard: Seq[Sequence], members: Seq[int]) -> MicroBatch:
    """Return the row of these members of the shard, or this rank's share of it."""
    images = [shard[i].images for i in members]
    if net.share.size == 1:
        return packed_row(shard, members, DEVICE, partial(row, device=DEVICE, images=images))
    layout = partial(row, device=DEVICE, share=net.share)
    whole = packed_row(shard, members, DEVICE, layout, multiple=net.share.size)
    return share_of(whole, net.share.held(len(whole.tokens)).to(DEVICE))


@torch.no_grad()
def compute(net: Net, batches: list[MicroBatch], forward: Forward) -> list[list[Tensor]]:
    """Return the first value of the forward pass, per micro-batch and member, on the CPU."""
    values = [batch.split(forward(net, batch)[0].float().cpu()) for batch in batches]
    reshard(net)
    return values


def score(
    net: Net, shard: Seq[Sequence], size: MicroBatchSize, ranks: Ranks, forward: Forward
) -> list[Tensor]:
    """Return values of `forward` per sequence. Collective, even for a rank without sequences."""
    batches = micro_batches(net, shard, size, ranks)
    return by_sequence(batches, compute(net, batches, forward), len(shard))
