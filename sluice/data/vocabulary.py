"""Vocabularies: tokens of a model's tokenizer, of its embedding, and of its teacher."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.data.chat import PromptError, load_tokenizer
from sluice.runtime.pod_env import ConfigurationError

_SHOWN = 3


def embedding_size(model_dir: Path) -> int | None:
    """Return the `vocab_size` of a model's config.json; None if it is not stated."""
    try:
        config = json.loads((model_dir / "config.json").read_text())
        text = config.get("text_config") or config  # multimodal models nest it
        size = text.get("vocab_size")
    except (OSError, ValueError, AttributeError):  # loading the model reports the error
        return None
    return size if isinstance(size, int) else None


def tokenizer_size(tokenizer: Any) -> int:
    """Return the highest token id plus one; a tokenizer may leave ids out."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def surplus(tokens: int, embedding: int | None) -> str:
    """Return a warning if the tokenizer has more tokens than the embedding; empty otherwise.

    Such a model is valid: the text model of Gemma 3 has one extra token for pictures. Only a text
    with such a token is unusable.
    """
    if embedding is None or tokens <= embedding:
        return ""
    return (
        f"the tokenizer has {tokens} tokens, the model's embedding {embedding}: rows with a token "
        f"id of {embedding} or more are refused"
    )


def check_ids(tokenizer: Any, ids: Sequence[int], embedding: int | None) -> None:
    """Raise PromptError if a token id is beyond the embedding."""
    if embedding is None or not ids or max(ids) < embedding:
        return
    position = next(i for i, token in enumerate(ids) if token >= embedding)
    raise PromptError(
        f"token {position} is {tokenizer.decode([ids[position]])!r}, id {ids[position]}, and the "
        f"model's embedding has {embedding} tokens (vocab_size of its config.json)"
    )


def check_teacher(student: Path, teacher: Path, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigurationError unless every token of the student is the same token of the teacher.

    Log-probs of tokens can be compared only then. The teacher may have more tokens, because the
    student never writes them.

    Parameters
    ----------
    student, teacher
        Hugging Face checkpoint directories.
    trust_remote_code
        Allow code of the checkpoint to load the tokenizer.

    """
    ours, theirs = (
        load_tokenizer(directory, trust_remote_code=trust_remote_code).get_vocab()
        for directory in (student, teacher)
    )
    if problem := difference(ours, theirs):
        raise ConfigurationError(
            f"the tokenizer of {teacher} is not that of the student, {student}: {problem}"
        )


def difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """Describe tokens of the student whose ids differ in the teacher; empty if all agree."""
    others = sorted(
        (number, token) for token, number in student.items() if teacher.get(token) != number
    )
    shown = [
        f"{token!r} is {number} here and {teacher.get(token, 'unknown')} there"
        for number, token in others[:_SHOWN]
    ]
    return (
        f"{len(others)} of {len(student)} tokens differ, such as {', '.join(shown)}"
        if others
        else ""
    )
