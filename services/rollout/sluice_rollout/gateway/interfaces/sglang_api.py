"""SGLang's /generate: a text or token ids in, token ids with their log-probs out.

It is for programs that keep their tokens themselves, as functions of slime and verl do.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import Field

from sluice_rollout.gateway.interfaces import exchange
from sluice_rollout.gateway.interfaces.errors import invalid
from sluice_rollout.gateway.interfaces.exchange import Answer, RawFormat, TurnRequest
from sluice_rollout.gateway.interfaces.parameters import MOST_STOP_IDS, Parameters, Stops, checked

_PATH = "sampling_params"
_TokenId = Annotated[int, Field(ge=0)]


class SamplingParams(Parameters):
    """SGLang's `sampling_params`."""

    max_new_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MOST_STOP_IDS)] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


def read(body: dict[str, Any]) -> TurnRequest:
    """Read a request. Raises GatewayError."""
    params = body.get(_PATH) or {}
    if not isinstance(params, dict):
        raise invalid(f"{_PATH}: expected an object", _PATH)
    parameters = checked(SamplingParams, params)
    for name in ("image_data", "video_data", "audio_data", "input_embeds", "lora_path"):
        if body.get(name):
            raise invalid(f"{name}: not supported; expected input_ids or text", name)
    if body.get("stream"):
        raise invalid("stream: not supported", "stream")
    return TurnRequest(
        prompt=_prompt(body),
        max_tokens=parameters.max_new_tokens,
        stop=parameters.stop or [],
        settings=exchange.settings(params),
        calls=False,
        raw=RawFormat(
            parameters.skip_special_tokens is not False,
            bool(parameters.no_stop_trim),
            parameters.stop_token_ids or [],
        ),
    )


def _prompt(body: dict[str, Any]) -> str | list[int]:
    ids, text = body.get("input_ids"), body.get("text")
    if isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
        return ids
    if ids is None and isinstance(text, str) and text:
        return text
    raise invalid("expected input_ids, one list of token ids, or text, one text", "input_ids")


def write(answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
    """Make the body of an answer, with those fields of SGLang that apply."""
    ids = [token for token, _ in answer.sampled]
    meta = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": answer.finish}
        | ({"matched": answer.stop} if answer.stop else {}),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_token_logprobs": [[log_prob, token, None] for token, log_prob in answer.sampled],
    }
    return {"text": answer.text, "output_ids": ids, "meta_info": meta}
