"""Tokenizers with chat templates of every kind: each byte is a token, special tokens aside, so
masks show as texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Qwen2.5: a message is written alike whatever comes before and after it.
PLAIN = """
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

MARKED = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Qwen3: the last answer gets a (perhaps empty) thought, earlier ones lose theirs.
REWRITING = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content, thought = message.content, '' %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].strip() %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}
{%- endif %}
{{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""


# Qwen3.5: the generation prompt, not the model, opens the thought.
OPENING = """
{%- for message in messages %}
{%- set content, thought = message.content, message.reasoning_content | default('') %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].strip() %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""


def tokenizer(template: str | None = PLAIN, **options: Any) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **{"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"], **options},
    )
    fast.chat_template = template
    return fast


def save(directory: Path, template: str | None = PLAIN, context: int = 4096) -> Path:
    """A model directory as far as the buffer looks into it."""
    tokenizer(template).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return directory


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}
