"""Given answers with images: read, stored and let go with their samples."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.images.image import Image
from sluice.images.processor import ImageProcessor
from sluice.runtime.pod_env import ConfigurationError
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import SampleFacts, pack_facts, unpack_facts
from sluice_buffer.sources import answers as source
from sluice_buffer.sources.prompts import RowUnavailableError
from tests.unit.buffer.buffer_tools import LocalBuffer
from tests.unit.buffer.test_buffer_answers import samples
from tests.vision_models import make_model, picture

MakeBuffer = Callable[..., LocalBuffer]
ROWS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


def rows(directory: Path, **changed: Any) -> str:
    """Write six rows, each with its image; the last has none."""
    lines = []
    for number in range(ROWS):
        (directory / f"{number}.png").write_bytes(picture(64, 32 * (1 + number), number).data)
        text, images = ("<image>?", [f"{number}.png"]) if number < ROWS - 1 else ("?", [])
        talk = [{"role": "user", "content": text}, {"role": "assistant", "content": str(number)}]
        lines.append(changed.get(f"row{number}", {"messages": talk, "images": images}))
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def sft(make_buffer: MakeBuffer, model: Path, tmp_path: Path) -> MakeBuffer:
    def make(path: str | None = None, **data: Any) -> LocalBuffer:
        prompts = [{"path": path or rows(tmp_path)}]
        return make_buffer(
            model={"path": str(model)},
            data={"prompts": prompts, "shuffle": False, "images": {}, **data},
            rollout={"batchSize": 3},
            reward=None,
            trainer={"backend": "fsdp", "steps": 4},
            algorithm={"loss": {"type": "sft"}},
        )

    return make


def stored(buffer: LocalBuffer) -> set[str]:
    return {digest.hex() for digest in buffer.core.memory.images.heads}


def of_row(number: int) -> Image:
    return picture(64, 32 * (1 + number), number)


def test_a_sample_has_its_image_and_counts_its_tokens(sft: MakeBuffer, model: Path) -> None:
    buffer, processor = sft(), ImageProcessor(model)
    assert buffer.step(1) == [0, 1, 2]
    for number, group in enumerate(samples(buffer, 1)):
        (sample,) = group.samples
        image = of_row(number)
        assert list(sample.images) == list(group.prompt.images) == [image.digest]
        assert sample.image_tokens == processor.added([(image.width, image.height)])
        tokens = np.frombuffer(sample.tokens, "<i4")
        assert list(tokens).count(processor.placeholder) == 1
        assert sample.response == f"{number}<|im_end|>"
        (fact,) = unpack_facts(buffer.core.memory.groups[number].summary)
        assert (fact.image_tokens, fact.status) == (sample.image_tokens, sample.status)
    lengths = [s.length for s in buffer.core.sequences(1, 1)]
    assert lengths[0] < lengths[2]
    assert stored(buffer) == {of_row(number).digest for number in range(3)}
    buffer.restart()
    assert stored(buffer) == {of_row(number).digest for number in range(3)}
    buffer.check()


def test_facts_of_older_databases_have_no_images() -> None:
    old = struct.Struct("<iiiidqq").pack(9, 4, 3, pb.SAMPLE_STATUS_TRUNCATED, 0.5, 1, 2)
    fact = SampleFacts(9, 4, 3, pb.SAMPLE_STATUS_TRUNCATED, 0.5, 1, 2)
    assert unpack_facts(old) == [fact]
    assert pack_facts([fact]) == old
    many = fact._replace(image_tokens=1 << 30)
    assert unpack_facts(pack_facts([many])) == [many._replace(image_tokens=(1 << 24) - 1)]


def test_images_go_with_the_checkpoint(sft: MakeBuffer) -> None:
    buffer = sft()
    buffer.step(1)
    assert buffer.step(2) == [3, 4, 5]
    assert not samples(buffer, 2)[2].samples[0].images, "a row without an image"
    buffer.core.commit_checkpoint(1, 1)
    assert stored(buffer) == {of_row(number).digest for number in (3, 4)}
    buffer.core.commit_checkpoint(2, 1)
    assert not stored(buffer)


def test_rows_with_a_broken_image_are_left_out(
    sft: MakeBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path)
    (tmp_path / "1.png").write_bytes(picture(64, 64).data[:100])
    buffer = sft(path)
    assert buffer.step(1) == [0, 2, 3]
    assert buffer.counters["groups_failed"] == 1
    assert "rows.jsonl:2" in capsys.readouterr().out


def test_a_row_that_is_too_long_with_its_image_is_left_out_and_never_cut(
    sft: MakeBuffer,
) -> None:
    """Row 0 has 25 tokens and each further one two more."""
    buffer = sft(maxPromptTokens=30, truncation="right")
    assert buffer.step(1) == [0, 1, 5]
    assert buffer.counters["prompts_too_long:rows"] == 3


def test_an_answer_with_an_image_is_refused(sft: MakeBuffer, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<image>"}]
    wrong = {f"row{n}": {"messages": talk, "images": ["0.png"]} for n in range(ROWS)}
    with pytest.raises(ConfigurationError, match="row 0: a trained answer has an image"):
        sft(rows(tmp_path, **wrong))


def test_images_beyond_the_memory_are_stored_by_later_transitions(
    sft: MakeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "AHEAD_BYTES", len(of_row(0).data))
    buffer = sft()
    ahead = buffer.core.prepare(1)
    assert ahead is not None
    ahead.result(10)
    answers = buffer.core.local_source
    assert isinstance(answers, source.Answers)
    left_out = [future.result() is None for future in answers._soon.values()]
    assert left_out == [False, False, True]
    assert "2 of 3 groups finished" in str(buffer.core.take(1, 1))
    buffer.sync()
    assert buffer.core.take(1, 1) is None
    assert buffer.core.memory.batches[1] == [0, 1, 2]
    buffer.check()


def test_images_are_read_again_if_their_storage_fails(
    sft: MakeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PAUSE_SECONDS", 0.0)
    buffer = sft()
    read, failing = buffer.core.prompts.training, iter(range(source.TRIES - 1))

    def training(group_id: int) -> Any:
        if next(failing, None) is not None:
            raise RowUnavailableError("rows.jsonl: row 0: 0.png cannot be read: gone")
        return read(group_id)

    monkeypatch.setattr(buffer.core.prompts, "training", training)
    assert buffer.step(1) == [0, 1, 2]


def test_a_full_storage_waits_for_the_next_checkpoint(
    sft: MakeBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = sft()
    buffer.step(1)
    room = buffer.core.capacity.free_bytes
    monkeypatch.setattr(buffer.core.capacity, "free_bytes", lambda: 10)
    assert "0 of 3 groups finished" in str(buffer.core.take(2, 1))
    monkeypatch.setattr(buffer.core.capacity, "free_bytes", room)
    assert buffer.step(2) == [3, 4, 5]
    buffer.check()
