"""The model that is served: its forward pass, and its weights as a trainer changes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice.data import chat

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class NextLogits:
    """What a pass has computed.

    Attributes
    ----------
    scores
        [rows, vocabulary] float32, logits of the next token.
    cache
        The model's state after the pass.

    """

    scores: Tensor
    cache: Any


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a checkpoint is loaded.

    Attributes
    ----------
    draw_weights
        Do not read the weights: a trainer sends them before the first request.
    fp32_lm_head
        Compute logits in float32 (`model.fp32LmHead`).

    """

    directory: Path
    device: str
    dtype: torch.dtype
    draw_weights: bool = False
    fp32_lm_head: bool = False
    trust_remote_code: bool = False


class ServedModel:
    """A causal language model of transformers."""

    def __init__(self, options: ModelOptions) -> None:
        self._options = options
        self.device = torch.device(options.device)
        self.context_tokens = chat.context_length(options.directory)
        self._tokenizer = chat.load_tokenizer(
            options.directory, trust_remote_code=options.trust_remote_code
        )
        self.version = "default"
        make = self._draw if options.draw_weights else self._read
        self._use(make(options.directory))
        self.ends = _ends(self._net)
        self.vocabulary = int(self._net.get_input_embeddings().weight.shape[0])
        # In the present update: names that the model has itself, and tensors that it keeps in
        # another form.
        self._direct: set[str] = set()
        self._converted: dict[str, Tensor] = {}

    def unknown_ids(self, tokens: Iterable[int]) -> list[int]:
        """Return the token ids that the model has no embedding for."""
        return [token for token in tokens if not 0 <= token < self.vocabulary]

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text

    @torch.inference_mode()
    def next_logits(self, ids: Tensor, mask: Tensor, cache: Any) -> NextLogits:
        """Compute the logits that follow each row.

        Parameters
        ----------
        ids
            [rows, t] tokens that `cache` does not know yet.
        mask
            [rows, all tokens] 1 for tokens, 0 for padding.
        cache
            The state after the pass before; None: there was none.

        """
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        answer = self._forward(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return NextLogits(answer.logits[:, -1].float(), answer.past_key_values)

    @torch.inference_mode()
    def log_probs(self, tokens: list[int], count: int) -> list[float]:
        """Return the log-probs of the last `count` of these tokens, at temperature 1."""
        ids = torch.tensor([tokens], device=self.device)
        logits = self._net(input_ids=ids).logits[0, -count - 1 : -1].float()
        targets = ids[0, -count:, None]
        values: list[float] = logits.log_softmax(-1).gather(-1, targets)[:, 0].tolist()
        return values

    def begin(self) -> None:
        """Begin an update. What an unfinished one has left is dropped."""
        self._direct, self._converted = set(), {}

    @torch.no_grad()
    def take(self, tensors: Named) -> None:
        """Take tensors by their names in a checkpoint.

        Those that the model has under the same name replace its own at once. transformers keeps
        others in another form, such as all experts of a layer as one tensor, and converts them when
        it loads a checkpoint, so they are kept until `end`.

        Raises
        ------
        ValueError
            If a tensor has another shape than the model's.

        """
        own = self._net.state_dict(keep_vars=True)
        for name, tensor in tensors:
            if name not in own:
                self._converted[name] = tensor.to(self.device, self._options.dtype).clone()
                continue
            if own[name].shape != tensor.shape:
                raise ValueError(
                    f"{name}: shape {list(tensor.shape)}, but the engine's model has "
                    f"{list(own[name].shape)}: it was started with another model"
                )
            own[name].data.copy_(tensor)
            self._direct.add(name)

    def end(self) -> None:
        """End an update: load what transformers has to convert.

        Raises
        ------
        ValueError
            If the model then lacks a tensor, or cannot be made of what has come.

        """
        if not self._converted:
            return
        own = self._net.state_dict()
        state = {**{name: own[name] for name in self._direct}, **self._converted}
        self.begin()
        self._use(self._convert(state))

    def load(self, directory: Path) -> None:
        """Load a checkpoint.

        Raises
        ------
        ValueError
            If there is none.

        """
        if not any(directory.glob("*.safetensors")):
            raise ValueError(f"{directory}: expected a directory with *.safetensors")
        self._use(self._read(directory))

    def _read(self, directory: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            directory,
            config=self._config(directory),
            dtype=self._options.dtype,
            trust_remote_code=self._options.trust_remote_code,
        )

    def _draw(self, directory: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(
            self._config(directory),
            dtype=self._options.dtype,
            trust_remote_code=self._options.trust_remote_code,
        )

    def _config(self, directory: Path) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=self._options.trust_remote_code
        )
        # PyTorch's attention, the default of transformers, does not cap scores (Gemma 2).
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            config._attn_implementation = "eager"
        return config

    def _convert(self, state: Mapping[str, Tensor]) -> Any:
        """Return a new model of tensors by their names in a checkpoint. Raises ValueError."""
        try:
            net, found = type(self._net).from_pretrained(
                None,
                config=self._net.config,
                state_dict=dict(state),
                dtype=self._options.dtype,
                output_loading_info=True,
            )
        except AttributeError as error:  # a name that the model's class does not know
            raise ValueError(f"transformers cannot load the update: {error}") from error
        if found["missing_keys"]:
            raise ValueError(f"the update has no {min(found['missing_keys'])}")
        return net

    def _use(self, net: Any) -> None:
        self._net = net.to(self.device).eval().requires_grad_(requires_grad=False)
        if self._options.fp32_lm_head:
            head = net.get_output_embeddings()
            head.forward = partial(_in_float32, head)
        self._forward = _last_only(net)


def _last_only(net: Any) -> Callable[..., Any]:
    """Return the forward pass, with the logits of the last token alone if it can do that."""
    if "logits_to_keep" in inspect.signature(net.forward).parameters:
        return partial(net, logits_to_keep=1)
    return partial(net)


def _in_float32(head: Any, hidden: Tensor) -> Tensor:
    bias = None if head.bias is None else head.bias.float()
    return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)


def _ends(net: Any) -> frozenset[int]:
    """Return the tokens that end a response, as the checkpoint's generation_config.json says."""
    ends = getattr(net, "generation_config", None) and net.generation_config.eos_token_id
    if ends is None:
        ends = net.config.get_text_config().eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
