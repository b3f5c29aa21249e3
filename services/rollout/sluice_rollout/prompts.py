"""Encodes prompts as their source asks for, and checks that they fit into the engine's context."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.api import EvaluationDataset, RLJobSpec
from sluice.data import chat
from sluice.data.chat import PromptError
from sluice.data.vocabulary import check_ids, embedding_size, surplus, tokenizer_size
from sluice.images.image import Image
from sluice.images.processor import ImageProcessor
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Purpose
from sluice.telemetry import logs

SHORTEST_PROMPT = 1


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens of prompt and response together that an engine can hold."""

    tokens: int
    # The setting or file that says so.
    origin: str


class PromptTooLongError(PromptError):
    """The prompt does not fit. The message says by how much."""


class PromptEncoder:
    """Encodes prompts as their source asks for: plain text, or through the chat template."""

    def __init__(self, spec: RLJobSpec, model_dir: Path) -> None:
        """Load the tokenizer. Raises ConfigurationError."""
        try:
            self.tokenizer: Any = chat.load_tokenizer(
                model_dir, trust_remote_code=spec.model.trust_remote_code
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"spec.model.path: {error}") from error
        # None: the job's model gets no images.
        self.image_processor = (
            None
            if spec.data.images is None
            else ImageProcessor(model_dir, trust_remote_code=spec.model.trust_remote_code)
        )
        self.media_tokens = _media_tokens(model_dir) if self.image_processor else frozenset[int]()
        self.embedding = embedding_size(model_dir)
        if warning := surplus(tokenizer_size(self.tokenizer), self.embedding):
            logs.get().warning(f"spec.model.path: {model_dir}: {warning}")
        evaluation = spec.evaluation.datasets if spec.evaluation else []
        self._sources = {source.source_name: source for source in [*spec.data.prompts, *evaluation]}
        self._spec = spec
        self.context = context_of_model(spec, model_dir)
        check_context(spec, self.context)

    def fit(self, tokens: int | None) -> None:
        """Use the engine's context; None if the engine was started with the model's.

        Raises ConfigurationError.
        """
        if tokens is not None:
            self.context = Context(tokens, "as the engine reports")
            check_context(self._spec, self.context)

    def encode(self, prompt: Prompt, images: Sequence[Image] = ()) -> list[int]:
        """Return the token ids of a prompt, with one placeholder for each image.

        Parameters
        ----------
        prompt
            The prompt.
        images
            Its images, in the order of `prompt.images`. Its length counts all of their tokens.

        Raises
        ------
        PromptTooLongError
            If the prompt does not fit.
        PromptError
            If the chat template refuses the prompt or writes another number of placeholders, or
            the model's embedding lacks one of its tokens.

        """
        source = self._sources.get(prompt.dataset)
        try:
            ids = chat.encode(
                self.tokenizer,
                prompt.prompt,
                chat=source.apply_chat_template if source else False,
                tools=prompt.tools,
                arguments=self.template_arguments(prompt.dataset),
            )
            check_ids(self.tokenizer, ids, self.embedding)
            self._check_placeholders(ids, prompt)
            length = len(ids) + self.image_tokens(images)
        except PromptError as error:
            raise PromptError(f"{prompt.dataset} row {prompt.row}: {error}") from error
        if length > (longest := longest_prompt(self._spec, self.context, prompt)):
            raise PromptTooLongError(
                f"{prompt.dataset} row {prompt.row}: the prompt has {length} tokens, at most "
                f"{longest} fit "
                "(data.maxPromptTokens, or the model's context less maxResponseTokens)"
            )
        return ids

    def image_tokens(self, images: Sequence[Image]) -> int:
        """Return the tokens that images add once each placeholder is as long as its image.

        Raises PromptError if the model's processor refuses one.
        """
        if self.image_processor is None or not images:
            return 0
        try:
            return self.image_processor.added([(image.width, image.height) for image in images])
        except ValueError as error:
            raise PromptError(str(error)) from error

    def _check_placeholders(self, ids: list[int], prompt: Prompt) -> None:
        """Raise PromptError unless the tokens have a placeholder for each image."""
        if self.image_processor is None:
            return
        placeholder, images = self.image_processor.placeholder, len(prompt.images)
        if images and isinstance(prompt.prompt, str):
            raise PromptError(
                f"a plain text has no places for its {images} images: write the prompt as chat "
                "messages"
            )
        if (count := ids.count(placeholder)) != images:
            name = self.tokenizer.convert_ids_to_tokens(placeholder)
            raise PromptError(
                f"the prompt has {count} placeholders {name} for {images} images: expected a chat "
                "template that writes one for each image, and none in texts"
            )

    def template_arguments(self, dataset: str) -> dict[str, Any] | None:
        """Return further variables of the chat template, as the source of a prompt sets them."""
        source = self._sources.get(dataset)
        return source.chat_template_args if source else None

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _media_tokens(directory: Path) -> frozenset[int]:
    """Return the tokens by which an engine finds images and videos in a model's prompts."""
    config = json.loads((directory / "config.json").read_text())
    names = ("image_token_id", "video_token_id", "vision_start_token_id")
    return frozenset(config[name] for name in names if config.get(name) is not None)


