"""Prompts -> token ids, with the model's own tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sluice.api import RLJobSpec
from sluice.environment import ConfigurationError
from sluice.sample import Prompt

DEFAULT_CONTEXT = 32768
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
"""Without any of them transformers makes an empty tokenizer, and says nothing."""


class PromptTooLongError(Exception):
    """The prompt does not fit. The message says by how much."""


class PromptEncoder:
    """Encodes prompts as their source asks for: plain text, or through the chat template."""

    def __init__(self, spec: RLJobSpec, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        if not any(next(model_dir.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            raise ConfigurationError(f"spec.model.path: {model_dir} has no tokenizer")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                model_dir, trust_remote_code=spec.model.trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"spec.model.path: {model_dir} has no usable tokenizer: {error}") from error
        evaluation = spec.evaluation.datasets if spec.evaluation else []
        self._chat = {s.source_name: s.apply_chat_template for s in [*spec.data.prompts, *evaluation]}
        longest = _context_length(model_dir) - spec.rollout.sampling.max_response_tokens
        self._limit = min(spec.data.max_prompt_tokens or longest, longest)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises PromptTooLongError."""
        chat = self._chat.get(prompt.dataset, False) or not isinstance(prompt.prompt, str)
        ids = self._template(prompt) if chat else self.tokenizer.encode(prompt.prompt)
        if len(ids) > self._limit:
            raise PromptTooLongError(
                f"{prompt.dataset} row {prompt.row}: the prompt has {len(ids)} tokens, at most {self._limit} fit "
                "(data.maxPromptTokens, or the model's context less maxResponseTokens)"
            )
        return [int(i) for i in ids]

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _template(self, prompt: Prompt) -> Any:
        messages = prompt.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        text = self.tokenizer.apply_chat_template(
            messages, tools=prompt.tools, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer.encode(text, add_special_tokens=False)


def _context_length(model_dir: Path) -> int:
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"spec.model.path: {model_dir}/config.json cannot be read: {error}") from error
    return int(config.get("max_position_embeddings", DEFAULT_CONTEXT))
