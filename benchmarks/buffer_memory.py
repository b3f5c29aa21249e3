"""Memory of the buffer while large groups come in, beside the bytes that are under way.

    python benchmarks/buffer_memory.py [--groups 64] [--streams 8] [--tokens 160000]

All groups are sent at once, over several streams, to a buffer in its own process with the default
`buffer.memory`. Printed: bytes sent at once, the most that the buffer had under way at one time (it
lets in no more than its budget), the growth of its memory (anonymous pages; those of the database's
file are the kernel's to take back), and their ratio.
"""

import argparse
import asyncio
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group, make_job

MIB = 1 << 20


def anonymous(pid: int) -> int:
    """Bytes of memory that are the process's own."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


async def peak_of(pid: int, done: asyncio.Event) -> int:
    peak = 0
    while not done.is_set():
        peak = max(peak, anonymous(pid))
        await asyncio.sleep(0.01)
    return peak


async def send(address: str, groups: list[common.SampleGroup]) -> None:
    async with Client(address) as client:
        answers = await client.submit(groups)
        if {a.outcome for a in answers.values()} != {pb.SubmitResponse.OUTCOME_STORED}:
            raise RuntimeError(f"not stored: {answers}")


async def measure(options: argparse.Namespace, root: Path) -> None:
    job = make_job(
        root,
        rows=options.groups,
        rollout__batchSize=options.groups,
        rollout__samplesPerPrompt=8,
        buffer__storage__size="8Gi",
        buffer__memory=options.memory,
    )
    server = BufferProcess(job, root)
    address = server.start()
    assert server.process
    try:
        async with Client(address) as client:
            prompts = [g.prompt for g in (await client.lease(count=options.groups)).groups]
            groups = [make_group(prompt, samples=8, response=options.tokens) for prompt in prompts]
            await asyncio.sleep(1.0)
            before, done = anonymous(server.process.pid), asyncio.Event()
            watching = asyncio.create_task(peak_of(server.process.pid, done))
            await asyncio.gather(
                *(send(address, groups[i :: options.streams]) for i in range(options.streams))
            )
            done.set()
            grown = await watching - before
            most = (await client.stats()).under_way_peak_bytes
            sent = sum(group.ByteSize() for group in groups)
            print(
                "| groups | bytes each | sent at once | under way | memory grew by | grown / under "
                "way |"
            )
            print("|---:|---:|---:|---:|---:|---:|")
            sizes = " | ".join(f"{size / MIB:,.0f} MiB" for size in (sent, most, grown))
            print(
                f"| {options.groups} | {sent / options.groups / 1e6:.1f} MB | {sizes} | "
                f"{grown / most:.2f} |"
            )
            print(f"before: {before / MIB:.0f} MiB")
    finally:
        server.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument(
        "--tokens", type=int, default=160_000, help="of each of a group's 8 responses"
    )
    parser.add_argument("--memory", default="2Gi")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(measure(options, Path(root)))


if __name__ == "__main__":
    main()
