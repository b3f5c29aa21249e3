"""Rows with given answers as other trainers write them, in the form that `answers` reads.

- LLaMA-Factory, LLaVA: `conversations`, messages with `from` and `value` (ShareGPT's form).
- TRL: `prompt` and `completion`, both texts or both messages.
- TRL: images without places in the messages; they stand before the first text of the user.
"""

from __future__ import annotations

from typing import Any

from sluice.api.groups.data import PromptSource
from sluice.data.files import Row
from sluice.data.row_images import PLACEHOLDER
from sluice.data.rows import MASKS, RowError
from sluice.images.image import IMAGE_PART, IMAGE_PART_TYPES

COMPLETION = "completion"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}


def usual_form(row: Row, key: str, source: PromptSource) -> Row:
    """Return a row whose prompt, in column `key`, has messages of role and content.

    The answer is in them, or in the label. Raises RowError if a message has an unknown speaker.
    """
    changed = {**row, key: _messages(row[key], key)}
    if "label" not in row and source.label_key in (None, COMPLETION):
        changed = _completed(changed, key)
    if row.get(source.images_key) and isinstance(changed[key], list):
        changed[key] = _with_places(changed[key], row[source.images_key])
    return changed


def _messages(prompt: Any, key: str) -> Any:
    """Return ShareGPT's messages as those of role and content; any other prompt as it is."""
    if not (isinstance(prompt, list) and prompt and all(map(_is_share_gpt, prompt))):
        return prompt
    messages = []
    for position, message in enumerate(prompt):
        speaker = message["from"]
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise RowError(
                f"{key}[{position}].from: expected one of {', '.join(_ROLES)}, found {speaker!r}; "
                "write other messages with role and content"
            )
        masks = {name: message[name] for name in MASKS if name in message}
        messages.append({"role": _ROLES[speaker], "content": message["value"], **masks})
    return messages


def _is_share_gpt(message: Any) -> bool:
    return isinstance(message, dict) and {"from", "value"} <= message.keys()


def _completed(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a row of TRL with its completion as the label, or behind the prompt's messages."""
    completion, prompt = row.get(COMPLETION), row[key]
    if isinstance(completion, str):
        return row | {"label": completion}
    if not (isinstance(completion, list) and isinstance(prompt, list)):
        return row
    # What the prompt has of the assistant is given, not trained.
    given = [message | {MASKS[0]: 0} if _is_answer(message) else message for message in prompt]
    return row | {key: [*given, *completion]}


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _with_places(messages: list[Any], images: Any) -> list[Any]:
    """Return messages with a place for each image, if they have none at all."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    users = [at for at, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "user"]
    if any(map(_has_place, contents)) or not users:
        return messages
    count = len(images) if isinstance(images, list) else 1
    first = messages[users[0]]
    content = first.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    places = [{"type": IMAGE_PART}] * count
    return [
        *messages[: users[0]],
        first | {"content": [*places, *parts]},
        *messages[users[0] + 1 :],
    ]


def _has_place(content: Any) -> bool:
    if isinstance(content, str):
        return PLACEHOLDER in content
    parts = content if isinstance(content, list) else []
    return any(
        isinstance(part, dict)
        and (
            str(part.get("type")) in IMAGE_PART_TYPES or PLACEHOLDER in str(part.get("text") or "")
        )
        for part in parts
    )
