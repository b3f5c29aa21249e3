"""Prompt -> text -> token ids, with the model's own tokenizer and chat template."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from sluice.data.rows import MASKS
from sluice.environment import ConfigurationError

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
"""Without any of them transformers makes an empty tokenizer, and says nothing."""


DEFAULT_CONTEXT = 32768
_MARK = "%sluice-turn%"


class PromptError(Exception):
    """A prompt that cannot be encoded. The message says why."""


def context_length(model_dir: Path) -> int:
    """Tokens that the model was made for, as its config.json says."""
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"spec.model.path: {model_dir}/config.json cannot be read: {error}"
        ) from error
    return int(config.get("max_position_embeddings", DEFAULT_CONTEXT))


def leave_torch_out() -> None:
    """Keep this process from importing torch, in which no user's code may run.

    transformers imports torch wherever it is installed, for a tokenizer as well, which has no use
    for it: hundreds of megabytes and some seconds of each process.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as Python marks what is absent
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(advice)
    os.environ[advice] = "1"  # or it tells each process that it found no torch
    import transformers  # noqa: F401

    if before is None:
        del os.environ[advice]
    else:
        os.environ[advice] = before


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hugging Face checkpoint directory, without asking the hub."""
    from transformers import AutoTokenizer

    if not any(next(directory.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise ConfigurationError(f"{directory} has no tokenizer")
    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever transformers and tokenizers stumble over
        raise ConfigurationError(
            f"{directory} has no usable tokenizer: {type(error).__name__}: {error}"
        ) from error


def render(
    tokenizer: Any,
    prompt: str | list[dict[str, Any]],
    *,
    chat: bool,
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
    opened: bool = True,
) -> str:
    """The prompt as the text that the model sees.

    Raises PromptError where the template refuses the messages.

    chat: also a text goes through the template, as one user message; messages always do. arguments:
    further variables of the template. opened: the template also begins the answer. What messages
    say about losses is not for the template, and is left out.
    """
    from jinja2 import TemplateError

    if isinstance(prompt, str):
        if not chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    messages = without_masks(prompt)
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=opened, tokenize=False, **(arguments or {})
        )
    except (TemplateError, TypeError, ValueError) as error:  # templates raise what Python does, too
        raise PromptError(f"the chat template refuses the prompt: {error}") from error
    return text


def without_masks(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the template is shown them."""
    return [
        {key: value for key, value in message.items() if key not in MASKS} for message in messages
    ]


def encode(
    tokenizer: Any,
    prompt: str | list[dict[str, Any]],
    *,
    chat: bool,
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt. A template writes special tokens itself; a plain text gets the
    tokenizer's own.
    """
    text = render(tokenizer, prompt, chat=chat, tools=tools, arguments=arguments)
    rendered = chat or not isinstance(prompt, str)
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=not rendered)]


def between_turns(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    last_token: int,
    arguments: dict[str, Any] | None = None,
) -> list[int]:
    """Tokens that the chat template writes between two turns of the model,
    where `messages` come between.

    Taken from a conversation of marks, so that what the model said is never rendered again
    (templates drop thoughts and trim texts). last_token: the last that the model made; where that
    is the end of its turn it is not written twice.
    """
    start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    text: str = tokenizer.apply_chat_template(
        [*start, *messages], add_generation_prompt=True, tokenize=False, **(arguments or {})
    )
    ids: list[int] = tokenizer.encode(
        text[text.index(_MARK) + len(_MARK) :], add_special_tokens=False
    )
    return ids[1:] if ids and ids[0] == last_token else ids
