"""`model.fp32LmHead`: engine and trainer compute the same logits, without rounding them to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice_trainer.backend_registry import backend_class
from sluice_trainer.batch.sequences import Sequence
from sluice_trainer.policy.learning_policy import LearningPolicy
from tests.integration.engines import Sglang, call, gpus, save_model
from tests.integration.trainer import tiny

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.skipif(gpus() > 0, reason="trainer and engine would be on different devices"),
]
PROMPT, RESPONSE = 30, 60


@pytest.fixture(scope="module")
def only_a_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a bf16 model whose layers add 0 and whose logits reach 40.

    Trainer and engine can then differ only by the head.
    """
    directory = tmp_path_factory.mktemp("head") / "model"
    save_model(directory, 3, tie_word_embeddings=False, dtype="bfloat16")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["lm_head.weight"] *= 10
    save_file({n: t.bfloat16() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def answer(
    only_a_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Sequence, torch.Tensor]]:
    """Return random words and their log-probs by SGLang in bf16 with a float32 head.

    Sampled words would not do: the model may reach a word that is followed by itself with
    certainty, for which a rounded head gives the same.
    """
    log = tmp_path_factory.mktemp("sglang") / "log"
    server = Sglang(only_a_head, log, "--dtype", "bfloat16", "--enable-fp32-lm-head")
    try:
        server.wait_ready()
        tokens = np.random.default_rng(1).integers(8, 2040, PROMPT + RESPONSE)
        body = {
            "input_ids": tokens.tolist(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": PROMPT - 1,
        }
        status, said = call(server.url + "/generate", body)
        assert status == 200, said
        entries = said["meta_info"]["input_token_logprobs"][-RESPONSE:]
        assert [entry[1] for entry in entries] == tokens[PROMPT:].tolist()
        yield (
            Sequence(tokens.astype(np.int32), RESPONSE),
            torch.tensor([entry[0] for entry in entries]),
        )
    finally:
        server.kill()


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_trainer_and_engine_agree_if_both_have_a_float32_head(
    only_a_head: Path, answer: tuple[Sequence, torch.Tensor], backend: str
) -> None:
    sequence, said = answer
    distances = [
        (log_probs(only_a_head, sequence, backend, fp32) - said).abs().mean()
        for fp32 in (True, False)
    ]
    assert distances[0] < 1e-4
    assert distances[1] > 1e-2


def log_probs(model: Path, sequence: Sequence, backend: str, fp32: bool) -> torch.Tensor:
    """Return the trainer's log-probs in bf16."""
    spec = tiny.spec(
        model,
        model={"path": str(model), "fp32LmHead": fp32},
        trainer={"precision": "bf16", "backend": backend},
    )
    policy = backend_class(spec)(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))
    assert isinstance(policy, LearningPolicy)
    (values,) = policy.log_probs([sequence])
    return values
