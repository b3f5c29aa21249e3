"""Batches of preferences: a pair is one sample, and none is lost or trained twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.sources.answers import Answers
from tests.chat import PLAIN, assistant, save, tokenizer, user
from tests.unit.buffer.buffer_tools import LocalBuffer, shard_group

MakeBuffer = Callable[..., LocalBuffer]


def rows(path: Path, count: int = 12, /, **changed: Any) -> str:
    """Pairs `<i>`: `<i+1>` is better than `?`; changed: other rows, by `row<i>`."""
    pairs = [
        changed.get(
            f"row{i}",
            {
                "prompt": [user(str(i))],
                "chosen": [assistant(str(i + 1))],
                "rejected": [assistant("?")],
            },
        )
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return str(path)


@pytest.fixture
def dpo(make_buffer: MakeBuffer, tmp_path: Path) -> Callable[..., LocalBuffer]:
    """Buffers of a job that learns from pairs: batches of 4, 12 rows, in their order."""
    model = save(tmp_path / "model", PLAIN, context=200)

    def make(path: str | None = None, **changes: Any) -> LocalBuffer:
        prompts = [{"path": path or rows(tmp_path / "rows.jsonl")}]
        usual: dict[str, Any] = {
            "model": {"path": str(model)},
            "data": {"prompts": prompts, "shuffle": False},
            "rollout": {"batchSize": 4},
            "reward": None,
            "algorithm": {"loss": {"type": "dpo"}},
        }
        return make_buffer(**{**usual, **changes})

    return make


def samples(buffer: LocalBuffer, step: int) -> list[pb.SampleGroup]:
    ids = buffer.core.memory.batches[step]
    return [shard_group(buffer.core, group_id, [0]) for group_id in ids]


def trained(sequence: pb.Sample | pb.Branch) -> str:
    tokens = np.frombuffer(sequence.tokens, "<i4")[-sequence.response_length :]
    return str(tokenizer().decode(tokens[np.frombuffer(sequence.loss_mask, np.uint8) == 1]))


def test_a_pair_is_a_sample_with_the_rejected_answer_as_its_branch(dpo: MakeBuffer) -> None:
    buffer = dpo()
    assert buffer.step(1) == [0, 1, 2, 3]
    group = samples(buffer, 1)[2]
    (sample,) = group.samples
    (branch,) = sample.branches
    assert (trained(sample), trained(branch)) == ("3<|im_end|>", "?<|im_end|>")
    assert sample.response == "3<|im_end|>"
    sequences = buffer.core.sequences(1, 2)
    assert len(sequences) == 4, "both answers of a pair go to one rank, in one optimizer step"
    assert {s.rank for s in sequences} == {0, 1}
    assert [s.trainable_tokens for s in sequences] == [4, 4, 4, 4]
    assert sequences[2].length == (len(sample.tokens) + len(branch.tokens)) // 4
    buffer.check()


def test_a_rewind_and_a_restart_give_the_same_pairs_again(dpo: MakeBuffer) -> None:
    buffer = dpo(data__shuffle=True)
    for step in (1, 2, 3):
        buffer.step(step)
    before = {step: [g.SerializeToString() for g in samples(buffer, step)] for step in (2, 3)}
    buffer.restart(flushed=False)
    assert buffer.core.rewind(1, 2) == 2
    for step in (2, 3):
        assert buffer.core.take(step, 2) is None
        assert [g.SerializeToString() for g in samples(buffer, step)] == before[step]
        buffer.core.commit(step, step, 2, {})
    assert buffer.counters["groups_leased"] == 12
    buffer.check()


def test_a_pair_of_which_one_answer_cannot_be_trained_is_left_out(
    dpo: MakeBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows(
        tmp_path / "mixed.jsonl",
        row0={"prompt": "a", "chosen": "b", "rejected": "c" * 300},
        row1={"prompt": "a", "chosen": "b", "rejected": "c"},
    )
    buffer = dpo(file)
    assert buffer.step(1) == [1, 2, 3, 4]
    assert buffer.counters["prompts_too_long:mixed"] == 1
    assert "row 0: 302 tokens, at most 200 fit" in capsys.readouterr().out
    buffer.check()


def test_an_answer_that_the_template_refuses_is_named(dpo: MakeBuffer, tmp_path: Path) -> None:
    wrong = {"prompt": [user("?")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
    file = rows(tmp_path / "rows.jsonl", 1, row0=wrong)
    with pytest.raises(ConfigurationError, match=r"rows.jsonl: row 0: chosen: .*template"):
        dpo(file, model={"path": str(save(tmp_path / "bare", None))})


def test_a_wrong_row_ends_the_job_with_its_line(dpo: MakeBuffer, tmp_path: Path) -> None:
    file = rows(tmp_path / "wrong.jsonl", row3={"prompt": "a", "chosen": "b"})
    with pytest.raises(ConfigurationError, match=r"wrong.jsonl:4: no column 'rejected'"):
        dpo(file)


def test_an_answer_of_kto_has_the_one_of_the_row_before_to_estimate_a_kl(
    dpo: MakeBuffer, tmp_path: Path
) -> None:
    judged = {
        f"row{i}": {"prompt": f"{i} + 1 =", "completion": f" {i + 1}", "label": i % 2 == 0}
        for i in range(5)
    }
    judged["row3"]["completion"] = "?" * 300
    file = rows(tmp_path / "judged.jsonl", 5, **judged)
    buffer = dpo(file, algorithm={"loss": {"type": "kto"}})
    assert buffer.step(1) == [0, 1, 2, 4]
    made = [group.samples[0] for group in samples(buffer, 1)]
    assert [sample.reward for sample in made] == [1.0, 0.0, 1.0, 1.0]
    assert [trained(sample) for sample in made] == [f" {i}<|im_end|>" for i in (1, 2, 3, 5)]
    others = [[trained(branch) for branch in sample.branches] for sample in made]
    assert others == [[" 2<|im_end|>"], [" 1<|im_end|>"], [" 2<|im_end|>"], []]
    whole = tokenizer().decode(np.frombuffer(made[1].branches[0].tokens, "<i4"))
    assert whole == "1 + 1 = 1<|im_end|>"
    buffer.check()


def held_out(buffer: LocalBuffer, first: int, count: int) -> list[pb.Sample]:
    """Return the samples of held-out rows, each a group of its own."""
    source = buffer.core.local_source
    assert isinstance(source, Answers)
    numbers = range(first, first + count)
    groups = [pb.SampleGroup.FromString(source.held_out(0, at).result()) for at in numbers]
    assert [group.prompt.group_id for group in groups] == [*numbers]
    return [sample for group in groups for sample in group.samples]


def test_held_out_pairs_are_encoded_as_those_of_training_and_never_trained(
    dpo: MakeBuffer, tmp_path: Path
) -> None:
    file = rows(
        tmp_path / "others.jsonl",
        5,
        row3={"prompt": "a", "chosen": "b", "rejected": "c" * 300},
    )
    buffer = dpo(evaluation={"heldOut": [{"path": file}]})
    read = held_out(buffer, 1, 3)
    assert [trained(sample) for sample in read[:2]] == ["2<|im_end|>", "3<|im_end|>"]
    assert [trained(branch) for branch in read[0].branches] == ["?<|im_end|>"]
    assert read[2].status == pb.SAMPLE_STATUS_FAILED
    assert f"{file}: row 3: 302 tokens, at most 200 fit" in read[2].error
    assert buffer.step(1) == [0, 1, 2, 3]
    assert buffer.counters["groups_leased"] == 4
    buffer.check()


def test_held_out_answers_of_kto_have_the_one_of_the_row_before(
    dpo: MakeBuffer, tmp_path: Path
) -> None:
    judged = {
        f"row{i}": {"prompt": f"{i} + 1 =", "completion": f" {i + 1}", "label": True}
        for i in range(12)
    }
    file = rows(tmp_path / "judged.jsonl", 12, **judged)
    buffer = dpo(
        file,
        algorithm={"loss": {"type": "kto"}},
        evaluation={"heldOut": [{"path": f"{file}@[8:]"}]},
    )
    others = [[trained(b) for b in sample.branches] for sample in held_out(buffer, 0, 3)]
    assert others == [[" 10<|im_end|>"], [" 9<|im_end|>"], [" 10<|im_end|>"]]


@pytest.mark.parametrize(
    ("rejected", "message"),
    [
        ({"rejected": "c" * 300}, r"heldOut\[0\]: .*pairs.jsonl: row 0: 302 tokens"),
        ({}, r"pairs.jsonl:1: no column 'rejected'"),
    ],
    ids=["all too long", "a wrong row"],
)
def test_held_out_rows_that_are_no_use_end_the_job_at_its_start(
    dpo: MakeBuffer, tmp_path: Path, rejected: dict[str, str], message: str
) -> None:
    file = rows(tmp_path / "pairs.jsonl", 1, row0={"prompt": "a", "chosen": "b", **rejected})
    with pytest.raises(ConfigurationError, match=message):
        dpo(evaluation={"heldOut": [{"path": file}]})
