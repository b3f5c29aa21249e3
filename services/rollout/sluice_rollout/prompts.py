"""Prompts -> token ids, as their source asks for it, and no longer than the job allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.api import RLJobSpec
from sluice.data import chat
from sluice.data.chat import PromptError
from sluice.data.vocabulary import check_ids, embedding_size, surplus, tokenizer_size
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt
from sluice.telemetry import logs
from sluice_rollout import context


class PromptTooLongError(PromptError):
    """The prompt does not fit. The message says by how much."""


class PromptEncoder:
    """Encodes prompts as their source asks for: plain text, or through the chat template."""

    def __init__(self, spec: RLJobSpec, model_dir: Path) -> None:
        """Raises ConfigurationError."""
        try:
            self.tokenizer: Any = chat.load_tokenizer(
                model_dir, trust_remote_code=spec.model.trust_remote_code
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"spec.model.path: {error}") from error
        self.embedding = embedding_size(model_dir)
        if warning := surplus(tokenizer_size(self.tokenizer), self.embedding):
            logs.get().warning(f"spec.model.path: {model_dir}: {warning}")
        evaluation = spec.evaluation.datasets if spec.evaluation else []
        self._sources = {source.source_name: source for source in [*spec.data.prompts, *evaluation]}
        self._spec = spec
        self.context = context.of_model(spec, model_dir)
        context.check(spec, self.context)

    def fit(self, tokens: int | None) -> None:
        """Keep to the engine's context; None: it was started with the model's.

        Raises ConfigurationError.
        """
        if tokens is not None:
            self.context = context.Context(tokens, "the engine's own word")
            context.check(self._spec, self.context)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises PromptTooLongError, or PromptError if the chat template
        refuses it or the model's embedding lacks one of its tokens.
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
        except PromptError as error:
            raise PromptError(f"{prompt.dataset} row {prompt.row}: {error}") from error
        if len(ids) > (longest := context.longest_prompt(self._spec, self.context, prompt)):
            raise PromptTooLongError(
                f"{prompt.dataset} row {prompt.row}: the prompt has {len(ids)} tokens, at most "
                f"{longest} fit "
                "(data.maxPromptTokens, or the model's context less maxResponseTokens)"
            )
        return ids

    def template_arguments(self, dataset: str) -> dict[str, Any] | None:
        """Further variables of the chat template, as the source of a prompt gives them."""
        source = self._sources.get(dataset)
        return source.chat_template_args if source else None

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text
