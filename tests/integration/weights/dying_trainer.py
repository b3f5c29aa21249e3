"""A trainer that stops in the middle of an update.

`python -m tests.integration.weights.dying_trainer RENDEZVOUS MODEL KIND` sends the first bucket,
announces the second one, prints a line while the engine waits for its bytes, and never sends them.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sluice.api import WeightSync
from sluice.engines.protocol import Engine
from sluice.engines.sglang import Sglang
from sluice.engines.sglang.layout import Layout
from sluice.engines.transformers import Transformers
from sluice.engines.vllm import Vllm
from sluice.wire import rpc
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_trainer.weights.buckets import buckets
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import backend
from tests.integration.weights.tools import BUCKET, begin, on_device

ENGINES: dict[str, Engine] = {
    type(engine).__name__: engine for engine in (Sglang(), Vllm(), Transformers())
}


async def main(rendezvous: str, weights: Path, engine: str) -> None:
    stub = rendezvous_pb2_grpc.RendezvousStub(rpc.channel(rendezvous))
    sync = WeightSync.model_validate({"transport": backend(), "timeoutSeconds": 60})
    transport = Collective(backend(), "127.0.0.1", 60, "trainer-0-1")
    sender = WeightSender(stub, ("trainer-0", 1), sync, transport, ENGINES[engine])
    await begin(sender, 1, joiners_only=False)
    first, second, *_ = buckets(on_device(weights), BUCKET, Layout())
    await sender.send(first)
    assert sender.current
    (peer,) = sender.current.peers.values()
    group = transport.communicators[peer.name].name
    announcing = asyncio.create_task(
        peer.control.receive(
            group, second.names, second.dtypes, second.shapes, version=None, flush=False
        )
    )
    await asyncio.sleep(1.0)  # the engine has the request, and waits in the collective
    print("half-way", flush=True)
    await announcing


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
