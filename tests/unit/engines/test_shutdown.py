"""An engine ends soon after it is told to. The tokenizer manager has the shape of SGLang's."""

from __future__ import annotations

import asyncio
import time
from types import ModuleType, SimpleNamespace

import pytest

from tests.unit.engines.conftest import Plugin


@pytest.fixture
def shutdown(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    shutdown = plugin("shutdown")
    monkeypatch.setattr(shutdown, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(shutdown, "REST_SECONDS", 0.05)
    return shutdown


@pytest.fixture
def tokenizer() -> SimpleNamespace:
    return SimpleNamespace(gracefully_exit=False, rid_to_state={"a request": 1}, ended=None)


async def original(tokenizer: SimpleNamespace) -> None:
    tokenizer.ended = time.monotonic()


async def test_it_ends_when_it_is_told_to_and_its_requests_have_ended(
    shutdown: ModuleType, tokenizer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "REST_SECONDS", 1.0)
    task = asyncio.create_task(shutdown.end_soon(original, tokenizer))
    await asyncio.sleep(0.1)
    assert tokenizer.ended is None, "it was not told"
    tokenizer.gracefully_exit = True
    await asyncio.sleep(0.1)
    assert tokenizer.ended is None, "it has a request"
    tokenizer.rid_to_state.clear()
    cleared = time.monotonic()
    await asyncio.wait_for(task, 30)
    assert tokenizer.ended is not None
    assert tokenizer.ended - cleared > 0.5, "its last answers are on their way"


async def test_requests_that_do_not_end_are_left_to_sglang(
    shutdown: ModuleType, tokenizer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "PATIENCE_SECONDS", 0.1)
    tokenizer.gracefully_exit = True
    await asyncio.wait_for(shutdown.end_soon(original, tokenizer), 30)
    assert tokenizer.ended is not None
