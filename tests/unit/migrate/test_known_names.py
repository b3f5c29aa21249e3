"""No argument of slime and no key of verl is unknown; each that is lost says why."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_migrate.draft import Lost, Same, To
from sluice_migrate.slime import table as slime_table
from sluice_migrate.verl import table as verl_table

SLIME = """
--rollout-data-transport --flush-cache-interval --use-score-centering
--freeze-params-name-list --ci-test
--rollout-health-check-interval --wandb-mode --mtp-num-layers
--sglang-router-ip
--eval-function-path --rollout-function-path --data-source-path --custom-config-path --dump-details
"""
VERL = """
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
        *((slime_table, name) for name in SLIME.split()),
        *((verl_table, name) for name in VERL.split()),
    ],
)
def test_a_name_has_an_entry_with_a_reason(table: Any, name: str) -> None:
    entry = table.TABLE.get(name) or table.fallback(name)
    assert isinstance(entry, Lost | Same)
    assert not entry.why.startswith("sluice knows no")


@pytest.mark.parametrize(
    ("name", "value", "lost"),
    [
        ("actor_rollout_ref.actor.optim.weight_decay_incr_style", "constant", False),
        ("actor_rollout_ref.actor.loss_scale_factor", 4096, True),
        ("async_training.use_dynamic_resource_scheduling", False, False),
    ],
)
def test_a_default_loses_nothing(name: str, value: Any, lost: bool) -> None:
    entry = verl_table.TABLE.get(name) or verl_table.fallback(name)
    assert isinstance(entry, Lost)
    assert (value not in entry.unless) == lost


@pytest.mark.parametrize("table", [slime_table, verl_table], ids=["slime", "verl"])
def test_no_name_stands_in_two_tables(table: Any) -> None:
    """The rest must not hide behind a field, nor a field behind it."""
    rest = __import__(f"{table.__name__.replace('_table', '_rest')}", fromlist=["REST"]).REST
    assert [name for name in rest if table.TABLE[name] is not rest[name]] == []


def test_slimes_hooks_on_samples_become_ours() -> None:
    entry = slime_table.TABLE["--rollout-sample-hook-path"]
    assert isinstance(entry, To)
    assert entry.path == "rollout.hooks.beforeReward"
