"""spec.trainer.lora: low-rank adapters instead of all weights."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, PositiveInt
from sluice.api.schema.paths import AdapterPath
from sluice.api.schema.rules import Rule, field, requires, written

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
ModuleName = Annotated[
    str, Field(pattern=r"^(all-linear|[A-Za-z_][A-Za-z0-9_.]*)$", max_length=256)
]


# PEFT's names of first weights, with `default` for its default. A rule refuses `eva`.
Initialise = Annotated[str, Field(pattern=r"^(default|pissa|pissa_niter_[1-9][0-9]?|eva)$")]


class Lora(Model):
    """Train low-rank adapters; the weights of the model itself stay as they are."""

    rank: Annotated[int, Field(ge=1, le=1024)] = Field(
        32, description="Rank of every adapter: columns of B and rows of A."
    )
    alpha: PositiveInt = Field(
        32, description="Scale of the adapters: a module computes W x + alpha / rank B A x."
    )
    rank_stabilized: bool = Field(
        False, description="Scale by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023)."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Fraction of an adapter's inputs that a training pass drops. Log-probs are "
        "always computed without it, as the engine does.",
    )
    initialise: Initialise = Field(
        "default",
        description="First weights, by PEFT's names. default: A is random and B is 0. pissa: both "
        "are the principal part of the weight that they adapt (Meng et al. 2024), which learns "
        "faster. pissa_niter_16 computes that part approximately, with 16 iterations, in a small "
        "fraction of the time.",
    )
    quantize_base: Literal["nf4"] | None = Field(
        None,
        description="Keep the frozen linear layers of the decoder in 4 bits (NF4, QLoRA, Dettmers "
        "et al. 2023), 0.56 bytes for each weight. Engines get the weights that the trainer "
        "computes with, so log-probs agree. Default: they stay in trainer.precision.",
    )
    target_modules: Annotated[list[ModuleName], Field(min_length=1, max_length=64)] = Field(
        [ALL_LINEAR],
        description="Names of the linear layers that get an adapter, such as q_proj, as PEFT "
        "matches them. all-linear: every linear layer of the decoder, without routers, the output "
        "layer and, in a mixture, layers that have the name of a part of an expert. experts: each "
        "expert of a mixture, with its own adapter.",
    )
    exclude_modules: Annotated[list[ModuleName], Field(max_length=64)] = Field(
        default_factory=list, description="Names of linear layers that get none."
    )
    export: Literal["adapter", "merged", "both"] = Field(
        "both",
        description="What checkpoint.exportHF writes at the end: the adapter in PEFT's format "
        "(`adapter`), the model with the adapter added (`hf`), or both.",
    )
    from_: AdapterPath | None = Field(
        None,
        alias="from",
        description="Directory of a PEFT adapter to continue from. Its rank, alpha and target "
        "modules must be those of this section.",
    )

    rules = (
        Rule(
            field("initialise") != "eva",
            "eva computes first weights from the inputs of layers, which a trainer has only once "
            "there are responses, and gives layers different ranks, which engines cannot hold: set "
            "initialise: pissa_niter_16, which needs the weights alone",
            "initialise",
        ),
        requires(
            written("'experts' in self.targetModules", lambda lora: lora.experts),
            (field("dropout") == 0) & (field("initialise") == "default"),
            "adapters of experts have neither dropout nor first weights of pissa: leave dropout "
            "and initialise out, or experts out of targetModules",
            "targetModules",
        ),
        requires(
            field("from").is_set,
            field("initialise") == "default",
            "the first weights are those of the adapter in from: leave initialise out",
            "initialise",
        ),
        requires(
            field("quantizeBase").is_set,
            field("initialise") == "default",
            "pissa decomposes the weights before they are quantized, and would start from others "
            "than the trainer computes with: leave initialise or quantizeBase out",
            "initialise",
        ),
    )

    @property
    def experts(self) -> bool:
        """True if the experts of a mixture get adapters."""
        return EXPERTS in self.target_modules

    @property
    def pissa(self) -> bool:
        """True if the adapter starts as the principal part of the weights."""
        return self.initialise != "default"

    @property
    def pissa_iterations(self) -> int | None:
        """Iterations of an approximate decomposition; None for an exact one."""
        _, _, iterations = self.initialise.partition("_niter_")
        return int(iterations) if iterations else None

    @property
    def stored_rank(self) -> int:
        """Rank of the adapter in files and engines.

        With pissa it also holds the principal part, which it takes off the base.
        """
        return self.rank * (2 if self.pissa else 1)

    @property
    def adapted_names(self) -> list[str]:
        """Names of the layers that get an adapter; `all-linear` stands for every one."""
        return [name for name in self.target_modules if name not in self.exclude_modules]

    def adapts(self, layer: str) -> bool:
        """Return True if linear layers of this name, without a dot, get an adapter."""
        named = ALL_LINEAR in self.target_modules or layer in self.target_modules
        return named and layer not in self.exclude_modules

    @property
    def attention_is_whole(self) -> bool:
        """False if one of q_proj, k_proj, v_proj has an adapter, and q_proj or v_proj has none.

        True if a name has a dot: it may match any layer.
        """
        if any("." in name for name in self.target_modules):
            return True
        q, k, v = map(self.adapts, ("q_proj", "k_proj", "v_proj"))
        return q == v and (q or not k)

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return scaling(self.rank, self.alpha, rank_stabilized=self.rank_stabilized)


def scaling(rank: int, alpha: float, *, rank_stabilized: bool) -> float:
    """Return the factor of B A: alpha / rank, or alpha / sqrt(rank) (rsLoRA)."""
    return alpha / (math.sqrt(rank) if rank_stabilized else rank)
