"""verl.experimental.agent_loop.agent_loop: the base class of agent loops, and their output."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from sluice.data import chat

_Loop = TypeVar("_Loop", bound=type)
Ids = list[int]


class AgentLoopMetrics(BaseModel):
    """Seconds that a loop spent."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """The sample of a loop. response_mask: 1 for tokens of the model, 0 for others."""

    prompt_ids: Ids
    response_ids: Ids
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    routed_experts: Any = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics | dict[str, Any] = AgentLoopMetrics()
    extra_fields: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class DictConfigWrap:
    """Wraps a configuration."""

    config: Any


@dataclass(frozen=True, slots=True)
class ToolListWrap:
    """Wraps tools."""

    tools: list[Any]


@dataclass(frozen=True, slots=True)
class MergedTokens:
    """The tokens of a conversation, including the new ones."""

    token_ids: Ids


def register(agent_name: str) -> Callable[[_Loop], _Loop]:
    """Decorate an agent loop. It has no effect: `rollout.function` names the class."""

    def keep(loop: _Loop) -> _Loop:
        return loop

    return keep


class AgentLoopBase(ABC):
    """Base class of agent loops, with server manager, tokenizer and configuration.

    A conversation keeps the tokens that the engine got and sampled. Only new messages are encoded,
    as the chat template renders them after those tokens (verl's continuous tokens).
    """

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: DictConfigWrap | None = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer, self.processor, self.dataset_cls = tokenizer, processor, dataset_cls
        self.data_config = data_config.config if data_config else self.config.data
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play a sample. kwargs: the fields of its row, including `raw_prompt`."""

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return no media. Raises ValueError if the messages have images, sound or video."""
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            if any(part.get("type") not in (None, "text") for part in parts):
                raise ValueError("messages: sluice does not train on images, sound and video")
        return {}

    process_multi_modal_info = process_vision_info

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise ValueError("messages: sluice does not train on images, sound and video")

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        remove_system_prompt: bool = False,
        **media: Any,
    ) -> Ids:
        """Encode the messages, up to the start of an answer.

        remove_system_prompt: drop what the template writes before the first message.
        """
        self._assert_mm_supported(any(media.values()))
        ids = self._encoded(messages, tools)
        return ids[len(self._opening()) :] if remove_system_prompt else ids

    def _encoded(self, messages: Any, tools: Any, *, opened: bool = True) -> Ids:
        arguments = dict(self.apply_chat_template_kwargs)
        text = chat.render(
            self.tokenizer, messages, chat=True, tools=tools, arguments=arguments, opened=opened
        )
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]

    def _opening(self) -> Ids:
        """Return the tokens that the template writes before the first message."""
        # A second message adds the tokens of a message; the first one has the opening too.
        empty = {"role": "user", "content": ""}
        first = self._encoded([empty], None, opened=False)
        both = self._encoded([empty, empty], None, opened=False)
        return first[: 2 * len(first) - len(both)]

    async def ct_build_initial_tokens(
        self, messages: list[dict[str, Any]], tools: Any = None, **media: Any
    ) -> Ids:
        """Encode the first prompt; returns its last `rollout.prompt_length` tokens."""
        self._assert_mm_supported(any(media.values()))
        return self._encoded(messages, tools)[-int(self.rollout_config.prompt_length) :]

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Ids,
        assistant_token_ids: Ids,
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[MergedTokens, list[int], list[float] | None]:
        """Append a turn of the model to tokens, mask and log-probs."""
        return _merged(
            (runtime_token_ids, response_mask, response_logprobs),
            assistant_token_ids, 1, assistant_logprobs,
        )  # fmt: skip

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: Ids,
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Any = None,
    ) -> tuple[MergedTokens, list[int], list[float] | None]:
        """Append new messages to tokens, mask and log-probs, up to the start of an answer."""
        new = updated_messages[len(previous_messages) :]
        last = runtime_token_ids[-1] if runtime_token_ids else -1
        arguments = dict(self.apply_chat_template_kwargs)
        ids = chat.between_turns(self.tokenizer, new, last, arguments)
        return _merged((runtime_token_ids, response_mask, response_logprobs), ids, 0, None)


def _merged(
    before: tuple[Ids, list[int], list[float] | None],
    ids: Ids,
    mask: int,
    log_probs: list[float] | None,
) -> tuple[MergedTokens, list[int], list[float] | None]:
    tokens, old_mask, old = before
    new = None if old is None else [*old, *(log_probs or [0.0] * len(ids))]
    return MergedTokens([*tokens, *ids]), [*old_mask, *[mask] * len(ids)], new
