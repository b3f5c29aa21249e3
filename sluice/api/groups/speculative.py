"""spec.rollout.speculative: engines verify several proposed tokens in one pass of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model
from sluice.api.schema.paths import DraftPath
from sluice.api.schema.rules import field, only_with, requires

_HAS_CHECKPOINT = field("algorithm").is_in(("eagle3", "draft"))


class Speculative(Model):
    """Speculative decoding.

    Something cheap proposes tokens, and the model verifies several of them in one pass. Responses
    come from the same distribution as without, with the model's log-probs.
    """

    algorithm: Literal["ngram", "eagle3", "mtp", "draft"] = Field(
        description="What proposes tokens. ngram: earlier responses and the prompt, by their last "
        "tokens. mtp: the layers of the checkpoint that predict further tokens, as in DeepSeek-V3, "
        "GLM-4.5 and Qwen3.5. eagle3: an EAGLE-3 head in `model`. draft: a smaller model in "
        "`model`, with the same tokenizer. They stay as in their checkpoint, and propose worse the "
        "more the policy changes; only the layers of mtp learn, with trainer.mtp."
    )
    model: DraftPath | None = Field(
        None,
        description="Hugging Face checkpoint of the EAGLE-3 head or the draft model. With "
        "model.volume: relative to the root of that volume.",
    )
    steps: Annotated[int, Field(ge=1, le=64)] = Field(
        3, description="Number of tokens that are proposed one after another."
    )
    top_k: Annotated[int, Field(ge=1, le=32)] = Field(
        1,
        description="Number of candidates at each step. With more than 1 they form a tree, of "
        "which steps x topK tokens are verified.",
    )

    rules = (
        requires(
            _HAS_CHECKPOINT,
            field("model").is_set,
            "eagle3 and draft need a checkpoint: set model",
            "model",
            reason="FieldValueRequired",
        ),
        only_with(
            "model",
            _HAS_CHECKPOINT,
            "ngram proposes from earlier tokens, and mtp with layers of the model's own "
            "checkpoint: leave model out",
        ),
    )

    @property
    def verified_tokens(self) -> int:
        """Tokens that one pass computes for a response: the last one and proposed ones."""
        return self.steps * self.top_k + 1


_SPECULATES = field("rollout.speculative").is_set

# Rules of a job's spec.
SPECULATION = (
    requires(
        _SPECULATES,
        field("weightSync.enginePlugin").is_true,
        "without sluice's plugin SGLang loads each update into the draft model too: leave "
        "weightSync.enginePlugin out",
        "rollout.speculative",
    ),
    requires(
        _SPECULATES,
        ~field("rollout.pool").is_set,
        "the engines are started by the pool: leave speculative out",
        "rollout.speculative",
    ),
    requires(
        _SPECULATES,
        field("weightSync.lora") == "merged",
        "an engine that applies adapters by itself has not been shown to verify with them: set "
        "weightSync.lora: merged, or leave speculative out",
        "rollout.speculative",
    ),
    requires(
        _SPECULATES,
        field("trainer.routingReplay") != "rollout",
        "the routing of tokens that were proposed and refused would be replayed too: leave "
        "trainer.routingReplay or rollout.speculative out",
        "trainer.routingReplay",
    ),
    requires(
        _SPECULATES,
        field("trainer.deterministic").is_false,
        "deterministic needs an engine that computes each token as the trainer does, and "
        "verification computes several in one pass: leave rollout.speculative out",
        "trainer.deterministic",
    ),
    requires(
        _SPECULATES & (field("rollout.precision") != "bf16"),
        field("rollout.speculative.algorithm") == "ngram",
        "a draft would have to be quantized like the model, whose weights come with updates: set "
        "algorithm: ngram, or leave rollout.precision out",
        "rollout.speculative.algorithm",
    ),
    requires(
        _SPECULATES,
        ~field("data.images").is_set,
        "speculative decoding has not been shown to work with images: leave speculative out",
        "rollout.speculative",
    ),
    requires(
        field("rollout.speculative.algorithm") == "mtp",
        field("model.init") != "random",
        "model.init: random draws no layers that predict further tokens: choose another algorithm",
        "rollout.speculative.algorithm",
    ),
    requires(
        field("trainer.mtp").is_set,
        (field("model.init") != "random") & ~field("data.images").is_set,
        "the layer that predicts a further token is read from the checkpoint, and has not been "
        "shown to learn with images: leave trainer.mtp, or model.init and data.images out",
        "trainer.mtp",
    ),
    requires(
        field("trainer.mtp").is_set,
        field("algorithm.loss.type") != "reward_model",
        "a reward model generates nothing: leave trainer.mtp out",
        "trainer.mtp",
    ),
)
