"""Rewards over HTTP: slime's protocol, SGLang's reward models, and servers that fail, hang or talk
nonsense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sluice.api import Reward
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.judging.judge import Judge
from sluice.wire.json_endpoint import JsonEndpoint
from tests.integration.rewards.servers import reward_model_server, save_reward_model, serving

PROMPT = [{"role": "user", "content": "w0001 w0002"}]


def sample(response: str, label: Any = "l", prompt: Any = "p", **metadata: Any) -> RewardInput:
    return RewardInput(prompt=prompt, response=response, label=label, metadata=metadata)


async def judged(samples: list[RewardInput], **fields: Any) -> list[Any]:
    judge = Judge(Reward(**fields))
    try:
        await judge.check()
        return await judge(samples)
    finally:
        await judge.close()


async def test_slimes_protocol() -> None:
    async with serving(lambda _: 0.25) as server:
        assert await judged([sample("r", prompt=PROMPT)], url=server.url) == [(0.25, {})]
        assert server.seen == [{"prompt": PROMPT, "response": "r", "label": "l"}]


async def test_a_dictionary_and_its_key() -> None:
    async with serving(lambda _: {"score": 1, "style": 0.5, "why": "x"}) as server:
        assert await judged([sample("r")], url=server.url) == [(1.0, {"score": 1.0, "style": 0.5})]
        assert await judged([sample("r")], url=server.url, key="style") == [
            (0.5, {"score": 1.0, "style": 0.5})
        ]


async def test_rows_that_name_a_reward_do_not_go_to_the_server() -> None:
    async with serving(lambda _: 0.25) as server:
        rows = [sample("l", rm_type="exact_match"), sample("l", rm_type="remote_rm"), sample("l")]
        assert await judged(rows, url=server.url) == [(1.0, {}), (0.25, {}), (0.25, {})]
        assert len(server.seen) == 2


async def test_a_server_that_fails_twice_is_asked_again() -> None:
    async with serving(lambda _: 0.25, 503, 429) as server:
        assert await judged([sample("r")], url=server.url) == [(0.25, {})]
        assert len(server.seen) == 3


async def test_a_request_that_hangs_is_sent_again() -> None:
    async with serving(lambda _: 0.25, 100.0) as server:
        assert await judged([sample("r")], url=server.url, timeout_seconds=2) == [(0.25, {})]
        assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([503] * 1000, r"503 Service Unavailable; given up after \d+ attempts"),
        ([100.0] * 1000, r"no answer after 0.5 s; given up after \d+ attempts"),
    ],
)
async def test_retries_are_bounded(faults: list[Any], message: str) -> None:
    async with serving(lambda _: 1, *faults) as server:
        endpoint = JsonEndpoint(server.url, 0.5, RewardError, back_off=lambda n: 0.0)
        with pytest.raises(RewardError, match=message):
            await endpoint.post({})
        await endpoint.close()


async def test_an_unreachable_server_fails_its_samples() -> None:
    (outcome,) = await judged([sample("r")], url="http://127.0.0.1:9/", timeout_seconds=0.3)
    assert "ClientConnectorError" in str(outcome)
    assert outcome.reason == "timeout"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda _: web.Response(status=422, text="no field x"),
            "422 Unprocessable Entity: b'no field x'",
        ),
        (lambda _: web.Response(text="<html>"), "expected JSON, got b'<html>'"),
        (lambda _: "good", "'good', expected a number"),
        (lambda _: None, "None, expected a number"),
        (lambda _: {"points": 1}, "set reward.key"),
        (
            lambda _: web.Response(text='{"score": NaN}', content_type="application/json"),
            "is nan, expected a finite",
        ),
        (lambda _: 1e39, "the reward is 1e+39, expected a finite number of at most 1e+15"),
        (lambda _: {"score": 1, "\ud83d": 1}, "the name of a reward part: half of a surrogate"),
        (
            lambda _: web.Response(text="[" * 100_000, content_type="application/json"),
            "expected JSON, got b'[[[",
        ),
        (
            lambda _: web.Response(text="9" * 5000, content_type="application/json"),
            "expected JSON, got b'999",
        ),
        (lambda _: "x" * (2 << 20), "the answer has more than 1048576 bytes"),
    ],
)
async def test_an_answer_that_is_no_reward_fails_its_sample_at_once(
    answer: Callable[[Any], Any], message: str
) -> None:
    async with serving(answer) as server:
        (outcome,) = await judged([sample("r")], url=server.url)
        assert message in str(outcome)
        assert len(server.seen) == 1


# --- reward models


def embeddings(body: Any) -> list[Any]:
    """Answer as SGLang's /classify does."""
    return [
        {"embedding": [float(len(text)), -1.0], "meta_info": {"id": "x"}} for text in body["text"]
    ]


