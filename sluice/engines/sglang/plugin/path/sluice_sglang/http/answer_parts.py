"""An answer by parts: new tokens with their log-probs and versions as they come, then all of it.

SGLang's own stream repeats all earlier log-probs in each event, so a long answer costs the square
of its length.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from ..weights import versions
from .request_batching import SendPart

# Fields of `meta_info` that have an entry for each sampled token.
_TOKEN_FIELDS = ("output_token_logprobs", versions.KEY)
_SPANS = "weight_versions"
# Aborts that SGLang raises as errors, unless the answer is a stream.
_REFUSALS = (400, 500, 503)


async def last_output(
    outputs: AsyncGenerator[dict[str, Any], None],
    send_part: SendPart,
    has_left: Callable[[], Awaitable[bool]],
) -> dict[str, Any]:
    """Send the parts of a streamed answer, and return SGLang's last output, the whole answer.

    An output that does not tell which weights sampled its tokens makes no part. Raises
    ConnectionError if the client has left.
    """
    output: dict[str, Any] = {}
    sent = 0
    try:
        async for output in outputs:
            meta = output["meta_info"]
            if meta["finish_reason"] is None:
                if await has_left():
                    raise ConnectionError("the client has left")
                if _SPANS in meta or versions.KEY in meta:
                    send_part(json.dumps(part(meta, sent)).encode())
                    sent = meta["completion_tokens"]
    finally:
        await outputs.aclose()
    return output


def part(meta: dict[str, Any], start: int) -> dict[str, Any]:
    """Return the tokens of an unfinished output from `start` on, in the form of an answer.

    The lists may have tokens that came after the output: SGLang goes on filling them.
    """
    end = meta["completion_tokens"]
    fields = {name: meta[name][start:end] for name in _TOKEN_FIELDS if name in meta}
    if _SPANS in meta:
        fields[_SPANS] = [
            span | {"start": max(span["start"] - start, 0), "end": span["end"] - start}
            for span in meta[_SPANS]
            if span["end"] > start
        ]
    return {
        "meta_info": {"finish_reason": {"type": ""}, "weight_version": meta["weight_version"]}
        | fields
    }


def refusal(output: dict[str, Any]) -> tuple[int, str] | None:
    """Return status and message if the scheduler has refused the request, else None."""
    reason = output["meta_info"]["finish_reason"]
    if reason["type"] != "abort" or reason.get("status_code") not in _REFUSALS:
        return None
    return int(reason["status_code"]), str(reason.get("message"))
