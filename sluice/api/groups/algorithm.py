"""spec.algorithm: from rewards to advantages, and from advantages to a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.advantages import (
    OF_PARTS,
    OF_TURNS,
    OVERLONG_ACROSS_GROUPS,
    WITH_SEATS,
    Overlong,
    RewardPart,
    TurnAdvantage,
)
from sluice.api.groups.distillation import Distillation
from sluice.api.groups.environment import REWARDED
from sluice.api.groups.estimators import (
    ESTIMATORS,
    Aggregation,
    EstimatorKind,
    EstimatorName,
    estimators,
)
from sluice.api.groups.losses import (
    BY_COVARIANCE,
    DUAL_CLIPPED,
    OFFLINE,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    WITH_REFERENCE,
    Loss,
    PolicyLossName,
)
from sluice.api.groups.off_policy import OffPolicy
from sluice.api.groups.offline import IS_OFFLINE, WITHOUT_ADVANTAGES
from sluice.api.schema.base import (
    Fraction,
    Model,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Unique,
)
from sluice.api.schema.paths import ModelPath, UserFunction
from sluice.api.schema.rules import (
    Condition,
    Rule,
    at_most_one_of,
    belong_together,
    field,
    only_with,
    requires,
    written,
)


class AdaptiveKL(Model):
    """Controller of kl.coef.

    After each step coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon.
    """

    target: PositiveFloat = Field(
        0.1, description="Mean KL of a trained token at which the coefficient stays as it is."
    )
    horizon: PositiveInt = Field(
        10_000,
        description="Number of sequences in which the coefficient changes by at most a fifth.",
    )


class KL(Model):
    """Distance from the reference model, as part of the reward or of the loss."""

    coef: NonNegativeFloat = Field(
        0.0, description="Weight of the penalty inside the reward. 0: no penalty."
    )
    loss_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the term in the loss. 0: no term."
    )
    type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k1",
        description="Estimator, with d = log pi - log pi_ref. k1: d; k2: d^2 / 2; k3: "
        "exp(-d) - 1 + d; low_var_kl: k3, clamped to [-10, 10].",
    )
    unbiased: bool = Field(False, description="Multiply the estimate in the loss by pi / pi_old.")
    adaptive: AdaptiveKL | None = Field(
        None, description="Adapt the coefficient to a target KL. coef is then its first value."
    )

    rules = (
        only_with(
            "adaptive",
            field("coef") > 0,
            "adaptive needs coef, the first coefficient of the penalty in the reward",
        ),
        at_most_one_of(
            "coef",
            "lossCoef",
            message="coef (in the reward) and lossCoef (in the loss) cannot both be set",
        ),
        only_with(
            "unbiased",
            field("lossCoef") > 0,
            "unbiased needs lossCoef: it corrects the gradient of the KL term in the loss",
        ),
    )


class Critic(Model):
    """Value model of ppo. Its optimizer is trainer.optimizer with another learning rate."""

    model_path: ModelPath | None = Field(
        None,
        description="Checkpoint of a language or reward model that the critic starts from. "
        "Default: model.path.",
    )
    lr: NonNegativeFloat = Field(1e-5, description="Learning rate of the critic.")
    min_lr: NonNegativeFloat = Field(
        0.0,
        description="Learning rate of the critic at the end of the schedule of trainer.optimizer.",
    )
    clip: PositiveFloat = Field(
        0.2,
        description="Largest distance of a value from its prediction before the step; "
        "further ones are clipped.",
    )
    warmup_steps: NonNegativeInt = Field(
        0, description="Number of first steps that train the critic alone."
    )


def _estimator(kinds: Callable[[EstimatorKind], bool]) -> Condition:
    """True if the estimator of spec.algorithm is of some kinds."""
    return field("estimator").is_in(estimators(kinds))


class Algorithm(Model):
    """Estimator of advantages and loss.

    Names and defaults are slime's. docs/algorithms.md has the formulas and compares with slime
    and verl.
    """

    estimator: EstimatorName = Field(
        "grpo",
        description="Estimator of advantages from rewards. docs/algorithms.md has the formulas.",
    )
    function: UserFunction | None = Field(
        None, description="Own estimator, with `estimator: custom`."
    )
    normalize_std: bool = Field(
        True,
        description="Divide advantages by the standard deviation of the group. Estimators "
        "grpo, gspo, cispo, grpo_passk and gdpo.",
    )
    normalize_advantages: bool | None = Field(
        None,
        description="Whiten advantages over the whole batch. Default: only for "
        "reinforce_plus_plus, reinforce_plus_plus_baseline and gdpo, which always do.",
    )
    gamma: Fraction = Field(
        1.0, description="Discount factor. Estimators ppo and reinforce_plus_plus."
    )
    lambda_: Fraction = Field(
        1.0, alias="lambda", description="Lambda of ppo's generalized advantage estimation (GAE)."
    )
    loss: Loss = Field(default_factory=Loss)
    kl: KL = Field(default_factory=KL)
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus in the loss.")
    aggregation: Aggregation | None = Field(
        None,
        description="How the losses of tokens become one number. sequence_mean: mean of each "
        "sequence, then of all; prompt_mean: mean of all tokens of a prompt's responses, "
        "then of prompts; token_mean: mean of all tokens; token_sum: sum of each sequence, "
        "then mean; token_sum_norm: token_sum divided by rollout.sampling.maxResponseTokens. "
        "Default: sequence_mean; token_sum_norm for dr_grpo; token_mean for sft.",
    )
    off_policy: OffPolicy = Field(default_factory=OffPolicy)
    critic: Critic | None = Field(
        None, description="Value model of estimator ppo. Default: one with the defaults below."
    )
    distillation: Distillation | None = None
    overlong: Overlong | None = Field(
        None,
        description="Penalty for responses that come near the length limit. Default: no penalty.",
    )
    reward_parts: Annotated[list[RewardPart], Field(max_length=16), Unique("name")] = Field(
        default_factory=list,
        description="Parts of the reward that estimator gdpo normalizes separately.",
    )

    turn_advantage: TurnAdvantage | None = Field(
        None,
        description="Give each turn of the model an advantage by the rewards that follow it. "
        "Default: one advantage for all turns of an episode.",
    )

    rules = (
        belong_together(
            field("estimator") == "custom",
            field("function").is_set,
            "estimator: custom and function belong together",
            "function",
        ),
        only_with("critic", _estimator(lambda k: k.critic), "only estimator: ppo has a critic"),
        requires(
            _estimator(lambda k: k.whitened),
            ~field("normalizeAdvantages").is_false,
            "reinforce_plus_plus, reinforce_plus_plus_baseline and gdpo always whiten advantages; "
            "leave it out",
            "normalizeAdvantages",
        ),
        only_with(
            "gamma",
            _estimator(lambda k: k.discounts),
            "only ppo and reinforce_plus_plus discount; the other estimators give all tokens the "
            "same advantage",
        ),
        only_with(
            "lambda",
            _estimator(lambda k: k.smooths),
            "only ppo has a lambda: it weighs the critic's values",
        ),
        only_with(
            "loss.clip.dual",
            field("loss.function").is_set
            | field("loss.type").is_in(DUAL_CLIPPED)
            | (~field("loss.type").is_set & (field("estimator") != "cispo")),
            f"the dual clip bounds the losses {', '.join(DUAL_CLIPPED[:-1])} and "
            f"{DUAL_CLIPPED[-1]}; the others have nothing to bound",
        ),
        *OF_PARTS,
        *OF_TURNS,
        *WITHOUT_ADVANTAGES,
    )

    @property
    def kind(self) -> EstimatorKind:
        return ESTIMATORS[self.estimator]

    @property
    def offline(self) -> bool:
        """True if the job learns from given answers, without rewards and advantages."""
        return self.loss.type in OFFLINE

    @property
    def prefers(self) -> bool:
        """True if the rows have answers of which one is preferred."""
        return self.loss.type in PREFERENCE_LOSSES

    @property
    def paired(self) -> bool:
        """True if an answer is trained together with a worse one."""
        return self.prefers and self.loss.type != "kto"

    @property
    def trains_reward_model(self) -> bool:
        """True if the model gets a head with one output, the reward."""
        return self.loss.type == "reward_model"

    @property
    def needs_reference(self) -> bool:
        """True if a term of the reward or the loss compares the policy with the reference."""
        return self.kl.coef > 0 or self.kl.loss_coef > 0 or self.loss.type in WITH_REFERENCE

    @property
    def whitens(self) -> bool:
        return self.kind.whitened or bool(self.normalize_advantages)

    @property
    def loss_aggregation(self) -> Aggregation:
        if self.offline:
            return self.aggregation or "token_mean"
        return self.aggregation or self.kind.aggregation

    @property
    def policy_loss(self) -> PolicyLossName:
        """The policy loss; meaningless if `loss.function` is set or the job is `offline`."""
        return next((name for name in POLICY_LOSSES if name == self.loss.type), self.kind.loss)

    @property
    def by_covariance(self) -> bool:
        """True if the loss chooses tokens among all of an optimizer step."""
        return self.loss.type in BY_COVARIANCE

    @property
    def value_model(self) -> Critic | None:
        """Critic of the estimator, with its defaults; None if the estimator has no critic."""
        return (self.critic or Critic()) if self.kind.critic else None


_HAS_OLD_POLICY = (field("algorithm.offPolicy.oldLogProbs") == "rollout") | (
    field("trainer.stepsPerBatch") > 1
)


def _job_estimator(kinds: Callable[[EstimatorKind], bool]) -> Condition:
    """True if the estimator of a job's spec is of some kinds."""
    return field("algorithm.estimator").is_in(estimators(kinds))


