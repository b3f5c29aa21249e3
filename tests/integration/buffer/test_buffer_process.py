"""The buffer process: exit codes, last line, metrics, membership, a full disk."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from sluice.runtime.pod_env import free_port
from sluice.wire import membership
from sluice.wire.v1 import buffer_pb2 as pb
from tests.unit.buffer.buffer_tools import BufferProcess, Client, error_of, make_group

Make = Callable[..., BufferProcess]


def failure(server: BufferProcess) -> tuple[int, str]:
    """(exit code, last line) of a process that must not start."""
    with pytest.raises(RuntimeError):
        server.start()
    return server.end(), server.lines[-1].strip()


def test_sigterm_is_a_clean_end(make_server: Make) -> None:
    server = make_server()
    server.start()
    assert server.end(signal.SIGTERM) == 143


def test_a_missing_prompt_file_is_a_configuration_error(make_server: Make, tmp_path: Path) -> None:
    server = make_server()
    (tmp_path / "prompts.jsonl").unlink()
    assert failure(server) == (2, f"error: {tmp_path}/prompts.jsonl: no such prompt file")


def test_a_broken_row_is_a_configuration_error(make_server: Make, tmp_path: Path) -> None:
    server = make_server()
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write("{nonsense\n")
    code, line = failure(server)
    assert code == 2
    assert line.startswith(f"error: {tmp_path}/prompts.jsonl:21:2: not valid JSON")


def test_changed_prompts_are_a_configuration_error(make_server: Make, tmp_path: Path) -> None:
    server = make_server()
    server.start()
    server.end()
    path = tmp_path / "prompts.jsonl"
    path.write_text(path.read_text() + '{"prompt": "one more"}\n')
    code, line = failure(server)
    assert code == 2
    assert "the database was made with another prompt files (spec.data.prompts)" in line


def test_a_storage_that_cannot_be_written_is_a_configuration_error(
    make_server: Make, tmp_path: Path
) -> None:
    server = make_server()
    (tmp_path / "storage").write_text("not a directory")
    code, line = failure(server)
    assert code == 2
    assert line.startswith(f"error: {tmp_path}/storage: cannot make this directory")


def test_a_second_process_on_the_same_storage_fails_and_may_be_restarted(
    make_server: Make, tmp_path: Path
) -> None:
    make_server().start()
    code, line = failure(make_server())
    assert code == 1
    assert "another buffer process uses this directory" in line


async def test_metrics(make_server: Make) -> None:
    port = free_port()
    server = make_server({"SLUICE_PORT_METRICS": str(port)})
    async with Client(server.start()) as client:
        await client.lease(count=2)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert "sluice_buffer_step 0.0" in text
    assert "sluice_buffer_groups_lost_total 0.0" in text
    assert "sluice_buffer_capacity_bytes" in text


async def test_it_registers_at_the_rendezvous_and_again_when_that_was_away(
    make_server: Make,
) -> None:
    port = free_port()
    environment = {**os.environ, "SLUICE_PORT_GRPC": str(port), "SLUICE_BIND": "127.0.0.1"}

    def rendezvous() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "sluice_rendezvous"], env=environment, stderr=subprocess.DEVNULL
        )

    first = rendezvous()
    try:
        server = make_server({"SLUICE_RENDEZVOUS": f"127.0.0.1:{port}"})
        address = server.start()
        assert (await membership.find_members(f"127.0.0.1:{port}", "buffer", seconds=20))[
            0
        ].address == address
        first.kill()
        first.wait(10)
        first = rendezvous()
        assert (await membership.find_members(f"127.0.0.1:{port}", "buffer", seconds=20))[
            0
        ].address == address
        first.terminate()
        assert first.wait(20) == 143
    finally:
        first.kill()
        first.wait(10)


async def fill(client: Client, steps: int, response: int) -> int:
    """Train until a call is refused for want of room; the step that could not be finished."""
    for step in range(1, steps):
        leased = (await client.lease(count=4, version=step - 1)).groups
        if len(leased) < 4:
            return step
        groups = [make_group(g.prompt, response=response, version=step - 1) for g in leased]
        try:
            answers = await client.submit(groups)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return step
        assert {a.outcome for a in answers.values()} <= {pb.SubmitResponse.OUTCOME_STORED}
        assert (await client.take(step)).state == pb.TakeBatchResponse.STATE_READY
        await client.commit(step)
    raise AssertionError("the storage was never full")


async def recovers(client: Client, full_at: int, response: int) -> None:
    """A checkpoint makes room, and the step that was refused goes on."""
    stats = await client.stats()
    assert (stats.step, stats.counters["groups_lost"]) == (full_at - 1, 0)
    assert await client.checkpoint(full_at - 1) == 4 * (full_at - 1)
    leased = list((await client.lease("rollout-1", 4, version=full_at - 1, attempt=1)).groups)
    while len(leased) < 4:  # what rollout-1 does not come for
        answer = await client.lease("rollout-0", 4, version=full_at - 1, attempt=2, wait=20)
        leased += answer.groups
    await client.submit(
        make_group(g.prompt, response=response, version=full_at - 1) for g in leased
    )
    assert (await client.take(full_at)).state == pb.TakeBatchResponse.STATE_READY
    await client.commit(full_at)


async def test_a_full_map_refuses_and_recovers(make_server: Make) -> None:
    server = make_server(rows=400, trainer__steps=100, buffer__storage__size="4Mi")
    async with Client(server.start()) as client:
        full_at = await fill(client, 60, 10_000)
        leased = (await client.lease(count=1, version=full_at - 1)).groups
        assert not leased
        await recovers(client, full_at, 10_000)


async def test_a_submit_that_does_not_fit_is_refused_and_everything_else_kept(
    make_server: Make,
) -> None:
    server = make_server(buffer__storage__size="3Mi")
    async with Client(server.start()) as client:
        leased = (await client.lease(count=4)).groups
        await client.submit([make_group(leased[0].prompt)])
        code, details = await error_of(
            client.submit([make_group(leased[1].prompt, response=200_000)])
        )
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no room for group 1" in details
        answers = await client.submit([make_group(g.prompt) for g in leased[1:]])
        assert {a.outcome for a in answers.values()} == {pb.SubmitResponse.OUTCOME_STORED}
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    async with Client(server.start()) as client:
        assert (await client.stats()).depth == 4


async def test_a_full_disk_refuses_and_recovers(make_server: Make, small_disk: Path) -> None:
    server = make_server(rows=400, trainer__steps=100, buffer__storage__size="1Gi")
    async with Client(server.start()) as client:
        full_at = await fill(client, 60, 10_000)
        assert full_at > 2
        await recovers(client, full_at, 10_000)


async def test_a_disk_that_somebody_else_fills_meanwhile(
    make_server: Make, small_disk: Path
) -> None:
    """Writes fail in the middle of a commit: no group is lost, and the buffer continues.

    It does so once there is space again.
    """
    server = make_server(rows=400, trainer__steps=100, buffer__storage__size="1Gi")
    async with Client(server.start()) as client:
        leased = (await client.lease(count=4)).groups
        await client.submit([make_group(leased[0].prompt)])
        with (small_disk / "other").open("wb", buffering=0) as other:
            try:
                while other.write(bytes(4096)):
                    pass
            except OSError:
                other.flush()
        code, _ = await error_of(client.submit([make_group(leased[1].prompt, response=100_000)]))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        (small_disk / "other").unlink()
        assert server.process
        assert server.process.poll() is None
        for _ in range(100):
            try:
                answers = await client.submit(
                    [make_group(g.prompt, response=10_000) for g in leased]
                )
                break
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.5)
        stored, duplicate = pb.SubmitResponse.OUTCOME_STORED, pb.SubmitResponse.OUTCOME_DUPLICATE
        assert [answers[i].outcome for i in range(4)] == [duplicate, stored, stored, stored]
        assert (await client.take(1)).state == pb.TakeBatchResponse.STATE_READY
