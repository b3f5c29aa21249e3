"""Batches of given answers: the buffer makes their samples, with the promises of all samples."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.wire.v1 import common_pb2 as pb
from tests.chat import PLAIN, assistant, save, tokenizer, user
from tests.templates import FAMILIES
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group, shard_group

MakeBuffer = Callable[..., LocalBuffer]


def rows(path: Path, count: int = 12, /, **changed: Any) -> str:
    """Conversations `<i>` -> `<i+1>`; changed: other rows, by `row<i>`."""
    conversations = [
        changed.get(f"row{i}", {"messages": [user(str(i)), assistant(str(i + 1))]})
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    return str(path)


@pytest.fixture
def sft(make_buffer: MakeBuffer, tmp_path: Path) -> Callable[..., LocalBuffer]:
    """Buffers of a job that learns from conversations: batches of 4, 12 rows, in their order."""
    model = save(tmp_path / "model", PLAIN, context=200)

    def make(*paths: str, **changes: Any) -> LocalBuffer:
        prompts = [{"path": path} for path in paths or [rows(tmp_path / "rows.jsonl")]]
        usual: dict[str, Any] = {
            "model": {"path": str(model)},
            "data": {"prompts": prompts, "shuffle": False},
            "rollout": {"batchSize": 4},
            "reward": None,
            "algorithm": {"loss": {"type": "sft"}},
        }
        return make_buffer(**{**usual, **changes})

    return make


def samples(buffer: LocalBuffer, step: int) -> list[pb.SampleGroup]:
    ids = buffer.core.memory.batches[step]
    return [shard_group(buffer.core, group_id, [0]) for group_id in ids]


def answers(buffer: LocalBuffer, step: int) -> list[str]:
    return [group.samples[0].response for group in samples(buffer, step)]


def test_a_batch_is_the_next_rows_as_samples(sft: MakeBuffer) -> None:
    buffer = sft()
    assert buffer.step(1) == [0, 1, 2, 3]
    assert answers(buffer, 1) == [f"{i}<|im_end|>" for i in (1, 2, 3, 4)]
    group = samples(buffer, 1)[2]
    sample = group.samples[0]
    text = "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    assert tokenizer().decode(np.frombuffer(sample.tokens, "<i4")) == text
    assert sample.loss_mask == b"\x01\x01\x00", "the line's end is the template's"
    assert np.frombuffer(sample.rollout_log_probs, "<f4").tolist() == [0.0] * 3
    assert (sample.status, sample.reward, group.prompt.row) == (pb.SAMPLE_STATUS_COMPLETED, 0.0, 2)
    assert [s.trainable_tokens for s in buffer.core.sequences(1, 1)] == [2, 2, 2, 2]
    assert buffer.stats.policy_lag == 0
    buffer.check()


def test_an_answer_ends_with_the_token_at_which_the_engine_stops(
    sft: MakeBuffer, tmp_path: Path
) -> None:
    """GLM-4.5 writes no end; its configuration says that the token of the next role is one."""
    glm = FAMILIES["GLM-4.5"]
    glm.tokenizer.save_pretrained(tmp_path / "glm")
    ids = glm.tokenizer.convert_tokens_to_ids([glm.eos, *glm.stops])
    config = {"max_position_embeddings": 200, "eos_token_id": ids}
    (tmp_path / "glm/config.json").write_text(json.dumps(config))
    talk = {"messages": [user("1"), assistant("2"), user("3"), assistant("4")]}
    buffer = sft(rows(tmp_path / "talk.jsonl", row0=talk), model={"path": str(tmp_path / "glm")})
    buffer.step(1)
    thought = "\n<think></think>\n"
    assert answers(buffer, 1)[0] == f"{thought}2<|user|>{thought}4<|endoftext|>"


def test_epochs_take_every_row_once_and_end(sft: MakeBuffer) -> None:
    buffer = sft(trainer={"epochs": 2}, data__shuffle=True)
    order = [text for step in range(1, 7) for text in (buffer.step(step), answers(buffer, step))[1]]
    assert set(Counter(order[:12]).values()) == set(Counter(order[12:]).values()) == {1}
    assert order[:12] != order[12:], "another order in the second epoch"
    assert buffer.core.take(7, 1)
    assert buffer.core.batches.exhausted
    assert buffer.counters["groups_leased"] == buffer.counters["groups_trained"] == 24
    buffer.check()


def test_several_data_sets_have_their_weights(sft: MakeBuffer, tmp_path: Path) -> None:
    small = rows(tmp_path / "small.jsonl", 2)
    data = {
        "prompts": [{"path": rows(tmp_path / "large.jsonl", 8)}, {"path": small, "weight": 4}],
        "seed": 1,
    }
    buffer = sft(data=data, trainer={"epochs": 1})
    datasets = [
        group.prompt.dataset
        for step in range(1, 5)
        for group in (buffer.step(step), samples(buffer, step))[1]
    ]
    assert Counter(datasets) == {"large": 8, "small": 8}


def test_a_rewind_and_a_restart_give_the_same_samples_again(sft: MakeBuffer) -> None:
    buffer = sft(data__shuffle=True)
    for step in (1, 2, 3):
        buffer.step(step)
    before = {step: [g.SerializeToString() for g in samples(buffer, step)] for step in (2, 3)}
    buffer.restart()
    assert buffer.core.rewind(1, 2) == 2
    buffer.restart(flushed=False)
    assert buffer.core.rewind(1, 3) == 2
    for step in (2, 3):
        assert buffer.core.take(step, 3) is None
        assert [g.SerializeToString() for g in samples(buffer, step)] == before[step]
        buffer.core.commit(step, step, 3, {})
    assert buffer.core.take(4, 3) is None
    assert buffer.counters["groups_leased"] == 16
    buffer.check()


def test_what_cannot_be_trained_is_left_out_counted_and_named(
    sft: MakeBuffer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = rows(
        tmp_path / "mixed.jsonl",
        row0={"messages": [user("x" * 300), assistant("y")]},
        row1={"messages": [user("?"), assistant("unsure", loss_mask=0)]},
        row3={"messages": [assistant("first"), user("?"), assistant("second")]},
        row4={"tokens": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 0]},
        row5={"prompt": "2 + 2 = ", "label": "4"},
    )
    caplog.set_level(logging.WARNING)
    buffer = sft(file)
    assert buffer.step(1) == [2, 4, 5, 6], "others take their places"
    assert answers(buffer, 1) == ["3<|im_end|>", "", "4<|im_end|>", "7<|im_end|>"]
    tokens = samples(buffer, 1)[1].samples[0]
    assert (tokens.response_length, tokens.loss_mask) == (2, b"\x01\x00")
    assert (
        buffer.counters["prompts_too_long:mixed"]
        == buffer.counters["filtered_nothing_trained"]
        == 1
    )
    assert (buffer.counters["groups_filtered"], buffer.counters["groups_failed"]) == (2, 1)
    buffer.check()


def test_max_prompt_tokens_counts_the_answers_too(sft: MakeBuffer, tmp_path: Path) -> None:
    file = rows(tmp_path / "long.jsonl", row1={"messages": [user("1"), assistant("2" * 60)]})
    data = {"prompts": [{"path": file}], "shuffle": False, "maxPromptTokens": 70}
    buffer = sft(data=data)
    assert buffer.step(1) == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("side", "longest", "trained"),
    [("right", 22, "22"), ("left", 3, "<|im_end|>")],
    ids=["right", "left"],
)
def test_longer_rows_may_be_cut(
    sft: MakeBuffer, tmp_path: Path, side: str, longest: int, trained: str
) -> None:
    """20 tokens of prompt, 60 of the answer, its end token, and a line's end."""
    row = {"messages": [user("1"), assistant("2" * 60)]}
    file = rows(tmp_path / "long.jsonl", row1=row)
    data = {"prompts": [{"path": file}], "shuffle": False, "maxPromptTokens": longest}
    buffer = sft(data={**data, "truncation": side})
    assert buffer.step(1) == [0, 1, 2, 3], "none is left out"
    sample = samples(buffer, 1)[1].samples[0]
    tokens = np.frombuffer(sample.tokens, np.int32)
    assert len(tokens) == longest
    response = tokens[-sample.response_length :]
    mask = np.frombuffer(sample.loss_mask, np.uint8)
    assert tokenizer().decode(response[mask == 1]) == trained
    buffer.check()