# Rules of a job's spec that are about its algorithm.
ACROSS_GROUPS = (
    requires(
        REWARDED & ~IS_OFFLINE & _job_estimator(lambda kind: kind.grouped),
        field("rollout.samplesPerPrompt") > 1,
        "this estimator compares the responses to a prompt, and rollout.samplesPerPrompt is 1: "
        "nothing would be learned; use reinforce_plus_plus, remax or ppo, or more samples",
        "algorithm.estimator",
    ),
    requires(
        _job_estimator(lambda kind: kind.greedy),
        ~field("reward.group").is_true,
        "remax scores its greedy response alone; a reward that needs the whole group cannot do "
        "that",
        "reward.group",
    ),
    Rule(
        written(
            "!has(self.algorithm.critic) || !has(self.trainer.steps) || "
            "self.algorithm.critic.warmupSteps < self.trainer.steps",
            lambda s: (
                not (s.algorithm.critic and s.trainer.steps)
                or s.algorithm.critic.warmup_steps < s.trainer.steps
            ),
        ),
        "the policy would never be trained: warmupSteps must be less than trainer.steps",
        "algorithm.critic.warmupSteps",
    ),
    only_with(
        "algorithm.offPolicy.opsmDelta",
        _HAS_OLD_POLICY,
        "with one optimizer step per batch the old policy is the current one and no sequence is "
        "ever masked; set offPolicy.oldLogProbs: rollout or trainer.stepsPerBatch",
    ),
    requires(
        field("algorithm.loss.type") == "kl_cov",
        _HAS_OLD_POLICY,
        "with one optimizer step per batch the old policy is the current one and kl_cov holds "
        "nothing back; set offPolicy.oldLogProbs: rollout or trainer.stepsPerBatch",
        "algorithm.loss.type",
    ),
    *OVERLONG_ACROSS_GROUPS,
    *WITH_SEATS,
)
