"""Training of the layer that predicts a further token (multi-token prediction, MTP).

An engine proposes tokens with this layer (`rollout.speculative.algorithm: mtp`). From the state
that predicts the next token, and that token, it predicts the token after it (DeepSeek-V3,
arXiv:2412.19437, section 2.2). Its inputs, and the embedding and output layer that it shares with
the model, are constants for its loss: the policy learns as if the layer were not there.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from sluice.model_parts import tensor_names
from sluice_trainer.fsdp.families import backbone
from sluice_trainer.model.huggingface_files import EMBEDDING, HEAD, stored
from sluice_trainer.model.unsupported import UnsupportedModelError
from sluice_trainer.step.head import Head, score_tokens
from sluice_trainer.step.logits import log_probs_and_entropies
from sluice_trainer.step.packing import MicroBatch

# Attribute of a model of transformers that holds the layer.
ATTRIBUTE = "mtp"
_DECODER = f"{ATTRIBUTE}.decoder."
_ONLY_LAYER = "model.layers.0."
_LAST_NORM = "model.norm.weight"
_QWEN = re.compile(r"((?:model\.)?mtp)\.layers\.(\d+)\.")
_NUMBERED = re.compile(r"(model\.layers\.(\d+))\.eh_proj\.weight")


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names of the layer's tensors in a checkpoint.

    Attributes
    ----------
    layer
        Prefix of the decoder layer.
    own
        Names of the other tensors, by those in `Mtp`; without `.weight`.

    """

    layer: str
    own: Mapping[str, str]

    @classmethod
    def of(cls, directory: Path) -> MtpNames:
        """Return the names in a checkpoint: those of Qwen's, or of DeepSeek's and GLM's.

        Raises
        ------
        UnsupportedModelError
            The checkpoint has no such layer, or several.

        """
        names = tensor_names(directory)
        qwen = {match.group(1, 2) for match in map(_QWEN.match, names) if match}
        numbered = {match.group(1, 2) for match in map(_NUMBERED.fullmatch, names) if match}
        if len(qwen | numbered) != 1:
            count = len(qwen | numbered) or "no"
            raise UnsupportedModelError(
                f"{directory} has {count} layers that predict further tokens, and trainer.mtp "
                "trains one: leave trainer.mtp out"
            )
        ((prefix, number),) = qwen | numbered
        if qwen:
            norms = {part: f"{prefix}.pre_fc_norm_{part}" for part in ("embedding", "hidden")}
            last = f"{prefix}.norm"
            layer, projection = f"{prefix}.layers.{number}.", f"{prefix}.fc"
        else:
            norms = {"embedding": f"{prefix}.enorm", "hidden": f"{prefix}.hnorm"}
            last = f"{prefix}.shared_head.norm"
            layer, projection = f"{prefix}.", f"{prefix}.eh_proj"
        own = {f"{part}_norm": name for part, name in norms.items()}
        return cls(layer, own | {"projection": projection, "norm": last})


