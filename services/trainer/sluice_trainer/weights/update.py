"""One weight update as all ranks of the trainer make it together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.weights.buckets import Bucket, buckets
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.update_session import UpdateSession

_AHEAD = 2
"""Buckets that are being sent or wait for it, while the next is made: memory for one more than that
is needed."""


def update_engines(
    tensors: Callable[[frozenset[int]], Iterable[tuple[str, Tensor]]],
    version: int,
    session: UpdateSession,
    ranks: Ranks,
    *,
    bucket_bytes: int,
    joiners_only: bool = False,
    hand_over: Callable[[], None] | None = None,
) -> list[UpdateOutcome]:
    """Bring the weights to the engines. Answers what each rank's share of the update came to,
    everywhere. Collective.

    tensors: names and full tensors as the engines' layout wants them, for ranks with engines, to
    which all ranks give their part. Each of those lays them into buckets for its engines. The first
    bucket is made while engines are prepared, before they are paused, and the others while earlier
    ones are on their way. hand_over: what every rank does once all engines have all weights, before
    any of them generates.
    """
    plan = session.plan(version, joiners_only=joiners_only) if ranks.rank == 0 else None
    plan = pb.UpdatePlan.FromString(ranks.broadcast(plan.SerializeToString() if plan else b""))
    shares = session.shares(plan.engines, ranks.world_size)
    engines = shares[ranks.rank]
    if not joiners_only:
        session.keep(engines)
    if not plan.engines:
        return []
    whole = tensors(frozenset(rank for rank, some in enumerate(shares) if some))
    if engines:
        preparing = session.prepare(version, engines)
        filled = buckets(whole, bucket_bytes, session.layout)
        first = next(filled)
        preparing.result()
        session.pause()
        _send(first, filled, session)
    else:
        deque(whole, maxlen=0)  # the others need our part of the weights
    if hand_over:
        ranks.gather(None)  # all engines have their weights
        hand_over()
        ranks.gather(None)  # all ranks have made room
    outcomes = ranks.gather(session.finish() if engines else None)
    return [outcome for outcome in outcomes if outcome]


def _send(first: Bucket, filled: Iterator[Bucket], session: UpdateSession) -> None:
    sending = deque([session.send(first)])
    for bucket in filled:
        sending.append(session.send(bucket))
        if len(sending) > _AHEAD:
            sending.popleft().result()
    for sent in sending:
        sent.result()
