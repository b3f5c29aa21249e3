"""Prompt -> text -> token ids, with the model's own tokenizer and chat template."""

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

# Without any of them transformers makes an empty tokenizer, and says nothing.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


DEFAULT_CONTEXT = 32768
_MARK = "%sluice-turn%"


NO_TEMPLATE = (
    "the model has no chat template, which a prompt of chat messages (or applyChatTemplate) needs; "
    "put the model's chat_template.jinja into the directory of spec.model.path"
)


class PromptError(Exception):
    """A prompt that cannot be encoded. The message says why."""


def context_length(model_dir: Path) -> int:
    """Tokens that the model was made for, as its config.json says."""
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        if gguf := gguf_problem(model_dir):
            raise ConfigurationError(f"spec.model.path: {gguf}") from error
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
        raise ConfigurationError(gguf_problem(directory) or f"{directory} has no tokenizer")
    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever transformers and tokenizers stumble over
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
    """Texts of the tokens at which an engine ends a turn: the end token of the tokenizer, and those
    of the model's configuration (GLM-4.5 ends a turn with the token of the next role).
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
    """The object in a file; empty if there is none."""
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
    """The prompt as the text that the model sees.

    Parameters
    ----------
    tokenizer
        The model's, with its chat template.
    prompt
        A text, or chat messages.
    chat
        Put a text through the template as well, as one user message. Messages always go through it.
    tools
        Definitions of tools that the template describes to the model.
    arguments
        Further variables of the template.
    opened
        Let the template also begin the answer.

    Raises
    ------
    PromptError
        If the template refuses the messages, or there is none.

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
    """A conversation as text, and the parts of it, [start, end) in characters, that the template
    marks as the assistant's (`{% generation %}`). Raises PromptError.
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
    """Turn whatever a template raises into PromptError: it is a program, and fails as such."""
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
    """The messages as templates are shown them, without what rows say about losses."""
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
    is the end of its turn it is not written twice. Raises PromptError.
    """
    start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    text = render(tokenizer, [*start, *messages], chat=True, arguments=arguments)
    ids: list[int] = tokenizer.encode(
        text[text.index(_MARK) + len(_MARK) :], add_special_tokens=False
    )
    return ids[1:] if ids and ids[0] == last_token else ids
