"""`python -m sluice_rollout`: its exit codes and its last line."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from sluice.wire import codec
from tests.integration.engines import CONTEXT, Sglang, until
from tests.integration.rendezvous_server import DEADLINE, Rendezvous
from tests.integration.rollout.pods import Pod, Services

MakeServices = Callable[..., Services]
Start = Callable[..., Pod]
NOBODY = "http://127.0.0.1:9"


async def joined(worker: Pod, rendezvous: Rendezvous) -> None:
    end = asyncio.get_running_loop().time() + 120
    while "rollout-0" not in await rendezvous.ledger():
        assert worker.process.poll() is None, "".join(worker.lines)
        assert asyncio.get_running_loop().time() < end, "".join(worker.lines)
        await asyncio.sleep(0.05)


async def test_sigterm_returns_the_leases_with_what_they_have(
    make_services: MakeServices, start_pod: Start, sglang: Sglang, rendezvous: Rendezvous
) -> None:
    services = make_services(rollout__sampling__maxResponseTokens=3000)
    async with await services.start_buffer() as client:
        worker = start_pod(services, sglang.url)
        await joined(worker, rendezvous)
        loaded = Path(f"/proc/{worker.process.pid}/maps").read_text()
        assert "libtorch" not in loaded, "hundreds of megabytes that no worker needs"
        await rendezvous.serve(0)
        await sglang.generated(8 * 30)
        assert await worker.end(60, signal.SIGTERM) == 143
        stats = await client.stats()
        assert (stats.leases, stats.returned) == (0, 4)
        again = (await client.lease("rollout-1", count=4)).groups
        partial = [codec.sample_from_message(s) for g in again for s in g.partial.samples]
        assert sum(s.response_length for s in partial) >= 8 * 20
    assert not [line for line in worker.lines if "Traceback" in line]


async def test_a_users_function_finds_torch_in_its_worker(
    make_services: MakeServices, start_pod: Start, tmp_path: Path
) -> None:
    """It may import it whenever it likes, so transformers has it from the start."""
    (tmp_path / "hook.py").write_text("def hook(prompt, sample): ...")
    services = make_services(rollout__hooks={"beforeReward": f"{tmp_path}/hook.py:hook"})
    async with await services.start_buffer():
        worker = start_pod(services, NOBODY)
        maps = Path(f"/proc/{worker.process.pid}/maps")
        await asyncio.to_thread(until, lambda: "libtorch" in maps.read_text(), 60, "torch is there")


async def test_an_engine_that_is_gone_ends_the_pod_with_its_name(
    make_services: MakeServices, start_pod: Start, sglang: Sglang, rendezvous: Rendezvous
) -> None:
    services = make_services(rollout__sampling__maxResponseTokens=3000)
    gate = await asyncio.create_subprocess_exec(
        "python3", "-c", RELAY, str(sglang.port), stdout=asyncio.subprocess.PIPE
    )
    assert gate.stdout
    url = f"http://127.0.0.1:{int(await gate.stdout.readline())}"
    async with await services.start_buffer():
        worker = start_pod(services, url)
        await joined(worker, rendezvous)
        await rendezvous.serve(0)
        await sglang.generated(8 * 10)
        gate.kill()
        assert await worker.end(60) == 1
    assert worker.lines[-1].startswith(f"error: engine {url}: ")
    assert not [line for line in worker.lines if "Traceback" in line or "never retrieved" in line]


RELAY = """
import asyncio, sys
async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
async def relay(reader, writer):
    there, to_there = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(copy(reader, to_there), copy(there, writer), return_exceptions=True)
async def main():
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


async def test_a_reward_function_that_is_not_there_is_a_configuration_error(
    make_services: MakeServices, start_pod: Start, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def other(sample):\n    return 1.0\n")
    path = f"{tmp_path}/mine.py:judge"
    worker = start_pod(make_services(reward={"function": path}), NOBODY)
    assert await worker.end(60) == 2
    where = f"{path}: {tmp_path}/mine.py has no function 'judge'; it has other"
    assert worker.lines[-1].strip() == f"error: spec.reward.function: {where}"


async def test_a_filter_that_is_not_there_is_a_configuration_error(
    make_services: MakeServices, start_pod: Start
) -> None:
    worker = start_pod(make_services(rollout__dynamicFilter="nowhere.odd"), NOBODY)
    assert await worker.end(60) == 2
    assert worker.lines[-1].startswith(
        "error: spec.rollout.dynamicFilter: nowhere.odd: cannot import nowhere"
    )


async def test_responses_longer_than_the_context_are_a_configuration_error(
    make_services: MakeServices, start_pod: Start
) -> None:
    worker = start_pod(make_services(rollout__sampling__maxResponseTokens=CONTEXT), NOBODY)
    assert await worker.end(60) == 2
    line = (
        f"error: spec.rollout.sampling.maxResponseTokens: {CONTEXT} tokens and a prompt do not fit"
    )
    assert worker.lines[-1].startswith(line)


async def test_sigterm_before_the_engine_is_there(
    make_services: MakeServices, start_pod: Start, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        f"open({str(tmp_path / 'loaded')!r}, 'w')\ndef judge(sample):\n    return 1.0\n"
    )
    worker = start_pod(make_services(reward={"function": f"{tmp_path}/mine.py:judge"}), NOBODY)
    async with asyncio.timeout(60):
        while not (tmp_path / "loaded").exists():
            await asyncio.sleep(0.05)
    assert await worker.end(60, signal.SIGTERM) == 143


async def test_a_pod_whose_place_is_taken_says_so(
    make_services: MakeServices, start_pod: Start, sglang: Sglang
) -> None:
    services = make_services()
    services.rendezvous.service.registry.fence("rollout-0", 2)
    worker = start_pod(services, sglang.url, SLUICE_ATTEMPT="1")
    assert await worker.end(DEADLINE + 20) == 1
    line = "error: refused by the rendezvous: rollout-0: attempt 1 was replaced by attempt 2"
    assert worker.lines[-1].strip() == line


async def test_a_pod_with_a_wrong_token_says_so(
    make_services: MakeServices, start_pod: Start, sglang: Sglang
) -> None:
    services = make_services()
    async with Rendezvous(token="right") as services.rendezvous:
        worker = start_pod(services, sglang.url, SLUICE_TOKEN="wrong")
        assert await worker.end(DEADLINE + 20) == 1
    assert worker.lines[-1].startswith("error: ")
    assert worker.lines[-1].strip().endswith("the call does not carry this job's token")
