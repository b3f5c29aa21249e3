"""The clients of the services that a rank of the trainer calls: rendezvous, buffer and engines."""

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
class Clients:
    """The clients of one rank."""

    member: Member
    buffer: BufferClient
    engines: UpdateSession


@contextmanager
def connect(
    env: Environment, spec: RLJobSpec, stop: threading.Event, *, rank: int = 0
) -> Iterator[Clients]:
    """Open the clients of a rank for the duration of a block.

    Parameters
    ----------
    env
        Environment of the pod.
    spec
        Spec of the job.
    stop
        Set by SIGTERM; calls then raise `Stopped` instead of waiting for an absent service.
    rank
        Rank of this process.

    Yields
    ------
    The clients. None of the services needs to be reachable yet.

    """
    with ExitStack() as stack:
        background = Background(stop)
        stack.callback(background.close)
        buffer = BufferClient(env, background, balance_tokens(spec))
        stack.callback(buffer.close)
        member = Member(env, rank, background, devices=spec.trainer.devices)
        engines = UpdateSession(env, spec, member, rank, background)
        stack.callback(engines.close)
        stack.callback(member.close)
        yield Clients(member, buffer, engines)


def balance_tokens(spec: RLJobSpec) -> float:
    """Return n0 of the cost n (1 + n / n0) of a sequence for `trainer.balance: flops`, else 0.

    Raises
    ------
    ConfigurationError
        The operations of the model are not known.

    """
    if spec.trainer.balance == "tokens":
        return 0.0
    path = Path(spec.model.path, "config.json")
    flops = model_flops(json.loads(path.read_text()))
    if flops is None:
        raise ConfigurationError(
            f"trainer.balance: flops needs a model whose operations are known, and those of "
            f"{path} are not; use tokens"
        )
    return flops.balance_tokens
