"""Supervised fine-tuning rows: encode given answers, and mask the tokens that are trained.

A row is a conversation, whose assistant messages are trained; a prompt with the answer as its
label; or token ids with a mask.

Only the chat template knows which text of a conversation is the assistant's. A template with `{%
generation %}` marks it. With any other template, parts of the conversation are rendered (slime's
`MultiTurnLossMaskGenerator` and verl's `MultiTurnSFTDataset` render single messages). An answer
begins at the end of the preceding messages, rendered with the answer opened, and ends at the end of
the messages up to it. Both renderings must be prefixes of the whole text. Otherwise the row is
refused, because a model must never be trained on a text that it would not see. The trained tokens
are those that the model has to generate: the answer and the token that ends its turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sluice.api.groups.data import ImageLimits, PromptSource
from sluice.data import chat
from sluice.data.answer_forms import usual_form
from sluice.data.chat import PromptError
from sluice.data.files import Row
from sluice.data.messages import normalised, shown
from sluice.data.rows import (
    MASKS,
    PROMPT_KEYS,
    PromptRow,
    RowError,
    missing,
    parse_row,
    prompt_key,
)

TOKEN_KEYS = ("tokens", "input_ids")
# Columns of the prompt if the source sets no promptKey; the first that a row has is used.
KEYS = (*TOKEN_KEYS, "messages", "conversations", *PROMPT_KEYS)
TOKEN_MASK = "loss_mask"  # noqa: S105 - a mask of tokens, not a password
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_IN = "\u2042stand-in\u2042"
# Fields of a message's reasoning: most templates', and gpt-oss's.
_THOUGHTS = ("reasoning_content", "thinking")
Interval = tuple[int, int]
# Token ids are stored as int32.
MAX_VOCABULARY = 2**31


@dataclass(frozen=True, slots=True)
class AnsweredRow(PromptRow):
    """A row with a given answer.

    Attributes
    ----------
    answer
        Text that is trained after the prompt; None if the prompt is a conversation with its
        answers.
    tokens, mask
        Token ids and loss mask of a row that is already encoded; its prompt is empty.

    """

    answer: str | None = None
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and a loss mask of the same length.

    Attributes
    ----------
    tokens
        Token ids.
    mask
        1 for trained tokens; always 0 for the first token.
    answer
        The trained text; empty if it is not known.

    """

    tokens: list[int]
    mask: list[int]
    answer: str = ""


def parse_answer(
    row: Row,
    source: PromptSource,
    vocabulary: int | None = None,
    images: ImageLimits | None = None,
) -> AnsweredRow:
    """Read a row with a given answer.

    Parameters
    ----------
    row
        The row.
    source
        Names of its columns.
    vocabulary
        Number of tokens of the model's embedding, which bounds token ids; None if unknown.
    images
        `data.images`; None refuses rows with images.

    Raises
    ------
    RowError
        If the row has no usable prompt or answer.

    """
    key = prompt_key(row, source, KEYS)
    if key is None:
        raise RowError(
            missing(row, [source.prompt_key] if source.prompt_key else KEYS, "promptKey")
        )
    if _numbers(row[key]):
        tokens, mask = _tokens(row, key, MAX_VOCABULARY if vocabulary is None else vocabulary)
        if row.get(source.images_key):
            raise RowError(
                f"{source.images_key}: a row of token ids cannot have images: give its "
                "conversation instead, so that the model's chat template writes their places"
            )
        return AnsweredRow("", None, {}, None, tokens=tokens, mask=mask)
    row = usual_form(row, key, source)
    plain = parse_row(row, source.model_copy(update={"prompt_key": key}), images)
    answers = (
        []
        if isinstance(plain.prompt, str)
        else [message for message in plain.prompt if _is_answer(message)]
    )
    answer = None if answers and answers[-1] is plain.prompt[-1] else plain.label
    if answer is None and not answers:
        raise RowError(
            f"{key}: no answer to learn from: no message is from the assistant, and there is "
            + missing(row, [source.label_key or "label"], "labelKey")
        )
    if answer is not None and not (isinstance(answer, str) and answer):
        raise RowError(
            f"{source.label_key or 'label'}: expected the answer as a text, found {shown(answer)}"
        )
    return AnsweredRow(
        plain.prompt, plain.label, plain.metadata, plain.tools, plain.images, answer=answer
    )


def _numbers(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(number, int) for number in value)
    )


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
            f"{TOKEN_MASK}: expected a list of 0 and 1, as long as {key} ({len(tokens)}), that "
            f"says which tokens are trained; found {shown(mask)}"
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
    stops: Sequence[str] = (),
) -> Encoded:
    """Encode a row, and mask what the model must generate: its answers, each with its end of turn.

    Parameters
    ----------
    tokenizer
        Tokenizer of the model.
    row
        A conversation, a prompt with its answer, or tokens with their mask.
    chat_text
        Put a text through the chat template as well, as one user message.
    arguments
        Variables of the chat template.
    stops
        Texts of the tokens at which an engine ends a turn (`chat.stop_tokens`), in addition to
        the tokenizer's end token.

    Raises
    ------
    PromptError
        If the answers, or the tokens that end them, cannot be located.

    """
    if row.tokens:
        return Encoded(row.tokens, [0, *row.mask[1:]])
    ends = _Ends.collect(tokenizer, stops, arguments)
    if row.answer is not None:
        return _prompt_and_answer(tokenizer, row, row.answer, ends, chat_text, arguments)
    assert not isinstance(row.prompt, str)
    spans_of = _marked if _MARKED.search(_template(tokenizer, row.tools)) else _rendered
    text, spans = spans_of(tokenizer, row.prompt, row.tools, arguments)
    return _by_spans(tokenizer, *ends.close(text, spans))


