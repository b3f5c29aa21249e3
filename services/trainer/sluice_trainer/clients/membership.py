"""A rank of the trainer as a member of the rendezvous: who it is, what it does, which version it
has.
"""

from __future__ import annotations

import time

from sluice.runtime.pod_env import Environment
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.clients.background import Background
from sluice_trainer.telemetry import metrics


class Member:
    def __init__(
        self, env: Environment, rank: int, background: Background, *, devices: int = 0
    ) -> None:
        """devices: GPUs of all ranks, or 1 on CPUs; told by rank 0."""
        self._env, self._rank, self._background = env, rank, background
        self._devices = 0 if rank else devices
        self._state = ("starting", time.time())
        self.version = -1
        """Of the weights that engines are given; -1: none yet."""
        self._membership = background.call(
            Membership(env.rendezvous, self._hello, self._heartbeat).__aenter__()
        )

    def close(self) -> None:
        self._background.call(self._membership.__aexit__())

    def unready(self) -> str:
        """Why this rank cannot train yet, in words; empty: it has joined. What comes later is told
        by its progress.
        """
        return "" if self._membership.latest else "not joined: the rendezvous does not answer"

    def state(self, word: str) -> None:
        """Say what the trainer is doing, in one word, for people who watch."""
        self._state = (word, time.time())
        metrics.PHASES.enter(word)
        self._background.soon(self._membership.beat)

    def _hello(self) -> pb.Member:
        return pb.Member(
            role="trainer",
            name=self._env.name,
            attempt=self._env.attempt,
            index=self._rank,
            address=self._env.advertise,
            devices=self._devices,
            starting_seconds=metrics.PHASES.seconds()["starting"],
        )

    def _heartbeat(self) -> pb.Heartbeat:
        state, since = self._state
        return pb.Heartbeat(state=state, version=max(self.version, 0), gauges={"since": since})