def test_rows_of_which_none_can_be_trained_end_the_job(sft: MakeBuffer, tmp_path: Path) -> None:
    """Without a bound a job of a number of steps would look for one for ever."""
    masked = {
        f"row{i}": {"messages": [user("?"), assistant("unsure", loss_mask=0)]} for i in range(12)
    }
    buffer = sft(rows(tmp_path / "masked.jsonl", **masked))
    with pytest.raises(
        ConfigurationError,
        match=r"no row of a whole epoch can be trained; the last: .*row 11: no token",
    ):
        buffer.core.take(1, 1)


def test_rows_that_the_template_refuses_are_told_of_before_anything_is_trained(
    sft: MakeBuffer, tmp_path: Path
) -> None:
    wrong = {
        f"row{i}": {"messages": [assistant("first"), user("?"), assistant("second")]}
        for i in range(12)
    }
    with pytest.raises(
        ConfigurationError, match=r"spec.data.prompts\[0\]: .*wrong.jsonl: row 0: messages\[0\]"
    ):
        sft(rows(tmp_path / "wrong.jsonl", **wrong))


def test_a_row_without_an_answer_is_told_of_with_its_line(sft: MakeBuffer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unlike.jsonl:4: messages: no answer"):
        sft(rows(tmp_path / "unlike.jsonl", row3={"messages": [user("?")]}))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "half a surrogate pair in a question": (
        {"messages": [user("\ud83d"), assistant("3")]},
        r"wrong.jsonl:4: messages\[0\].content: half of a surrogate pair",
    ),
    "half a surrogate pair in an answer": (
        {"messages": [user("2"), assistant("\ud83d")]},
        r"wrong.jsonl:4: messages\[1\].content: half of a surrogate pair",
    ),
    "a token beyond the embedding": (
        {"tokens": [104, 99999, 106], "loss_mask": [0, 1, 1]},
        r"wrong.jsonl:4: tokens\[1\]: token id 99999, expected ids below 258",
    ),
    "a token beyond int32": (
        {"tokens": [104, 2**31], "loss_mask": [0, 1]},
        r"wrong.jsonl:4: tokens\[1\]: token id 2147483648, expected ids below 258",
    ),
}


