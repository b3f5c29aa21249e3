"""Everybody whom a rank of the trainer talks to: the rendezvous, the buffer, the engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.runtime.pod_env import ConfigurationError, Environment
from sluice_trainer.clients.background import Background
from sluice_trainer.clients.buffer_client import BufferClient
from sluice_trainer.clients.membership import Member
from sluice_trainer.model.flops import model_flops
from sluice_trainer.weights.update_session import UpdateSession


@dataclass(frozen=True, slots=True)
class Peers:
    member: Member
    buffer: BufferClient
    engines: UpdateSession


@contextmanager
def connected(
    env: Environment, spec: RLJobSpec, stop: threading.Event, *, rank: int = 0
) -> Iterator[Peers]:
    """The peers of this rank, none of which need be there yet. stop: set by SIGTERM."""
    with ExitStack() as stack:
        background = Background(stop)
        stack.callback(background.close)
        buffer = BufferClient(env, background, balance_tokens(spec))
        stack.callback(buffer.close)
        member = Member(env, rank, background, devices=spec.trainer.devices)
        engines = UpdateSession(env, spec, member, rank, background)
        stack.callback(engines.close)
        stack.callback(member.close)
        yield Peers(member, buffer, engines)


def balance_tokens(spec: RLJobSpec) -> float:
    """n0 of a sequence's cost n (1 + n / n0) with `trainer.balance.by: flops`; else 0."""
    if spec.trainer.balance.by == "tokens":
        return 0.0
    path = Path(spec.model.path, "config.json")
    flops = model_flops(json.loads(path.read_text()))
    if flops is None:
        raise ConfigurationError(
            f"trainer.balance.by: flops needs a model whose operations are known, and of {path} "
            "they are not; take tokens"
        )
    return flops.balance_tokens
