"""A rank of the trainer as a member of the rendezvous: its identity, state and weight version."""

from __future__ import annotations

import time

from sluice.runtime.pod_env import Environment
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.clients.background import Background
from sluice_trainer.telemetry import metrics


class Member:
    """The membership of one rank, with heartbeats in the background.

    Parameters
    ----------
    env
        Environment of the pod.
    rank
        Rank of this process.
    background
        Runs the heartbeats.
    devices
        GPUs of all ranks, or 1 on CPUs. Only rank 0 reports them.

    """

    def __init__(
        self, env: Environment, rank: int, background: Background, *, devices: int = 0
    ) -> None:
        self._env, self._rank, self._background = env, rank, background
        self._devices = 0 if rank else devices
        self._state = ("starting", time.time())
        # Version of the weights that engines receive; -1: no version yet.
        self.version = -1
        self._membership = background.call(
            Membership(env.rendezvous, self._hello, self._heartbeat).__aenter__()
        )

    def close(self) -> None:
        self._background.call(self._membership.__aexit__())

    def unready(self) -> str:
        """Return why this rank has not joined yet; empty once it has.

        What happens afterwards shows in its progress.
        """
        return "" if self._membership.latest else "not joined: the rendezvous does not answer"

    def set_state(self, state: str) -> None:
        """Report what the trainer is doing, in one word for people."""
        self._state = (state, time.time())
        metrics.PHASES.enter(state)
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
