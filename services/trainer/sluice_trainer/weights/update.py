"""A weight update: the collective call of all ranks of the trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.weights.buckets import Bucket, buckets
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.update_session import UpdateSession

# Buckets in flight or queued while the next one is filled; memory holds one more than that.
_AHEAD = 2


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
    """Bring the weights to the engines. Collective.

    The first bucket is filled while engines prepare, before they are paused; later buckets are
    filled while earlier ones are sent.

    Parameters
    ----------
    tensors
        Called with the ranks that send to engines; yields names and full tensors in the engines'
        layout. All ranks contribute their parts, and the senders get whole tensors.
    version
        Weight version of the update.
    session
        This rank's update session.
    ranks
        All ranks of the trainer.
    bucket_bytes
        Limit of a bucket, in bytes.
    joiners_only
        Update only engines that wait for their first weights.
    hand_over
        Called on every rank once all engines have all weights, before any engine generates.

    Returns
    -------
    The outcome of each rank that sent to engines, on every rank; empty if no engine takes part.
    With a store there is one outcome, without engines: they fetch the weights later.

    """
    if session.publishes:
        session.know_base(ranks)
        return _publish(tensors(frozenset((0,))), version, session, ranks, bucket_bytes)
    # Rank 0 asks which engines take part; from the plan every rank derives the same shares.
    plan = session.plan(version, joiners_only=joiners_only) if ranks.rank == 0 else None
    plan = pb.UpdatePlan.FromString(ranks.broadcast(plan.SerializeToString() if plan else b""))
    shares = session.shares(plan.engines, ranks.world_size)
    engines = shares[ranks.rank]
    if not joiners_only:
        session.keep(engines)
    if not plan.engines:
        return []
    session.know_base(ranks)
    whole = tensors(frozenset(rank for rank, some in enumerate(shares) if some))
    if engines:
        # Engines generate until the first bucket is filled and all communicators are ready.
        preparing = session.prepare(version, engines)
        filled = buckets(session.in_precision(whole), bucket_bytes, session.layout)
        first = next(filled)
        preparing.result()
        session.pause()
        _send(first, filled, session)
    else:
        deque(whole, maxlen=0)  # other ranks need this rank's part of the weights
    if hand_over:
        ranks.gather(None)  # wait until all engines have their weights
        hand_over()
        ranks.gather(None)  # wait until all ranks have handed over
    outcomes = ranks.gather(session.finish() if engines else None)
    return [outcome for outcome in outcomes if outcome]


def _publish(
    whole: Iterable[tuple[str, Tensor]],
    version: int,
    session: UpdateSession,
    ranks: Ranks,
    bucket_bytes: int,
) -> list[UpdateOutcome]:
    outcome: UpdateOutcome | None = None
    if ranks.rank == 0:
        for bucket in buckets(session.in_precision(whole), bucket_bytes, session.layout):
            session.write(bucket, version)
        outcome = session.publish(version)
    else:
        deque(whole, maxlen=0)  # rank 0 needs this rank's part of the weights
    return [outcome for outcome in ranks.gather(outcome) if outcome]


def _send(first: Bucket, filled: Iterator[Bucket], session: UpdateSession) -> None:
    sending = deque([session.send(first)])
    for bucket in filled:
        sending.append(session.send(bucket))
        if len(sending) > _AHEAD:
            sending.popleft().result()
    for sent in sending:
        sent.result()
