"""The end of a vLLM server: when it is told to, and when it has lost a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.engines.vllm.plugin.__main__ import PATH
from tests.integration.engines import distance, log_probs
from tests.integration.vllm_engine import PYTHON, VllmServer
from tests.tools import missing

PROMPT = [10, 11, 12, 13]


def started(model: Path, directory: Path, **changes: Any) -> Iterator[VllmServer]:
    if not PYTHON.exists():
        missing("needs vLLM: make vllm")
    server = VllmServer(model, directory / "log", **changes)
    try:
        server.wait_ready()
        server.reset()  # it starts without weights, which a trainer brings
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="module")
def truncating(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A job's that samples from a part of the tokens."""
    yield from started(
        model, tmp_path_factory.mktemp("truncating"), sampling={"topP": 0.8, "topK": 50}
    )


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Iterator[VllmServer]:
    yield from started(model, tmp_path)


@pytest.mark.vllm
async def test_log_probs_are_those_of_all_tokens_where_top_p_and_top_k_leave_some_out(
    truncating: VllmServer, model: Path
) -> None:
    sampling = {"max_new_tokens": 40, "ignore_eos": True, "top_p": 0.8, "top_k": 50}
    async with truncating.engine.client(truncating.url) as engine:
        answer = await engine.generate("one", PROMPT, sampling)
    assert distance(answer.log_probs, log_probs(model, PROMPT + answer.tokens, 40)) < 1e-4


@pytest.mark.vllm
async def test_as_a_teacher_it_scores_given_tokens_at_temperature_1(
    truncating: VllmServer, model: Path
) -> None:
    scorer = truncating.engine.scorer(truncating.url, 30.0)
    tokens = [*PROMPT, 700, 701, 702]
    try:
        assert distance(await scorer.log_probs(tokens, 3), log_probs(model, tokens, 3)) < 1e-4
        assert await scorer.token_texts([8, 2047]) == ["w0000", "w2039"]
    finally:
        await scorer.close()


@pytest.mark.vllm
def test_a_server_that_is_told_to_end_ends_well_and_leaves_nobody_behind(
    truncating: VllmServer,
) -> None:
    parts = [truncating.part("EngineCore"), truncating.part("Worker")]
    truncating.process.send_signal(signal.SIGTERM)
    assert truncating.process.wait(30) == 0, truncating.log.read_text()[-2000:]
    psutil.wait_procs(parts, timeout=10)
    assert not any(part.is_running() for part in parts)


@pytest.mark.vllm
def test_a_server_whose_process_has_died_ends_as_a_failure(own: VllmServer) -> None:
    own.part("Worker").kill()  # its scheduler hears of it, and ends, and the HTTP server of that
    assert own.process.wait(60) not in (0, None), own.log.read_text()[-2000:]


def test_without_vllm_the_script_says_what_to_do(tmp_path: Path) -> None:
    nowhere = tmp_path / "bin" / "python"
    done = subprocess.run(
        [sys.executable, str(PATH / "launch_server.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={"SLUICE_VLLM_PYTHON": str(nowhere)},
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"rollout.engine: vllm needs vLLM at {nowhere}: run `make vllm`, or set SLUICE_VLLM_PYTHON"
    )
