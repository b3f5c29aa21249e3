"""Several jobs share one SGLang: each has its adapter, and reaches nothing of the others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sluice.api import WeightSync
from sluice.engines.plugin_common import pool_credential
from sluice.engines.protocol import BaseModel, EngineError, WeightsLostError
from sluice.engines.sglang.client import Client
from sluice.model_digest import model_digest
from sluice.wire.membership import Membership
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.sender import WeightSender
from tests.boards import metrics, queries
from tests.integration.engines import (
    Sglang,
    backend,
    call,
    distance,
    gpus,
    log_probs,
    save_model,
    tolerance,
    until,
)
from tests.integration.rendezvous_server import Rendezvous, engine_member
from tests.integration.weights import tools
from tests.integration.weights.adapters import (
    ATTENTION,
    RANK,
    adapter,
    job_metrics,
    merged,
    publish_adapter,
)
from tests.integration.weights.conftest import PATIENCE
from tests.integration.weights.tools import PROMPT, SGLANG, Tensors

KEY = "5a" * 32
JOBS = 3
SILENT_SECONDS = 900.0
RUNNING = 8  # requests at a time
SAMPLING = {"max_new_tokens": 12, "ignore_eos": True}


@dataclass
class PoolJob:
    """A job's trainer and worker, as far as an engine of a pool sees them."""

    name: str
    server: Sglang
    sender: WeightSender
    client: Client

    async def publish(self, version: int, tensors: Tensors) -> UpdateOutcome:
        return await publish_adapter(self.sender, version, tensors)

    async def status(self, path: str, body: dict[str, Any]) -> int:
        """Return the engine's answer to a call with this job's credential."""
        async with self.client.session.post(self.server.url + path, json=body) as answer:
            return answer.status

    async def computes_as(self, model: Path, version: int) -> bool:
        """Return True if the job's requests use these weights, and say so."""
        generation = await self.client.generate(f"{self.name}-{version}", PROMPT, SAMPLING)
        assert [span.version for span in generation.spans] == [version], generation
        expected = log_probs(model, PROMPT + generation.tokens, len(generation.tokens))
        return distance(generation.log_probs, expected) < tolerance()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model", 1)


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """An engine of a pool. Each test's jobs have names of their own, and leave at its end."""
    with engine_of_pool(base, tmp_path_factory.mktemp("pool") / "log", SILENT_SECONDS) as server:
        yield server


def engine_of_pool(base: Path, log: Path, silent_seconds: float) -> AbstractContextManager[Sglang]:
    """Start an engine of a pool, for which a job that is silent for so long has ended."""
    settings = {"rank": RANK, "versions": 1, "jobs": JOBS, "silent_seconds": silent_seconds}
    return tools.serving(
        base,
        log,
        *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", "all"),
        *("--max-loras-per-batch", str(JOBS + 1)),
        *("--enable-metrics", "--max-running-requests", str(RUNNING)),
        *([] if gpus() else ["--lora-backend", "torch_native"]),
        SLUICE_LORA=json.dumps(settings),
        SLUICE_POOL_KEY=KEY,
    )


@asynccontextmanager
async def joined(
    server: Sglang,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    weight: int = 1,
    attempt: int = 1,
    created: int = 1,
) -> AsyncIterator[PoolJob]:
    """Let a job join the engine, with a rendezvous of its own. attempt: of its trainer."""
    credential = pool_credential.credential(KEY, name, weight, created)
    settings = WeightSync.model_validate(
        {
            "transport": backend(),
            "lora": "adapter",
            "pauseMode": "versions",
            "timeoutSeconds": PATIENCE,
        }
    )
    async with Rendezvous(member_timeout=PATIENCE) as rendezvous:
        member = engine_member("rollout-0", server.address)
        membership = Membership(rendezvous.address, lambda: member)
        transport = Collective(
            backend(),
            "127.0.0.1",
            PATIENCE,
            f"trainer-0-{attempt}-0",
            tag=pool_credential.name_start(credential),
        )
        caller = ("trainer-0", attempt)
        sender = WeightSender(rendezvous.stub, caller, settings, transport, SGLANG, in_pool=True)
        sender.base = BaseModel(str(server.model), model_digest(server.model))
        with monkeypatch.context() as environment:
            environment.setenv(pool_credential.VARIABLE, credential)
            sender._http = SGLANG.session()
            client = Client(server.url)
            await client.__aenter__()
        async with membership:
            await membership.connected.wait()
            await client.wait_ready(30.0)
            try:
                yield PoolJob(name, server, sender, client)
            finally:
                await client.leave()
                await client.__aexit__()
                await sender.close()


