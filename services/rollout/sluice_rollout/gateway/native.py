"""/generate, as SGLang has it: token ids or a text in, token ids with their log-probs out.

For programs that keep their tokens themselves, as the functions of slime and verl do.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from sluice_rollout.gateway import exchange
from sluice_rollout.gateway.errors import invalid
from sluice_rollout.gateway.exchange import Answer, Raw, Request

_PATH = "sampling_params"


def read(body: dict[str, Any]) -> Request:
    """The turn that is asked for. Raises GatewayError."""
    params = body.get(_PATH) or {}
    if not isinstance(params, dict):
        raise invalid(f"{_PATH}: expected an object", _PATH)
    exchange.one_answer(params)
    for name in ("image_data", "video_data", "audio_data", "input_embeds", "lora_path"):
        if body.get(name):
            raise invalid(f"{name}: not offered; expected input_ids or text", name)
    if body.get("stream"):
        raise invalid("stream: an answer comes as a whole", "stream")
    return Request(
        prompt=_prompt(body),
        max_tokens=_limit(params),
        stop=exchange.stops(params.get("stop")),
        settings=exchange.settings(params),
        calls=False,
        raw=Raw(
            bool(params.get("skip_special_tokens", True)),
            bool(params.get("no_stop_trim", False)),
            _stop_ids(params.get("stop_token_ids")),
        ),
    )


def _prompt(body: dict[str, Any]) -> str | list[int]:
    ids, text = body.get("input_ids"), body.get("text")
    if isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
        return ids
    if ids is None and isinstance(text, str) and text:
        return text
    raise invalid("expected input_ids, one list of token ids, or text, one text", "input_ids")


def _limit(params: dict[str, Any]) -> int | None:
    if params.get("max_new_tokens") == 0:
        return 0
    return exchange.limit(params, "max_new_tokens")


def _stop_ids(value: Any) -> list[int]:
    ids = value or []
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise invalid("stop_token_ids: expected a list of token ids", "stop_token_ids")
    return ids


def write(answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, with the fields of SGLang's that there are."""
    ids = [token for token, _ in answer.sampled]
    meta = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": answer.finish}
        | ({"matched": answer.stop} if answer.stop else {}),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "cached_tokens": 0,
        "output_token_logprobs": [[log_prob, token, None] for token, log_prob in answer.sampled],
    }
    return {"text": answer.text, "output_ids": ids, "meta_info": meta}


def stream(answer: Answer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answer as one event."""
    yield write(answer, body)
