"""Vocabularies of tokenizers, embeddings and teachers: differences are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.api import RLJobSpec
from sluice.data.chat import PromptError
from sluice.data.vocabulary import difference, embedding_size
from sluice.samples.sample import Prompt
from sluice_rollout.prompts import PromptEncoder
from tests.chat import PLAIN, save, user

STUDENT = {"<pad>": 0, "a": 1, "b": 2, "<think>": 3}


@pytest.mark.parametrize(
    ("teacher", "problem"),
    [
        (STUDENT, ""),
        (STUDENT | {"<tool>": 4}, ""),
        (
            {"<pad>": 0, "a": 1, "b": 2},
            "1 of 4 tokens differ, such as '<think>' is 3 here and unknown there",
        ),
        (
            STUDENT | {"a": 2, "b": 1},
            "2 of 4 tokens differ, such as 'a' is 1 here and 2 there, 'b' is 2 here and 1",
        ),
        ({}, "4 of 4 tokens differ, such as '<pad>' is 0 here and unknown there"),
    ],
    ids=["the same", "one token more", "one token less", "two exchanged", "none"],
)
def test_every_token_of_the_student_must_be_the_teachers(
    teacher: dict[str, int], problem: str
) -> None:
    complaint = difference(STUDENT, teacher)
    assert complaint.startswith(problem)
    assert bool(complaint) == bool(problem)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 258}', 258),
        ('{"text_config": {"vocab_size": 258}}', 258),
        ('{"vocab_size": 9, "text_config": {"vocab_size": 258}}', 258),
        ('{"vocab_size": 258, "text_config": null}', 258),
        ('{"vocab_size": null}', None),
        ("[]", None),
        ("{", None),
        (None, None),
    ],
)
def test_the_size_of_an_embedding_is_read_from_the_models_configuration(
    tmp_path: Path, config: str | None, size: int | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert embedding_size(tmp_path) == size


def test_a_worker_refuses_a_prompt_with_a_token_beyond_the_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(tmp_path / "model", PLAIN)
    config = {"max_position_embeddings": 400, "vocab_size": 257}
    (model / "config.json").write_text(json.dumps(config))
    spec = RLJobSpec.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"prompts": [{"path": "p.jsonl", "name": "p"}]},
            "rollout": {"sampling": {"maxResponseTokens": 8}},
            "reward": {"type": "f1"},
            "trainer": {"steps": 1},
        }
    )
    encoder = PromptEncoder(spec, model)
    assert "the tokenizer has 258 tokens, the model's embedding 257" in capsys.readouterr().out
    assert len(encoder.encode(Prompt(0, "plain", dataset="p"))) == 5
    with pytest.raises(PromptError, match=r"p row 7: token 0 is '<\|im_start\|>', id 257"):
        encoder.encode(Prompt(0, [user("chat")], dataset="p", row=7))
