"""Differences between transformers' model families that this backend must know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from sluice.api.groups.trainer import VisionPart
from sluice.model_parts import vision_part
from sluice_trainer.model.unsupported import UnsupportedModelError

# Kinds of layers that depend on positions in a row only through the attention mask. Others (gated
# delta nets, state spaces, convolutions, chunked attention) would read the preceding sequence.
_PACKABLE = {"full_attention", "sliding_attention"}
# Attribute of a model with the trained parts of its vision side.
_TRAINED_PARTS = "_sluice_trained_parts"
# Name of the modules that choose the keys of sparse attention (DeepSeek-V3.2, GLM-5).
_INDEXER = "indexer"
# Model types whose masks ignore positions in transformers 5.12.
_ALONE = {"gpt_oss"}


def can_pack(model: Any) -> bool:
    """Return True if a row may hold several sequences; otherwise each sequence needs its own row.

    With torch's operations, transformers keeps packed sequences apart only in attention. Families
    without `layer_types` have attention in every layer.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    parameters = inspect.signature(backbone(model).forward).parameters
    alone = is_recurrent(model) or config.model_type in _ALONE
    return kinds <= _PACKABLE and "position_ids" in parameters and not alone


def is_recurrent(model: Any) -> bool:
    """Return True if layers carry a state along the row: state spaces, gated delta nets."""
    return any(hasattr(module, "A_log") for module in model.modules())


def backbone(model: Any) -> Any:
    """Return the model without its output layer: token ids -> hidden states."""
    return getattr(model, model.base_model_prefix)


def kept_parameters(model: Any) -> set[str]:
    """Return the names of parameters and buffers that the job does not train.

    They are those of towers for images or sound and of their projectors: all that is neither the
    decoder nor the output layer of a multimodal model. `train_parts` takes parts out of them.
    """
    if not _is_multimodal(model):
        return set()
    text = (model.get_decoder(), model.get_output_embeddings())
    trained = {id(t) for module in text for t in (*module.parameters(), *module.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    parts = trained_parts(model)
    return {
        name
        for name, tensor in named
        if id(tensor) not in trained and vision_part(name) not in parts
    }


def train_parts(model: Any, parts: Collection[VisionPart]) -> None:
    """Note which parts of a vision-language model the job trains besides its language model."""
    setattr(model, _TRAINED_PARTS, frozenset(parts))


def indexers(model: Any) -> list[str]:
    """Return the names of modules that choose the keys of sparse attention.

    A choice has no gradient, so they stay as they are, and engines get them with all other weights.
    """
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] == _INDEXER]


def trained_parts(model: Any) -> frozenset[VisionPart]:
    """Return the parts that `train_parts` has noted."""
    parts: frozenset[VisionPart] = getattr(model, _TRAINED_PARTS, frozenset())
    return parts


def kept_modules(model: Any) -> list[str]:
    """Return the names of the outermost modules that hold only `kept_parameters`."""
    kept, names = kept_parameters(model), list[str]()
    for name, module in model.named_modules():
        parameters = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        inner = name.startswith(tuple(f"{outer}." for outer in names))
        if parameters and kept.issuperset(parameters) and not inner:
            names.append(name)
    return names


def _is_multimodal(model: Any) -> bool:
    return model.config.get_text_config() is not model.config


def final_transform(config: Any) -> Callable[[Tensor], Tensor]:
    """Return the family's last operation on the logits of the output layer."""
    cap = getattr(config, "final_logit_softcapping", None)
    factor = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0

    def apply(logits: Tensor) -> Tensor:
        if factor != 1.0 or divisor != 1.0:
            logits = logits * (factor / divisor)
        return torch.tanh(logits / cap) * cap if cap else logits

    return apply


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the layers of the decoder, which are gathered one at a time.

    Raises
    ------
    UnsupportedModelError
        If the family does not name them.

    """
    names = set(model._no_split_modules or [])
    # The layers of a tower are not gathered one at a time: a rank without images calls none.
    decoder = model.get_decoder() if _is_multimodal(model) else model
    layers = [module for module in decoder.modules() if type(module).__name__ in names]
    if not layers:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} is not supported by trainer.backend: fsdp: "
            f"{type(model).__name__} of transformers does not name its layers"
        )
    return layers
