"""How a request wants its tokens chosen, and the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Parameters of SGLang that say nothing if they have this value, by name.
_WITHOUT_EFFECT: dict[str, Any] = {
    "skip_special_tokens": True,  # the engine returns tokens, and no text
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class RefusedError(ValueError):
    """The request cannot be answered. The message says which parameter, and what it may be."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Parameters of one request, by SGLang's names and with its meanings.

    Attributes
    ----------
    temperature
        0: always the most likely token.
    top_p, top_k
        As `rollout.sampling` has them; 1 and -1 leave no token out.
    stop
        Texts that end the response. They stay in its tokens.
    sampling_seed
        Seed of this request's draws; None: they follow the draws of other requests.

    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SamplingParameters:
        """Read the parameters of a request.

        Raises
        ------
        RefusedError
            For a parameter that this engine lacks, or a value that it cannot have.

        """
        chosen: dict[str, Any] = {}
        for name, value in given.items():
            if name in cls.__slots__:
                chosen[name] = value
            elif value is not None and value != _WITHOUT_EFFECT.get(name):
                raise RefusedError(
                    f"sampling: rollout.engine transformers has nothing for {name}; it has "
                    f"{', '.join(cls.__slots__)}"
                )
        stop = chosen.get("stop") or ()
        chosen["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        chosen["stop_token_ids"] = frozenset(chosen.get("stop_token_ids") or ())
        parameters = cls(**chosen)
        parameters._check()
        return parameters

    def _check(self) -> None:
        for name in ("top_k", "max_new_tokens", "min_new_tokens", "sampling_seed"):
            value = getattr(self, name)
            optional = name == "sampling_seed" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int)):
                raise RefusedError(f"sampling: {name} must be a whole number, found {value!r}")
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            if not all(isinstance(entry, kind) for entry in getattr(self, name)):
                raise RefusedError(f"sampling: {name}: expected entries of type {kind.__name__}")
        if not (isinstance(self.temperature, int | float) and self.temperature >= 0):
            raise RefusedError(
                f"sampling: temperature must be non-negative, found {self.temperature}"
            )
        if not (isinstance(self.top_p, int | float) and 0 < self.top_p <= 1):
            raise RefusedError(f"sampling: top_p must be above 0 and at most 1, found {self.top_p}")
        if self.max_new_tokens < 1:
            raise RefusedError(
                f"sampling: max_new_tokens must be at least 1, found {self.max_new_tokens}"
            )


def choose(
    logits: Tensor, parameters: SamplingParameters, generator: torch.Generator
) -> tuple[int, float]:
    """Draw a token, and return it with its log-probability.

    The log-probability is that of the temperature-scaled distribution over all tokens, which the
    trainer computes too, whatever top-p and top-k leave out. With temperature 0 it is that of
    temperature 1.

    Parameters
    ----------
    logits
        [vocabulary] float32.
    parameters
        The request's parameters.
    generator
        The source of chance, on the device of the logits.

    """
    log_probs = torch.log_softmax(logits / (parameters.temperature or 1.0), -1)
    if parameters.temperature == 0 or parameters.top_k == 1:
        token = int(log_probs.argmax())
    else:
        weights = truncated(log_probs.exp(), parameters.top_p, parameters.top_k)
        token = int(torch.multinomial(weights, 1, generator=generator))
    return token, float(log_probs[token])


def truncated(probabilities: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return the [vocabulary] probabilities with 0 for the tokens that are left out.

    If tokens are equally likely, the one with the smaller number counts as more likely.
    """
    if top_p >= 1 and top_k <= 0:
        return probabilities
    ordered, order = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = before < top_p
    if top_k > 0:
        kept[top_k:] = False
    return torch.zeros_like(probabilities).scatter(-1, order, ordered * kept)
