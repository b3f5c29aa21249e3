"""The engine's context: tokens of it that a prompt may have, beside the longest response to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.data import chat
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Purpose

SHORTEST_PROMPT = 1


@dataclass(frozen=True, slots=True)
class Context:
    """tokens: of prompt and response together. origin: what says so."""

    tokens: int
    origin: str


def of_model(spec: RLJobSpec, directory: Path) -> Context:
    """The context of the model's config.json, or the job's, where it gives the engine
    another one.
    """
    for name, value in spec.rollout.engine_args.items():
        if _plain(name) == "contextlength" and isinstance(value, int):
            return Context(value, "rollout.engineArgs")
    return Context(chat.context_length(directory), "config.json of the model")


def check(spec: RLJobSpec, context: Context) -> None:
    """Raise ConfigurationError where the longest responses leave no room for any prompt."""
    for field, tokens in response_lengths(spec).items():
        if tokens + SHORTEST_PROMPT > context.tokens:
            raise ConfigurationError(
                f"{field}: {tokens} tokens and a prompt do not fit into the context of "
                f"{context.tokens} tokens "
                f"({context.origin}): expected at most {context.tokens - SHORTEST_PROMPT}"
            )


def response_lengths(spec: RLJobSpec) -> dict[str, int]:
    """Tokens of the longest responses, by the field that says so."""
    lengths = {"spec.rollout.sampling.maxResponseTokens": spec.rollout.sampling.max_response_tokens}
    if spec.evaluation is None:
        return lengths
    if spec.evaluation.sampling.max_response_tokens:
        lengths["spec.evaluation.sampling.maxResponseTokens"] = (
            spec.evaluation.sampling.max_response_tokens
        )
    for position, one in enumerate(spec.evaluation.datasets):
        if one.sampling and one.sampling.max_response_tokens:
            field = f"spec.evaluation.datasets[{position}].sampling.maxResponseTokens"
            lengths[field] = one.sampling.max_response_tokens
    return lengths


def longest_prompt(spec: RLJobSpec, context: Context, prompt: Prompt) -> int:
    """Tokens that this prompt may have."""
    room = context.tokens - _response(spec, prompt)
    return min(spec.data.max_prompt_tokens or room, room)


def _response(spec: RLJobSpec, prompt: Prompt) -> int:
    usual = spec.rollout.sampling.max_response_tokens
    if prompt.purpose is Purpose.TRAIN or spec.evaluation is None:
        return usual
    dataset = next(
        (one for one in spec.evaluation.datasets if one.source_name == prompt.dataset), None
    )
    of_dataset = dataset.sampling.max_response_tokens if dataset and dataset.sampling else None
    return of_dataset or spec.evaluation.sampling.max_response_tokens or usual


def _plain(name: str) -> str:
    """contextLength, context-length and context_length are one argument."""
    return re.sub("[^a-z]", "", name.lower())
