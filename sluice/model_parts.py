"""The parts of a Hugging Face checkpoint: what a job trains, and what it keeps as it is.

A job trains the language model. Engines get those tensors from the trainer and must read the others
from the checkpoint, so their launch scripts import this file too: it needs the standard library
only.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors has the same limit
_LAYER = re.compile(r"((?:model\.|language_model\.)*layers\.(\d+))\.")
# Tensors of the vision side, and those between its tower and the language model.
_VISION = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.")
_PROJECTOR = re.compile(r"(^|\.)(merger|deepstack_merger_list|multi_modal_projector)\.")
# Modules around a language model. transformers has others than a multimodal checkpoint.
_AROUND = re.compile(r"^(model\.|language_model\.)+")
_FURTHER_TOKENS = re.compile(r"((?:model\.)?mtp)(?:\.|$)")
# Modules of a language model inside a multimodal one, after `model.`.
_LANGUAGE = {"language_model", "text_model", "layers", "embed_tokens", "norm", "lm_head"}


def kept_parts(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Return the parts that no job trains, with the number of their tensors.

    They are the layers that predict further tokens and, in a multimodal checkpoint, everything but
    the language model.

    Parameters
    ----------
    config
        The checkpoint's config.json.
    names
        Names of its tensors.

    Returns
    -------
    For example `{"model.visual": 33, "mtp": 2}`.

    """
    parts = (_kept_part(name, config) for name in names)
    return dict(Counter(part for part in parts if part))


def predicts_further_tokens(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return True if a checkpoint has layers that predict further tokens (MTP)."""
    return any(map(is_mtp, kept_parts(config, names)))


def is_mtp(part: str) -> bool:
    """Return True if one of the `kept_parts` is a layer that predicts further tokens (MTP)."""
    return bool(_FURTHER_TOKENS.match(part) or _LAYER.fullmatch(f"{part}."))


def trained_names(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names of tensors that are in none of the `kept_parts`."""
    return [name for name in names if not _kept_part(name, config)]


def _kept_part(name: str, config: Mapping[str, Any]) -> str:
    """Return the part that a tensor belongs to; empty if it is trained."""
    text = config.get("text_config")
    # Qwen2.5-VL as released has the text's settings at the top of its configuration.
    multimodal = text or "vision_config" in config
    layers = (text or config).get("num_hidden_layers")
    if match := _FURTHER_TOKENS.match(name):
        return match[1]
    if (match := _LAYER.match(name)) and layers is not None and int(match[2]) >= layers:
        return match[1]
    module = name.removeprefix("model.").partition(".")[0]
    if not multimodal or module in _LANGUAGE:
        return ""
    return name[: name.index(module) + len(module)]


def kept_parts_of(directory: Path, trained: Collection[str] = ()) -> dict[str, int]:
    """Return the `kept_parts` of a checkpoint; empty if its tensors have no index or header.

    trained: parts of the vision side that are trained, too (`vision_part`). Raises ValueError if
    the file with the tensors is damaged.
    """
    config = directory / "config.json"
    if not config.is_file():
        return {}
    names = tensor_names(directory)
    if trained:
        names = [n for n in names if not is_vision(n) or vision_part(n) not in trained]
    return kept_parts(json.loads(config.read_text()), names)


def is_vision(name: str) -> bool:
    """Return True for a tensor of the vision side of a model: of its tower or projector."""
    return _VISION.match(name) is not None


def vision_part(name: str) -> Literal["vision", "projector"]:
    """Return the part of a tensor on the vision side of a model: tower or projector."""
    return "projector" if _PROJECTOR.search(name) else "vision"


def tensor_names(directory: Path) -> list[str]:
    """Return the names of a checkpoint's tensors; none if they have no index or header."""
    for index in INDEXES:
        if (directory / index).is_file():
            return list(json.loads((directory / index).read_text())["weight_map"])
    if not (directory / SINGLE).is_file():
        return []
    return list(safetensors_header(directory / SINGLE))


def name_in_language_model(name: str) -> str:
    """Return a tensor's name without the modules around the language model."""
    return _AROUND.sub("", name)


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and place of each tensor of a safetensors file, without reading these.

    Raises ValueError if the file is damaged or another one.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # A longer header is none: these are the first bytes of another file.
        text = file.read(length) if length < _LONGEST_HEADER else b""
    try:
        header: dict[str, dict[str, Any]] = dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged or no safetensors file ({path.stat().st_size} bytes): download the "
            "model again"
        ) from error
    header.pop("__metadata__", None)
    return header
