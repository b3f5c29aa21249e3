"""Chat templates of model families, in our own words and their structure: who opens a turn, what
ends it, how tool calls and thoughts are written.

Each family also says, without its template, what its model generates as an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.chat import tokenizer

Message = dict[str, Any]
_HERMES_CALL = """
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}"""
_CHATML = """
{%- if tools %}
{{- '<|im_start|>system\\nYou may call:\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
THOUGHT
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
CALL
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\nOPENED' }}{% endif %}"""


def _chatml(thought: str = "", opened: str = "", call: str = _HERMES_CALL) -> str:
    parts = {"\nTHOUGHT": thought, "\nCALL": call, "OPENED": opened}
    text = _CHATML
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


QWEN25 = _chatml()
QWEN3 = _chatml("""
{%- set thought = message.reasoning_content or '' %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}""")
QWEN35 = _chatml(
    """
{%- if loop.index0 > ns.last %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}""",
    "<think>\\n",
    """
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\\n' }}
{{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}""",
)
LLAMA31 = """
{{- bos_token }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + (tools | tojson) + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call a turn') }}{% endif %}
{%- set function = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + function.name }}
{{- '", "parameters": ' + (function.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) }}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
GLM45 = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\\n' + (tools | tojson) }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' }}
{%- if loop.index0 > ns.last %}{{ message.reasoning_content or '' }}{% endif %}
{{- '</think>' }}
{%- if message.content.strip() %}{{ '\\n' + message.content.strip() }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
GPT_OSS = """
{{- '<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- set ns = namespace(called=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content %}{{ raise_exception('no content beside a call') }}{% endif %}
{%- set ns.called = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + ns.called.name + '<|channel|>commentary json' }}
{{- '<|message|>' + (ns.called.arguments | tojson) + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if ns.called is none %}{{ raise_exception('the answer of a tool to no call') }}{% endif %}
{{- '<|start|>functions.' + ns.called.name + ' to=assistant<|channel|>commentary' }}
{{- '<|message|>' + (message.content | tojson) + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
# Arguments are added to a text, as DeepSeek-V3's own template does.
DEEPSEEK = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}{% endif %}
{%- endfor %}
{%- if tools %}{{ '\\n\\n## Tools\\n' + (tools | tojson) }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{%- elif message.role == 'assistant' %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}"""
MISTRAL = """
{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content + eos_token }}
{%- else %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""
GEMMA = """
{{- bos_token }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{{- (first if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template, its tokens, and what the model generates.

    said: an answer's text, without its end, by the message and whether it follows the last user's.
    ends: the end of an answer by the role of the next message ("": there is none); None: the
    template writes another there than the model generates. calls: how many tools a turn may call.
    beside: a call may come with a text. single: only answers behind the last user's message are
    written as they are generated.
    """

    template: str
    eos: str
    stops: tuple[str, ...]
    special: tuple[str, ...]
    said: Callable[[Message, bool], str]
    ends: Callable[[Message, str], str | None]
    calls: int = 2
    beside: bool = True
    single: bool = False

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        others = sorted({*self.special, *self.stops} - {self.eos})
        return tokenizer(
            self.template,
            eos_token=self.eos,
            bos_token="<s>",
            additional_special_tokens=others,
        )


def functions(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of a message's calls, however they were recorded."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    arguments = [call["arguments"] for call in calls]
    read = [json.loads(value) if isinstance(value, str) else value for value in arguments]
    return [(call["name"], value) for call, value in zip(calls, read, strict=True)]


def content(message: Message) -> str:
    """The text of a message, however it was recorded."""
    value = message.get("content") or ""
    return value if isinstance(value, str) else "".join(part["text"] for part in value)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _lines(message: Message, calls: list[str]) -> str:
    return "\n".join(part for part in (content(message), *calls) if part)


def _hermes(message: Message, _: bool) -> str:
    return _lines(
        message,
        [
            f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n</tool_call>'
            for name, arguments in functions(message)
        ],
    )


def _qwen3(message: Message, newest: bool) -> str:
    thought = message.get("reasoning_content") or ""
    written = newest and (thought or message["is_last"])
    return (f"<think>\n{thought}\n</think>\n\n" if written else "") + _hermes(message, newest)


def _qwen35(message: Message, _: bool) -> str:
    calls = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{as_text(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in functions(message)
    ]
    return f"{message.get('reasoning_content') or ''}\n</think>\n\n{_lines(message, calls)}"


def _llama(message: Message, _: bool) -> str:
    for name, arguments in functions(message):
        return f'{{"name": "{name}", "parameters": {as_json(arguments)}}}'
    return content(message)


def _glm(message: Message, newest: bool) -> str:
    thought = (message.get("reasoning_content") or "") if newest else ""
    calls = [
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in functions(message)
    ]
    return "\n".join(["", f"<think>{thought}</think>", _lines(message, calls)])


def _gpt_oss(message: Message, _: bool) -> str:
    for name, arguments in functions(message):
        return f" to=functions.{name}<|channel|>commentary json<|message|>{as_json(arguments)}"
    return f"<|channel|>final<|message|>{content(message)}"


def _gpt_oss_end(message: Message, follows: str) -> str | None:
    if functions(message):
        return "<|call|>"
    return None if follows else "<|return|>"


def _deepseek(message: Message, _: bool) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in functions(message)
    ]
    written = f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    return content(message) + written


def _mistral(message: Message, _: bool) -> str:
    calls = [
        f'{{"name": "{name}", "arguments": {as_json(arguments)}}}'
        for name, arguments in functions(message)
    ]
    return f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else f" {content(message)}"


def _always(end: str) -> Callable[[Message, str], str]:
    return lambda _message, _follows: end


_GLM_ENDS = {"user": "<|user|>", "tool": "<|observation|>", "": "<|endoftext|>"}
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>")
_TOOLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "<｜User｜>")
FAMILIES = {
    "Qwen2.5": Family(
        QWEN25, "<|im_end|>", ("<|endoftext|>",), ("<|im_start|>",), _hermes, _always("<|im_end|>")
    ),
    "Qwen2.5 base": Family(
        QWEN25, "<|endoftext|>", (), ("<|im_start|>", "<|im_end|>"), _hermes, _always("<|im_end|>")
    ),
    "Qwen3": Family(
        QWEN3, "<|im_end|>", ("<|endoftext|>",), ("<|im_start|>",), _qwen3, _always("<|im_end|>")
    ),
    "Qwen3.5": Family(
        QWEN35,
        "<|im_end|>",
        ("<|endoftext|>",),
        ("<|im_start|>",),
        _qwen35,
        _always("<|im_end|>"),
        single=True,
    ),
    "Llama 3.1": Family(
        LLAMA31,
        "<|eot_id|>",
        ("<|eom_id|>",),
        _HEADERS,
        _llama,
        _always("<|eot_id|>"),
        calls=1,
        beside=False,
    ),
    "GLM-4.5": Family(
        GLM45,
        "<|endoftext|>",
        ("<|user|>", "<|observation|>"),
        ("<|assistant|>", "<|system|>"),
        _glm,
        lambda _, follows: _GLM_ENDS[follows],
    ),
    "gpt-oss": Family(
        GPT_OSS,
        "<|return|>",
        ("<|call|>",),
        _HARMONY,
        _gpt_oss,
        _gpt_oss_end,
        calls=1,
        beside=False,
    ),
    "DeepSeek": Family(
        DEEPSEEK,
        "<｜end▁of▁sentence｜>",
        (),
        _TOOLS,
        _deepseek,
        _always("<｜end▁of▁sentence｜>"),
    ),
    "Mistral": Family(
        MISTRAL, "</s>", (), ("[INST]", "[/INST]"), _mistral, _always("</s>"), beside=False
    ),
    "Gemma": Family(
        GEMMA,
        "<eos>",
        ("<end_of_turn>",),
        ("<start_of_turn>",),
        lambda message, _: content(message),
        _always("<end_of_turn>"),
        calls=0,
    ),
}