class Mtp(nn.Module):
    """A layer that predicts a further token, in the form in which it is trained.

    Parameters
    ----------
    decoder
        A model of the family with one layer, without embedding and output layer.
    names
        Names of the tensors in the checkpoint.

    """

    def __init__(self, decoder: Any, names: MtpNames) -> None:
        super().__init__()
        last = backbone(decoder).norm
        hidden, dtype = last.weight.shape[0], last.weight.dtype
        self.decoder, self.names = decoder, names
        self.embedding_norm, self.hidden_norm = copy.deepcopy(last), copy.deepcopy(last)
        self.projection = nn.Linear(
            2 * hidden, hidden, bias=False, device=last.weight.device, dtype=dtype
        )

    def forward(self, states: Tensor, embeddings: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the states that predict a further token, [t, h].

        Parameters
        ----------
        states
            The model's states before its output layer, [t, h].
        embeddings
            Those of the tokens that the states predict, [t, h].
        arguments
            Positions and bounds of the row's sequences.

        """
        parts = (self.embedding_norm(embeddings), self.hidden_norm(states))
        joined = self.projection(torch.cat(parts, -1))
        result: Tensor = backbone(self.decoder)(inputs_embeds=joined[None], **arguments)[0][0]
        return result


def blank(model: Any, directory: Path) -> Mtp:
    """Return the layer of a checkpoint without its weights, on the default device."""
    decoder = type(model)._from_config(_config_of_one_layer(model.config), dtype=torch.float32)
    return Mtp(_without_words(decoder), MtpNames.of(directory))


def loaded(model: Any, directory: Path) -> Mtp:
    """Return the layer of a checkpoint with its weights, on the CPU."""
    names = MtpNames.of(directory)
    with stored(directory) as tensors:
        own = {part: tensors.read(f"{name}.weight") for part, name in names.own.items()}
        layer = {
            name.replace(names.layer, _ONLY_LAYER, 1): tensors.read(name)
            for name in tensors.names
            if name.startswith(names.layer) and not _is_beside(name, names)
        }
    last = own.pop("norm")
    # Without these words transformers would report that it has drawn weights.
    words = dict.fromkeys((EMBEDDING, HEAD), torch.zeros(1, len(last)))
    decoder, report = type(model).from_pretrained(
        None,
        config=_config_of_one_layer(model.config),
        state_dict={**layer, **words, _LAST_NORM: last},
        dtype="auto",
        output_loading_info=True,
    )
    lost = [name for name in report["missing_keys"] if name.startswith(_ONLY_LAYER)]
    if lost:
        missing = lost[0].replace(_ONLY_LAYER, names.layer, 1)
        raise UnsupportedModelError(
            f"{directory} has no tensor {missing} of the layer that predicts further tokens: "
            "leave trainer.mtp out, or fetch the checkpoint again"
        )
    layer_of_model = Mtp(_without_words(decoder), names)
    for part, tensor in own.items():
        layer_of_model.get_submodule(part).weight.data = tensor
    return layer_of_model


def _is_beside(name: str, names: MtpNames) -> bool:
    """Return True for tensors that DeepSeek's form has among those of the layer.

    The copies of embedding and output layer are not trained: engines use the model's own.
    """
    rest = name.removeprefix(names.layer)
    own = {f"{name}.weight" for name in names.own.values()}
    return name in own or rest.startswith(("embed_tokens.", "shared_head."))


def _config_of_one_layer(config: Any) -> Any:
    """Return the configuration of a model whose only layer is as the last ones of the family.

    It has one word, since the layer shares the embedding and output layer of the model.
    """
    one = copy.deepcopy(config.get_text_config())
    if getattr(one, "layer_types", None):
        one.layer_types = ["full_attention"]
    if getattr(one, "mlp_layer_types", None):
        one.mlp_layer_types = one.mlp_layer_types[-1:]
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    one.num_hidden_layers, one.vocab_size, one.tie_word_embeddings = 1, 1, False
    one.pad_token_id = one.bos_token_id = one.eos_token_id = None
    return one


def _without_words(decoder: Any) -> Any:
    backbone(decoder).embed_tokens = None
    decoder.lm_head = None
    return decoder


def layer_of(model: Any) -> Mtp | None:
    """Return the layer that predicts a further token, if the job trains it."""
    layer: Mtp | None = getattr(model, ATTRIBUTE, None)
    return layer


def is_of_layer(name: str) -> bool:
    """Return True for a parameter or buffer of the layer that predicts a further token."""
    return name.startswith(f"{ATTRIBUTE}.")


def restored(layer: Mtp, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the layer under their names in the checkpoint.

    tensors: by their names in the model of transformers.
    """
    result = {}
    inner = {n.removeprefix(_DECODER): t for n, t in tensors.items() if n.startswith(_DECODER)}
    for name, tensor in revert_weight_conversion(layer.decoder, inner).items():
        own = f"{layer.names.own['norm']}.weight"
        key = own if name == _LAST_NORM else name.replace(_ONLY_LAYER, layer.names.layer, 1)
        result[key] = tensor
    for name, tensor in tensors.items():
        if not name.startswith(_DECODER):
            part, _, kind = name.removeprefix(f"{ATTRIBUTE}.").partition(".")
            result[f"{layer.names.own[part]}.{kind}"] = tensor
    return result


def predicted(batch: MicroBatch) -> Tensor:
    """Return which response tokens the layer predicts, [r] bool: all with two tokens before."""
    known: Tensor = batch.packing.positions[batch.predicting] > 0
    return known


def scores(
    model: Any,
    batch: MicroBatch,
    states: Tensor,
    head: Head,
    final: Callable[[Tensor], Tensor],
    scale: float,
) -> Tensor:
    """Return log-probs of the response tokens, and 1 for each that is the most likely, [2, r].

    Values of tokens that are not `predicted` are undefined.

    Parameters
    ----------
    model
        A model of transformers with the layer.
    batch
        A row of packed sequences.
    states
        The model's states before its output layer, [t, h].
    head
        The model's output layer.
    final
        The family's last operation on logits.
    scale
        Factor of the logits.

    """
    layer = layer_of(model)
    assert layer is not None
    with torch.no_grad():
        # The last token of a sequence gets the first of the next one, and predicts nothing.
        embeddings = model.get_input_embeddings()(batch.tokens.roll(-1))
    arguments = batch.packing.arguments(model.config._attn_implementation)
    further = layer(states.detach(), embeddings, arguments)
    # The state one position before the one that predicts a token has seen the token before it.
    hidden = further.index_select(0, (batch.predicting - 1).clamp(min=0))
    bias = None if head.bias is None else head.bias.detach()

    def score(product: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
        logits = final(product)
        log_probs, _entropies = log_probs_and_entropies(logits, targets, scale=scale)
        hits = (logits.detach().argmax(-1) == targets).to(log_probs.dtype)
        return torch.stack((log_probs, hits))

    return score_tokens(
        score, hidden, Head(head.weight.detach(), bias, head.float32), batch.targets
    )
