"""Prompts as text and token ids, with the model's tokenizer and chat template."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sluice.data.messages import MessageError, normalised
from sluice.data.rows import MASKS
from sluice.model_files import gguf_problem
from sluice.runtime import error_summary
from sluice.runtime.pod_env import ConfigurationError

# Without any of these files, transformers silently creates an empty tokenizer.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


DEFAULT_CONTEXT = 32768
_MARK = "%sluice-turn%"


NO_TEMPLATE = (
    "the model has no chat template, which a prompt of chat messages (or applyChatTemplate) needs; "
    "put the model's chat_template.jinja into the directory of spec.model.path"
)


class PromptError(Exception):
    """A prompt cannot be encoded. The message says why."""


def context_length(model_dir: Path) -> int:
    """Return the context length in tokens that the model's config.json states.

    A multimodal model's is that of its language model.
    """
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        if gguf := gguf_problem(model_dir):
            raise ConfigurationError(f"spec.model.path: {gguf}") from error
        raise ConfigurationError(
            f"spec.model.path: {model_dir}/config.json cannot be read: {error}"
        ) from error
    stated = (config, config.get("text_config")) if isinstance(config, dict) else ()
    for part in stated:
        length = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(length, int) and length > 0:
            return length
    return DEFAULT_CONTEXT


def leave_torch_out() -> None:
    """Keep this process from importing torch, in processes that run no user code.

    transformers imports torch if it is installed, also for a tokenizer, which does not need it.
    That costs hundreds of megabytes and some seconds per process.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # how Python marks a module as absent
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(advice)
    os.environ[advice] = "1"  # suppresses its warning that torch is missing
    import transformers  # noqa: F401

    if before is None:
        del os.environ[advice]
    else:
        os.environ[advice] = before


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a Hugging Face checkpoint directory, without contacting the hub."""
    from transformers import AutoTokenizer

    if not any(next(directory.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise ConfigurationError(gguf_problem(directory) or f"{directory} has no tokenizer")
    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise ConfigurationError(
            f"{directory} has no usable tokenizer: {type(error).__name__}: {error}"
        ) from error


def has_template(directory: Path) -> bool:
    """True if a checkpoint directory holds a chat template. Reads files only."""
    if (directory / "chat_template.jinja").exists():
        return True
    if (directory / "additional_chat_templates/default.jinja").exists():
        return True
    return any(
        bool(_json(directory / name).get("chat_template"))
        for name in ("tokenizer_config.json", "chat_template.json")
    )


def stop_tokens(tokenizer: Any, directory: Path) -> list[str]:
    """Return texts of the tokens at which an engine ends a turn.

    They are the tokenizer's end token, and those of the model's configuration (GLM-4.5 ends a turn
    with the token of the next role).
    """
    config = _json(directory / "config.json")
    sources = (_json(directory / "generation_config.json"), config, config.get("text_config") or {})
    ids = [number for source in sources for number in _numbers(source.get("eos_token_id"))]
    texts = [tokenizer.eos_token, *tokenizer.convert_ids_to_tokens(list(dict.fromkeys(ids)))]
    return list(dict.fromkeys(text for text in texts if text))


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int)]


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if the file has no object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def render(
    tokenizer: Any,
    prompt: str | list[dict[str, Any]],
    *,
    chat: bool,
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
    opened: bool = True,
) -> str:
    """Render a prompt as the text that the model sees.

    Parameters
    ----------
    tokenizer
        Tokenizer of the model, with its chat template.
    prompt
        A text, or chat messages.
    chat
        Put a text through the template as well, as one user message. Messages always go through
        it.
    tools
        Definitions of tools that the template describes to the model.
    arguments
        Further variables of the template.
    opened
        Let the template also begin the answer.

    Raises
    ------
    PromptError
        If the template refuses the messages, or there is no template.

    """
    if isinstance(prompt, str):
        if not chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    with _refusals(tokenizer):
        text: str = tokenizer.apply_chat_template(
            list(_shown(prompt)),
            tools=tools,
            add_generation_prompt=opened,
            tokenize=False,
            **(arguments or {}),
        )
    return text


def render_marked(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation with a template that marks the assistant's text (`{% generation %}`).

    Returns
    -------
    The text, and the marked parts as [start, end) in characters.

    Raises
    ------
    PromptError
        If the template refuses the messages.

    """
    from transformers.utils.chat_template_utils import render_jinja_template

    with _refusals(tokenizer):
        [text], [marks] = render_jinja_template(
            conversations=[list(_shown(messages))],
            tools=tools,
            chat_template=tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **(arguments or {})},
        )
    return text, [(start, end) for start, end in marks]


@contextmanager
def _refusals(tokenizer: Any) -> Iterator[None]:
    """Turn any error of a template, which is a program, into a PromptError."""
    from jinja2 import TemplateError

    try:
        yield
    except MessageError as error:
        raise PromptError(f"messages: {error}") from error
    except Exception as error:
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(NO_TEMPLATE) from error
        reason = (
            f"{error}"
            if isinstance(error, TemplateError)
            else error_summary.type_and_message(error)
        )
        raise PromptError(f"the chat template refuses the prompt: {reason}") from error


def _shown(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages as templates get them, without loss masks."""
    for message in messages:
        yield normalised({key: value for key, value in message.items() if key not in MASKS})


def encode(
    tokenizer: Any,
    prompt: str | list[dict[str, Any]],
    *,
    chat: bool,
    tools: list[dict[str, Any]] | None = None,
    arguments: dict[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a prompt.

    A template writes special tokens itself; a plain text gets those of the tokenizer.
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
    """Return the tokens that the chat template writes between two turns of the model.

    They are taken from a conversation with a marker as the model's turn, so that the model's text
    is never rendered again (templates drop reasoning and trim texts).

    Parameters
    ----------
    tokenizer
        Tokenizer of the model.
    messages
        Messages between the two turns.
    last_token
        Last token that the model generated. If it already ends the turn, the end is not
        repeated.
    arguments
        Variables of the chat template.

    Raises
    ------
    PromptError
        If the template refuses the messages.

    """
    start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    text = render(tokenizer, [*start, *messages], chat=True, arguments=arguments)
    ids: list[int] = tokenizer.encode(
        text[text.index(_MARK) + len(_MARK) :], add_special_tokens=False
    )
    return ids[1:] if ids and ids[0] == last_token else ids
