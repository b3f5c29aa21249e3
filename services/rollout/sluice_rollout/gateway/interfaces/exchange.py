"""Requests and answers in the form that all interfaces of the gateway share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sluice.data import messages as chat_messages
from sluice.data.messages import MessageError, arguments_text
from sluice.images.image import IMAGE_PART, IMAGE_PART_TYPES, SCHEME, Image, image_part
from sluice.images.reading import Base64, ImageError, RawImage, raw_image
from sluice.samples.sample import Messages
from sluice_rollout.gateway.interfaces.errors import invalid

# Settings that change the distribution from which tokens are drawn, with their neutral values.
_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "seed": None,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
}
_FREE_CHOICES = (None, "auto", "none")
_WITH_IMAGES = ("user", "tool")
# Images as a client has sent them, by the digest of their text, which messages refer to until the
# images are read (`SessionImages.admit`).
RawImages = dict[str, RawImage]


@dataclass(frozen=True, slots=True)
class AnswerToolCall:
    """A tool call in the model's answer."""

    id: str
    name: str
    arguments: str  # JSON as the model wrote it


@dataclass(frozen=True, slots=True)
class RawFormat:
    """The form of a turn's text for a program that keeps its tokens itself."""

    skip_special_tokens: bool = True
    keep_stop: bool = False  # keep the stop string at the end of the text
    stop_ids: list[int] = field(default_factory=list)  # token ids that also end the turn


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that a client asks for.

    Parameters
    ----------
    messages
        The history, in the form of `canonical`.
    prompt
        A text or token ids in place of messages (/v1/completions, /generate).
    tools
        Tools in the form that chat templates expect.
    max_tokens
        Most tokens of the answer.
    stop
        Stop strings.
    settings
        Sampling settings that the client asks for. The job's settings apply instead.
    calls
        True if the answer may contain tool calls.
    raw
        Form of the answer for a program that keeps its tokens itself, else None.
    raw_images
        Images in the request, by the digests that messages refer to.
    images
        Those that were read for this request, by their digests.

    """

    messages: Messages = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    calls: bool = True
    raw: RawFormat | None = None
    raw_images: RawImages = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The approximate number of characters."""
        texts = len(self.prompt or ()) + len(str(self.tools or ""))
        return texts + sum(
            _characters(message["content"]) + len(str(message.get("tool_calls", "")))
            for message in self.messages
        )


def _characters(content: str | list[dict[str, Any]]) -> int:
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(map(len, parts))


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's turn as an interface needs it."""

    text: str
    calls: list[AnswerToolCall]
    finish: str  # "stop", "length" or "tool_calls"
    prompt_tokens: int
    completion_tokens: int
    stop: str | None = None  # the stop string that ended the turn
    sampled: list[tuple[int, float]] = field(default_factory=list)  # (token id, log-prob)
    cached_tokens: int = 0  # of the prompt, that the engine had in its prefix cache

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, in the form of `canonical`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call_message(c.id, c.name, c.arguments) for c in self.calls]
        return message