def context_of_model(spec: RLJobSpec, directory: Path) -> Context:
    """Return the context that the job gives the engine, or that of the model's config.json."""
    for name, value in spec.rollout.engine_args.items():
        if _plain(name) == "contextlength" and isinstance(value, int):
            return Context(value, "rollout.engineArgs")
    return Context(chat.context_length(directory), "config.json of the model")


def check_context(spec: RLJobSpec, context: Context) -> None:
    """Raise ConfigurationError if the longest responses leave no room for a prompt."""
    for field, tokens in response_lengths(spec).items():
        if tokens + SHORTEST_PROMPT > context.tokens:
            raise ConfigurationError(
                f"{field}: {tokens} tokens and a prompt do not fit into the context of "
                f"{context.tokens} tokens "
                f"({context.origin}): expected at most {context.tokens - SHORTEST_PROMPT}"
            )


def response_lengths(spec: RLJobSpec) -> dict[str, int]:
    """Return the tokens of the longest responses, by the field that sets them."""
    lengths = {"spec.rollout.sampling.maxResponseTokens": spec.rollout.sampling.max_response_tokens}
    if spec.evaluation is None:
        return lengths
    if spec.evaluation.sampling.max_response_tokens:
        lengths["spec.evaluation.sampling.maxResponseTokens"] = (
            spec.evaluation.sampling.max_response_tokens
        )
    for index, dataset in enumerate(spec.evaluation.datasets):
        if dataset.sampling and dataset.sampling.max_response_tokens:
            field = f"spec.evaluation.datasets[{index}].sampling.maxResponseTokens"
            lengths[field] = dataset.sampling.max_response_tokens
    return lengths


def longest_prompt(spec: RLJobSpec, context: Context, prompt: Prompt) -> int:
    """Return the number of tokens that this prompt may have."""
    room = context.tokens - _max_response_tokens(spec, prompt)
    return min(spec.data.max_prompt_tokens or room, room)


def _max_response_tokens(spec: RLJobSpec, prompt: Prompt) -> int:
    default = spec.rollout.sampling.max_response_tokens
    dataset = evaluation_dataset(spec, prompt)
    if dataset is None or spec.evaluation is None:
        return default
    dataset_limit = dataset.sampling.max_response_tokens if dataset.sampling else None
    return dataset_limit or spec.evaluation.sampling.max_response_tokens or default


def evaluation_dataset(spec: RLJobSpec, prompt: Prompt) -> EvaluationDataset | None:
    """Return the evaluation data set that a prompt comes from; None for a training prompt."""
    if prompt.purpose is Purpose.TRAIN or spec.evaluation is None:
        return None
    return next((d for d in spec.evaluation.datasets if d.source_name == prompt.dataset), None)


def _plain(name: str) -> str:
    """Return an argument's letters: contextLength and context-length are one argument."""
    return re.sub("[^a-z]", "", name.lower())
