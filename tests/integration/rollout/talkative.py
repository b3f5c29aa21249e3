"""A model whose words are tool calls, and programs of the OpenAI API that play with it.

The engine sees ids alone, so the tests' random model may serve any tokenizer of its size.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sluice_rollout.episode import Episode
from tests.integration.engines import WORDS

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<{{ 'assistant' if m.role == 'assistant' else 'user' }}> "
    "{{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.name }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUMBERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": NUMBERS, "strict": True},
    }
    for name in ("add", "lookup")
]
# Words of the vocabulary that are special tokens.
SPECIAL = 8
# Tokens of a turn: one without any call is seen once in half a million.
TURN = 12


def word(i: int) -> str:
    if i % 3 == 2:
        return f"w{i:04d}"
    call = {"name": ("add", "lookup")[i % 3], "arguments": {"n": i}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


# Ids of the words that are calls.
CALLS = [SPECIAL + i for i in range(WORDS) if i % 3 != 2]


def save_talkative(model: Path, directory: Path) -> Path:
    """The model with a vocabulary of which two thirds are calls of two tools."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    words = ["<pad>", "<bos>", "<c>", "<user>", "<assistant>", "<unused>", "<a>", "<b>"]
    vocabulary = {text: i for i, text in enumerate([*words, *map(word, range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unused>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return directory


async def said(client: AsyncOpenAI, messages: list[Any], *, stream: bool, **settings: Any) -> Any:
    """The model's message, as its client puts it into the history."""
    request: dict[str, Any] = {"model": "any", "messages": messages, **settings}
    if not stream:
        answer = await client.chat.completions.create(**request)
        return answer.choices[0].message
    content, calls = "", []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or []]
    message = {"role": "assistant", "content": content, "tool_calls": calls or None}
    return ChatCompletionMessage.model_validate(message)


async def three_turns(client: AsyncOpenAI, *, stream: bool) -> list[Any]:
    """Two turns that call tools, and one that answers; the messages."""
    messages: list[Any] = [{"role": "user", "content": "w0002 w0005"}]
    for _ in range(2):
        message = await said(client, messages, stream=stream, tools=TOOLS, max_tokens=TURN)
        assert message.tool_calls
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"w{8 + 3 * i:04d}"}
            for i, call in enumerate(message.tool_calls)
        ]
    last = await said(
        client, messages, stream=stream, tools=TOOLS, max_tokens=TURN, tool_choice="none"
    )
    assert not last.tool_calls
    return [*messages, last.model_dump(exclude_none=True)]


def client_of(episode: Episode) -> AsyncOpenAI:
    gateway = episode.gateway
    return AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.api_key)


async def play(episode: Episode) -> None:
    async with client_of(episode) as client:
        episode.metadata["messages"] = len(await three_turns(client, stream=False))


async def play_streaming(episode: Episode) -> None:
    async with client_of(episode) as client:
        episode.metadata["messages"] = len(await three_turns(client, stream=True))
