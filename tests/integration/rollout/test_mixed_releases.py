"""Processes whose rendezvous is of a newer release: each ends with exit code 2 and one sentence."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.wire import protocol
from sluice.wire.protocol import PROTOCOL
from tests.integration.engines import Sglang
from tests.integration.rendezvous_server import Rendezvous
from tests.integration.rollout.pods import Pod, Services

MakeServices = Callable[..., Services]
Start = Callable[..., Pod]
REFUSAL = (
    f"the caller speaks protocol {PROTOCOL} (sluice {protocol.release()}), the server protocol 99"
)


@pytest.fixture
def newer(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    """In this process the number is another one; all that is started here has its own."""
    monkeypatch.setattr(protocol, "PROTOCOL", 99)
    return rendezvous


@pytest.mark.usefixtures("newer")
async def test_a_buffer_ends(make_services: MakeServices) -> None:
    buffer = make_services().buffer
    await asyncio.to_thread(buffer.start)
    assert buffer.process
    await asyncio.to_thread(buffer.process.wait, 30.0)
    assert buffer.end() == 2
    assert buffer.lines[-1].startswith(f"error: refused by the rendezvous: {REFUSAL}")


@pytest.mark.usefixtures("newer")
async def test_a_worker_ends(make_services: MakeServices, start_pod: Start, sglang: Sglang) -> None:
    worker = start_pod(make_services(), sglang.url)
    assert await worker.end(60) == 2
    last = worker.lines[-1]
    assert last.startswith("error: ")
    assert REFUSAL in last


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_trainer_ends(
    make_services: MakeServices, newer: Rendezvous, tmp_path: Path, ranks: int
) -> None:
    job = make_services(trainer__steps=None, trainer__epochs=1, trainer__processesPerNode=ranks).job
    job_file = tmp_path / "trainer.json"
    job_file.write_text(job.model_dump_json(by_alias=True, exclude_unset=True, exclude_none=True))
    variables = {
        **os.environ,
        "SLUICE_JOB_FILE": str(job_file),
        "SLUICE_RENDEZVOUS": newer.address,
        "OMP_NUM_THREADS": "1",
        "SLUICE_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "SLUICE_RUN_DIR": str(tmp_path / "run"),
    }
    command = [sys.executable, "-m", "sluice_trainer.launch"]
    trainer = await asyncio.to_thread(
        subprocess.run, command, env=variables, capture_output=True, text=True, timeout=120
    )
    assert trainer.returncode == 2, trainer.stderr
    errors = [line for line in trainer.stderr.splitlines() if line.startswith("error: ")]
    assert errors
    assert all(
        line.startswith(f"error: rendezvous at {newer.address}: {REFUSAL}") for line in errors
    ), errors
