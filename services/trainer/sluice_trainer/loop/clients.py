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
from sluice_trainer.clients.buffer_client import BY_TOKENS, Balance, BufferClient
from sluice_trainer.clients.membership import Member
from sluice_trainer.model.flops import image_cost, model_flops
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
        buffer = BufferClient(env, background, balance(spec))
        stack.callback(buffer.close)
        member = Member(env, rank, background, devices=spec.trainer.devices)
        engines = UpdateSession(env, spec, member, rank, background)
        stack.callback(engines.close)
        stack.callback(member.close)
        yield Clients(member, buffer, engines)


def balance(spec: RLJobSpec) -> Balance:
    """Return the cost of a sequence for `trainer.balance`.

    Raises
    ------
    ConfigurationError
        The operations of the model are not known.

    """
    if spec.trainer.balance == "tokens":
        return BY_TOKENS
    path = Path(spec.model.path, "config.json")
    config = json.loads(path.read_text())
    flops = model_flops(config)
    if flops is None:
        raise ConfigurationError(
            f"trainer.balance: flops needs a model whose operations are known, and those of "
            f"{path} are not; use tokens"
        )
    if spec.data.images is None:
        return Balance(flops.balance_tokens)
    cost = image_cost(config, flops, spec.trainer.trained_parts, spec.samples_per_prompt)
    return Balance(flops.balance_tokens, cost)
