"""Every argument of slime and key of verl is known, or unsupported with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_migrate.slime import unsupported_keys as slime_keys
from sluice_migrate.slime.table import SLIME
from sluice_migrate.translation import (
    UNKNOWN_SETTING,
    Covered,
    Field,
    Table,
    Translation,
    Unsupported,
)
from sluice_migrate.verl import unsupported_keys as verl_keys
from sluice_migrate.verl.table import VERL

SLIME_NAMES = """
--rollout-data-transport --flush-cache-interval --use-score-centering
--freeze-params-name-list --ci-test
--rollout-health-check-interval --tb-project-name --mtp-num-layers
--sglang-router-ip
--eval-function-path --rollout-function-path --data-source-path --custom-config-path --dump-details
"""
VERL_NAMES = """
actor_rollout_ref.rollout.enable_rollout_routing_replay actor_rollout_ref.actor.qat.enable
actor_rollout_ref.actor.loss_scale_factor
actor_rollout_ref.actor.megatron.override_ddp_config
actor_rollout_ref.rollout.disaggregation.enabled
actor_rollout_ref.actor.checkpoint.save_contents data.custom_cls.name
reward.reward_model.rollout.name
reward_model.megatron.seed trainer.val_only algorithm.pf_ppo.weight_pow model_engine data.audio_key
"""


@pytest.mark.parametrize(
    ("table", "name"),
    [
        *((SLIME, name) for name in SLIME_NAMES.split()),
        *((VERL, name) for name in VERL_NAMES.split()),
    ],
)
def test_a_name_has_an_entry_with_a_reason(table: Table, name: str) -> None:
    entry = table.entry(name)
    assert isinstance(entry, Unsupported | Covered)
    assert entry.why != UNKNOWN_SETTING


@pytest.mark.parametrize(
    ("name", "value", "lost"),
    [
        ("actor_rollout_ref.actor.optim.weight_decay_incr_style", "constant", False),
        ("actor_rollout_ref.actor.loss_scale_factor", 4096, True),
        ("async_training.use_dynamic_resource_scheduling", False, False),
    ],
)
def test_a_default_value_is_not_reported_as_unsupported(name: str, value: Any, lost: bool) -> None:
    entry = VERL.entry(name)
    assert isinstance(entry, Unsupported)
    assert (value not in entry.unless) == lost


@pytest.mark.parametrize(
    ("table", "unsupported"),
    [(SLIME, slime_keys.UNSUPPORTED), (VERL, verl_keys.UNSUPPORTED)],
    ids=["slime", "verl"],
)
def test_a_name_has_a_field_or_a_reason_not_both(
    table: Table, unsupported: dict[str, Translation]
) -> None:
    assert [name for name in unsupported if table.entries[name] is not unsupported[name]] == []


def test_hooks_of_slime_on_samples_become_hooks_of_the_rollout() -> None:
    entry = SLIME.entry("--rollout-sample-hook-path")
    assert isinstance(entry, Field)
    assert entry.path == "rollout.hooks.beforeReward"
