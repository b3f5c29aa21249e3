"""The two buffers of an engine's rank, on a GPU that loads more slowly than buckets arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sluice.engines.sglang.plugin.__main__ import PATH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BYTES = 64 << 20
BUCKETS = 12
# About 10 ms on a GPU: many times as long as filling a bucket takes.
CYCLES = 20_000_000


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PATH))
    from sluice_sglang.weights.receive import Buffers

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return Buffers()


def receive(buffers: Any, value: int) -> torch.Tensor:
    with buffers.receiving("cuda"):
        data = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
        buffers.keep(data)
        data.fill_(value)
    return data


def test_no_bucket_is_overwritten_before_it_is_loaded(buffers: Any) -> None:
    loaded = torch.zeros(2 * BUCKETS, BYTES, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    for update in range(2):
        for number in range(update * BUCKETS, (update + 1) * BUCKETS):
            data = receive(buffers, number + 1)
            torch.cuda._sleep(CYCLES)
            loaded[number].copy_(data)
            del data
        buffers.release()
    most = torch.cuda.max_memory_reserved()
    expected = torch.arange(1, 2 * BUCKETS + 1, dtype=torch.uint8, device="cuda")
    assert (loaded == expected[:, None]).all()
    assert torch.cuda.memory_allocated() <= before + expected.nbytes + 512
    assert most < loaded.nbytes + 3 * BYTES + (32 << 20)


def test_a_bucket_comes_while_the_one_before_is_loaded(buffers: Any) -> None:
    first, second = torch.cuda.Event(), torch.cuda.Event()
    for value in range(3):  # afterwards both buffers are allocated
        receive(buffers, value)
    torch.cuda.synchronize()
    torch.cuda._sleep(100 * CYCLES)
    first.record()
    with buffers.receiving("cuda"):
        data = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
        buffers.keep(data)
        data.fill_(2)
        second.record()
    second.synchronize()
    assert not first.query(), "the second bucket has arrived while the first is being loaded"
