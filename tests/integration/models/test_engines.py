"""Engines compute each family as transformers does, before and after a trainer's weights.

The models of engines are called without their servers, which tests of `weights` and `rollout` start
for one family each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.engines.sglang.layout import Layout
from sluice.engines.transformers.server.model import ModelOptions, ServedModel
from sluice_trainer.fsdp.policy import ShardedPolicy
from tests.integration.engines import distance, engine_environment, gpus, with_us
from tests.integration.models.checkpoints import SERVED, save
from tests.integration.models.sglang_models import PROMPT
from tests.integration.trainer import tiny
from tests.integration.weights.conftest import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(gpus() > 0, reason="the table is that of CPUs"),
    pytest.mark.usefixtures("process_group"),
]

TOLERANCE = 1e-4
TOKENS = torch.randint(
    1, tiny.VOCAB, (PROMPT + 14,), generator=torch.Generator().manual_seed(0)
).tolist()
Record = Callable[[str, object], None]

# Families that the engine does not serve on a CPU, and why.
_SPARSE = "SGLang 0.5.21 has sparse attention for GPUs only"
SGLANG_FAILS = {
    "deepseek-v3.2": _SPARSE,
    "gemma2": "attention for CPUs of SGLang 0.5.21 does not cap scores",
    "gemma4": "SGLang 0.5.21 refuses its attention for CPUs with this family",
    "glm-moe-dsa": _SPARSE,
    "gpt-oss": "attention for CPUs of SGLang 0.5.21 has no sinks",
}
TRANSFORMERS_FAILS: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """A family's first checkpoint, the one that an update brings, and what the trainer sends of it.

    Experts are stacked for SGLang.
    """

    first: Path
    second: Path
    sent: Path
    stacked: Path


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: _case(name, tmp_path_factory.mktemp(name)) for name in SERVED}


def _case(name: str, directory: Path) -> Case:
    first, second = (save(name, directory / str(seed), seed) for seed in (1, 2))
    spec = tiny.spec(second, trainer={"backend": "fsdp"})
    policy = ShardedPolicy(spec, model_dir=second, timeout=timedelta(seconds=tiny.TIMEOUT))
    files = {}
    for file, stack_name in (("sent", None), ("stacked", Layout().stack_name)):
        tensors = {n: tensor.contiguous() for n, tensor in policy.hf_tensors(stack_name)}
        files[file] = directory / f"{file}.safetensors"
        save_file(tensors, files[file])
    return Case(first, second, **files)


def expected(model: Path) -> list[float]:
    """Return transformers' log-probs of the tokens after the prompt."""
    with torch.no_grad():
        logits = tiny.hf_model(model, "eager")(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return [logits[i - 1, TOKENS[i]].item() for i in range(PROMPT, len(TOKENS))]


@pytest.fixture(scope="module")
def sglang(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Return what SGLang computes of all families."""
    requests = [
        {"model": str(case.first), "weights": str(case.stacked), "tokens": TOKENS}
        for case in cases.values()
    ]
    command = [sys.executable, "-m", "tests.integration.models.sglang_models", json.dumps(requests)]
    result = subprocess.run(
        with_us(*command),
        cwd=ROOT,
        # The last one is that of sluice's launch script.
        env=engine_environment()
        | {
            "HF_HUB_OFFLINE": "1",
            "SGLANG_MAMBA_CONV_DTYPE": "float32",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return dict(zip(cases, map(json.loads, lines), strict=True))


@pytest.mark.support("sglang", "serves")
@pytest.mark.parametrize("name", SERVED)
def test_sglang_computes_what_transformers_does(
    sglang: dict[str, dict[str, Any]],
    cases: dict[str, Case],
    record_property: Record,
    name: str,
) -> None:
    result = sglang[name]
    if why := SGLANG_FAILS.get(name):
        assert "before" not in result or (
            distance(result["before"], expected(cases[name].first)) > TOLERANCE
        ), "it works now: take it out of SGLANG_FAILS"
        record_property("fails", why)
        return
    assert "before" in result, result
    assert distance(result["before"], expected(cases[name].first)) < TOLERANCE


@pytest.mark.support("sglang", "updates")
@pytest.mark.parametrize("name", [name for name in SERVED if name not in SGLANG_FAILS])
def test_sglang_takes_the_weights_of_a_trainer(
    sglang: dict[str, dict[str, Any]], cases: dict[str, Case], name: str
) -> None:
    result = sglang[name]
    assert "after" in result, result
    assert distance(result["after"], expected(cases[name].second)) < TOLERANCE


@torch.no_grad()
def _step_by_step(model: ServedModel) -> list[float]:
    values, cache = [], None
    ids, mask = torch.tensor([TOKENS[:PROMPT]]), torch.ones(1, PROMPT, dtype=torch.int64)
    for token in TOKENS[PROMPT:]:
        step = model.next_logits(ids, mask, cache)
        values.append(step.scores[0].log_softmax(-1)[token].item())
        ids, cache = torch.tensor([[token]]), step.cache
        mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.int64)], 1)
    return values


@pytest.mark.support("transformers", "serves")
@pytest.mark.parametrize("name", SERVED)
def test_the_transformers_engine_computes_tokens_one_by_one(
    cases: dict[str, Case], record_property: Record, name: str
) -> None:
    model = ServedModel(ModelOptions(cases[name].first, "cpu", torch.float32))
    gap = distance(_step_by_step(model), expected(cases[name].first))
    if why := TRANSFORMERS_FAILS.get(name):
        assert gap > TOLERANCE, "it works now: take it out of TRANSFORMERS_FAILS"
        record_property("fails", why)
    else:
        assert gap < TOLERANCE


@pytest.mark.support("transformers", "updates")
@pytest.mark.parametrize("name", [name for name in SERVED if name not in TRANSFORMERS_FAILS])
def test_the_transformers_engine_takes_the_weights_of_a_trainer(
    cases: dict[str, Case], name: str
) -> None:
    model = ServedModel(ModelOptions(cases[name].first, "cpu", torch.float32))
    model.begin()
    model.take(load_file(cases[name].sent).items())
    model.end()
    assert distance(_step_by_step(model), expected(cases[name].second)) < TOLERANCE
