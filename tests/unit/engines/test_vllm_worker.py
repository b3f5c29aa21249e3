"""The vLLM plugin's loading of weights, from the trainer's memory and over gloo."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import _world

from sluice.engines.vllm import Vllm
from sluice.engines.vllm.plugin.__main__ import PATH
from sluice_trainer.weights.buckets import Bucket, buckets
from sluice_trainer.weights.ipc import Ipc, handle

SENT = [("a", torch.randn(3, 5)), ("b", torch.arange(7, dtype=torch.bfloat16))]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(PATH))
    import sluice_vllm.worker as module

    return module


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    Ipc()
    [tensor] = buckets(SENT, 1 << 20, Vllm().layout)
    yield tensor
    torch.multiprocessing.set_sharing_strategy("file_descriptor")


class Engine:
    """A worker of vLLM, for a bucket. taken: the tensors that its model was given."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.taken: list[tuple[str, torch.Tensor]] = []

    def sluice_take(self, tensors: Any) -> None:
        self.taken += tensors


def same(tensors: list[tuple[str, torch.Tensor]]) -> bool:
    return all(
        name == other and tensor.dtype == expected.dtype and torch.equal(tensor, expected)
        for (name, tensor), (other, expected) in zip(tensors, SENT, strict=True)
    )


def test_a_bucket_is_copied_out_of_the_trainers_memory(
    worker: SimpleNamespace, bucket: Bucket
) -> None:
    engine = Engine()
    worker.Weights.sluice_open(engine, [handle(bucket)])
    assert same(engine.taken)
    bucket.data.zero_()
    assert same(engine.taken), "a layer that is not complete keeps its tensors beyond the bucket"


def test_a_handle_that_names_anything_else_is_refused(worker: SimpleNamespace) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    text = base64.b64encode(pickle.dumps({"flattened_tensor": Harm()})).decode()
    with pytest.raises(pickle.UnpicklingError, match=r"a bucket has no (posix|os)\.system"):
        worker.Weights.sluice_open(Engine(), [text])


def test_a_bucket_of_a_communicator_that_the_engine_is_not_in_is_refused(
    worker: SimpleNamespace,
) -> None:
    with pytest.raises(ValueError, match="not in the communicator sluice-x"):
        worker.Weights.sluice_receive(Engine(), "sluice-x", [], [], [])


def test_a_newer_communicator_replaces_the_older(worker: SimpleNamespace) -> None:
    """Each of one rank, as two of one process cannot have the same name."""
    engine, before = Engine(), set(_world.pg_names)
    engine.rank = -1  # so that its rank there is 0
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    for name in ("sluice-one", "sluice-two"):
        worker.Weights.sluice_join(engine, name, "127.0.0.1", store.port, 1, "gloo", 20.0)
    assert list(worker._groups) == ["sluice-two"]
    assert set(_world.pg_names) - before == set(worker._groups.values())
    worker.release(worker._groups.pop("sluice-two"))