async def test_a_group_goes_to_the_reward_model_in_one_request() -> None:
    async with serving(embeddings, path="/classify") as server:
        outcomes = await judged(
            [sample("a" * n) for n in range(8)], model={"url": server.url + "/"}
        )
        assert outcomes == [(float(n + 1), {}) for n in range(8)]
        assert server.seen == [{"text": ["p" + "a" * n for n in range(8)]}]


async def test_the_output_may_be_chosen_and_the_chat_template_renders(model: Path) -> None:
    async with serving(embeddings, path="/classify") as server:
        settings = {"url": server.url, "tokenizer": str(model), "output": 1}
        assert await judged([sample("w0003", prompt=PROMPT)], model=settings) == [(-1.0, {})]
        assert server.seen == [{"text": ["<user> w0001 w0002 <assistant> w0003 "]}]


async def test_a_reward_model_without_a_chat_template_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"reward\.model\.tokenizer: "):
        await judged([], model={"url": "http://127.0.0.1:9", "tokenizer": str(tmp_path)})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: {"object": "error"}, "expected a list of 1 answers"),
        (
            lambda _: [{"embedding": []}],
            "expected an embedding with more than 0 outputs (reward.model.output)",
        ),
        (lambda _: [{"text": "x"}], "expected an embedding"),
        (lambda _: [{"embedding": ["x"]}], "the reward is str 'x', expected a number"),
        (lambda _: [{"embedding": [1e39]}], "the reward is 1e+39, expected a finite number"),
    ],
)
async def test_a_server_that_is_no_reward_model_is_told_apart(
    answer: Callable[[Any], Any], message: str
) -> None:
    async with serving(answer, path="/classify") as server:
        (outcome,) = await judged([sample("r")], model={"url": server.url})
        assert message in str(outcome)


@pytest.mark.timeout(400)
async def test_a_reward_model_on_a_real_sglang(model: Path, tmp_path: Path) -> None:
    """Rewards are those of transformers, up to a constant: SGLang's Qwen3 head has a bias that
    checkpoints lack."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForSequenceClassification

    directory = save_reward_model(tmp_path / "rm", model)
    reference = Qwen3ForSequenceClassification.from_pretrained(directory, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    words = ["w0003", "w0004 w0005", "w0006 w0007 w0008"]
    with reward_model_server(directory, tmp_path / "log") as url:
        settings = {"url": url, "tokenizer": str(directory)}
        outcomes = await judged(
            [sample(w, prompt=PROMPT) for w in words], model=settings, timeout_seconds=60
        )
    chats = [[*PROMPT, {"role": "assistant", "content": w}] for w in words]
    ids = [tokenizer.encode(tokenizer.apply_chat_template(c, tokenize=False)) for c in chats]
    with torch.no_grad():
        expected = [float(reference(torch.tensor([i])).logits) for i in ids]
    offsets = [reward - right for (reward, _), right in zip(outcomes, expected, strict=True)]
    assert max(offsets) - min(offsets) < 1e-3
    assert max(expected) - min(expected) > 1e-2  # the rewards do differ
