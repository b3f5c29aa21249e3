"""The tiny models of the tests by `model_type`, and checkpoints of them that engines serve."""

from __future__ import annotations

from pathlib import Path

from tests.integration.trainer import tiny

# `model_type` of config.json, by the name of the tiny model.
MODEL_TYPES: dict[str, str] = {
    "cohere": "cohere",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v3.2": "deepseek_v32",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma3-pictures": "gemma3",
    "gemma4": "gemma4_text",
    "gemma4-moe": "gemma4_text",
    "glm-moe-dsa": "glm_moe_dsa",
    "glm4": "glm4",
    "glm4-moe": "glm4_moe",
    "glm4-moe-lite": "glm4_moe_lite",
    "gpt-oss": "gpt_oss",
    "granite": "granite",
    "llama": "llama",
    "minimax-m2": "minimax_m2",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "moonlight": "deepseek_v3",
    "nemotron-h": "nemotron_h",
    "olmo3": "olmo3",
    "phi4": "phi3",
    "qwen2": "qwen2",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3_moe",
    "qwen3-moe-mixed": "qwen3_moe",
    "qwen3-next": "qwen3_next",
    "qwen3-tied": "qwen3",
    "qwen3-yarn": "qwen3",
    "qwen3.5": "qwen3_5_text",
    "qwen3.5-moe": "qwen3_5_moe_text",
    "qwen3.5-moe-pictures": "qwen3_5_moe",
    "qwen3.5-pictures": "qwen3_5",
    "qwen3_5": "qwen3_5",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "seed-oss": "seed_oss",
    "smollm3": "smollm3",
}
_SERVED = tiny.FAMILIES | tiny.OTHERS
# SGLang 0.5.21 ignores the windows of these families. Their latest releases have none, or one as
# long as their context.
_WITHOUT_WINDOW = ("mistral", "phi4")
# The plainest model of each `model_type`.
SERVED = [
    name
    for name in MODEL_TYPES
    if name in _SERVED
    and name not in ("gemma4-moe", "moonlight", "qwen3-moe-mixed", "qwen3-tied", "qwen3-yarn")
]


def save(name: str, directory: Path, seed: int) -> Path:
    """Save a checkpoint with a tokenizer that has as many words as the model."""
    kind, changes = _SERVED[name]
    if name in _WITHOUT_WINDOW:
        changes = {**changes, "sliding_window": None}
    tiny.save_kind(kind, changes, directory, seed=seed)
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0} | {f"w{number:03d}": number for number in range(1, tiny.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(
        directory
    )
