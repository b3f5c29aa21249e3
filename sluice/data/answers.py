"""Rows with given answers (supervised fine-tuning) -> token ids, and which of them are trained.

A row is one of three: a conversation, of which the assistant's messages are trained; a prompt and,
as its label, the answer; token ids with a mask of their own.

Which text of a conversation is the assistant's, only the chat template knows. One that marks it
(`{% generation %}`) says so itself. With any other it is found by rendering parts of the
conversation (slime's `MultiTurnLossMaskGenerator` and verl's `MultiTurnSFTDataset` render single
messages): an answer begins where the messages before it end once the template has opened an answer,
and ends where the messages up to it end. Both must be beginnings of the whole text, or the row is
refused: a model is never trained on a text that it would not see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sluice.api.data import PromptSource
from sluice.data import chat
from sluice.data.chat import PromptError
from sluice.data.files import Row
from sluice.data.rows import (
    MASKS,
    PROMPT_KEYS,
    PromptRow,
    RowError,
    missing,
    parse_row,
    prompt_key,
    shown,
)

TOKEN_KEYS = ("tokens", "input_ids")
KEYS = (*TOKEN_KEYS, "messages", *PROMPT_KEYS)
"""Columns of the prompt where the source names none; the first that a row has counts."""
TOKEN_MASK = "loss_mask"  # noqa: S105 - a mask of tokens, not a password
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_IN = "\u2042stand-in\u2042"
Interval = tuple[int, int]
MAX_VOCABULARY = 2**31
"""Token ids are int32."""


@dataclass(frozen=True, slots=True)
class AnsweredRow(PromptRow):
    """answer: what is trained behind the prompt; None: the prompt is a conversation that has its
    answers in it.

    tokens, mask: of a row that is encoded already; then the prompt is empty.
    """

    answer: str | None = None
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Encoded:
    """tokens, mask: equally long, 1: trained; the first token never is. answer: the trained text,
    where it is known.
    """

    tokens: list[int]
    mask: list[int]
    answer: str = ""


def parse_answer(row: Row, source: PromptSource, vocabulary: int | None = None) -> AnsweredRow:
    """Read a row with a given answer as the source says. Raises RowError.

    vocabulary: tokens of the model's embedding, which bound the ids of a row of tokens; None: not
    known.
    """
    key = prompt_key(row, source, KEYS)
    if key is None:
        raise RowError(
            missing(row, [source.prompt_key] if source.prompt_key else KEYS, "promptKey")
        )
    if _numbers(row[key]):
        tokens, mask = _tokens(row, key, MAX_VOCABULARY if vocabulary is None else vocabulary)
        return AnsweredRow("", None, {}, None, tokens=tokens, mask=mask)
    plain = parse_row(row, source.model_copy(update={"prompt_key": key}))
    answers = (
        []
        if isinstance(plain.prompt, str)
        else [message for message in plain.prompt if _is_answer(message)]
    )
    answer = None if answers and answers[-1] is plain.prompt[-1] else plain.label
    if answer is None and not answers:
        raise RowError(
            f"{key}: no answer to learn from: no message is the assistant's, and there is "
            + missing(row, [source.label_key or "label"], "labelKey")
        )
    if answer is not None and not (isinstance(answer, str) and answer):
        raise RowError(
            f"{source.label_key or 'label'}: expected the answer as a text, found {shown(answer)}"
        )
    return AnsweredRow(plain.prompt, plain.label, plain.metadata, plain.tools, answer=answer)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, int) for each in value)


def _tokens(row: Row, key: str, vocabulary: int) -> tuple[list[int], list[int]]:
    tokens: list[int] = row[key]
    mask: Any = row.get(TOKEN_MASK)
    if min(tokens) < 0:
        raise RowError(f"{key}: a token id is negative: {min(tokens)}")
    if (largest := max(tokens)) >= vocabulary:
        raise RowError(
            f"{key}[{tokens.index(largest)}]: token id {largest}, expected ids below {vocabulary}, "
            "the vocab_size of the model's config.json"
        )
    if not _numbers(mask) or len(mask) != len(tokens) or not set(mask) <= {0, 1}:
        raise RowError(
            f"{TOKEN_MASK}: expected a list of 0 and 1, as long as {key} ({len(tokens)}): which "
            f"tokens are trained; found {shown(mask)}"
        )
    return list(map(int, tokens)), list(map(int, mask))


def _is_answer(message: dict[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


def encode(
    tokenizer: Any,
    row: AnsweredRow,
    *,
    chat_text: bool = False,
    arguments: dict[str, Any] | None = None,
) -> Encoded:
    """The row's token ids and mask. Raises PromptError where that cannot be told.

    chat_text: also a text goes through the chat template, as one user message. arguments: variables
    of the template.
    """
    if row.tokens:
        return Encoded(row.tokens, [0, *row.mask[1:]])
    if row.answer is not None:
        return _prompt_and_answer(tokenizer, row, row.answer, chat_text, arguments)
    assert not isinstance(row.prompt, str)
    template = _template(tokenizer, row.tools)
    if _MARKED.search(template):
        return _marked(tokenizer, row.prompt, row.tools, arguments)

    def render(messages: Sequence[dict[str, Any]], *, opened: bool = False) -> str:
        return chat.render(
            tokenizer,
            list(messages),
            chat=True,
            tools=row.tools,
            arguments=arguments,
            opened=opened,
        )

    text = render(row.prompt)
    spans = [
        _span(render, text, row.prompt, i)
        for i, message in enumerate(row.prompt)
        if _trained(message)
    ]
    return _by_spans(tokenizer, text, spans)


def _template(tokenizer: Any, tools: list[dict[str, Any]] | None) -> str:
    try:
        template: str = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise PromptError(
            f"the tokenizer has no chat template, and the row is a conversation: {error}"
        ) from error
    return template


def _prompt_and_answer(
    tokenizer: Any, row: AnsweredRow, answer: str, chat_text: bool, arguments: dict[str, Any] | None
) -> Encoded:
    """The prompt as the engine would see it, the answer behind it, and the end token."""
    if tokenizer.eos_token_id is None:
        raise PromptError("the tokenizer has no end token (eos_token), which an answer ends with")
    prompt = chat.encode(
        tokenizer, row.prompt, chat=chat_text, tools=row.tools, arguments=arguments
    )
    trained = [*_ids(tokenizer, answer), int(tokenizer.eos_token_id)]
    return Encoded(
        [*prompt, *trained], [0] * len(prompt) + [1] * len(trained), answer + tokenizer.eos_token
    )


def _trained(message: dict[str, Any]) -> bool:
    return _is_answer(message) and all(message.get(key, 1) == 1 for key in MASKS)


def _marked(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, Any] | None,
) -> Encoded:
    """By a template that marks what the assistant writes."""
    from jinja2 import TemplateError

    try:
        encoding = tokenizer.apply_chat_template(
            chat.without_masks(messages),
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **(arguments or {}),
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise PromptError(f"the chat template refuses the conversation: {error}") from error
    tokens, mask = (
        [int(i) for i in encoding["input_ids"]],
        [int(i) for i in encoding["assistant_masks"]],
    )
    answers = [message for message in messages if _is_answer(message)]
    if not all(map(_trained, answers)):
        runs = _runs(mask)
        if len(runs) != len(answers):
            raise PromptError(
                f"the chat template marks {len(runs)} texts of {len(answers)} messages of the "
                "assistant's: which of them a message's mask is about cannot be told"
            )
        for (start, end), message in zip(runs, answers, strict=True):
            mask[start:end] = [int(_trained(message))] * (end - start)
    text = tokenizer.decode([token for token, trained in zip(tokens, mask, strict=True) if trained])
    return Encoded(tokens, [0, *mask[1:]], text)


def _runs(mask: list[int]) -> list[Interval]:
    """[start, end) of each run of ones."""
    edges = [
        i
        for i in range(len(mask) + 1)
        if (mask[i - 1] if i else 0) != (mask[i] if i < len(mask) else 0)
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _span(
    render: Callable[..., str], text: str, messages: list[dict[str, Any]], position: int
) -> Interval:
    """Where the message at `position` stands in the text of all messages:
    [start, end) in characters.
    """
    where = f"messages[{position}]"
    if position == 0:
        raise PromptError(
            f"{where}: nothing comes before this answer; a mask of 0 leaves it untrained"
        )
    before = render(messages[:position], opened=True)
    if not text.startswith(before):
        raise PromptError(
            f"{where}: the chat template writes what comes before this answer differently once the "
            "answer is there, so no text is both what is trained and what the model will see; see "
            "chatTemplateArgs, or give token ids"
        )
    end = _end(render, text, messages, position)
    if end is None or end < len(before):
        raise PromptError(
            f"{where}: where this answer ends in the chat template's text cannot be told; give "
            "token ids"
        )
    opening = before.removeprefix(render(messages[:position]))
    if _left_out(messages[position], opening, text[len(before) : end]):
        raise PromptError(
            f"{where}: the chat template leaves out part of this answer, as templates do with "
            "earlier reasoning. Give "
            "the message a mask of 0 and its reasoning a row that ends with it, or give token ids"
        )
    return len(before), end


def _end(
    render: Callable[..., str], text: str, messages: list[dict[str, Any]], position: int
) -> int | None:
    """Where the message at `position` ends in the text;
    None where the template does not let us see.

    Some templates write an answer differently once others follow (Qwen3: without its reasoning).
    Then a stand-in takes its place: what the template writes behind that is the message's end, and
    the rest of the conversation.
    """
    through = render(messages[: position + 1])
    if text.startswith(through):
        return len(through)
    before, stand_in, after = (
        messages[:position],
        {"role": "assistant", "content": _STAND_IN},
        messages[position + 1 :],
    )
    close = render([*before, stand_in]).rpartition(_STAND_IN)[2]
    behind = render([*before, stand_in, *after]).rpartition(_STAND_IN)[2]
    if not (text.endswith(behind) and behind.startswith(close)):
        return None
    return len(text) - len(behind) + len(close)


def _left_out(message: dict[str, Any], opening: str, span: str) -> bool:
    """True where part of what the message says is not in its text; white space does not count.

    opening: what the template begins every answer with. Where that is `<think>` (Qwen3.5), the
    message's own stands there.
    """
    content = message.get("content")
    parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    said = [
        "".join(part.split())
        for part in (*parts, message.get("reasoning_content"))
        if isinstance(part, str)
    ]
    opening, written = "".join(opening.split()), "".join(span.split())
    return not all(part in written or _continues(part, opening, written) for part in said)


def _continues(part: str, opening: str, written: str) -> bool:
    """True where a beginning of the part ends the opening, and its rest, some of it, comes next."""
    return any(
        opening.endswith(part[:cut]) and written.startswith(part[cut:])
        for cut in range(1, min(len(part), len(opening) + 1))
    )


def cut(encoded: Encoded, longest: int, side: Literal["left", "right"]) -> Encoded:
    """The row without its first (left) or last (right) tokens, as far as it is longer than
    `longest` (verl's `data.truncation`). Its text is not known any more.
    """
    if len(encoded.tokens) <= longest:
        return encoded
    kept = slice(-longest, None) if side == "left" else slice(longest)
    return Encoded(encoded.tokens[kept], [0, *encoded.mask[kept][1:]])


def _by_spans(tokenizer: Any, text: str, spans: Sequence[Interval]) -> Encoded:
    """The text with these parts trained. Each part is encoded by itself, as it is when the model
    writes it.
    """
    tokens: list[int] = []
    mask: list[int] = []
    at = 0
    for start, end in (*spans, (len(text), len(text))):
        for piece, trained in ((text[at:start], 0), (text[start:end], 1)):
            ids = _ids(tokenizer, piece)
            tokens += ids
            mask += [trained] * len(ids)
        at = end
    return Encoded(tokens, [0, *mask[1:]], "".join(text[start:end] for start, end in spans))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)] if text else []