def check_places(tokenizer: Any, encoded: Encoded, placeholder: int, images: int) -> None:
    """Check that a row has a placeholder for each of its images, and that none is trained.

    Raises PromptError.
    """
    places = [at for at, token in enumerate(encoded.tokens) if token == placeholder]
    if len(places) != images:
        name = tokenizer.convert_ids_to_tokens(placeholder)
        raise PromptError(
            f"the row has {len(places)} placeholders {name} for {images} images: expected a chat "
            "template that writes one for each image, and none in texts"
        )
    if any(encoded.mask[at] for at in places):
        raise PromptError(
            "a trained answer has an image, which the model cannot generate: give its message "
            "loss_mask: 0"
        )


def _template(tokenizer: Any, tools: list[dict[str, Any]] | None) -> str:
    try:
        template: str = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise PromptError(chat.NO_TEMPLATE) from error
    return template


@dataclass(frozen=True, slots=True)
class _Ends:
    """Tokens that end a turn of the model.

    Attributes
    ----------
    token
        The tokenizer's end token, if it has one.
    pattern
        Regular expression that matches any end.
    special
        All special tokens.

    """

    token: str | None
    pattern: str
    special: tuple[str, ...]

    @classmethod
    def collect(
        cls, tokenizer: Any, stops: Sequence[str], arguments: dict[str, Any] | None
    ) -> _Ends:
        """Collect the ends at which engines stop, and the end that the chat template writes.

        A base model that learns to chat has the latter from its template alone.
        """
        special = _special(tokenizer)
        token = tokenizer.eos_token
        written = re.match(rf"\s*({_any_of(special)})", _behind_an_answer(tokenizer, arguments))
        ends = {*stops, *([token] if token else []), *([written[1]] if written else [])}
        return cls(token, _any_of(ends), special)

    def close(self, text: str, spans: Sequence[Interval]) -> tuple[str, list[Interval]]:
        """Return the text and its answers, each up to the end of its turn.

        Text that a template writes after an end, such as the line break after Qwen's, is not the
        model's. Some templates write no end. Then the token of the next role is the end if
        generation stops there (GLM-4.5), and the last answer gets the end token. If a template ends
        an earlier answer differently from the model (gpt-oss), that answer is trained without its
        end.

        Raises PromptError if no answer gets an end: the model would never learn to stop.
        """
        closed, ended = [], False
        for start, end in spans:
            if (stop := self._stop(text, start, end)) is not None:
                end = stop
            else:
                bare = start + len(self._bare(text[start:end]))
                if self.token and not text[end:].strip():
                    text = f"{text[:bare]}{self.token}"
                    stop = end = len(text)
                else:
                    end = bare
            closed.append((start, end))
            ended = ended or stop is not None
        if closed and not ended:
            raise PromptError(
                "the chat template writes no token after an answer at which generation would end, "
                "so the model would not learn to stop; end the row with the answer that is trained"
            )
        return text, closed

    def _stop(self, text: str, start: int, end: int) -> int | None:
        """Return the position after the end of an answer; None if the template writes no end."""
        if inside := re.search(rf"({self.pattern})\s*\Z", text[start:end]):
            return start + inside.end(1)
        behind = re.compile(rf"\s*({self.pattern})").match(text, end)
        return behind.end(1) if behind else None

    def _bare(self, text: str) -> str:
        """Return the text without trailing special tokens and white space."""
        while (shorter := text.rstrip()).endswith(self.special):
            last = next(token for token in self.special if shorter.endswith(token))
            text = shorter.removesuffix(last)
        return shorter


def _special(tokenizer: Any) -> tuple[str, ...]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple({*tokenizer.all_special_tokens, *added})


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches any of the texts; it never matches without texts."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"


