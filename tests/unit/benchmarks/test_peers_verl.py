"""The comparison with verl gives it the job's own settings, under names that verl has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import CASES
from benchmarks.peers_settings import NoEqualSettingError, Setting
from benchmarks.peers_settings_verl import ACTOR, ROLLOUT, override, verl_settings
from benchmarks.peers_verl_optimizer import AdamW
from benchmarks.peers_verl_run import step_record, verl_row
from sluice.api import RLJobSpec, load_job

# Settings of verl 0.9.1's ppo_trainer, but for those of profilers, quantization and the like.
NAMES = Path(__file__).with_name("verl_names.txt")


def spec_of(case: str, *overrides: str) -> RLJobSpec:
    return load_job(CASES[case].manifest, [*CASES[case].overrides, *overrides]).spec


def settings(spec: RLJobSpec, *, chat: bool = True) -> list[Setting]:
    return verl_settings(spec, prompt_tokens=9, rates=[0.1, 0.2], chat=chat)


def values(spec: RLJobSpec) -> dict[str, Any]:
    return {setting.name: setting.value for setting in settings(spec)}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [],
            {
                "trainer.total_training_steps": 120,
                "data.train_batch_size": 32,
                f"{ACTOR}.ppo_mini_batch_size": 32,
                f"{ROLLOUT}.n": 8,
                "data.max_response_length": 4,
                f"{ROLLOUT}.top_k": -1,
                f"{ACTOR}.loss_agg_mode": "token-mean",
                f"{ACTOR}.loss_scale_factor": None,
                f"{ACTOR}.clip_ratio_low": 0.2,
                f"{ACTOR}.clip_ratio_high": 0.28,
                f"{ACTOR}.clip_ratio_c": 1e9,
                f"{ACTOR}.use_kl_loss": False,
                f"{ACTOR}.entropy_coeff": 0.1,
                f"{ACTOR}.optim.lr": 1.5e-3,
                f"{ACTOR}.optim.betas": [0.9, 0.95],
                f"{ACTOR}.optim.weight_decay": 0.01,
                "trainer.device": "cpu",
                "trainer.n_gpus_per_node": 1,
                f"{ACTOR}.fsdp_config.dtype": "float32",
                f"+{ROLLOUT}.engine_kwargs.sglang.device": "cpu",
            },
        ),
        (["algorithm.loss.clip.high=null"], {f"{ACTOR}.clip_ratio_high": 0.2}),
        (["algorithm.loss.clip.dual=3"], {f"{ACTOR}.clip_ratio_c": 3.0}),
        (["algorithm.normalizeStd=false"], {"algorithm.norm_adv_by_std_in_grpo": False}),
        (
            ["algorithm.kl.lossCoef=0.01", "algorithm.kl.type=k3"],
            {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.01},
        ),
        (
            ["algorithm.aggregation=token_sum_norm"],
            {
                f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                f"{ACTOR}.loss_scale_factor": 4,
            },
        ),
        (["rollout.sampling.topK=5"], {f"{ROLLOUT}.top_k": 5}),
    ],
    ids=[
        "the quickstart",
        "one bound",
        "dual clip",
        "no deviation",
        "KL in the loss",
        "sum of tokens",
        "likeliest tokens",
    ],
)
def test_verl_trains_with_the_settings_of_the_job(
    overrides: list[str], expected: dict[str, Any]
) -> None:
    values_of_verl = values(spec_of("quickstart", *overrides))
    assert {name: values_of_verl[name] for name in expected} == expected


def test_the_case_for_a_gpu_trains_in_bf16_and_hands_on_the_engines_arguments() -> None:
    values_of_verl = values(spec_of("reasoning", "rollout.engineArgs.attentionBackend=triton"))
    assert values_of_verl["trainer.device"] == "cuda"
    assert values_of_verl[f"{ACTOR}.fsdp_config.dtype"] == "bfloat16"
    assert values_of_verl[f"{ACTOR}.ppo_max_token_len_per_gpu"] == 16384
    assert values_of_verl[f"{ROLLOUT}.gpu_memory_utilization"] == 0.5
    assert values_of_verl[f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend"] == "triton"
    assert f"+{ROLLOUT}.engine_kwargs.sglang.mem_fraction_static" not in values_of_verl


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["algorithm.estimator=rloo"], "algorithm.estimator"),
        (["algorithm.loss.type=cispo"], "algorithm.loss.type"),
        (["algorithm.aggregation=prompt_mean"], "algorithm.aggregation"),
        (["algorithm.kl.coef=0.1"], "algorithm.kl.coef"),
        (["algorithm.kl.lossCoef=0.1"], "algorithm.kl.type"),
        (["algorithm.offPolicy.method=tis"], "algorithm.offPolicy"),
        (["rollout.mode=async", "rollout.maxStaleness=1"], "rollout.mode"),
        (["trainer.stepsPerBatch=2"], "trainer.stepsPerBatch"),
        (["trainer.gpusPerNode=1"], "trainer.colocate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_verl_does_not_have_is_refused_by_name(
    overrides: list[str], field: str
) -> None:
    with pytest.raises(NoEqualSettingError, match=rf"^spec\.{field}: no equal setting in verl"):
        settings(spec_of("quickstart", *overrides))


@pytest.mark.parametrize("case", ["quickstart", "reasoning"])
def test_verls_own_configuration_has_every_name(case: str) -> None:
    names = set(NAMES.read_text().split())
    written = settings(spec_of(case), chat=case != "quickstart")
    assert {setting.name for setting in written if not setting.name.startswith("+")} <= names


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("token-mean", '"token-mean"'),
        ([0.9, 0.95], "[0.9, 0.95]"),
        (1e-08, "1e-08"),
    ],
    ids=["nothing", "truth", "text", "list", "small number"],
)
def test_a_setting_is_an_argument_that_hydra_reads(value: Any, text: str) -> None:
    assert override(Setting("a.b", value)) == f"a.b={text}"


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("max 1 2 3 =", [{"role": "user", "content": "max 1 2 3 ="}]),
        ([{"role": "system", "content": "x"}], [{"role": "system", "content": "x"}]),
    ],
    ids=["text", "messages"],
)
def test_a_row_keeps_all_that_the_reward_needs(prompt: Any, messages: Any) -> None:
    row = {"prompt": prompt, "label": 3, "metadata": {"a": [1, "b"]}}
    theirs = verl_row(row)
    assert theirs["prompt"] == messages
    assert json.loads(theirs["extra_info"]["row"]) == row


def test_a_step_is_read_from_verls_log() -> None:
    data = {"critic/rewards/mean": 0.5, "actor/entropy": 2.5, "response_length/mean": 3, "x": 1}
    assert step_record(7.0, json.dumps({"step": 2, "data": data})) == {
        "step": 2,
        "time": 7.0,
        "reward": 0.5,
        "entropy": 2.5,
        "tokens": 3,
    }


def test_the_optimizer_has_the_rate_of_each_step_and_decays_no_vector() -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    optimizer = AdamW([matrix, vector], rates=[0.1, 0.2], weight_decay=0.5, lr=9.0)
    rates = []
    for _ in range(3):
        matrix.grad, vector.grad = torch.zeros_like(matrix), torch.zeros_like(vector)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.2, 0.2]
    assert matrix.detach().tolist()[0][0] == pytest.approx(0.95 * 0.9 * 0.9)
    assert vector.detach().tolist() == [1.0, 1.0]
