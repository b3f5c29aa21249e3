"""The client of vLLM: sampling parameters, answers, refusals; and the plugin's pauses."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.engines.protocol import EngineError, PromptRefusedError, ScoringError, ServerInfo
from sluice.engines.vllm.client import Client, generation, sampling_params, server_info
from sluice.engines.vllm.plugin.__main__ import PATH
from sluice.engines.vllm.score import read_answer
from sluice.samples.sample import WeightSpan


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(
            {"max_new_tokens": 5, "min_new_tokens": 2},
            {"max_tokens": 5, "min_tokens": 2},
            id="lengths",
        ),
        pytest.param(
            {"top_k": -1, "top_p": 0.9, "stop": None},
            {"top_k": -1, "top_p": 0.9},
            id="nothing said",
        ),
        pytest.param({"sampling_seed": 3}, {"seed": 3}, id="seed"),
        pytest.param({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}, id="grammar"),
    ],
)
def test_sampling_parameters_are_translated(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert sampling_params(ours) == theirs


def test_a_parameter_that_vllm_does_not_have_is_refused_and_those_it_has_are_named() -> None:
    with pytest.raises(
        PromptRefusedError, match=r"vLLM has nothing for custom_params; it has .*temperature"
    ):
        sampling_params({"custom_params": {}})


def test_a_request_names_the_cache_and_reads_text_only_where_a_stop_string_ends_it() -> None:
    body = Client("http://x").body("r", [1, 2], {"max_new_tokens": 3, "stop": ["."]}, "7")
    sampling = {"max_tokens": 3, "stop": ["."], "logprobs": 0, "detokenize": True}
    assert body == {
        "request_id": "r",
        "token_ids": [1, 2],
        "sampling_params": sampling,
        "cache_salt": "7",
    }
    body = Client("http://x").body("r", [1, 2], {"max_new_tokens": 3}, "")
    assert body["sampling_params"] == {"max_tokens": 3, "logprobs": 0, "detokenize": False}
    assert "cache_salt" not in body


def answer(**changes: Any) -> str:
    choice = {
        "token_ids": [5, 6, 7],
        "finish_reason": "stop",
        "stop_reason": "end",
        "logprobs": {"content": [{"token_id": t, "logprob": -t / 10} for t in (5, 6, 7)]},
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 3},
        ],
    }
    return json.dumps({"choices": [{**choice, **changes}]})


def test_an_answer_tells_tokens_log_probs_weights_and_its_end() -> None:
    assert generation(answer()).spans == [WeightSpan(-1, 0, 1), WeightSpan(4, 1, 3)]
    assert generation(answer()).log_probs == [-0.5, -0.6, -0.7]
    assert (generation(answer()).finish, generation(answer()).matched_stop) == ("stop", "end")


@pytest.mark.parametrize(
    ("model", "versions"),
    [
        pytest.param("sluice+7@3", [3], id="one of several"),
        pytest.param("sluice+7", [-1, 4], id="replaced in place"),
        pytest.param("org/model@3", [-1, 4], id="a model of another name"),
        pytest.param(None, [-1, 4], id="no name"),
    ],
)
def test_a_response_of_a_held_version_has_this_version(
    model: str | None, versions: list[int]
) -> None:
    text = json.dumps({**json.loads(answer()), "model": model})
    spans = generation(text).spans
    assert [span.version for span in spans] == versions
    assert spans[-1].end == 3


def test_a_token_that_ends_a_response_is_not_a_stop_string() -> None:
    assert generation(answer(stop_reason=151643)).matched_stop is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{}", "not an answer of vLLM's", id="another server's"),
        pytest.param(answer(weight_versions=None), "take vLLM 0.32 or later", id="an older vLLM's"),
        pytest.param(
            answer(token_ids=[5, 6]), "log-probs of 3 tokens for 2 others", id="other tokens'"
        ),
        pytest.param(answer(finish_reason="error"), "finish_reason 'error'", id="unfinished"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_an_error(text: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        generation(text)


@pytest.mark.parametrize(("status", "kind"), [(400, PromptRefusedError), (500, EngineError)])
def test_a_refusal_gives_the_servers_words(status: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"engine answered {status}: no"):
        Client("http://x").read(status, json.dumps({"error": {"message": "no"}}))


def test_a_server_says_how_many_ranks_and_tokens_it_has() -> None:
    assert server_info({"world_size": 2}, {"data": [{"max_model_len": 4096}]}) == ServerInfo(
        2, 4096
    )
    assert server_info({"world_size": 1}, {}) == ServerInfo(1, None)


def test_scores_are_those_of_the_requested_tokens() -> None:
    entries = [None, {"8": {"logprob": -1.0}}, {"9": {"logprob": -2.0}, "3": {"logprob": -0.1}}]
    scored = {"choices": [{"prompt_logprobs": entries}]}
    assert read_answer(scored, [8, 9]) == [-1.0, -2.0]
    with pytest.raises(ScoringError, match="not an answer of vLLM's"):
        read_answer(scored, [8, 4])


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(PATH))
    import sluice_vllm.pauses as module

    monkeypatch.setattr(module.time, "monotonic", lambda: module.now)
    module.now = 100.0
    return module


async def test_a_pause_lasts_until_a_resume_has_been_answered(pauses: SimpleNamespace) -> None:
    statuses = {"/pause": 200, "/resume": 500}
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": statuses[scope["path"]], "headers": []}
        )

    async def send(message: Any) -> None:
        sent.append(message)

    async def call(path: str) -> Any:
        await desk({"type": "http", "path": path}, None, send)
        return json.loads(sent[-1]["body"])["seconds"] if path == pauses.PATH else None

    desk = pauses.Pauses(application)
    assert await call(pauses.PATH) == 0.0
    await call("/pause")
    pauses.now += 5
    await call("/pause")
    assert await call(pauses.PATH) == 5.0, "a second pause is part of the first"
    await call("/resume")
    assert await call(pauses.PATH) == 5.0, "a resume that fails is none"
    statuses["/resume"] = 200
    await call("/resume")
    assert await call(pauses.PATH) == 0.0