@pytest.mark.parametrize(("row", "message"), WRONG.values(), ids=WRONG)
def test_a_row_that_no_process_could_read_ends_the_job_with_its_line(
    sft: MakeBuffer, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    embedding(tmp_path / "model", 258)
    with pytest.raises(ConfigurationError, match=message):
        sft(rows(tmp_path / "wrong.jsonl", row3=row))


def test_a_row_of_tokens_is_bounded_without_an_embedding_too(
    sft: MakeBuffer, tmp_path: Path
) -> None:
    row = {"tokens": [104, 2**31], "loss_mask": [0, 1]}
    with pytest.raises(ConfigurationError, match=r"wrong.jsonl:4: tokens\[1\]: token id 21474836"):
        sft(rows(tmp_path / "wrong.jsonl", row3=row))


def test_a_text_with_a_token_beyond_the_embedding_is_left_out(
    sft: MakeBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token 257 is <|im_start|>, which only conversations have."""
    embedding(tmp_path / "model", 257)
    plain = {f"row{i}": {"prompt": str(i), "label": str(i)} for i in (0, 2, 3, 4)}
    buffer = sft(rows(tmp_path / "rows.jsonl", **plain))
    said = capsys.readouterr().out
    assert "the tokenizer has 258 tokens, the model's embedding 257" in said
    assert buffer.step(1) == [0, 2, 3, 4]
    said = capsys.readouterr().out
    assert "row 1: token 0 is '<|im_start|>', id 257, and the model's embedding has" in said


def embedding(model: Path, size: int) -> None:
    """Give a model an embedding of so many tokens."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": size}))


def test_a_model_without_a_tokenizer_is_told_of(sft: MakeBuffer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec.model.path: .* no tokenizer"):
        sft(model={"path": str(tmp_path)})


def test_workers_get_evaluations_alone(sft: MakeBuffer, tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "3", "label": "4"}\n')
    buffer = sft(
        evaluation={
            "everySteps": 1,
            "datasets": [{"path": str(held_out), "reward": {"type": "exact_match"}}],
        }
    )
    (leased,) = buffer.lease(count=50)
    assert leased.prompt.purpose == pb.PURPOSE_EVALUATE
    assert "evaluation of version 0" in str(buffer.core.take(1, 1))
    buffer.submit_group(make_group(leased.prompt, 1, reward=1.0))
    assert buffer.step(1) == [0, 1, 2, 3]
    assert [leased.prompt.version for leased in buffer.lease(count=50, version=1)] == [1]
    buffer.check()


def test_a_full_storage_waits_for_the_next_checkpoint(
    sft: MakeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = sft()
    buffer.step(1)
    room = buffer.core.capacity.free_bytes
    left = iter([1 << 20, 10])
    monkeypatch.setattr(buffer.core.capacity, "free_bytes", lambda: next(left, 0))
    assert "1 of 4 groups finished" in str(buffer.core.take(2, 1))
    monkeypatch.setattr(buffer.core.capacity, "free_bytes", room)
    assert buffer.step(2) == [4, 5, 6, 7]
    buffer.check()


def test_the_next_batch_is_encoded_while_this_one_is_trained(sft: MakeBuffer) -> None:
    buffer = sft()
    assert buffer.core.take(1, 1) is None
    buffer.core.commit(1, 1, 1, {})
    beside = buffer.core.prepare(2)
    assert beside is not None
    beside.result(10)
    assert buffer.step(2) == [4, 5, 6, 7]
    assert buffer.core.prepare(2) is None, "its batch is fixed"
