"""Building transformers' model and its initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter, rename_source_key

from sluice.api.groups.lora import Lora
from sluice.api.groups.trainer import VisionPart
from sluice.model_parts import trained_names
from sluice_trainer.fsdp import lora, mtp
from sluice_trainer.fsdp.attention import attention, tower_attention
from sluice_trainer.fsdp.families import indexers, kept_parameters, train_parts
from sluice_trainer.fsdp.nf4 import quantize_linear_layers
from sluice_trainer.model.huggingface_files import VALUE_HEAD, read_config, reader, stored
from sluice_trainer.model.unsupported import UnsupportedModelError, check_not_quantized


@dataclass(frozen=True, slots=True)
class Recipe:
    """Source of a model's configuration and initial weights.

    Attributes
    ----------
    directory
        A Hugging Face checkpoint.
    drawn
        Use only the config and draw weights from `seed`.
    seed
        Seed of random weights.
    compute
        Precision of forward and backward passes.
    values
        Replace the output layer by a head with one output, which starts at 0 unless the checkpoint
        is a reward model.
    trust_remote_code
        Run the checkpoint's own model code.
    vision
        Parts of a vision-language model that are trained besides its language model; None: build
        the language model alone.
    shares_rows
        Whether ranks share the tokens of a row.
    mtp
        Also train the checkpoint's layer that predicts a further token.

    """

    directory: Path
    drawn: bool
    seed: int
    compute: torch.dtype
    values: bool = False
    trust_remote_code: bool = False
    lora: Lora | None = None
    vision: frozenset[VisionPart] | None = None
    shares_rows: bool = False
    mtp: bool = False

    def config(self) -> Any:
        """Return transformers' configuration.

        Raises
        ------
        UnsupportedModelError
            If this backend cannot train the model.

        """
        try:
            config = transformers.AutoConfig.from_pretrained(
                self.directory, trust_remote_code=self.trust_remote_code
            )
            kind = _class(config, self._auto, self.trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            kind_of_model = "language model" if self.vision is None else "vision-language model"
            raise UnsupportedModelError(
                f"{self.directory}/config.json is not a {kind_of_model} of transformers "
                f"{transformers.__version__}: {_first_line(error)}"
            ) from error
        check_not_quantized(read_config(self.directory), self.directory)
        text = config.get_text_config()
        # A value head replaces the output layer, which can then not be the embedding.
        if self.values:
            text.tie_word_embeddings = config.tie_word_embeddings = False
        config._attn_implementation = attention(
            kind, text, self.compute, shares_rows=self.shares_rows
        )
        if self.vision is not None:
            config.vision_config._attn_implementation = tower_attention(config._attn_implementation)
        return config

    @property
    def _auto(self) -> Any:
        if self.vision is None:
            return transformers.AutoModelForCausalLM
        return transformers.AutoModelForImageTextToText

    def blank(self) -> Any:
        """Return the model without memory: names and shapes of its tensors, in float32."""
        with torch.device("meta"):
            model = self._built(self.config())
            if self.mtp:
                model.mtp = mtp.blank(model, self.directory)
            return self._adapted(model, first=False)

    def source(self) -> Any:
        """Return the model with its initial weights, on the CPU in the checkpoint's precision."""
        transformers.utils.logging.disable_progress_bar()
        config = self.config()
        torch.manual_seed(self.seed)
        if self.drawn:
            return self._adapted(self._built(config), first=True)
        _keep_choice_biases(_class(config, self._auto, self.trust_remote_code))
        model = self._auto.from_pretrained(
            self.directory,
            config=config,
            dtype="auto",
            trust_remote_code=self.trust_remote_code,
        )
        restore_names(model, self.directory, whole=self.vision is not None)
        if self.mtp:
            model.mtp = mtp.loaded(model, self.directory)
        if self.values:
            head = _with_value_head(model)
            with reader(self.directory) as read:
                head.weight.data = read(VALUE_HEAD, tuple(head.weight.shape))
        return self._adapted(model, first=True)

    def _adapted(self, model: Any, *, first: bool) -> Any:
        """Add adapters, if the recipe has some; `first`: with their first weights."""
        train_parts(model, self.vision or ())
        if self.lora is not None:
            lora.inject(model, self.lora)
            if first:
                # A critic does not continue from the policy's adapter.
                changes = {"from_": None} if self.values else {}
                lora.initialise(model, self.lora.model_copy(update=changes), self.seed)
            if self.lora.quantize_base:
                quantize_linear_layers(model, lora.expert_counts(model))
            if self.values:  # a head that starts at 0 has no base to adapt
                model.get_output_embeddings().requires_grad_(True)
        for name in kept_parameters(model) & dict(model.named_parameters()).keys():
            model.get_parameter(name).requires_grad_(False)
        for name in indexers(model):
            model.get_submodule(name).requires_grad_(False)
        return model

    def _built(self, config: Any) -> Any:
        model = self._auto.from_config(
            config, dtype=torch.float32, trust_remote_code=self.trust_remote_code
        )
        if model.config.model_type != config.model_type:
            # The language model of a multimodal checkpoint, whose names have one more module.
            model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
        if self.values:
            nn.init.zeros_(_with_value_head(model).weight)
        return model


