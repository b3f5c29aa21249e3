"""The engine transformers: what it samples from, models that it has to convert, its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.engines.protocol import Client, PromptRefusedError
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import distance, log_probs, save_model
from tests.integration.rendezvous_server import Rendezvous
from tests.integration.transformers_engine import TransformersServer
from tests.integration.weights.conftest import join_engine, make_sender  # noqa: F401 - fixtures
from tests.integration.weights.tools import publish, serves

pytestmark = pytest.mark.parametrize("server", ["transformers"], indirect=True)
PROMPT = [10, 11, 12, 13]
EXACT = 1e-4
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two mixtures of experts of one shape, which transformers keeps in another form than files."""
    directory = tmp_path_factory.mktemp("mixtures")
    return [save_model(directory / f"{seed}", seed, "Qwen3Moe", **EXPERTS) for seed in (1, 2)]


@pytest.fixture(scope="module")
def drawn(
    mixtures: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TransformersServer]:
    """An engine of a mixture that waits for its weights; the last test ends it."""
    log = tmp_path_factory.mktemp("drawn") / "log"
    server = TransformersServer(mixtures[0], log, "--draw-weights")
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


async def test_log_probs_are_those_of_all_tokens_though_some_are_left_out(
    engine: Client, server: TransformersServer, model: Path
) -> None:
    sampling = {"max_new_tokens": 40, "ignore_eos": True, "top_p": 0.5, "top_k": 3}
    answer = await engine.generate("one", PROMPT, sampling)
    assert distance(answer.log_probs, log_probs(model, PROMPT + answer.tokens, 40)) < EXACT


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(
    engine: Client, server: TransformersServer
) -> None:
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 7}
    first = await engine.generate("one", PROMPT, sampling)
    await engine.generate("two", PROMPT, {"max_new_tokens": 5, "ignore_eos": True})
    assert (await engine.generate("three", PROMPT, sampling)).tokens == first.tokens
    other = await engine.generate("four", PROMPT, {**sampling, "sampling_seed": 8})
    assert other.tokens != first.tokens


async def test_what_it_lacks_is_refused_by_name(engine: Client, server: TransformersServer) -> None:
    with pytest.raises(PromptRefusedError, match="has nothing for json_schema; it has temperature"):
        await engine.generate("one", PROMPT, {"max_new_tokens": 5, "json_schema": "{}"})


async def test_a_bad_request_harms_no_other(engine: Client, server: TransformersServer) -> None:
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    fine = asyncio.create_task(engine.generate("fine", PROMPT, sampling))
    await server.generated(5)
    for ids, given in (
        ([1 << 20], {}),
        ([-1], {}),
        (PROMPT, {"stop_token_ids": [1 << 20]}),
        (PROMPT, {"top_k": "three"}),
    ):
        with pytest.raises(PromptRefusedError, match=r"token id|top_k"):
            await engine.generate("bad", ids, {"max_new_tokens": 5, **given})
    assert len((await fine).tokens) == 200


async def test_as_a_teacher_it_scores_given_tokens_at_temperature_1(
    server: TransformersServer, model: Path
) -> None:
    scorer = server.engine.scorer(server.url, 30.0)
    tokens = [*PROMPT, 700, 701, 702]
    try:
        assert distance(await scorer.log_probs(tokens, 3), log_probs(model, tokens, 3)) < EXACT
        assert await scorer.token_texts([8, 2047]) == ["w0000", "w2039"]
    finally:
        await scorer.close()


async def test_a_mixture_gets_its_weights_from_the_trainer(
    drawn: TransformersServer,
    mixtures: list[Path],
    rendezvous: Rendezvous,
    join_engine: Callable[..., Awaitable[Any]],  # noqa: F811
    make_sender: Callable[..., WeightSender],  # noqa: F811
    server: TransformersServer,
) -> None:
    await join_engine("rollout-0", drawn.address)
    sender = make_sender()
    for version, weights in enumerate(mixtures):
        update = await publish(sender, version, weights)
        assert (list(update.engines), update.failed) == (["rollout-0"], {})
        assert await serves(drawn.url, weights, version, drawn.engine)


async def test_weights_of_another_shape_are_refused_by_name(
    drawn: TransformersServer,
    rendezvous: Rendezvous,
    join_engine: Callable[..., Awaitable[Any]],  # noqa: F811
    make_sender: Callable[..., WeightSender],  # noqa: F811
    tmp_path: Path,
    server: TransformersServer,
) -> None:
    other = save_model(tmp_path / "other", 1, "Qwen3Moe", hidden_size=96, **EXPERTS)
    await join_engine("rollout-0", drawn.address)
    update = await publish(make_sender(), 0, other)
    assert "but the engine's model has" in update.failed["rollout-0"]


def test_a_server_that_is_told_to_end_ends_well(
    drawn: TransformersServer, server: TransformersServer
) -> None:
    drawn.process.send_signal(signal.SIGTERM)
    assert drawn.process.wait(30) == 0, drawn.log.read_text()[-2000:]
