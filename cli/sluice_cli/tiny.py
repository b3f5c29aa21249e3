"""A tiny model directory in Qwen3's shape: config.json and a tokenizer, no weights. It is for
seeing that a task fits together, on any CPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>")
UNKNOWN = "<unused>"


def write_model(directory: Path, words: Sequence[str], context: int) -> None:
    """words: the vocabulary of texts whose words are separated by spaces; none: bytes, for any
    text. context: tokens of prompt and response. Needs the library tokenizers.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = [*words, UNKNOWN] if words else sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *alphabet])}
    if words:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    _write(
        directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    )
    _write(directory / "config.json", _config(len(vocabulary), context))


def _config(vocabulary: int, context: int) -> dict[str, Any]:
    """Two layers of 128 channels."""
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