def call_message(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Make a tool call in the form that a message holds."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def canonical(message: Any, name: str, images: RawImages) -> dict[str, Any]:
    """Reduce a message to what the model sees, so that messages can be compared.

    Parameters
    ----------
    message
        The message.
    name
        Its place in the request, such as `messages[3]`.
    images
        Gets the images of the message.

    Raises
    ------
    GatewayError
        If it is not a message.

    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid("messages: expected objects with a `role` and a `content`", "messages")
    kept: dict[str, Any] = {
        "role": "system" if message["role"] == "developer" else message["role"],
        "content": content_of(message.get("content"), f"{name}.content", images),
    }
    if not isinstance(kept["content"], str) and kept["role"] not in _WITH_IMAGES:
        raise invalid(
            f"{name}.content: images are read in messages of users and in results of tools, not in "
            f"those of role {kept['role']}",
            name,
        )
    kept |= {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)}
    if message.get("tool_calls"):
        try:
            kept["tool_calls"] = [
                call_message(
                    str(call.get("id")),
                    str(call["function"]["name"]),
                    arguments_text(call["function"]),
                )
                for call in message["tool_calls"]
            ]
        except (TypeError, KeyError, AttributeError) as error:
            raise invalid(
                "messages: a tool call is {id, type, function: {name, arguments}}", "messages"
            ) from error
    return kept


def text_of(content: Any) -> str:
    """Return the text of a message. Raises GatewayError if it contains anything else."""
    try:
        return chat_messages.text_of(content)
    except MessageError as error:
        raise invalid(f"messages: {error}", "messages") from error


def content_of(content: Any, name: str, images: RawImages) -> str | list[dict[str, Any]]:
    """Return the text of a content, or its parts if it has images.

    Parameters
    ----------
    content
        A text, or a list of parts.
    name
        Its place in the request, such as `messages[3].content`.
    images
        Gets the images of the content.

    Raises
    ------
    GatewayError
        If it contains anything else.

    """
    if isinstance(content, list):
        content = [with_reference(p, f"{name}[{i}]", images) for i, p in enumerate(content)]
    return parts_of(content)


def parts_of(content: Any) -> str | list[dict[str, Any]]:
    """Return the text of a content whose images are references, or its parts if it has some.

    Raises GatewayError if it contains anything else.
    """
    try:
        return chat_messages.content_of(content)
    except MessageError as error:
        raise invalid(f"messages: {error}", "messages") from error


def with_reference(part: Any, name: str, images: RawImages) -> Any:
    """Replace a part that is an image by a reference to it, and add the image to `images`.

    Any other part, and a reference such as those in the messages of a row, is returned as it is.
    Raises GatewayError if the image is in no form that is read.
    """
    if not isinstance(part, dict) or part.get("type") not in IMAGE_PART_TYPES:
        return part
    if str(part.get(IMAGE_PART)).startswith(SCHEME):
        return part
    raw = _raw_image(part, name)
    assert isinstance(raw.source, Base64)  # a data URL has no other form
    digest = hashlib.sha256(raw.source.text.encode()).hexdigest()
    images[digest] = raw
    return image_part(digest)


def _raw_image(part: dict[str, Any], name: str) -> RawImage:
    if part["type"] == IMAGE_PART and "source" in part:
        name, source = f"{name}.source", part["source"]
        data = source.get("data") if isinstance(source, dict) else None
        if not isinstance(data, str) or not data or source.get("type") != "base64":
            raise invalid(
                f"{name}: expected {{type: base64, media_type, data}}; images are not fetched from "
                "addresses or by the ids of files",
                name,
            )
        return RawImage(name, Base64(data))
    field = IMAGE_PART if part["type"] == IMAGE_PART else "image_url"
    name, url = f"{name}.{field}", part.get(field)
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise invalid(
            f"{name}: expected a data URL such as data:image/png;base64,...; images are not "
            "fetched from addresses or by the ids of files",
            name,
        )
    try:
        return raw_image(url, name)
    except ImageError as error:
        raise invalid(str(error), name) from error


def settings(body: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a request that would change the distribution of tokens."""
    requested = {
        name: body[name]
        for name, default in _DEFAULTS.items()
        if body.get(name) is not None and body[name] != default
    }
    # OpenAI's default temperature may differ from the job's, so it is not left out.
    requested |= {n: body[n] for n in ("temperature", "top_p") if body.get(n) is not None}
    if body.get("tool_choice") not in _FREE_CHOICES:
        requested["tool_choice"] = body["tool_choice"]
    return requested


def overridden_settings(requested: dict[str, Any], sampling: dict[str, Any]) -> Iterable[str]:
    """Return the names of requested settings that the job's sampling overrides."""
    return [n for n, value in requested.items() if n not in sampling or value != sampling[n]]


def is_function(function: Any) -> bool:
    """True if a chat template can render this description of a function."""
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters") or {}, dict)
    )