def _class(config: Any, auto: Any, trust_remote_code: bool) -> type[Any]:
    """Return the class of the model that `auto` builds.

    For a checkpoint's own code it is the base class, which supports fewer kinds of attention.
    """
    if trust_remote_code and auto.__name__ in (getattr(config, "auto_map", None) or {}):
        kind: type[Any] = transformers.PreTrainedModel
        return kind
    mapping = auto._model_mapping
    if type(config) not in mapping:
        raise ValueError(f"model_type {config.model_type!r} has no {auto.__name__}")
    kind = mapping[type(config)]
    return kind


def _keep_choice_biases(kind: type[Any]) -> None:
    """Load biases for the choice of experts in float32, in which checkpoints have them.

    transformers 5.12 rounds those of MiniMax-M2 to the precision of the weights.
    """
    names = set(kind._keep_in_fp32_modules_strict or ())
    kind._keep_in_fp32_modules_strict = names | {"e_score_correction_bias"}


def restore_names(model: Any, directory: Path, *, whole: bool) -> None:
    """Set the conversions that an export reverts: those of trained tensors in this checkpoint.

    transformers would also revert those that only other parts need, such as experts of layers that
    predict further tokens. whole: the model has the vision side of the checkpoint, too.
    """
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    turned: dict[str, bool] = {}
    with stored(directory) as tensors:
        names = list(tensors.names)
        for name in names if whole else trained_names(read_config(directory), names):
            own, pattern = rename_source_key(name, renamings, converters)
            if pattern is not None and pattern not in turned:
                shape = _shape(model, own)
                turned[pattern] = shape is not None and tensors.shape(name) == _turned(shape)
    for entry in converters:
        _always_turn(entry, turned)
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]


def _always_turn(converter: WeightConverter, turned: dict[str, bool]) -> None:
    """Have an export transpose what the checkpoint holds transposed.

    Experts of Qwen3-VL are [experts, in, out] in its releases and [experts, out, in] in
    transformers, which transposes if shapes differ. On export they do not, because it compares the
    tensor with the parameter that it comes from.
    """
    for operation in converter.operations:
        if isinstance(operation, Transpose) and operation.check_dims:
            operation.check_dims = not any(turned.get(p) for p in converter.source_patterns)


def _shape(model: Any, name: str) -> tuple[int, ...] | None:
    parameter = dict(model.named_parameters()).get(name)
    return None if parameter is None else tuple(parameter.shape)


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[:-3:-1])


def _with_value_head(model: Any) -> nn.Linear:
    before = model.get_output_embeddings().weight
    head = nn.Linear(before.shape[1], 1, bias=False, device=before.device, dtype=torch.float32)
    model.set_output_embeddings(head)
    return head


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
