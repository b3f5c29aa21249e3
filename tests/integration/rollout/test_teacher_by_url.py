"""A teacher behind a real SGLang server, and what becomes of samples whose teacher fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from transformers import AutoTokenizer

from sluice.engines.sglang.client import Client
from sluice.engines.sglang.score import Scorer
from sluice.runtime.pod_env import ConfigurationError, free_port
from sluice.samples.sample import Prompt, Sample, SampleStatus, WeightSpan
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.scoring.teacher import (
    PROBED_TOKENS,
    Teacher,
    TeacherError,
    Teachers,
    probe,
    teacher_of,
)
from tests.integration.engines import Sglang, call, distance, log_probs, until
from tests.integration.rendezvous_server import DEADLINE
from tests.integration.rewards.servers import Server, serving
from tests.integration.rollout.pods import Pod, Services, contained

READY = pb.TakeBatchResponse.STATE_READY
PROMPT = [10, 11, 12, 13]
EXACT = 1e-4


def sample(last: int = 24) -> Sample:
    """Two turns of the model, what a tool said between them, and what it said at the end."""
    turns = Sample(0)
    turns.append_prompt(PROMPT)
    for tokens, trainable in (
        ([20, 21, 22], True),
        ([30, 31], False),
        ([23, last], True),
        ([32], False),
    ):
        turns.append(
            tokens, [-1.0] * len(tokens), [WeightSpan(0, 0, len(tokens))], trainable=trainable
        )
    turns.status = SampleStatus.COMPLETED
    return turns


@pytest.fixture
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


async def ask(url: str, tokenizer: Any, sample: Sample, seconds: float = 60.0) -> Sample:
    teacher = Teacher(url, Scorer(url, seconds), tokenizer)
    try:
        await teacher(sample)
    finally:
        await teacher.close()
    return sample


async def wait(url: str, tokenizer: Any, seconds: float = 60.0) -> None:
    teacher = Teacher(url, Scorer(url, 60.0), tokenizer)
    try:
        await teacher.wait_ready(seconds)
    finally:
        await teacher.close()


async def test_it_scores_what_the_model_wrote(sglang: Sglang, model: Path, tokenizer: Any) -> None:
    await wait(sglang.url, tokenizer)
    scored = await ask(sglang.url + "/", tokenizer, sample(last=len(tokenizer) - 1))
    scores = scored.teacher_log_probs
    assert scores is not None
    expected = np.array(log_probs(model, scored.tokens.tolist(), 8))
    mask = scored.loss_mask > 0
    assert distance(scores[mask].tolist(), expected[mask].tolist()) < EXACT
    assert scores[~mask].tolist() == [0, 0, 0]
    assert scores.dtype == np.float32


async def test_a_job_without_a_reward_learns_from_its_teacher(
    make_services: Callable[..., Services], engine: Client, sglang: Sglang
) -> None:
    """The teacher is the student here: they agree about every token."""
    services = make_services(
        reward=None,
        rollout__samplesPerPrompt=1,
        algorithm__distillation={"teacher": {"url": sglang.url}},
    )
    async with await services.start_buffer() as client, services.working(engine):
        assert (await client.take(1, wait=DEADLINE)).state == READY
        groups = [codec.group_from_message(g) for g in await client.shard(1)]
    for sample in (s for g in groups for s in g.samples):
        sample.check()
        assert (sample.reward, sample.reward_parts) == (0.0, {})
        assert sample.teacher_log_probs is not None
        assert (
            distance(sample.teacher_log_probs.tolist(), sample.rollout_log_probs.tolist()) < EXACT
        )


async def test_a_reward_and_a_teacher_go_together_and_evaluations_have_none(
    make_services: Callable[..., Services], engine: Client, sglang: Sglang
) -> None:
    def forward(body: Any) -> Any:
        return call(sglang.url + "/generate", body)[1]

    async with serving(forward, path="/generate") as teacher:
        services = make_services(
            evaluation={"everySteps": 1}, algorithm__distillation={"teacher": {"url": teacher.url}}
        )
        async with await services.start_buffer() as client, services.working(engine) as (worker, _):
            assert (await client.take(1, wait=DEADLINE)).state == READY
            groups = [codec.group_from_message(g) for g in await client.shard(1)]
            await asyncio.to_thread(
                until, lambda: worker.group_maker.finished_samples == 8 + 3, 20.0, "the evaluation"
            )
    for group in groups:
        for sample in group.samples:
            assert sample.reward == contained(group.prompt, sample)
            assert sample.teacher_log_probs is not None
    trained = {tuple(sample.tokens.tolist()) for group in groups for sample in group.samples}
    assert {tuple(body["input_ids"]) for body in teacher.seen} == trained


def outcomes(outcome: str) -> float:
    return REGISTRY.get_sample_value("sluice_rollout_teacher_total", {"outcome": outcome}) or 0.0


def entries(values: list[float | None], tokens: list[int]) -> dict[str, Any]:
    pairs = zip(values, tokens, strict=True)
    return {"meta_info": {"input_token_logprobs": [[value, token, None] for value, token in pairs]}}


# From the first trained token to the last.
TOKENS = [20, 21, 22, 30, 31, 23, 24]
SCORES: list[float | None] = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
BAD = [
    ({"text": "hello"}, "not an answer of SGLang's /generate"),
    (entries(SCORES[:3], TOKENS[:3]), "log-probs of 3 other tokens than the 7 requested ones"),
    (entries(SCORES, [99, *TOKENS[1:]]), "log-probs of 7 other tokens"),
    (entries([None, *SCORES[1:]], TOKENS), "a trained token has no finite log-prob"),
]


@pytest.mark.parametrize(("answer", "reason"), BAD, ids=[reason for _, reason in BAD])
async def test_an_answer_that_is_none_fails_the_sample(
    tokenizer: Any, answer: Any, reason: str
) -> None:
    before = outcomes("invalid")
    async with serving(lambda _: answer, path="/generate") as server:
        failed = await ask(server.url, tokenizer, sample())
    assert failed.status is SampleStatus.FAILED
    assert failed.error.startswith("teacher: ")
    assert reason in failed.error
    assert (failed.reward, failed.trainable_tokens, failed.teacher_log_probs) == (0.0, 0, None)
    assert outcomes("invalid") == before + 1


async def test_faults_that_may_pass_are_outlived(tokenizer: Any) -> None:
    scores = [*SCORES[:3], None, *SCORES[4:]]  # untrained tokens may lack one
    async with serving(
        lambda _: entries([None, *scores], [13, *TOKENS]), 503, path="/generate"
    ) as server:
        scored = await ask(server.url, tokenizer, sample(), seconds=5)
    assert scored.teacher_log_probs is not None
    assert scored.teacher_log_probs.tolist() == [-1, -2, -3, 0, 0, -6, -7, 0]
    assert len(server.seen) == 2
    assert server.seen[0]["input_ids"] == PROMPT + TOKENS
    assert server.seen[0]["logprob_start_len"] == len(PROMPT) - 1


async def test_a_refusal_is_final(tokenizer: Any) -> None:
    async with serving(lambda _: {}, 400, path="/generate") as server:
        failed = await ask(server.url, tokenizer, sample())
    assert failed.error == f"teacher: {server.url}/generate: 400 Bad Request: b'fault'"
    assert len(server.seen) == 1


async def test_a_teacher_that_hangs_fails_its_samples_at_the_deadline(tokenizer: Any) -> None:
    before = outcomes("timeout")
    async with serving(lambda _: {}, 60.0, 60.0, 60.0, 60.0, path="/generate") as server:
        failed = await ask(server.url, tokenizer, sample(), seconds=0.2)
    assert failed.status is SampleStatus.FAILED
    assert "no answer after 0.2 s; given up" in failed.error
    assert outcomes("timeout") == before + 1


async def test_a_token_that_is_none_is_not_sent(tokenizer: Any) -> None:
    """SGLang would die of it, and with it the teacher of others."""
    broken = sample()
    broken.tokens[-2] = len(tokenizer)
    async with serving(lambda _: {}, path="/generate") as server:
        await ask(server.url, tokenizer, broken)
    assert broken.error == "teacher: token 2048 cannot be scored: the tokenizer has 2048 tokens"
    assert not server.seen


async def test_a_sample_without_a_trained_token_needs_no_teacher(tokenizer: Any) -> None:
    masked = sample()
    masked.loss_mask = np.zeros(8, np.uint8)
    await ask(f"http://127.0.0.1:{free_port()}", tokenizer, masked)
    assert masked.teacher_log_probs is not None
    assert masked.teacher_log_probs.tolist() == [0.0] * 8


async def test_rows_of_a_data_source_have_the_teacher_that_is_named_for_them(
    make_services: Callable[..., Services], tokenizer: Any
) -> None:
    def constant(value: float) -> Callable[[Any], Any]:
        return lambda body: entries([value] * 7, TOKENS)

    async with (
        serving(constant(-1.0), path="/generate") as others,
        serving(constant(-2.0), path="/generate") as mathematician,
    ):
        distillation = {
            "teacher": {"url": others.url},
            "teachers": [{"dataSource": "openai/gsm8k", "url": mathematician.url}],
        }
        spec = make_services(algorithm__distillation=distillation).job.spec
        teachers = teacher_of(spec, tokenizer)
        assert isinstance(teachers, Teachers)
        assert teachers.url == f"{others.url}, {mathematician.url}"
        scores = []
        for metadata in ({"data_source": "openai/gsm8k"}, {"data_source": "poems"}, {}):
            scored = sample()
            await teachers(Prompt(1, "p", metadata=metadata), scored)
            assert scored.teacher_log_probs is not None
            scores.append(float(scored.teacher_log_probs[0]))
        await teachers.close()
    assert scores == [-2.0, -1.0, -1.0]
    assert (len(others.seen), len(mathematician.seen)) == (2, 1)


async def test_all_teachers_are_waited_for_and_the_one_that_fails_is_named(
    make_services: Callable[..., Services], tokenizer: Any
) -> None:
    def texts(body: Any) -> Any:
        return {
            "text": [tokenizer.decode(ids, skip_special_tokens=False) for ids in body["tokens"]]
        }

    def others(body: Any) -> Any:
        return {"text": [f"w{ids[0]:04d}" for ids in body["tokens"]]}

    async with (
        serving(texts, path="/detokenize") as right,
        serving(others, path="/detokenize") as wrong,
    ):
        named = [{"dataSource": "a", "url": right.url}, {"dataSource": "b", "url": wrong.url}]
        spec = make_services(
            algorithm__distillation={"teacher": {"url": right.url}, "teachers": named}
        ).job.spec
        teachers = teacher_of(spec, tokenizer)
        assert teachers is not None
        with pytest.raises(
            ConfigurationError,
            match=r"spec.algorithm.distillation.teachers\[1\].url: the teacher's tok",
        ):
            await teachers.wait_ready(10)
        await teachers.close()


async def test_the_run_goes_on_while_a_teacher_fails(
    make_services: Callable[..., Services], engine: Client, sglang: Sglang
) -> None:
    def forward(body: Any) -> Any:
        return call(sglang.url + "/generate", body)[1]

    async with serving(forward, 400, 400, 400, path="/generate") as teacher:
        services = make_services(
            algorithm__distillation={"teacher": {"url": teacher.url}}, trainer__stepsPerBatch=2
        )
        async with await services.start_buffer() as client, services.working(engine):
            assert (await client.take(1, wait=DEADLINE)).state == READY
            samples = [
                s for g in await client.shard(1) for s in codec.group_from_message(g).samples
            ]
    assert len(samples) == 8
    for sample in samples:
        assert (sample.teacher_log_probs is None) == (sample.status is SampleStatus.FAILED)


async def test_it_waits_for_a_teacher_that_comes_late(tokenizer: Any) -> None:
    def texts(body: Any) -> Any:
        return {
            "text": [tokenizer.decode(ids, skip_special_tokens=False) for ids in body["tokens"]]
        }

    async with serving(texts, 503, 503, path="/detokenize") as server:
        await wait(server.url, tokenizer)
    assert len(server.seen) == 3
    assert server.seen[0]["tokens"][-1] == [len(tokenizer) - 1]


async def test_one_that_never_comes_ends_the_worker(tokenizer: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        TeacherError, match=rf"teacher.url: {url} does not answer: .*; given up after 1 s"
    ):
        await wait(url, tokenizer, 1.0)


async def test_a_server_without_a_tokenizer_is_taken_at_its_word(tokenizer: Any) -> None:
    async with serving(lambda _: {}, 404, path="/detokenize") as server:
        await wait(server.url, tokenizer)


@pytest.mark.parametrize("words", [1, 16, 2048, 3583, 151_669])
def test_the_tokens_that_are_compared_come_from_the_whole_vocabulary(words: int) -> None:
    ids = probe(words)
    assert len(ids) == len(set(ids)) <= PROBED_TOKENS
    assert ids[0] == 0
    assert ids[-256:] == list(range(words))[-256:]
    assert max((b - a for a, b in itertools.pairwise(ids)), default=1) <= max(words // 1000, 1)


def shifted(server: Server) -> Any:
    return {"text": [f"w{ids[0]:04d}" for ids in server.seen[-1]["tokens"]]}


async def test_other_tokens_end_the_job_with_the_reason(
    make_services: Callable[..., Services], start_pod: Callable[..., Pod], sglang: Sglang
) -> None:
    holder: list[Server] = []
    async with serving(lambda _: shifted(holder[0]), path="/detokenize") as server:
        holder.append(server)
        services = make_services(algorithm__distillation={"teacher": {"url": server.url}})
        started = start_pod(services, sglang.url)
        assert await started.end(60) == 2
    last = started.lines[-1]
    assert (
        "error: spec.algorithm.distillation.teacher.url: the teacher's tokens are not the student's"
        in last
    )
    assert "which is '<pad>' for the student and 'w0000' for the teacher" in last


async def test_what_is_no_sglang_is_told(tokenizer: Any) -> None:
    async with serving(lambda _: {"hello": 1}, path="/detokenize") as server:
        with pytest.raises(ConfigurationError, match="does not answer as SGLang does"):
            await wait(server.url, tokenizer)
