"""Programs of rollout.environment at a real engine: what it sampled for them is what is trained."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.engines.sglang.client import Client
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.wire import codec
from sluice_rollout.environments import directories, orphan_reaper
from sluice_rollout.environments.program import Program, program_of
from tests.integration.engines import Sglang
from tests.integration.rendezvous_server import DEADLINE
from tests.integration.rollout.pods import Pod, Services, job
from tests.integration.rollout.test_gateway import (
    AGENT,
    PARAMS,
    READY,
    RequestLog,
    check,
    check_tokens,
    runner_at_gateway,
)
from tests.integration.rollout.test_gateway import talkative as talkative
from tests.tools import tool

START_SECONDS = 120.0  # for a worker or a program on a busy machine
PYTHON = """
import asyncio, json, os, sys
sys.path[:0] = {path!r}
from openai import AsyncOpenAI
from tests.integration.rollout.talkative import three_turns

async def main():
    async with AsyncOpenAI() as client:
        messages = await three_turns(client, stream=False)
    result = dict(reward=0.75, metadata=dict(messages=len(messages)))
    with open("result.json", "w") as file:
        json.dump(result, file)

asyncio.run(main())
"""
SHELL = """
set -eu
history='{"role": "user", "content": "w0002 w0005"}'
for turn in 1 2 3; do
  body="{\\"model\\": \\"any\\", \\"max_tokens\\": 12, \\"messages\\": [$history]}"
  answer=$(curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" \\
    --header "Authorization: Bearer $OPENAI_API_KEY" --data "$body")
  said=$(echo "$answer" | jq --compact-output '.choices[0].message')
  history="$history, $said, {\\"role\\": \\"user\\", \\"content\\": \\"w0008\\"}"
done
echo '{"reward": 0.75}' > "$SLUICE_EPISODE/result.json"
"""
# Hangs after its first turn until the file that it is given exists.
SLOW = """
import json, os, subprocess, sys, time, urllib.request
subprocess.Popen([sys.executable, "-I", "-S", "-c", "__import__('time').sleep(600)"])
body = {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": "w0002"}]}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), key)).read()
if not os.path.exists(sys.argv[1]):
    time.sleep(600)
with open("result.json", "w") as file:
    json.dump({"reward": 1.0}, file)
"""
LONG = """
import json, os, urllib.request
messages = [{"role": "user", "content": "w0002"}]
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for tokens in (20, 600):
    body = {"model": "any", "max_tokens": tokens, "messages": messages}
    request = urllib.request.Request(address, json.dumps(body).encode(), key)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "w0005"}]
