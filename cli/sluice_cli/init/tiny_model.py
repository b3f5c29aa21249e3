"""Write a tiny model with Qwen3's architecture, to try a task on any CPU.

The model is a config.json and a tokenizer, without weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Unit = Literal["words", "characters", "bytes"]
SPECIAL = ("<pad>", "<bos>", "<eos>")
UNKNOWN = "<unused>"
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
TEMPLATE = """{%- for message in messages %}
{{- '<' + message.role + '>' + message.content }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""


def write_model(
    directory: Path,
    vocabulary: Sequence[str],
    context: int,
    *,
    unit: Unit = "words",
    chats: bool = False,
) -> None:
    """Write the model's config and tokenizer. Needs the tokenizers library.

    Parameters
    ----------
    directory
        Directory to write.
    vocabulary
        All words or characters that the model can read. A model of bytes needs none.
    context
        Longest prompt and response together, in tokens.
    unit
        What a token is. Words are separated by white space.
    chats
        Give the model a chat template.

    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = (*SPECIAL, *(ROLES if chats else ()))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = letters if unit == "bytes" else [*vocabulary, UNKNOWN]
    numbers = {token: number for number, token in enumerate(dict.fromkeys([*special, *tokens]))}
    if unit == "bytes":
        tokenizer = Tokenizer(models.BPE(numbers, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if unit == "characters":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    _write(
        directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    )
    if chats:
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    _write(directory / "config.json", _config(len(numbers), context))


def _config(vocabulary: int, context: int) -> dict[str, Any]:
    """Return the config of a model with two layers of 128 channels."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": context,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
