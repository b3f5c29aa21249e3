"""For each alert a fault and its end, as Prometheus' own unit tests have them: a value a minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

JOB = 'namespace="team",job="demo"'
OPERATOR = 'namespace="sluice-system",instance="operator:8080"'
OF_JOB = {"namespace": "team", "job": "demo"}
OF_OPERATOR = {"namespace": "sluice-system"}


@dataclass(frozen=True, slots=True)
class Case:
    """series: of promtool's notation, `0+1x10` and so on. quiet, firing, resolved: minutes at which
    the alert does not fire, fires, and no longer does. labels: of the alert.
    """

    alert: str
    series: Mapping[str, str]
    quiet: int
    firing: int
    resolved: int
    labels: Mapping[str, str] = field(default_factory=lambda: OF_JOB)


CASES = [
    Case(
        "SluiceNoProgress",
        {
            f"sluice_buffer_step{{{JOB}}}": "0+1x10 10x60 11+1x60",
            f"sluice_buffer_total_steps{{{JOB}}}": "100x140",
        },
        quiet=44,
        firing=50,
        resolved=80,
    ),
    Case(
        "SluiceEngineBehind",
        {
            f"sluice_rendezvous_version{{{JOB}}}": "0+1x60",
            f'sluice_rollout_version{{{JOB},replica="0"}}': "0+1x60",
            f'sluice_rollout_version{{{JOB},replica="1"}}': "0+1x10 10x20 32+1x30",
        },
        quiet=20,
        firing=28,
        resolved=35,
        labels=OF_JOB | {"replica": "1"},
    ),
    Case(
        "SluiceNoEngine",
        {
            f"sluice_rendezvous_engines{{{JOB}}}": "0x10 2x10 0x10 2x10",
            f'sluice_rendezvous_joins_total{{{JOB},member_role="rollout"}}': "_x10 2x40",
        },
        quiet=9,
        firing=30,
        resolved=35,
    ),
    Case(
        "SluiceRestarts",
        {'rljob_restarts_total{namespace="team",name="demo",role="trainer"}': "0x10 0+1x5 5x120"},
        quiet=11,
        firing=20,
        resolved=100,
        labels=OF_JOB | {"role": "trainer"},
    ),
    Case(
        "SluiceStorageNearlyFull",
        {
            f"sluice_buffer_stored_bytes{{{JOB}}}": "50x10 95x20 50x20",
            f"sluice_buffer_capacity_bytes{{{JOB}}}": "100x60",
        },
        quiet=15,
        firing=25,
        resolved=35,
    ),
    Case(
        "SluiceCheckpointTooOld",
        {
            f"sluice_buffer_step{{{JOB}}}": "0+1x300",
            f"sluice_buffer_checkpoint_step{{{JOB}}}": "0+1x60 60x150 210+1x80",
        },
        quiet=150,
        firing=200,
        resolved=220,
    ),
    Case(
        "SluiceQueueTooLong",
        {
            'rljob_status_condition{namespace="team",name="demo",condition="Admitted",'
            'status="True"}': "0x150 1x30"
        },
        quiet=100,
        firing=140,
        resolved=155,
    ),
    Case(
        "SluiceLogprobMismatch",
        {f"sluice_trainer_logprob_difference{{{JOB}}}": "0.01x20 0.5x40 0.01x40"},
        quiet=20,
        firing=45,
        resolved=90,
    ),
    Case(
        "SluiceRewardCollapsed",
        {f"sluice_trainer_reward{{{JOB}}}": "0.8x60 0.1x60 0.8x60"},
        quiet=60,
        firing=110,
        resolved=160,
    ),
    Case(
        "SluiceRewardsEqual",
        {f"sluice_trainer_equal_rewards_ratio{{{JOB}}}": "0.2x20 1x40 0.2x20"},
        quiet=30,
        firing=55,
        resolved=65,
    ),
    Case(
        "SluiceEntropyCollapsed",
        {f"sluice_trainer_entropy{{{JOB}}}": "0.5x20 0.0001x40 0.5x20"},
        quiet=30,
        firing=58,
        resolved=65,
    ),
    Case(
        "SluiceOperatorWithoutLeader",
        {
            f'controller_runtime_max_concurrent_reconciles{{{OPERATOR},controller="rljob"}}': (
                "8x60"
            ),
            f'leader_election_master_status{{{OPERATOR},name="sluice"}}': "1x10 0x20 1x20",
            'leader_election_master_status{namespace="other",instance="a:1",name="b"}': "0x60",
        },
        quiet=14,
        firing=25,
        resolved=35,
        labels=OF_OPERATOR,
    ),
    Case(
        "SluiceOperatorWithoutLeader",
        {
            f'controller_runtime_max_concurrent_reconciles{{{OPERATOR},controller="rljob"}}': (
                "8x10 stale _x30 8x20"
            ),
            f'leader_election_master_status{{{OPERATOR},name="sluice"}}': "1x10 stale _x30 1x20",
        },
        quiet=14,
        firing=30,
        resolved=45,
        labels={"controller": "rljob"},
    ),
    Case(
        "SluiceReconcileErrors",
        {
            f'controller_runtime_reconcile_errors_total{{{OPERATOR},controller="rljob"}}': (
                "0x10 0+2x40 80x40"
            )
        },
        quiet=12,
        firing=40,
        resolved=70,
        labels=OF_OPERATOR,
    ),
]
