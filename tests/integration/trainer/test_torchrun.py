"""The ranks of several pods meet through sluice's torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from sluice.runtime.pod_env import free_port
from sluice_trainer.distributed.rank_failure import EXIT_PEER_LOST

RANK = """
import os
import torch, torch.distributed as dist

address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
total = torch.tensor([rank + 1])
dist.all_reduce(total)
# One write: ranks share the pipe.
print(f"rank {rank} of {size}: {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def torchrun(
    script: Path, port: int, *, nodes: int = 1, processes: int = 1, index: int = 0
) -> subprocess.Popen[str]:
    """Start the ranks of one pod."""
    command = [sys.executable, "-m", "sluice_trainer.distributed.torchrun"]
    command += ["--nnodes", str(nodes), "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "sluice", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv-conf", f"rank={index}", str(script)]
    return subprocess.Popen(
        command,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_pods_of_two_ranks_meet_at_the_address_of_the_first(tmp_path: Path) -> None:
    script, port = tmp_path / "rank.py", free_port()
    script.write_text(RANK)

    pods = [torchrun(script, port, nodes=2, processes=2, index=index) for index in (1, 0)]
    outputs = [pod.communicate(timeout=200)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    ranks = sorted(
        line for output in outputs for line in output.splitlines() if line.startswith("rank ")
    )
    assert ranks == [f"rank {rank} of 4: 10" for rank in range(4)]


WAITING = """
import os, sys
import torch, torch.distributed as dist

from sluice_trainer.distributed import rank_failure

address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
dist.all_reduce(torch.zeros(1))
if rank == 1:
    os.kill(os.getpid(), 9)
try:
    dist.all_reduce(torch.zeros(1))
except RuntimeError as error:
    words = rank_failure.message(error)
    rank_failure.end(words) if words else sys.exit(1)
"""


def test_a_rank_that_lost_another_says_so_and_the_pod_of_the_other_has_the_reason(
    tmp_path: Path,
) -> None:
    script, port = tmp_path / "rank.py", free_port()
    script.write_text(WAITING)

    pods = [torchrun(script, port, nodes=2, index=index) for index in (0, 1)]
    outputs = [pod.communicate(timeout=200)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [3, 1], outputs
    assert outputs[1].splitlines()[-1] == "error: rank 1 was killed by SIGKILL"


def run_one_rank(code: str, directory: Path) -> tuple[int, list[str]]:
    """Run a torchrun whose only rank runs `code`; return its exit code and lines."""
    script = directory / "rank.py"
    script.write_text(code)
    process = torchrun(script, free_port())
    output, _ = process.communicate(timeout=100)
    return process.returncode, output.splitlines()


def test_the_last_line_says_which_rank_was_killed(tmp_path: Path) -> None:
    code, lines = run_one_rank(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", tmp_path)
    assert (code, lines[-1]) == (1, "error: rank 0 was killed by SIGKILL")


def test_the_last_words_of_a_rank_are_not_buried(tmp_path: Path) -> None:
    words = "error: the disk is full"
    code, lines = run_one_rank(
        f"import sys; print({words!r}, file=sys.stderr); sys.exit(1)", tmp_path
    )
    assert code == 1
    assert [line for line in lines[-5:] if line.startswith("error: ")] == [words]


def test_a_rank_that_lost_another_runs_its_exit_handlers() -> None:
    code = (
        "import atexit; from sluice_trainer.distributed import rank_failure; "
        "atexit.register(print, 'traces are sent'); rank_failure.end('another rank is gone')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_PEER_LOST
    assert done.stdout == "traces are sent\n"
    assert done.stderr.splitlines()[-1] == "error: another rank is gone"