"""


def make_program(directory: Path, model: Path, *command: str) -> Program:
    settings = {name: value for name, value in AGENT.items() if name != "rollout__function"}
    spec = job(directory, model, **settings, rollout__environment__command=[*command]).spec
    assert spec.rollout.environment
    return program_of(spec.rollout.environment, spec)


async def test_three_turns_of_a_program_are_the_tokens_that_the_engine_sampled(
    engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    """The `openai` client finds its address and key by itself."""
    agent = tmp_path / "agent.py"
    agent.write_text(PYTHON.format(path=[str(Path.cwd()), *sys.path[1:]]))
    await three_turns(make_program(tmp_path, talkative, sys.executable, str(agent)), engine, model,
                      talkative, tmp_path)  # fmt: skip


async def test_a_program_may_be_of_any_language(
    engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    tool("curl"), tool("jq")
    script = tmp_path / "agent.sh"
    script.write_text(SHELL)
    program = make_program(tmp_path, talkative, "sh", str(script))
    await three_turns(program, engine, model, talkative, tmp_path)


async def test_a_turn_that_a_drain_interrupts_is_continued(
    engine: Client, sglang: Sglang, model: Path, talkative: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(LONG)
    program = make_program(tmp_path, talkative, sys.executable, f"{tmp_path}/agent.py")
    log = RequestLog(engine)
    try:
        async with runner_at_gateway(program, engine, talkative, tmp_path) as runner:
            running = asyncio.create_task(runner(Prompt(0, "?"), [5], Sample(0), PARAMS))
            await sglang.generated(60)
            runner.generator.draining.set()
            await engine.abort()
            sample = codec.sample_from_message(codec.sample_to_message(await running))
        assert os.listdir(program._directory) == []
        assert (sample.status, sample.error) == (SampleStatus.ABORTED, "")
        before = sample.tokens.tolist()
        assert 20 < sample.response_length < 620
        async with runner_at_gateway(program, engine, talkative, tmp_path) as another:
            await another(Prompt(0, "?"), [5], sample, PARAMS)
    finally:
        program.close()
    assert sample.tokens.tolist()[: len(before)] == before
    assert (len(log.answers), sample.trainable_tokens) == (3, 620)
    sample.reward = 0.0
    check(sample, {0: model})


async def three_turns(
    program: Program, engine: Client, model: Path, talkative: Path, directory: Path
) -> None:
    log = RequestLog(engine)
    try:
        async with runner_at_gateway(program, engine, talkative, directory) as runner:
            sample = await runner(Prompt(0, "?"), [5], Sample(0), PARAMS)
        assert os.listdir(program._directory) == []
    finally:
        program.close()
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, ""), "the last turn was cut"
    assert sample.reward == 0.75
    check_tokens(sample, log)
    check(sample, {0: model})


async def test_a_worker_that_is_killed_leaves_no_program_and_the_next_one_no_directory(
    make_services: Callable[..., Services], start_pod: Callable[..., Pod], sglang: Sglang,
    talkative: Path, tmp_path: Path, model: Path,
) -> None:  # fmt: skip
    agent, go, place = tmp_path / "slow.py", tmp_path / "go", tmp_path / "place"
    place.mkdir()
    agent.write_text(SLOW)
    settings = AGENT | {
        "rollout__function": None,
        "rollout__environment__command": [sys.executable, str(agent), str(go)],
        "buffer__leaseSeconds": 10,
        "model__path": str(talkative),
    }
    services = make_services(**settings)
    async with await services.start_buffer() as client:
        worker = start_pod(services, sglang.url, TMPDIR=str(place))
        await until(lambda: _joined(services), START_SECONDS)
        await services.rendezvous.serve(0)
        await until(lambda: _programs(place, 4), START_SECONDS)
        (root,) = _roots(place)
        worker.kill()
        await until(lambda: _none(str(root)))
        assert root.exists(), "only the next worker can remove it"
        go.touch()
        another = start_pod(services, sglang.url, TMPDIR=str(place))
        await until(lambda: _joined(services), START_SECONDS)
        await services.rendezvous.serve(0)
        assert (await client.take(1, wait=60)).state == READY
        groups = [codec.group_from_message(g) for g in await client.shard(1)]
        assert not root.exists()
        assert await another.end(60, number=15) == 143
    # The groups of two batches: with partial responses, the first ones to finish are taken.
    assert len({group.group_id for group in groups} & {*range(8)}) == 4
    for sample in (sample for group in groups for sample in group.samples):
        assert (sample.error, sample.reward) == ("", 1.0)
        check(sample, {0: model})
    assert _roots(place) == []


async def _joined(services: Services) -> bool:
    return "rollout-0" in await services.rendezvous.ledger()


def _roots(place: Path) -> list[Path]:
    return list(place.glob(f"{directories.PREFIX}*"))


async def _programs(place: Path, count: int) -> bool:
    """True if at least `count` episodes have a program with a child."""
    episodes = [str(episode) for root in _roots(place) for episode in root.iterdir()]
    return sum(len(orphan_reaper.marked_processes(episode)) > 1 for episode in episodes) >= count


async def _none(root: str) -> bool:
    return orphan_reaper.marked_processes(root) == []


async def until(condition: Callable[[], Any], seconds: float = DEADLINE) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)