def _behind_an_answer(tokenizer: Any, arguments: dict[str, Any] | None) -> str:
    """Return the text that the chat template writes after the last answer of a conversation."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}]
    try:
        text = chat.render(tokenizer, messages, chat=True, arguments=arguments, opened=False)
    except PromptError:  # no template, or it requires other messages
        return ""
    return text.partition(_STAND_IN)[2]


def _prompt_and_answer(
    tokenizer: Any,
    row: AnsweredRow,
    answer: str,
    ends: _Ends,
    chat_text: bool,
    arguments: dict[str, Any] | None,
) -> Encoded:
    """Encode the prompt as the engine would see it, then the answer with the token that ends it."""
    if ends.token is None:
        raise PromptError("the tokenizer has no end token (eos_token), which an answer ends with")
    prompt = chat.encode(
        tokenizer, row.prompt, chat=chat_text, tools=row.tools, arguments=arguments
    )
    if not re.search(rf"(?:{ends.pattern})\Z", answer):
        answer += ends.token
    trained = _ids(tokenizer, answer)
    return Encoded([*prompt, *trained], [0] * len(prompt) + [1] * len(trained), answer)


def _trained(message: dict[str, Any]) -> bool:
    return _is_answer(message) and all(message.get(key, 1) == 1 for key in MASKS)


def _marked(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, Any] | None,
) -> tuple[str, list[Interval]]:
    """Return the text and its answers, with a template that marks what the assistant writes."""
    text, marks = chat.render_marked(tokenizer, messages, tools=tools, arguments=arguments)
    answers = [message for message in messages if _is_answer(message)]
    if all(map(_trained, answers)):
        return text, marks
    if len(marks) != len(answers):
        raise PromptError(
            f"the chat template marks {len(marks)} texts for {len(answers)} messages of the "
            "assistant, so the masks of messages cannot be matched to texts"
        )
    kept = zip(marks, answers, strict=True)
    return text, [mark for mark, message in kept if _trained(message)]


def _rendered(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, Any] | None,
) -> tuple[str, list[Interval]]:
    """Return the text and its answers, by rendering parts of the conversation."""

    def render(part: Sequence[dict[str, Any]], *, opened: bool = False) -> str:
        return chat.render(
            tokenizer, list(part), chat=True, tools=tools, arguments=arguments, opened=opened
        )

    text = render(messages)
    trained = [i for i, message in enumerate(messages) if _trained(message)]
    return text, [_span(render, text, messages, i) for i in trained]


def _span(
    render: Callable[..., str], text: str, messages: list[dict[str, Any]], position: int
) -> Interval:
    """Return the characters [start, end) of a message in the text of all messages."""
    where = f"messages[{position}]"
    if position == 0:
        raise PromptError(
            f"{where}: this answer has no message before it; a mask of 0 leaves it untrained"
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
            f"{where}: the end of this answer in the chat template's text cannot be found; give "
            "token ids"
        )
    opening = before.removeprefix(render(messages[:position]))
    if _left_out(messages[position], opening, text[len(before) : end]):
        raise PromptError(
            f"{where}: the chat template leaves out part of this answer, as templates do with "
            "earlier reasoning. Give the message a mask of 0 and train its reasoning in a row that "
            "ends with it, or give token ids"
        )
    return len(before), end


def _end(
    render: Callable[..., str], text: str, messages: list[dict[str, Any]], position: int
) -> int | None:
    """Return the end of a message in the text; None if it cannot be located.

    Some templates write an answer differently once other messages follow (Qwen3 without its
    reasoning, gpt-oss with another end). Then a stand-in replaces the message: the message ends
    before what the template writes after the stand-in.
    """
    through = render(messages[: position + 1])
    if text.startswith(through):
        return len(through)
    stand_in = {"role": "assistant", "content": _STAND_IN}
    try:
        whole = render([*messages[:position], stand_in, *messages[position + 1 :]])
    except PromptError:  # for example a tool's result without its call
        return None
    behind = whole.rpartition(_STAND_IN)[2]
    return len(text) - len(behind) if text.endswith(behind) else None


def _left_out(message: dict[str, Any], opening: str, span: str) -> bool:
    """Return whether part of what the message says is missing from its text, ignoring white space.

    `opening` is what the template begins every answer with. If it opens `<think>` (Qwen3.5), the
    message's own tag is expected there.
    """
    message = normalised(message)
    called = [call["function"]["name"] for call in message.get("tool_calls", [])]
    thoughts = [message.get(key) for key in _THOUGHTS]
    said = [
        "".join(part.split())
        for part in (message["content"], *thoughts, *called)
        if isinstance(part, str)
    ]
    opening, written = "".join(opening.split()), "".join(span.split())
    return not all(part in written or _continues(part, opening, written) for part in said)


def _continues(part: str, opening: str, written: str) -> bool:
    """Return whether the opening ends with a prefix of `part` and the text starts with its rest."""
    return any(
        opening.endswith(part[:cut]) and written.startswith(part[cut:])
        for cut in range(1, min(len(part), len(opening) + 1))
    )


def cut(encoded: Encoded, longest: int, side: Literal["left", "right"]) -> Encoded:
    """Truncate a row to `longest` tokens, on the left or right (verl's `data.truncation`).

    The text of the answer is dropped.
    """
    if len(encoded.tokens) <= longest:
        return encoded
    kept = slice(-longest, None) if side == "left" else slice(longest)
    return Encoded(encoded.tokens[kept], [0, *encoded.mask[kept][1:]])


def _by_spans(tokenizer: Any, text: str, spans: Sequence[Interval]) -> Encoded:
    """Encode the text with these spans trained.

    Each span is encoded separately, as when the model generates it.
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
