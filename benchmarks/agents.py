"""The gateway for agents: what a turn costs beside the engine's own time, how many episodes a
worker has room for, how much of a continued turn the engine still has in its prefix cache, and what
clients cost; how late the parts of streams are.

    python benchmarks/agents.py [--episodes 40] [--turns 4] [--concurrent 1000]
        [--parts engine episodes streams clients]

Overhead and cache: a real SGLang with random weights, on a CPU where there is no GPU, and episodes
of a long first message and short turns. Overhead is what a client waits for an answer less the time
that the engine had the request: HTTP both ways, template, tokens, the tree, the answer's JSON, and
the client's own work, since it runs in this process.

Concurrent episodes: no engine could serve so many here, so answers of random tokens come after some
seconds of waiting; everything else is what a worker has. Memory and time are this process's, the
programs' clients included.

Streams: as many episodes at once, whose answers come in parts of eight tokens, each after a moment.
A part is as late as the time from the engine's handing it over to the program's having read it.

Memory is measured above that of the parts before: for one alone name it with `--parts`.

Clients: as many episodes as an engine plays at once (256), answers after a moment; CPU of a turn in
all, for programs with OpenAI's client, made in several ways, and for one that posts JSON itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from benchmarks.processes import small_engine
from sluice.engines.protocol import Generation, OnPart
from sluice.engines.sglang.client import Client
from sluice.runtime.pod_env import free_port
from sluice.samples.sample import Prompt, Sample, SampleStatus, WeightSpan
from sluice_rollout.episode import Episode
from sluice_rollout.gateway.endpoint import Gateway
from sluice_rollout.gateway.registry import EpisodeRegistry
from sluice_rollout.generate import Generator
from sluice_rollout.health import EngineHealth
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.integration.engines import WORDS, save_model
from tests.unit.buffer.buffer_tools import make_job

# Tokens of the first message, of a later one, of an answer.
FIRST, LATER, ANSWER = 600, 20, 24
PART = 8  # tokens of a part of a stream
SPECIAL, MOST = 8, 2000
AT_ONCE = 256
PARAMS = {"max_new_tokens": MOST, "temperature": 1.0, "ignore_eos": True}
MIB = 2**20


@dataclass
class Seen:
    """Requests that an engine has had: seconds, tokens asked with, of them cached, and answered."""

    seconds: list[float] = field(default_factory=list)
    turns: list[tuple[int, int, int]] = field(default_factory=list)


class Watched(Client):
    """SGLang, and what it says of each request."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.seen = Seen()

    async def generate(self, rid: str, input_ids: list[int], *args: Any, **kw: Any) -> Generation:
        start = time.perf_counter()
        answer = await super().generate(rid, input_ids, *args, **kw)
        self.seen.seconds.append(time.perf_counter() - start)
        # Without the plugin the server names no version of its weights, and samples need one.
        return replace(answer, spans=[WeightSpan(0, 0, len(answer.tokens))])

    def read(self, status: int, text: str) -> Generation:
        meta_info = json.loads(text)["meta_info"]
        numbers = (
            meta_info["prompt_tokens"],
            meta_info["cached_tokens"],
            meta_info["completion_tokens"],
        )
        self.seen.turns.append(numbers)
        return super().read(status, text)


class Waiting(Client):
    """Random tokens, some seconds later: so many at least, three times as many at most."""

    def __init__(self, seconds: float) -> None:
        super().__init__("http://127.0.0.1:9")
        self.seconds = seconds

    async def generate(self, rid: str, input_ids: list[int], *args: Any, **kw: Any) -> Generation:
        await asyncio.sleep(random.uniform(self.seconds, 3 * self.seconds))
        tokens = random.choices(range(SPECIAL, SPECIAL + WORDS), k=ANSWER)
        return Generation(tokens, [-1.0] * ANSWER, [WeightSpan(0, 0, ANSWER)], "length", None)


