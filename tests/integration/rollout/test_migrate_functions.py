"""Functions of slime and verl on a real engine: the trained tokens are those that it sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJob
from sluice.engines.sglang.client import Client
from sluice.rewards import RewardInput
from sluice.runtime import user_code
from sluice.samples.sample import Prompt, Purpose, Sample, SampleStatus
from sluice.samples.turns import TURNS
from sluice.wire import codec
from sluice_rollout.gateway.registry import EpisodeRegistry
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.user_functions import loading
from sluice_rollout.user_functions.runner import EpisodeRunner
from tests.integration.engines import Sglang
from tests.integration.rollout.pods import Services, job, leases
from tests.integration.rollout.talkative import save_talkative
from tests.integration.rollout.test_gateway import READY, RequestLog, check
from tests.integration.rollout.test_generation import generator
from tests.integration.weights.conftest import make_sender as make_sender
from tests.integration.weights.tools import publish

FUNCTIONS = Path(__file__).parent / "migrate_functions"
SEARCH, RETOOL = f"{FUNCTIONS}/search.py:generate", f"{FUNCTIONS}/retool.py:generate"
GSM8K = f"{FUNCTIONS}/gsm8k.py:Gsm8kLoop"
ARGUMENTS: dict[str, dict[str, Any]] = {
    SEARCH: {"turn_tokens": 8},
    RETOOL: {"max_tool_calls": 3},
    GSM8K: {
        "turn_tokens": 8,
        "config": {"actor_rollout_ref": {"rollout": {"multi_turn": {"max_assistant_turns": 3}}}},
    },
}
ALL = pytest.mark.parametrize(
    "dotted", [SEARCH, RETOOL, GSM8K], ids=["slime: search", "slime: retool", "verl: gsm8k"]
)


@pytest.fixture(scope="session")
def talkative(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talkative(model, tmp_path_factory.mktemp("talkative") / "model")


def function_job(dotted: str, talkative: Path, directory: Path, tokens: int = 200) -> RLJob:
    return job(
        directory,
        talkative,
        rollout__function=dotted,
        rollout__functionArgs=ARGUMENTS[dotted],
        rollout__sampling__maxResponseTokens=tokens,
    )


async def play(
    dotted: str, engine: Client, talkative: Path, directory: Path, tokens: int = 200
) -> Sample:
    """Play a sample as the worker of the job does."""
    spec = function_job(dotted, talkative, directory, tokens).spec
    encoder = PromptEncoder(spec, talkative)
    loaded = loading.load_function(dotted, spec)
    assert loaded
    async with EpisodeRegistry.for_job(spec, encoder) as registry:
        runner = EpisodeRunner(
            loaded[1], loaded[0], generator(engine, talkative), encoder.tokenizer, 60.0, None,
            registry.open_gateway,
        )  # fmt: skip
        params = {
            "max_new_tokens": tokens, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None,
            "ignore_eos": True,
        }  # fmt: skip
        prompt = Prompt(0, "w0002 w0005", label=0.25, purpose=Purpose.EVALUATE)
        return await runner(prompt, [5], Sample(0), params)


def check_tokens(sample: Sample, log: RequestLog, turns: int) -> None:
    """Check that the trained ids are those that the engine sampled, each in its context."""
    tokens, at, learned = sample.tokens.tolist(), sample.prompt_length, []
    for turn in sample.metadata[TURNS]:
        if turn["by"] == "model":
            learned.append((tokens[:at], tokens[at : at + turn["length"]]))
        at += turn["length"]
    assert learned == [(prompt, answer.tokens) for prompt, answer in log.answers]
    assert len(learned) == turns
    assert sample.trainable_tokens == sum(len(answer.tokens) for _, answer in log.answers)
    assert sample.trainable_tokens < sample.response_length == at - sample.prompt_length


@ALL
async def test_a_sample_has_the_ids_and_log_probs_of_the_engine(
    dotted: str, engine: Client, model: Path, talkative: Path, tmp_path: Path
) -> None:
    log = RequestLog(engine)
    sample = await play(dotted, engine, talkative, tmp_path)
    assert sample.error == ""
    sample.reward = sample.reward or 0.0
    check_tokens(sample, log, 3)
    check(sample, {0: model})


async def test_status_reward_and_metadata_of_functions_reach_the_sample(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    search = await play(SEARCH, engine, talkative, tmp_path)
    assert (search.status, search.metadata["searches"]) == (SampleStatus.COMPLETED, 3)
    retool = await play(RETOOL, engine, talkative, tmp_path)
    assert (retool.status, retool.reward, retool.reward_parts["tools"]) == (
        SampleStatus.TRUNCATED, 0.5, 3,
    )  # fmt: skip
    assert retool.metadata["evaluation"] is True
    assert retool.prompt_length == 3, "the function's own prompt"
    gsm8k = await play(GSM8K, engine, talkative, tmp_path)
    assert (gsm8k.reward, gsm8k.metadata["num_turns"]) == (0.25, 3)
    assert gsm8k.metadata["calls"] > 0


@ALL
async def test_a_response_is_cut_at_its_limit(
    dotted: str, engine: Client, talkative: Path, tmp_path: Path
) -> None:
    sample = await play(dotted, engine, talkative, tmp_path, tokens=15)
    assert (sample.status, sample.error) == (SampleStatus.TRUNCATED, "")
    assert sample.response_length == 15
    sample.check_tokens()


@ALL
async def test_a_weight_update_in_the_middle_of_a_turn(
    dotted: str,
    make_services: Callable[..., Services],
    engine: Client,
    sglang: Sglang,
    model: Path,
    other_model: Path,
    talkative: Path,
    make_sender: Callable[..., Any],
) -> None:
    """A turn continues with the new weights, and every token has the version that sampled it."""
    long = {key: 250 if key == "turn_tokens" else value for key, value in ARGUMENTS[dotted].items()}
    services = make_services(
        model__path=str(talkative),
        rollout__function=dotted,
        rollout__functionArgs=long | ({"max_tool_calls": 60} if dotted == RETOOL else {}),
        rollout__sampling__maxResponseTokens=2500,
        rollout__mode="async",
        rollout__maxStaleness=1,
    )
    async with (
        await services.start_buffer_with_batch() as client,
        services.working(engine) as (worker, end),
    ):
        await leases(worker, 4)
        await sglang.generated(8 * 60)
        await publish(make_sender(timeoutSeconds=30), 1, other_model)
        await client.commit(1)
        assert (await client.take(2, wait=60)).state == READY
        groups = [codec.group_from_message(g) for g in await client.shard(2)]
        await end()
    samples = [sample for group in groups for sample in group.samples]
    assert [sample.error for sample in samples] == [""] * len(samples)
    assert {span.version for s in samples for span in s.weight_versions} == {0, 1}
    for sample in samples:
        assert sample.trainable_tokens < sample.response_length
        check(sample, {0: model, 1: other_model})


async def test_a_reward_function_of_slime_sees_attributes_of_the_generate_function(
    engine: Client, talkative: Path, tmp_path: Path
) -> None:
    sample = await play(SEARCH, engine, talkative, tmp_path)
    reward = user_code.load_reward(f"{FUNCTIONS}/search.py:reward_func")
    judged = RewardInput("w0002", sample.response, metadata=sample.metadata)
    assert await asyncio.wait_for(reward(judged), 5) == 3.0
