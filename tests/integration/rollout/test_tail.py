"""The tail of a batch, as a worker in its pod tells it to the rendezvous."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from sluice.samples.sample import WORKER_TAIL
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from tests.integration.engines import Sglang
from tests.integration.rendezvous_server import DEADLINE, Rendezvous
from tests.integration.rollout.pods import Pod, Services

START_SECONDS = 60.0
READY = pb.TakeBatchResponse.STATE_READY
FUNCTION = """
import asyncio
from pathlib import Path


async def play(episode):
    first = episode.prompt.group_id == 0 and episode.sample.index == 0
    while first and not Path({file!r}).exists():
        await asyncio.sleep(0.05)
    await episode.generate()
"""


async def engine_state(rendezvous: Rendezvous, *states: str, seconds: float = DEADLINE) -> str:
    """The engine's state, once it is one of these."""
    async with asyncio.timeout(seconds):
        while True:
            entry = (await rendezvous.ledger()).get("rollout-0")
            if entry and entry.state in states:
                return entry.state
            await asyncio.sleep(0.05)


async def test_one_sample_of_eight_is_the_batchs_tail_until_it_is_done(
    make_services: Callable[..., Services],
    start_pod: Callable[..., Pod],
    sglang: Sglang,
    rendezvous: Rendezvous,
    tmp_path: Path,
) -> None:
    done = tmp_path / "done"
    code = tmp_path / "long.py"
    code.write_text(FUNCTION.format(file=str(done)))
    services = make_services(rollout__function=f"{code}:play")
    async with await services.start_buffer() as client:
        start_pod(services, sglang.url)
        await engine_state(rendezvous, "idle", seconds=START_SECONDS)
        await rendezvous.serve(0)
        assert await engine_state(rendezvous, "tail") == "tail"
        await asyncio.sleep(0.5)
        done.write_text("")
        assert await engine_state(rendezvous, "idle", "generating") == "idle", "all is generated"
        assert (await client.take(1, wait=DEADLINE)).state == READY
        groups = [codec.group_from_message(g) for g in await client.shard(1)]
        seconds = {g.group_id: g.samples[0].metadata[WORKER_TAIL] for g in groups}
        assert seconds.pop(0) > 0.5
        assert max(seconds.values()) < 0.5, "the others were there before it"