class Parts(Waiting):
    """Random tokens, in parts with a wait before each. handed_over: when, by a part's tokens."""

    sends_parts = True

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.handed_over: dict[tuple[int, ...], float] = {}

    async def generate(self, rid: str, input_ids: list[int], *args: Any, **kw: Any) -> Generation:
        on_part: OnPart = kw["on_part"]
        tokens: list[int] = []
        for _ in range(ANSWER // PART):
            await asyncio.sleep(random.uniform(self.seconds, 3 * self.seconds))
            part = random.choices(range(SPECIAL, SPECIAL + WORDS), k=PART)
            self.handed_over[tuple(part)] = time.perf_counter()
            on_part(Generation(part, [-1.0] * PART, [WeightSpan(0, 0, PART)], "length", None))
            tokens += part
        spans = [WeightSpan(0, 0, len(tokens))]
        return Generation(tokens, [-1.0] * len(tokens), spans, "length", None)


@dataclass
class Bench:
    """A worker's gateway, and programs that play at it. waited: seconds of each of their turns."""

    turns: int
    waited: list[float] = field(default_factory=list)

    async def play(self, episode: Episode) -> None:
        """A client that sends its whole history with each turn, as they do."""
        gateway = episode.gateway
        headers = {"Authorization": f"Bearer {gateway.api_key}"}
        messages = [{"role": "user", "content": words(FIRST)}]
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(self.turns):
                body = {"model": "m", "messages": messages, "max_tokens": ANSWER}
                start = time.perf_counter()
                answer = await self.ask(session, f"{gateway.base_url}/chat/completions", body)
                self.waited.append(time.perf_counter() - start)
                messages += [answer, {"role": "user", "content": words(LATER)}]

    async def ask(
        self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the message that answers a turn."""
        async with session.post(url, json=body) as response:
            message: dict[str, Any] = (await response.json())["choices"][0]["message"]
            return message

    @asynccontextmanager
    async def runner(self, engine: Client, model: Path, room: int) -> AsyncIterator[EpisodeRunner]:
        spec = make_job(
            model.parent,
            model__path=str(model),
            rollout__function="agent.py:play",
            rollout__sampling__maxResponseTokens=MOST,
        ).spec
        encoder = PromptEncoder(spec, model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        generator = Generator(
            engine, tokenizer.decode, asyncio.Semaphore(room), lambda: 0, EngineHealth(engine, 60.0)
        )
        async with EpisodeRegistry.for_job(spec, encoder) as registry:
            gateway = registry.open_gateway
            yield EpisodeRunner(self.play, "agent", generator, tokenizer, 600.0, None, gateway)


@dataclass
class StreamReader(Bench):
    """A program that reads streams. late: seconds of each part."""

    engine: Parts = field(default_factory=lambda: Parts(2.0))
    late: list[float] = field(default_factory=list)

    async def ask(
        self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        answer = ""
        async with session.post(url, json=body | {"stream": True}) as response:
            async for line in response.content:
                answer += self.text_of(line)
        return {"role": "assistant", "content": answer}

    def text_of(self, line: bytes) -> str:
        """Return the text of a line of the stream, and note how late it is."""
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            return ""
        choices = json.loads(line[len("data: ") :])["choices"]
        text: str = choices[0]["delta"].get("content") or "" if choices else ""
        tokens = tuple(SPECIAL + int(word[1:]) for word in text.split())
        if tokens in self.engine.handed_over:
            self.late.append(now - self.engine.handed_over[tokens])
        return text


SHARED = AsyncOpenAI(api_key="of an episode")
# Ways in which a program gets OpenAI's client.
CLIENTS: dict[str, Callable[[Gateway], AsyncOpenAI]] = {
    "gateway.openai()": Gateway.openai,
    "AsyncOpenAI() for each episode": lambda gateway: AsyncOpenAI(
        base_url=gateway.base_url, api_key=gateway.api_key
    ),
    "one AsyncOpenAI() for all": lambda gateway: SHARED.with_options(
        base_url=gateway.base_url, api_key=gateway.api_key
    ),
}


@dataclass
class Program(Bench):
    """A program with OpenAI's client. It leaves that to be collected, as many do."""

    client: Callable[[Gateway], AsyncOpenAI] = Gateway.openai

    async def play(self, episode: Episode) -> None:
        client = self.client(episode.gateway)
        messages: list[Any] = [{"role": "user", "content": words(FIRST // 10)}]
        for _ in range(self.turns):
            answer = await client.chat.completions.create(
                model="m", messages=messages, max_tokens=ANSWER
            )
            messages += [answer.choices[0].message, {"role": "user", "content": words(LATER)}]


def words(count: int) -> str:
    return " ".join(f"w{random.randrange(WORDS):04d}" for _ in range(count))


async def episode(runner: EpisodeRunner, number: int) -> None:
    sample = await runner(Prompt(number, "?"), [5], Sample(0, reward=1.0), PARAMS)
    assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED), sample.error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured"
    )
    parser.add_argument("--concurrent", type=int, default=1000)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", 0)
        for part in options.parts:
            asyncio.run(PARTS[part](model, options))


async def beside_an_engine(model: Path, options: argparse.Namespace) -> None:
    """Overhead of a turn, one at a time, and what the cache has of it."""
    port = free_port()
    server = small_engine(model, port, cpu=not torch.cuda.is_available())
    try:
        async with Watched(f"http://127.0.0.1:{port}") as engine:
            await server.ready(engine, 240)
            bench = Bench(options.turns)
            async with bench.runner(engine, model, 8) as runner:
                await episode(runner, 0)
                bench.waited.clear()
                engine.seen = Seen()
                for number in range(options.episodes):
                    await episode(runner, number + 1)
    finally:
        server.terminate()
        server.wait(60)
    overhead = [w - s for w, s in zip(bench.waited, engine.seen.seconds, strict=True)]
    print(f"{len(overhead)} turns, one at a time: the engine {median_and_p95(engine.seen.seconds)}")
    print(f"  over the engine: {median_and_p95(overhead)}")
    cached = shared = 0
    turns = engine.seen.turns
    for at in range(len(turns)):
        if at % options.turns:
            asked_tokens, _, answered_tokens = turns[at - 1]
            cached, shared = cached + turns[at][1], shared + asked_tokens + answered_tokens
    print(f"  in the engine's cache: {cached / shared:.1%} of {shared:,} tokens that are continued")


async def request_slots(model: Path, options: argparse.Namespace) -> None:
    """Many episodes at once in one worker."""
    await side_by_side(Bench(options.turns), Waiting(5.0), model, options.concurrent)


async def streams(model: Path, options: argparse.Namespace) -> None:
    """Many episodes at once, whose programs read streams."""
    engine = Parts(2.0)
    bench = StreamReader(options.turns, engine=engine)
    print("as streams:")
    await side_by_side(bench, engine, model, options.concurrent)
    parts = len(engine.handed_over)
    print(f"  {len(bench.late) / parts:.1%} of {parts:,} parts found, {median_and_p95(bench.late)}")


async def side_by_side(bench: Bench, engine: Client, model: Path, room: int) -> None:
    """Print time, work and memory of so many episodes at once."""
    process = psutil.Process()
    async with engine, bench.runner(engine, model, room) as runner:
        await episode(runner, 0)
        before, start, work = process.memory_info().rss, time.perf_counter(), time.process_time()
        await asyncio.gather(*(episode(runner, n + 1) for n in range(room)))
        seconds, work = time.perf_counter() - start, time.process_time() - work
    memory = (process.memory_info().rss - before) / MIB
    turn = work / (room * bench.turns)
    print(f"{room} episodes of {bench.turns} turns at once: {seconds:.0f} s")
    print(f"  {turn * 1e3:.1f} ms of a core a turn, {work / seconds:.0%} of a core")
    print(f"  {memory:.0f} MiB more than before, {memory / room * 1024:.0f} KiB each")


async def clients(model: Path, options: argparse.Namespace) -> None:
    """Print the cost of a turn with each."""
    programs = {name: Program(options.turns, client=client) for name, client in CLIENTS.items()}
    for name, bench in {"JSON, posted": Bench(options.turns), **programs}.items():
        print(f"{name}: {await cost(bench, model) * 1e3:.1f} ms of a core a turn")


async def cost(bench: Bench, model: Path) -> float:
    """Seconds of a core for a turn, with as many episodes at once as an engine plays."""
    async with Waiting(0.1) as engine, bench.runner(engine, model, AT_ONCE) as runner:
        await asyncio.gather(*(episode(runner, number) for number in range(AT_ONCE)))
        before = time.process_time()
        await asyncio.gather(*(episode(runner, AT_ONCE + number) for number in range(AT_ONCE)))
        return (time.process_time() - before) / (AT_ONCE * bench.turns)


def median_and_p95(seconds: Sequence[float]) -> str:
    """Median and 95th percentile."""
    hundredths = statistics.quantiles(seconds, n=100)
    return f"p50 {hundredths[49] * 1e3:.1f} ms, p95 {hundredths[94] * 1e3:.1f} ms"


# What is measured, in this order: an engine beside the gateway, many episodes, streams, clients.
PARTS = {
    "engine": beside_an_engine,
    "episodes": request_slots,
    "streams": streams,
    "clients": clients,
}

if __name__ == "__main__":
    main()
