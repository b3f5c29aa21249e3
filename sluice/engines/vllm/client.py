"""The client of a vLLM server, over HTTP: `/inference/v1/generate`, tokens in and tokens out.

An answer tells as spans which weights sampled which of its tokens. The server's arguments decide
which log-probs it has (`launch.logprobs_mode`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sluice.engines.http.client import PROBE_SECONDS, HttpClient, version_number
from sluice.engines.protocol import (
    RESTING,
    WAKING,
    EngineError,
    Generation,
    PromptRefusedError,
    ServerInfo,
)
from sluice.samples.sample import WeightSpan

# vLLM's prefix of a request's name.
_REQUEST = "generate-tokens-"
_PROBE = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "ignore_eos": True}}
# vLLM's names of sampling parameters, by SGLang's.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
        )
    },
}
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
_ADAPTER_NAME = "sluice+"
_FINISHES = ("stop", "length", "abort")


class Client(HttpClient):
    """A vLLM server."""

    generate_path = "/inference/v1/generate"
    info = ServerInfo(1, None)

    async def learn(self) -> None:
        world = await self.get("/get_world_size?include_dp=false")
        self.info = server_info(world, await self.get("/v1/models"))

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        """Return (healthy, reason).

        With `generate` the engine has to make a token, which a hung one does not.
        """
        if generate:
            return await self.healthy(self.generate_path, timeout, json=_PROBE)
        return await self.healthy("/health", timeout)

    async def rests(self) -> bool:
        """Return True if the engine has given its memory to the trainer. It is then healthy."""
        try:
            answer = await self.get("/weight_info", PROBE_SECONDS)
        except EngineError:
            return False
        return answer.get("weight_version") in (RESTING, WAKING)

    async def paused_seconds(self) -> float:
        """Return how long the engine has been paused for a weight update; 0 if it is not.

        The plugin answers in the process that serves HTTP, without the scheduler, which may be
        waiting for weights.
        """
        try:
            return float((await self.get("/sluice/paused", PROBE_SECONDS)).get("seconds", 0.0))
        except EngineError:
            return 0.0

    async def answers(self) -> bool:
        """Return True if the server's scheduler answers, which it does in a pause too."""
        try:
            return "is_paused" in await self.get("/is_paused")
        except EngineError:
            return False

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. They answer with the tokens that they have."""
        await self.post("/abort_requests", {"request_ids": [_REQUEST + rid]} if rid else {})

    def body(
        self, rid: str, input_ids: list[int], sampling: Mapping[str, Any], cache: str
    ) -> dict[str, Any]:
        parameters = sampling_params(sampling)
        salt = {"cache_salt": cache} if cache else {}
        return {
            "request_id": rid,
            "token_ids": input_ids,
            "sampling_params": parameters | {"logprobs": 0, "detokenize": "stop" in parameters},
            **salt,
        }

    def read(self, status: int, text: str) -> Generation:
        if status == 200:
            return generation(text)
        kind = PromptRefusedError if status == 400 else EngineError
        raise kind(f"engine answered {status}: {_message(text)}")


def sampling_params(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Translate SGLang's sampling parameters to vLLM's.

    Raises PromptRefusedError for a parameter that vLLM lacks.
    """
    translated: dict[str, Any] = {}
    for name, value in sampling.items():
        if value is None:
            continue
        if name in _GRAMMARS:
            translated["structured_outputs"] = {_GRAMMARS[name]: value}
        elif name in _NAMES:
            translated[_NAMES[name]] = value
        else:
            raise PromptRefusedError(
                f"sampling: vLLM has nothing for {name}; it has "
                f"{', '.join(sorted({*_NAMES, *_GRAMMARS}))}"
            )
    return translated


def server_info(world: Mapping[str, Any], models: Mapping[str, Any]) -> ServerInfo:
    """Read the answers of /get_world_size and /v1/models."""
    context = next((model.get("max_model_len") for model in models.get("data", [])), None)
    return ServerInfo(int(world.get("world_size", 1)), int(context) if context else None)


def generation(text: str) -> Generation:
    """Return the generation of an answer. Raises EngineError if it is not vLLM's."""
    try:
        answer = json.loads(text)
        [choice] = answer["choices"]
        return _generation(choice, _held_version(answer.get("model")))
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            "engine: not an answer of vLLM's /inference/v1/generate: "
            f"{type(error).__name__} {error}"
        ) from error


def _held_version(model: Any) -> str | None:
    """Return the version of an answer's adapter if the engine holds several of them.

    The plugin names such an adapter `sluice+NUMBER@VERSION`.
    """
    name, _, version = model.partition("@") if isinstance(model, str) else ("", "", "")
    return version if version and name.startswith(_ADAPTER_NAME) else None


def _generation(choice: dict[str, Any], held_version: str | None) -> Generation:
    tokens = choice["token_ids"]
    if choice.get("weight_versions") is None:
        raise EngineError("engine: an answer without weight_versions: take vLLM 0.32 or later")
    spans = choice["weight_versions"]
    if held_version is not None:  # vLLM itself notes the newest version
        spans = [{"version": held_version, "start": 0, "end": len(tokens)}]
    stop, finish = choice["stop_reason"], choice["finish_reason"]
    if finish not in _FINISHES:
        raise ValueError(f"finish_reason {finish!r}: expected one of {', '.join(_FINISHES)}")
    return Generation(
        tokens,
        _log_probs(choice["logprobs"]["content"], tokens),
        [
            WeightSpan(version_number(span["version"]), span["start"], span["end"])
            for span in spans
            if span["end"] > span["start"]
        ],
        finish,
        stop if isinstance(stop, str) else None,
    )


def _log_probs(entries: list[dict[str, Any]], tokens: list[int]) -> list[float]:
    if [entry["token_id"] for entry in entries] != tokens:
        raise ValueError(f"log-probs of {len(entries)} tokens for {len(tokens)} others")
    return [float(entry["logprob"]) for entry in entries]


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
