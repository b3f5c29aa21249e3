"""Requests at the real engine: their tokens, log-probabilities, weight versions and ends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sluice.api import Sampling
from sluice.engines.protocol import Client, Engine, EngineError, Generation, PromptRefusedError
from sluice.engines.sglang import Sglang as SglangEngine
from sluice.engines.sglang import request_batching
from sluice.engines.sglang.client import Client as SglangClient
from sluice.engines.transformers import Transformers
from sluice.engines.vllm import Vllm
from sluice.samples.sample import Sample, SampleStatus, WeightSpan
from sluice_rollout.generate import Generator, sampling_params
from sluice_rollout.health import EngineHealth
from sluice_rollout.submit import mask_off_policy
from tests.chaos.proxy import Harm, Proxy
from tests.integration.conftest import Server
from tests.integration.engines import CONTEXT, Sglang, distance, log_probs
from tests.integration.proxy import Proxy as ProxyOfRequests
from tests.integration.transformers_engine import TransformersServer

PROMPT = [10, 11, 12, 13]
LONG = {"max_new_tokens": 3000, "ignore_eos": True}
EXACT = 1e-4
TOO_LONG = {
    "Sglang": f"longer than the model's context length \\({CONTEXT} tokens\\)",
    "Vllm": f"longer than the maximum model length of {CONTEXT}",
    "Transformers": f"fewer than the model's context of {CONTEXT}",
}


def generator(engine: Client, model: Path, version: int = 0) -> Generator:
    tokenizer = AutoTokenizer.from_pretrained(model)
    decode = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))  # noqa: E731
    return Generator(
        engine, decode, asyncio.Semaphore(8), lambda: version, EngineHealth(engine, 60.0)
    )


async def test_prompts_that_wait_for_each_other_are_all_answered(sglang: Sglang) -> None:
    """Requests come one at a time, while many others generate."""
    sampling = {"ignore_eos": True, "temperature": 1.0}
    async with SglangClient(sglang.url) as client:

        async def ask(number: int) -> int:
            await asyncio.sleep(number * 0.02)
            length = {**sampling, "max_new_tokens": 60 + number}
            return len((await client.generate(f"waits-{number}", PROMPT, length)).tokens)

        lengths = await asyncio.gather(*(ask(number) for number in range(40)))
    assert lengths == [60 + number for number in range(40)]
    assert "prompts wait for each other" in sglang.log.read_text()


async def test_requests_that_come_together_are_answered_each_by_itself(sglang: Sglang) -> None:
    async with ProxyOfRequests(sglang.url) as proxy, SglangClient(proxy.url) as client:
        await client.wait_ready(30.0)
        long = asyncio.create_task(client.generate("long", PROMPT, LONG))
        lengths = {"ignore_eos": True, "temperature": 1.0}
        answers = await asyncio.gather(
            client.generate("impossible", PROMPT, {"temperature": -1.0}),
            client.generate("too-long", PROMPT * (CONTEXT // 2), {"max_new_tokens": 1}),
            *(client.generate(f"{n}", PROMPT, {**lengths, "max_new_tokens": n}) for n in (3, 5)),
            return_exceptions=True,
        )
        assert not long.done()
        await client.abort("long")
        aborted = await long
    refused, too_long, *fine = answers
    assert isinstance(refused, PromptRefusedError)
    assert "non-negative" in str(refused)
    assert isinstance(too_long, PromptRefusedError)
    assert re.search(TOO_LONG["Sglang"], str(too_long))
    assert [
        len(generation.tokens) for generation in fine if isinstance(generation, Generation)
    ] == [3, 5]
    assert (aborted.finish, 0 < len(aborted.tokens) < 3000) == ("abort", True)
    sizes = [
        len(request.body) for request in proxy.requests if request.path == request_batching.PATH
    ]
    assert sizes == [0, 5]  # none, to ask if it can; all of this turn


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_the_scaled_distribution(
    engine: Client, model: Path, temperature: float
) -> None:
    generation = await engine.generate(
        "one", PROMPT, {"max_new_tokens": 40, "ignore_eos": True, "temperature": temperature}
    )
    assert (generation.finish, len(generation.tokens), generation.spans) == (
        "length",
        40,
        [WeightSpan(0, 0, 40)],
    )
    assert (
        distance(
            generation.log_probs, log_probs(model, PROMPT + generation.tokens, 40, temperature)
        )
        < EXACT
    )
    assert (
        distance(
            generation.log_probs,
            log_probs(model, PROMPT + generation.tokens, 40, temperature + 0.3),
        )
        > 100 * EXACT
    )


async def test_new_weights_do_not_see_what_older_ones_left_in_the_cache(
    engine: Client, server: Server, model: Path, other_model: Path
) -> None:
    """An engine that is never idle cannot empty its prefix cache."""
    prompt, sampling = (
        list(range(20, 320)),
        {"max_new_tokens": 10, "ignore_eos": True, "stop": None},
    )
    await generator(engine, model, version=0)(prompt, Sample(0), dict(sampling))
    server.load_weights(other_model, "1", flush=False)
    differences = []
    for version in (1, 0):  # the second is what would be without
        sample = await generator(engine, model, version=version)(prompt, Sample(0), dict(sampling))
        differences.append(
            distance(sample.rollout_log_probs, log_probs(other_model, sample.tokens.tolist(), 10))
        )
    assert differences[0] < EXACT
    keeps_prefixes = not isinstance(server, TransformersServer)
    assert bool(differences[1] > 100 * EXACT) is keeps_prefixes


async def test_an_engine_takes_the_request_to_leave_its_start_out_of_garbage_collection(
    sglang: Sglang,
) -> None:
    async with SglangClient(sglang.url) as engine:
        await engine.wait_ready(30.0)
        assert engine.frozen


async def test_an_end_token_is_a_stop(engine: Client) -> None:
    greedy = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    tokens = (await engine.generate("one", PROMPT, greedy)).tokens
    end = tokens[2]
    generation = await engine.generate(
        "two", PROMPT, {"max_new_tokens": 5, "temperature": 0, "stop_token_ids": [end]}
    )
    assert (generation.finish, generation.tokens, generation.matched_stop) == (
        "stop",
        tokens[: tokens.index(end) + 1],
        None,
    )


async def test_an_aborted_request_answers_what_it_has(engine: Client, server: Server) -> None:
    running = asyncio.create_task(engine.generate("long", PROMPT, LONG))
    await server.generated(50)
    await engine.abort("long")
    generation = await running
    assert generation.finish == "abort"
    assert 40 < len(generation.tokens) < LONG["max_new_tokens"]
    assert len(generation.log_probs) == len(generation.tokens) == generation.spans[-1].end


async def test_a_request_that_nobody_waits_for_ends_at_the_engine(
    engine: Client, server: Server
) -> None:
    running = asyncio.create_task(engine.generate("long", PROMPT, LONG))
    await server.generated(50)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    await server.idle(3.0)  # the engine itself looks every 4 s; the request would run for as long


async def test_an_answer_that_is_lost_is_asked_for_again_while_the_engine_is_at_work_on_it(
    server: Server,
) -> None:
    """The connection ends towards us alone: the engine has not noticed when the same request comes
    again."""
    port = int(server.url.rpartition(":")[2])
    async with Proxy("127.0.0.2", lambda *_: "worker") as proxy:
        await proxy.listen(port)
        async with server.engine.client(f"http://127.0.0.2:{port}") as engine:
            running = asyncio.create_task(engine.generate("long", PROMPT, LONG))
            await server.generated(50)
            proxy.inflict("worker", Harm.HALF_CLOSE)
            generation = await running
    assert (generation.finish, len(generation.tokens)) == ("length", LONG["max_new_tokens"])
    await server.idle(3.0)


async def test_a_prompt_beyond_the_context_is_refused(
    engine: Client, server: Server, model: Path
) -> None:
    with pytest.raises(PromptRefusedError, match=TOO_LONG[type(server.engine).__name__]):
        await engine.generate("one", [10] * (CONTEXT + 10), {"max_new_tokens": 1})
    sample = await generator(engine, model)([10] * (CONTEXT + 10), Sample(0), {"max_new_tokens": 1})
    assert sample.status is SampleStatus.FAILED
    assert re.search(TOO_LONG[type(server.engine).__name__], sample.error)


@pytest.mark.parametrize(
    "kind", [SglangEngine(), Vllm(), Transformers()], ids=["sglang", "vllm", "transformers"]
)
async def test_an_engine_that_is_not_there(kind: Engine) -> None:
    async with kind.client("http://127.0.0.1:9") as nobody:
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
            await nobody.generate("one", PROMPT, LONG)
        with pytest.raises(EngineError, match="abort_request"):
            await nobody.abort()
        with pytest.raises(EngineError, match="was not ready after 0 s: /health"):
            await nobody.wait_ready(0.1)


async def test_a_stop_string_ends_the_text_and_stays_in_the_tokens(
    engine: Client, model: Path
) -> None:
    generate = generator(engine, model)
    greedy = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    words = (await generate(PROMPT, Sample(0), greedy)).response.split()
    stop = words[-1]
    params = sampling_params(Sampling(stop=[stop], max_response_tokens=50)) | {"temperature": 0}
    sample = await generate(PROMPT, Sample(1), params)
    kept = words[: words.index(stop)]
    assert sample.status is SampleStatus.COMPLETED
    assert sample.response.split() == kept
    assert sample.response_length == len(kept) + 1


async def test_a_drained_sample_is_continued_as_one_sequence(
    engine: Client, model: Path, server: Server
) -> None:
    params = {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 0.9}
    first = generator(engine, model)
    running = asyncio.create_task(first(PROMPT, Sample(0), params))
    await server.generated(40)
    first.draining.set()
    await engine.abort()
    sample = await running
    partial = sample.response_length
    assert sample.status is SampleStatus.ABORTED
    assert 30 < partial < 1500
    await generator(engine, model)(PROMPT, sample, params)
    assert (sample.status, sample.response_length) == (SampleStatus.TRUNCATED, 1500)
    assert sample.weight_versions == [WeightSpan(0, 0, 1500)]
    expected = log_probs(model, sample.tokens.tolist(), 1500, 0.9)
    assert distance(sample.rollout_log_probs.tolist(), expected) < EXACT


async def test_nothing_is_sent_while_draining(engine: Client, model: Path) -> None:
    drained = generator(engine, model)
    drained.draining.set()
    sample = await drained(PROMPT, Sample(0), LONG)
    assert (sample.status, sample.response_length, sample.prompt_length) == (
        SampleStatus.ABORTED,
        0,
        len(PROMPT),
    )


@pytest.mark.parametrize(
    "kind", [SglangEngine(), Vllm(), Transformers()], ids=["sglang", "vllm", "transformers"]
)
async def test_an_engine_that_is_gone_first_leaves_a_draining_sample_as_it_was(
    model: Path, kind: Engine
) -> None:
    async with kind.client("http://127.0.0.1:9") as nobody:
        drained = generator(nobody, model)
        running = asyncio.create_task(drained(PROMPT, Sample(0), LONG))
        await asyncio.sleep(0)  # the request is on its way
        drained.draining.set()
        assert (await running).status is SampleStatus.ABORTED


@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_a_sample_that_lives_through_an_update_knows_which_weights_made_which_token(
    engine: Client, model: Path, other_model: Path, server: Server, mode: str
) -> None:
    params = {"max_new_tokens": 900, "ignore_eos": True, "temperature": 1.0}
    running = asyncio.create_task(generator(engine, model)(PROMPT, Sample(0), params))
    await server.generated(40)
    await asyncio.to_thread(server.update, mode, other_model, "1")
    sample = await running
    assert (sample.status, sample.response_length) == (SampleStatus.TRUNCATED, 900)
    assert [span.version for span in sample.weight_versions] == [0, 1]
    at = sample.weight_versions[0].end
    assert 30 < at < 900
    actual, tokens = sample.rollout_log_probs.tolist(), sample.tokens.tolist()
    old, new = (log_probs(directory, tokens, 900) for directory in (model, other_model))
    assert distance(actual[:at], old[:at]) < EXACT
    assert distance(actual[at:], new[at:]) < EXACT
    assert distance(actual[:at], new[:at]) > 100 * EXACT
    assert distance(actual[at:], old[at:]) > 100 * EXACT
    mask_off_policy(sample)
    assert sample.loss_mask.tolist() == [0] * at + [1] * (900 - at)