async def test_a_job_made_again_shares_nothing_with_the_deleted_one_that_still_runs(
    server: Sglang, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts and versions begin again, and the deleted job's processes change nothing."""
    before, after = adapter(base, 1), adapter(base, 2)
    old = merged(base, before, tmp_path / "old")
    new = merged(base, after, tmp_path / "new")
    async with (
        joined(server, "team/again", monkeypatch, attempt=3) as deleted,
        AsyncExitStack() as stack,
    ):
        for version in (1, 2):
            await deleted.publish(version, before)
            assert await deleted.computes_as(old, version)
        job = await stack.enter_async_context(joined(server, "team/again", monkeypatch, created=2))
        with pytest.raises(WeightsLostError, match="team/again has no adapter in this engine"):
            await job.client.generate("early", PROMPT, SAMPLING)
        for version in (1, 2):
            outcome = await job.publish(version, after)
            assert not outcome.failed, outcome
            assert await job.computes_as(new, version)
            # Its trainer comes back, and its worker ends.
            outcome = await deleted.publish(version + 2, before)
            assert "a later job of this name" in outcome.failed["rollout-0"], outcome
            await deleted.client.leave()
            assert await deleted.status("/generate", {"input_ids": PROMPT}) == 409
            assert await job.computes_as(new, version)


async def test_each_job_has_its_adapter(
    server: Sglang,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs of different ranks and layers update in turn and at the same time."""
    async with (
        joined(server, "team/math", monkeypatch) as math,
        joined(server, "team/code", monkeypatch) as code,
    ):
        with pytest.raises(WeightsLostError, match="team/code has no adapter in this engine"):
            await code.client.generate("early", PROMPT, SAMPLING)
        of_math, of_code = adapter(base, 1), adapter(base, 2, ATTENTION, 2)
        first = merged(base, of_math, tmp_path / "math-1")
        await math.publish(1, of_math)
        assert await math.computes_as(first, 1)
        await code.publish(7, of_code)
        assert await code.computes_as(merged(base, of_code, tmp_path / "code-7", 2), 7)
        assert await math.computes_as(first, 1), "an update of another job changes nothing"
        newer, other = adapter(base, 3), adapter(base, 4, ATTENTION, 2)
        outcomes = await asyncio.gather(math.publish(2, newer), code.publish(8, other))
        assert all(outcome.engines == ("rollout-0",) for outcome in outcomes), outcomes
        models = [
            merged(base, newer, tmp_path / "math-2"),
            merged(base, other, tmp_path / "code-8", 2),
        ]
        for _ in range(3):
            assert all(
                await asyncio.gather(math.computes_as(models[0], 2), code.computes_as(models[1], 8))
            )


async def test_a_job_reaches_nothing_of_another(
    server: Sglang, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its requests, its communicator or its version, and nothing that all jobs share."""
    async with (
        joined(server, "near/math", monkeypatch) as math,
        joined(server, "near/code", monkeypatch) as code,
    ):
        of_math = adapter(base, 1)
        await math.publish(1, of_math)
        await code.publish(1, adapter(base, 2))
        long = {"max_new_tokens": 300, "ignore_eos": True}
        running = [
            asyncio.create_task(job.client.generate("same-name", PROMPT, long))
            for job in (math, code)
        ]
        while not running[1].done():
            await code.client.abort()
            await asyncio.sleep(0.05)
        generations = await asyncio.gather(*running)
        assert [generation.finish for generation in generations] == ["length", "abort"]
        for path, status in (
            ("/flush_cache", 403),
            ("/pause_generation", 403),
            ("/update_weights_from_disk", 403),
            ("/release_memory_occupation", 403),
            ("/unload_lora_adapter", 403),
            ("/v1/chat/completions", 403),
        ):
            assert await code.status(path, {}) == status, path
        of_another = {"group_name": "sluice-near/math:1!rollout-0", "names": [], "dtypes": []}
        body = of_another | {"shapes": [], "weight_version": "9"}
        assert await code.status("/update_weights_from_distributed", body) == 403
        assert await code.status("/update_weight_version", {"new_version": "resting"}) == 200
        assert await math.computes_as(merged(base, of_math, tmp_path / "1"), 1)


@pytest.mark.parametrize(
    "credential",
    ["", "team/math:1:00", f"team/math:1:{'0' * 64}"],
    ids=["none", "too short", "not signed"],
)
async def test_a_stranger_is_refused(server: Sglang, credential: str) -> None:
    headers = {"Authorization": f"Bearer {credential}"} if credential else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        for path, status in (("/generate", 401), ("/server_info", 401), ("/health", 200)):
            method = "POST" if path == "/generate" else "GET"
            async with session.request(method, server.url + path, json={}) as answer:
                assert answer.status == status, path


async def test_an_adapter_that_does_not_fit_harms_its_job_only(
    server: Sglang, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = save_model(tmp_path / "wide", 1, hidden_size=128)
    async with (
        joined(server, "fits/math", monkeypatch) as math,
        joined(server, "fits/code", monkeypatch) as code,
    ):
        tensors = adapter(base, 1)
        await math.publish(1, tensors)
        for unfit, reason in (
            (adapter(base, 2, rank=RANK * 2), f"rank {RANK * 2}, and this engine was started for"),
            (adapter(wide, 2), "the adapter does not fit the engine's model: "),
        ):
            outcome = await code.publish(1, unfit)
            assert reason in outcome.refused["rollout-0"], outcome
        assert await math.computes_as(merged(base, tensors, tmp_path / "1"), 1)


async def test_a_pool_has_room_for_so_many_jobs(
    server: Sglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        for number in range(JOBS):
            await stack.enter_async_context(joined(server, f"room/job-{number}", monkeypatch))
        with pytest.raises(EngineError, match="429"):
            await stack.enter_async_context(joined(server, "room/one-more", monkeypatch))


async def test_a_burst_of_one_job_does_not_starve_another(
    server: Sglang, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes after 60 others is answered among the first."""
    async with (
        joined(server, "team/many", monkeypatch) as many,
        joined(server, "team/few", monkeypatch, weight=2) as few,
    ):
        await many.publish(1, adapter(base, 1))
        await few.publish(1, adapter(base, 2))
        ended: list[str] = []

        async def ask(job: PoolJob, rid: str) -> None:
            await job.client.generate(rid, PROMPT, {"max_new_tokens": 40, "ignore_eos": True})
            ended.append(rid)

        asking = [asyncio.create_task(ask(many, f"many-{number}")) for number in range(60)]
        while not ended:
            await asyncio.sleep(0.01)
        asking.append(asyncio.create_task(ask(few, "few")))
        before = len(ended)

        def waiting() -> float:
            return job_metrics(server, "team/many")["sluice_pool_requests_waiting"]

        await asyncio.to_thread(until, lambda: waiting() > RUNNING, PATIENCE, "requests wait")
        await asyncio.gather(*asking)
        # Those that ran, and those that run beside it.
        assert ended.index("few") - before <= 3 * RUNNING, ended
        generated = "sluice_pool_tokens_total generated"
        await asyncio.to_thread(
            until,
            lambda: job_metrics(server, "team/many")[generated] == 60 * 40,
            PATIENCE,
            "all tokens are counted while the engine is idle",
        )
        shown = job_metrics(server, "team/few")
        asking = [asyncio.create_task(ask(many, f"aborted-{number}")) for number in range(60)]
        await asyncio.to_thread(until, lambda: waiting() > RUNNING, PATIENCE, "requests wait")
        await many.client.abort()
        await asyncio.gather(*asking)
        await asyncio.to_thread(until, lambda: waiting() == 0, PATIENCE, "none waits")
        prompts = job_metrics(server, "team/many")["sluice_pool_tokens_total prompt"] / len(PROMPT)
        assert prompts <= 60 + 3 * RUNNING, "requests that have not begun have had tokens"
    assert shown.pop("sluice_adapter_bytes") > 0
    assert shown == {
        "sluice_adapter_versions": 1,
        "sluice_adapter_loads_total": 1,
        "sluice_adapter_drops_total": 0,
        "sluice_pool_job_weight": 2,
        "sluice_pool_requests_waiting": 0,
        "sluice_pool_tokens_total prompt": len(PROMPT),
        generated: 40,
    }
    exported = set(re.findall(r"^([\w:]+)[{ ]", call(server.url + "/metrics")[1], re.MULTILINE))
    named = {name for query in queries() if query.board == "pools" for name in metrics(query.expr)}
    assert named
    assert named - exported == set()


async def test_an_engine_forgets_jobs_that_have_ended(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that leaves makes room at once, one that falls silent after a while."""
    tensors = adapter(base, 9)
    async with AsyncExitStack() as stack:
        server = stack.enter_context(engine_of_pool(base, tmp_path / "log", 5.0))
        jobs = [
            await stack.enter_async_context(joined(server, f"team/job-{number}", monkeypatch))
            for number in range(JOBS)
        ]
        for number, job in enumerate(jobs):
            await job.publish(1, adapter(base, number))
        held = job_metrics(server, "team/job-0")
        long = {"max_new_tokens": 200, "ignore_eos": True}
        last = asyncio.create_task(jobs[0].client.generate("last", PROMPT, long))
        await jobs[1].client.generate("later", PROMPT, SAMPLING)  # so the one before has begun
        await jobs[0].client.leave()
        generation = await last
        assert (generation.finish, len(generation.tokens)) == ("length", 200)
        with pytest.raises(WeightsLostError):
            await jobs[0].client.generate("after", PROMPT, SAMPLING)
        await jobs[0].client.leave()
        late = await stack.enter_async_context(joined(server, "team/late", monkeypatch))
        await late.publish(1, tensors)
        left = job_metrics(server, "team/job-0")
        assert (held["sluice_adapter_versions"], left["sluice_adapter_versions"]) == (1, 0)
        assert (held["sluice_adapter_bytes"] > 0, left["sluice_adapter_bytes"]) == (True, 0)
        assert left["sluice_adapter_drops_total"] == 1
        assert await late.computes_as(merged(base, tensors, tmp_path / "late"), 1)
        await asyncio.sleep(5.0)
        after = await stack.enter_async_context(joined(server, "team/after", monkeypatch))
        await after.publish(1, tensors)
        assert await after.computes_as(merged(base, tensors, tmp_path / "after"), 1)
