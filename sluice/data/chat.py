"""Prompt -> text -> token ids, with the model's own tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.data.rows import MASKS
from sluice.environment import ConfigurationError

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
"""Without any of them transformers makes an empty tokenizer, and says nothing."""


class PromptError(Exception):
    """A prompt that cannot be encoded. The message says why."""


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hugging Face checkpoint directory, without asking the hub."""
    from transformers import AutoTokenizer

    if not any(next(directory.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise ConfigurationError(f"{directory} has no tokenizer")
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{directory} has no usable tokenizer: {error}") from error


def render(
    tokenizer: Any,
    prompt: str | list[dict[str, Any]],
    *,
    chat: bool,
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
) -> str:
    """The prompt as the text that the model sees. Raises PromptError where the template refuses the messages.

    chat: also a text goes through the template, as one user message; messages always do. arguments: further variables
    of the template. What messages say about losses is not for the template, and is left out.
    """
    from jinja2 import TemplateError

    if isinstance(prompt, str):
        if not chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    messages = [{key: value for key, value in message.items() if key not in MASKS} for message in prompt]
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **(arguments or {})
        )
    except (TemplateError, TypeError, ValueError) as error:  # templates raise what Python does, too
        raise PromptError(f"the chat template refuses the prompt: {error}") from error
    return text


def encode(
    tokenizer: Any,
    prompt: str | list[dict[str, Any]],
    *,
    chat: bool,
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt. A template writes special tokens itself; a plain text gets the tokenizer's own."""
    text = render(tokenizer, prompt, chat=chat, tools=tools, arguments=arguments)
    rendered = chat or not isinstance(prompt, str)
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=not rendered)]
