"""spec.algorithm: what follows from the estimator, and combinations that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sluice.api import Algorithm, Model, RLJobSpec, Rollout
from sluice.api.groups.algorithm import ACROSS_GROUPS, KL, Critic
from sluice.api.groups.colocation import COLOCATION
from sluice.api.groups.distillation import DISTILLATION_ACROSS_GROUPS, Distillation, TeacherSpec
from sluice.api.groups.losses import Covariance, Loss
from sluice.api.groups.off_policy import OffPolicy, Rejection
from sluice.api.groups.offline import OF_ADVANTAGES, OF_SAMPLES, OFFLINE_ACROSS_GROUPS
from sluice.api.groups.pool_jobs import POOL_ACROSS_GROUPS
from sluice.api.schema.rules import any_set
from tests.algorithm_cases import ALONE, CRITIC, SENSIBLE, TOGETHER, manifest


def job(algorithm: dict[str, Any], **groups: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(manifest(algorithm, groups))


def test_grpo_is_the_default() -> None:
    algorithm = Algorithm()
    assert (algorithm.estimator, algorithm.policy_loss, algorithm.loss_aggregation) == (
        "grpo",
        "ppo",
        "sequence_mean",
    )
    assert not algorithm.whitens
    assert algorithm.value_model is None


@pytest.mark.parametrize(
    ("algorithm", "loss", "aggregation", "whitens"),
    [
        ({"estimator": "dr_grpo"}, "ppo", "token_sum_norm", False),
        ({"estimator": "dr_grpo", "aggregation": "token_mean"}, "ppo", "token_mean", False),
        ({"estimator": "gspo"}, "gspo", "sequence_mean", False),
        ({"estimator": "cispo", "normalizeAdvantages": True}, "cispo", "sequence_mean", True),
        ({"estimator": "gspo", "loss": {"type": "reinforce"}}, "reinforce", "sequence_mean", False),
        ({"estimator": "rloo", "loss": {"type": "gspo"}}, "gspo", "sequence_mean", False),
        ({"estimator": "reinforce_plus_plus"}, "ppo", "sequence_mean", True),
        ({"estimator": "reinforce_plus_plus_baseline"}, "ppo", "sequence_mean", True),
        ({"estimator": "ppo"}, "ppo", "sequence_mean", False),
    ],
    ids=str,
)
def test_an_estimator_sets_loss_aggregation_and_whitening(
    algorithm: dict[str, Any], loss: str, aggregation: str, whitens: bool
) -> None:
    parsed = Algorithm.model_validate(algorithm)
    assert (parsed.policy_loss, parsed.loss_aggregation, parsed.whitens) == (
        loss,
        aggregation,
        whitens,
    )


def test_ppo_has_a_critic_by_default() -> None:
    assert Algorithm(estimator="ppo").value_model == Critic()
    described = Algorithm.model_validate({"estimator": "ppo", "critic": CRITIC}).value_model
    assert described is not None
    assert described.warmup_steps == 2


def test_sft_needs_neither_reward_nor_engines_and_takes_one_sample_a_row() -> None:
    alone = job({"loss": {"type": "sft"}}, reward=None)
    assert (alone.samples_per_prompt, alone.total_samples, alone.replicas, alone.judged) == (
        1,
        32,
        0,
        False,
    )
    assert alone.algorithm.loss_aggregation == "token_mean"
    evaluated = job({"loss": {"type": "sft"}}, evaluation={"datasets": [{"path": "e"}]})
    assert evaluated.replicas == 1, "engines only evaluate"
    assert not evaluated.judged
    measured = job({"loss": {"type": "sft"}}, reward=None, evaluation={"heldOut": [{"path": "e"}]})
    assert (measured.replicas, measured.evaluates) == (0, False), "the trainer measures them"


@pytest.mark.parametrize(
    ("loss", "beta", "normalized", "reference"),
    [
        ({"type": "dpo"}, 0.1, False, True),
        ({"type": "dpo", "preference": {"lengthNormalized": True}}, 0.1, True, True),
        ({"type": "ipo"}, 0.1, True, True),
        ({"type": "ipo", "preference": {"lengthNormalized": False}}, 0.1, False, True),
        ({"type": "kto"}, 0.1, False, True),
        ({"type": "simpo"}, 2.0, True, False),
        ({"type": "orpo", "preference": {"beta": 0.3}}, 0.3, True, False),
    ],
    ids=str,
)
def test_a_loss_of_preferences_has_the_defaults_of_its_paper(
    loss: dict[str, Any], beta: float, normalized: bool, reference: bool
) -> None:
    algorithm = job({"loss": loss}, reward=None).algorithm
    settings = algorithm.loss.preferences
    assert (settings.beta, settings.length_normalized) == (beta, normalized)
    assert algorithm.needs_reference is reference
    assert algorithm.offline
    assert algorithm.prefers


@pytest.mark.parametrize(
    ("model", "fields"),
    [(Algorithm, OF_ADVANTAGES), (Rollout, OF_SAMPLES)],
    ids=["algorithm", "rollout"],
)
def test_what_sft_refuses_are_fields_that_have_defaults(
    model: type[Model], fields: tuple[str, ...]
) -> None:
    assert set(fields) <= {info.alias for info in model.model_fields.values()}
    assert not any_set(*fields).holds(model())


def test_a_default_that_is_written_out_does_not_count_as_set_with_sft() -> None:
    """API servers write them all out."""
    spelled = RLJobSpec.model_validate(manifest({"loss": {"type": "sft"}}, {"reward": None}))
    again = RLJobSpec.model_validate(spelled.model_dump(mode="json", by_alias=True))
    assert again == spelled


def test_a_data_source_has_one_teacher() -> None:
    teachers = [{"dataSource": "a", "url": "http://a"}, {"dataSource": "a", "url": "http://b"}]
    with pytest.raises(ValidationError, match="dataSource 'a' is here twice; expected once"):
        job({"distillation": {"teacher": {"url": "http://t"}, "teachers": teachers}})


def refused(algorithm: dict[str, Any], **groups: Any) -> tuple[str, str]:
    with pytest.raises(ValidationError) as raised:
        job(algorithm, **groups)
    (problem,) = raised.value.errors()
    return str(problem["ctx"]["field"]), problem["msg"]


@pytest.mark.parametrize(("algorithm", "field", "reason"), ALONE, ids=str)
def test_an_invalid_algorithm_is_refused_with_the_reason(
    algorithm: dict[str, Any], field: str, reason: str
) -> None:
    where, why = refused(algorithm)
    assert where == field
    assert reason in why


@pytest.mark.parametrize(("algorithm", "groups", "field", "reason"), TOGETHER, ids=str)
def test_an_algorithm_that_contradicts_other_groups_is_refused(
    algorithm: dict[str, Any], groups: dict[str, Any], field: str, reason: str
) -> None:
    where, why = refused(algorithm, **groups)
    assert where == field
    assert reason in why


@pytest.mark.parametrize(("algorithm", "groups"), SENSIBLE, ids=str)
def test_a_valid_algorithm_is_accepted(algorithm: dict[str, Any], groups: dict[str, Any]) -> None:
    job(algorithm, **groups)


def test_every_rule_has_a_case_above() -> None:
    messages = [reason for *_, reason in ALONE] + [reason for *_, reason in TOGETHER]
    rules = [
        *Algorithm.rules,
        *KL.rules[1:],
        *OffPolicy.rules,
        *Rejection.rules,
        *Loss.rules,
        *Covariance.rules,
        *ACROSS_GROUPS,
        *OFFLINE_ACROSS_GROUPS,
    ]
    rules += [*TeacherSpec.rules, *Distillation.rules, *DISTILLATION_ACROSS_GROUPS, *COLOCATION]
    rules += POOL_ACROSS_GROUPS
    for rule in rules:
        assert any(message in rule.message for message in messages), rule.message
