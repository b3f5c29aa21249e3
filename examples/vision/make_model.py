"""Writes `model/`: a tiny vision-language model with random weights, about 300,000 parameters.

It has every part of a released checkpoint (tower, projector, tokenizer, chat
template, settings of the image processor), so a job with images runs on a laptop in seconds. Every
byte of a text is a token. The same family gives the same files on every machine with the same
torch.

    python examples/vision/make_model.py [DIRECTORY] [FAMILY]

Families are qwen3_vl, qwen3_vl_moe, qwen2_5_vl and qwen3_5.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# As in Qwen's tokenizers, in their order.
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Content of a message, as Qwen's templates have it: an image part becomes one placeholder between
# two marks.
CONTENT_TEMPLATE = """\
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
"""
CHAT_TEMPLATE = (
    """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
"""
    + CONTENT_TEMPLATE
    + """\
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
)

# Prefixes of transformers' classes of the model and of its video processor, then the settings of
# its text model, its tower and its image processor.
_FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VL",
        "Qwen3VL",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        {
            "patch_size": 16,
            "intermediate_size": 96,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        {
            "patch_size": 16,
            "size": {"shortest_edge": 1024, "longest_edge": 65536},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "Qwen2VL",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [4, 2, 2],
            },
        },
        {
            "patch_size": 14,
            "intermediate_size": 96,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        {
            "patch_size": 14,
            "size": {"shortest_edge": 3136, "longest_edge": 50176},
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
        },
    ),
}
_QWEN3_VL = _FAMILIES["qwen3_vl"]
_FAMILIES["qwen3_vl_moe"] = (
    "Qwen3VLMoe",
    "Qwen3VL",
    {
        **_QWEN3_VL[2],
        # One above each level of the tower: the last layer's outputs at images reach no loss.
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # As many levels as in the releases: SGLang takes that number for granted.
    {**_QWEN3_VL[3], "depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
    _QWEN3_VL[4],
)
_FAMILIES["qwen3_5"] = (
    "Qwen3_5",
    "Qwen3VL",
    {
        "head_dim": 32,
        "num_hidden_layers": 4,  # three with a recurrent state, one with attention
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    {
        "patch_size": 16,
        "intermediate_size": 96,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
    },
    _QWEN3_VL[4],
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
_PATCHES = {"merge_size": 2, "temporal_patch_size": 2}


def make_model(
    directory: Path,
    family: str = "qwen3_vl",
    *,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    patch_size: int | None = None,
) -> Path:
    """Write a tiny random vision-language model of a family in float32; return its directory.

    `tokenizer` replaces that of bytes, and has the tokens SPECIAL. An image has one token for each
    square of two by two patches; `patch_size` is the side of a patch in pixels.
    """
    name, video, text, vision, processor = _FAMILIES[family]
    if patch_size:
        vision, processor = ({**part, "patch_size": patch_size} for part in (vision, processor))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or _tokenizer()
    tokenizer.save_pretrained(directory)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    config = getattr(transformers, f"{name}Config")(
        text_config={**_TEXT, **text, **ends, "bos_token_id": None, "vocab_size": len(tokenizer)},
        vision_config={**_VISION, **vision},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        **ends,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(seed)
    for tensor, parameter in model.named_parameters():
        # Norms keep their ones; all else is large enough for images to change what is generated.
        if "norm" not in tensor:
            parameter.data.normal_(0, 0.08, generator=generator)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.save_pretrained(directory)
    if family == "qwen3_vl_moe":
        _turn_experts(directory / "model.safetensors")
    if family == "qwen3_5":
        _write_interval(directory / "config.json")
    _write_processors(directory, processor, f"{video}VideoProcessor")
    for weights in directory.glob("*.safetensors"):
        weights.chmod(0o644)  # pods read them as another user; safetensors leaves them to this one
    return directory


def _turn_experts(file: Path) -> None:
    """Store experts as [experts, in, out], which is how they are released.

    transformers reads them so, and writes them as [experts, out, in].
    """
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def _write_interval(file: Path) -> None:
    """Add a setting that SGLang reads and released files have; transformers does not write it."""
    config = json.loads(file.read_text())
    config["text_config"]["full_attention_interval"] = 4
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_processors(directory: Path, settings: dict[str, Any], video: str) -> None:
    images = {**_PATCHES, **settings}
    videos = {key: value for key, value in images.items() if key != "image_processor_type"}
    videos["video_processor_type"] = video
    for kind, content in (("", images), ("video_", videos)):
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (directory / f"{kind}preprocessor_config.json").write_text(text)


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


if __name__ == "__main__":
    out = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "model"
    make_model(out, *sys.argv[2:3])
    print(f"{out}: {', '.join(sorted(file.name for file in out.iterdir()))}")
