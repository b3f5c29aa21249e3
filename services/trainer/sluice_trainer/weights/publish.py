"""One weight update as all ranks of the trainer make it together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from sluice.engines.base import Layout
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.coordinator import Coordinator
from sluice_trainer.ranks import Ranks
from sluice_trainer.weights.buckets import Bucket, buckets
from sluice_trainer.weights.publisher import Published

_AHEAD = 2
"""Buckets that are being sent or wait for it, while the next is made: memory for one more than that is needed."""


def publish(
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    coordinator: Coordinator,
    ranks: Ranks,
    layout: Layout,
    *,
    bucket_bytes: int,
    joiners_only: bool = False,
    hand_over: Callable[[], None] | None = None,
) -> list[Published]:
    """Bring the weights to the engines. Answers what each source's update came to, on every rank. Collective.

    tensors: names and full tensors as the engine's layout wants them. They are gathered
    and laid into buckets by all ranks, each of which sends them to its share of the engines. The first bucket is made
    before the engines are paused, and the others while earlier ones are on their way. hand_over: what every rank does
    once all engines have all weights, before any of them generates.
    """
    plan = coordinator.plan_update(version, joiners_only=joiners_only) if ranks.rank == 0 else None
    plan = pb.UpdatePlan.FromString(ranks.broadcast(plan.SerializeToString() if plan else b""))
    engines = coordinator.share(plan.engines, ranks.world_size)
    if not joiners_only:
        coordinator.keep_engines(engines)
    if not plan.engines:
        return []
    if engines:
        coordinator.prepare_update(version, engines)
        _send(buckets(tensors, bucket_bytes, layout), coordinator)
    else:
        deque(tensors, maxlen=0)  # the others need our part of the weights
    if hand_over:
        ranks.gather(None)  # all engines have their weights
        hand_over()
        ranks.gather(None)  # all ranks have made room
    published = coordinator.finish_update() if engines else None
    return [found for found in ranks.gather(published) if found]


def _send(made: Iterator[Bucket], coordinator: Coordinator) -> None:
    first = next(made)
    coordinator.pause_engines()
    sending = deque([coordinator.send(first)])
    for bucket in made:
        sending.append(coordinator.send(bucket))
        if len(sending) > _AHEAD:
            sending.popleft().result()
    for sent in sending:
        sent.result()
