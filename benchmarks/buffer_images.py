"""Memory of the buffer while it leases prompts with images and sends the images.

    python benchmarks/buffer_images.py [--prompts 64] [--images 8] [--side 830] [--workers 4]

All prompts are leased by several workers at once, from a buffer in its own process with the default
`buffer.memory`, and each worker then fetches the images of its prompts. Printed: bytes of all
images, the most that the buffer had under way at one time, the growth of its memory (anonymous
pages), and the seconds of both parts.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.buffer_memory import MIB, anonymous, peak_of
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_job


def write_rows(root: Path, prompts: int, images: int, side: int) -> Path:
    """Write rows with images of random pixels, which hardly compress."""
    generator = np.random.default_rng(0)
    rows = root / "rows.jsonl"
    with rows.open("w") as file:
        for prompt in range(prompts):
            names = [f"{prompt}-{number}.png" for number in range(images)]
            for name in names:
                pixels = generator.integers(0, 256, (side, side, 3), np.uint8)
                Image.fromarray(pixels).save(root / name, compress_level=1)
            message = {"role": "user", "content": "<image>" * images}
            file.write(json.dumps({"prompt": [message], "images": names, "label": ""}) + "\n")
    return rows


async def lease(address: str, worker: str, count: int) -> list[str]:
    """Lease prompts; return the digests of their images."""
    async with Client(address) as client:
        groups = (await client.lease(worker, count, wait=120.0)).groups
        return [digest for group in groups for digest in group.prompt.images]


async def fetch(address: str, digests: list[str]) -> int:
    """Fetch images; return their bytes."""
    async with Client(address) as client:
        request = pb.GetImagesRequest(digests=digests)
        call = client.stub.GetImages(request, metadata=client.metadata)
        assembler, size = codec.Assembler(), 0
        async for chunk in call:
            data = assembler.add(chunk)
            size += len(data) if data is not None else 0
        return size


async def measure(options: argparse.Namespace, root: Path) -> None:
    rows = write_rows(root, options.prompts, options.images, options.side)
    job = make_job(
        root,
        data__prompts=[{"path": str(rows)}],
        data__images={},
        rollout__batchSize=options.prompts,
        buffer__storage__size="32Gi",
        buffer__memory=options.memory,
    )
    server = BufferProcess(job, root)
    address = server.start()
    assert server.process
    try:
        await asyncio.sleep(1.0)
        before, done = anonymous(server.process.pid), asyncio.Event()
        watching = asyncio.create_task(peak_of(server.process.pid, done))
        share = -(-options.prompts // options.workers)
        names = [f"rollout-{number}" for number in range(options.workers)]
        began = time.monotonic()
        digests = await asyncio.gather(*(lease(address, name, share) for name in names))
        leased = time.monotonic()
        sizes = await asyncio.gather(*(fetch(address, part) for part in digests if part))
        fetched = time.monotonic()
        done.set()
        grown = await watching - before
        async with Client(address) as client:
            stats = await client.stats()
        print(
            f"{stats.images} images, {stats.image_bytes / MIB:,.0f} MiB; leased in "
            f"{leased - began:.1f} s, {sum(sizes) / MIB:,.0f} MiB fetched in "
            f"{fetched - leased:.1f} s; under way {stats.under_way_peak_bytes / MIB:,.0f} of "
            f"{stats.under_way_limit_bytes / MIB:,.0f} MiB; memory grew by {grown / MIB:,.0f} MiB "
            f"from {before / MIB:,.0f}"
        )
    finally:
        server.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--side", type=int, default=830, help="pixels; 830 give 2 MB")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--memory", default="2Gi")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(measure(options, Path(root)))


if __name__ == "__main__":
    main()
