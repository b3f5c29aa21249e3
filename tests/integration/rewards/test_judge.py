"""Judging processes: a function that raises, hangs, dies or returns nonsense fails its sample, and
nothing else."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import REGISTRY

from sluice.api import Reward
from sluice.images.image import Image
from sluice.rewards import RewardError, RewardInput
from sluice.rewards.builtin.math_prm800k import hendrycks
from sluice.rewards.judging.judge import Judge
from sluice.rewards.judging.process import Process
from sluice.rewards.types import answer_number

USER = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
def good(sample): return len(sample.response)
def seen(sample): return sum(image.width * image.data.count(b"x") for image in sample.images)
async def later(sample):
    await asyncio.sleep(0.2)
    if sample.response == "raise": raise ValueError("no such unit")
    if sample.response == "wait": await asyncio.sleep(1000)
    if sample.response == "block": time.sleep(1000)
    if sample.response == "die": os._exit(3)
    return {"score": 0.5, "kind": "x"}
def forge(text):
    if text != "ok":
        for descriptor in range(3, 20):
            try: os.write(descriptor, text.encode() + b"\\n")
            except OSError: continue
def forges(sample):
    forge(sample.response)
    return 1.0
async def forges_later(sample):
    forge(sample.response)
    return 1.0
inside = 0
async def all_inside(sample):
    global inside
    inside += 1
    while inside < int(sample.label): await asyncio.sleep(0.01)
    return {"score": 0.5, "kind": "x"}
def moody(sample):
    if sample.response == "raise": raise ValueError("no such unit")
    if sample.response == "hang": time.sleep(1000)
    if sample.response == "spin":
        while True: pass
    if sample.response == "die": os._exit(3)
    if sample.response == "exit": sys.exit("bye")
    if sample.response == "text": return "very good"
    if sample.response == "none": return None
    if sample.response == "nan": return float("nan")
    if sample.response == "inf": return {"score": float("inf")}
    if sample.response == "beyond": return 1e39
    if sample.response == "many digits": return 10 ** 5000
    if sample.response == "half a pair": return {"score": 1, "\\ud83d": 2}
    if sample.response == "raise half": raise ValueError("no \\ud83d")
    if sample.response == "huge":
        return {"score": 1, **{str(i): "x" * 1000 for i in range(100_000)}}
    if sample.response == "eat": return len(bytearray(8 << 30))
    if sample.response == "print": print("{}" * 1000); return 1.0
    if sample.response == "children":
        child = subprocess.Popen(["sleep", "1000"])
        Path(sample.label).write_text(str(child.pid))
        time.sleep(1000)
    return 1.0
def ranks(samples): return [i for i, _ in enumerate(samples)]
def mixed(samples): return [{"score": 1}, "text"]
def short(samples): return [1.0]
async def ranks_later(args, samples): return [float(len(s.tokens)) for s in samples]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": 1}
"""


def sample(response: str, label: Any = None, **metadata: Any) -> RewardInput:
    return RewardInput(prompt="p", response=response, label=label, metadata=metadata)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "judges.py"
    path.write_text(USER)
    return path


@asynccontextmanager
async def judging(
    workers: int = 1, **fields: Any
) -> AsyncIterator[Callable[..., Awaitable[list[Any]]]]:
    judge = Judge(Reward(**fields), workers=workers)
    try:
        yield judge
    finally:
        await judge.close()


def children() -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process().children()
        if any("sluice.rewards.judging.child" in word for word in p.cmdline())
    ]


async def test_functions_sync_and_async_and_of_other_projects(user: Path) -> None:
    async with judging(function=f"{user}:good") as judge:
        assert await judge([sample("abc")]) == [(3.0, {})]
    async with judging(function=f"{user}:later") as judge:
        assert await judge([sample("abc")]) == [(0.5, {"score": 0.5})]
    async with judging(function=f"{user}:compute_score", key="acc") as judge:
        assert await judge([sample("a", "b")]) == [(1.0, {"score": 0.0, "acc": 1.0})]


async def test_a_function_sees_the_images(user: Path) -> None:
    images = [Image("image/png", 10, 1, b"axx"), Image("image/png", 100, 1, b"bx")]
    async with judging(function=f"{user}:seen") as judge:
        assert await judge([replace(sample("abc"), images=images)]) == [(120.0, {})]


async def test_one_bad_sample_fails_alone(user: Path) -> None:
    expected = {
        "raise": "raised ValueError: no such unit",
        "hang": "no reward after 3 s",
        "text": "'very good', expected a number",
        "die": "its process died .exit code 3.",
        "exit": "raised SystemExit: bye",
        "none": "None, expected a number",
        "nan": "the reward is nan, expected a finite number",
        "inf": "reward part 'score' is inf",
        "beyond": "the reward is 1e.39, expected a finite number of at most 1e.15",
        "many digits": "the reward is int, expected one number: int too large",
        "half a pair": r"the name of a reward part: half of a surrogate pair, .ud83d",
        "raise half": "raised ValueError: no \ufffd",
        "huge": "dictionary of 100001 entries, expected at most 64",
        "eat": "raised MemoryError .*: a judging process may take 4 GiB .spec.reward.sandbox",
    }
    words = ["ok", *expected, "print", "ok"]
    async with judging(
        function=f"{user}:moody", timeout_seconds=3, sandbox={"memory": "4Gi"}
    ) as judge:
        outcomes = dict(zip(words, await judge([sample(w) for w in words]), strict=True))
    assert outcomes.pop("ok") == outcomes.pop("print") == (1.0, {})
    for word, message in expected.items():
        assert isinstance(outcomes[word], RewardError)
        with pytest.raises(RewardError, match=message):
            raise outcomes[word]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("name", ["good", "later"])
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        pytest.param({"a": nested(900)}, "RecursionError", id="nested 900 deep"),
        pytest.param({"a": lambda: None}, "pickle", id="a function"),
    ],
)
async def test_a_sample_that_cannot_be_sent_fails_alone(
    user: Path, name: str, metadata: dict[str, Any], message: str
) -> None:
    broken = RewardInput("p", "abc", metadata=metadata)
    async with judging(workers=1, function=f"{user}:{name}") as judge, asyncio.timeout(60):
        first, bad, second = await judge([sample("abc"), broken, sample("abc")])
        assert isinstance(bad, RewardError)
        assert "the sample cannot be sent to a judging process" in str(bad)
        assert message in str(bad)
        assert first == second == (await judge([sample("abc")]))[0]


@pytest.mark.parametrize("name", ["forges", "forges_later"])
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param('{"id": [], "outcomes": [[1, {}]]}', id="a list as its number"),
        pytest.param('{"id": 0, "outcomes": [[1, []]]}', id="a list as parts"),
        pytest.param('{"id": 0, "outcomes": [[1e39, {}]]}', id="a reward beyond float32"),
        pytest.param('{"id": 0, "outcomes": ' + "[" * 3000 + "]" * 3000 + "}", id="3000 deep"),
        pytest.param('{"id": ' + "9" * 5000 + "}", id="5000 digits"),
        pytest.param("[]", id="no object"),
    ],
)
async def test_an_answer_that_a_function_forges_ends_no_other_sample(
    user: Path, name: str, answer: str
) -> None:
    async with judging(workers=1, function=f"{user}:{name}") as judge, asyncio.timeout(60):
        (bad,) = await judge([sample(answer)])
        assert isinstance(bad, RewardError)
        assert await judge([sample("ok")]) == [(1.0, {})]


async def test_an_unexpected_error_answers_the_samples_of_its_process(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending fails in a way that no code expects."""

    def fails(self: Process, jobs: object) -> None:
        raise ZeroDivisionError("of nobody's making")

    async with judging(workers=1, function=f"{user}:good") as judge, asyncio.timeout(60):
        with monkeypatch.context() as patch:
            patch.setattr(Process, "send", fails)
            outcomes = await judge([sample("a"), sample("b")])
        assert [str(outcome).partition(" (")[0] for outcome in outcomes] == [
            f"{user}:good: judging ended: ZeroDivisionError: of nobody's making"
        ] * 2
        assert await judge([sample("abc")]) == [(3.0, {})]


async def test_a_process_that_cannot_be_started_answers_those_who_wait(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judging(workers=1, function=f"{user}:good") as judge, asyncio.timeout(60):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no/such/python")
            (outcome,) = await judge([sample("a")])
        assert "no process can be started: FileNotFoundError" in str(outcome)
        assert await judge([sample("abc")]) == [(3.0, {})]


async def test_failures_are_counted_by_their_cause(user: Path) -> None:
    def count(outcome: str) -> float:
        return (
            REGISTRY.get_sample_value("sluice_rollout_rewards_total", {"outcome": outcome}) or 0.0
        )

    before = {outcome: count(outcome) for outcome in ("ok", "raised", "died", "refused")}
    async with judging(function=f"{user}:moody") as judge:
        await judge([sample(w) for w in ("ok", "raise", "die", "nan", "ok")])
    assert {outcome: count(outcome) - b for outcome, b in before.items()} == {
        "ok": 2, "raised": 1, "died": 1, "refused": 1,
    }  # fmt: skip


async def test_processor_time_is_limited(user: Path) -> None:
    async with judging(function=f"{user}:moody", sandbox={"cpu_seconds": 1}) as judge:
        spun, fine = await judge([sample("spin"), sample("ok")])
    assert "it used up sandbox.cpuSeconds" in str(spun)
    assert fine == (1.0, {})


async def test_hanging_samples_do_not_block_others_and_processes_are_bounded(user: Path) -> None:
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(children()))
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    async with judging(workers=2, function=f"{user}:moody", timeout_seconds=20) as judge:
        hanging = [asyncio.ensure_future(judge([sample("hang")])) for _ in range(5)]
        good = asyncio.gather(*(judge([sample("ok")]) for _ in range(100)))
        await asyncio.wait_for(good, 15)  # long before the first of the hanging is given up
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
    watching.cancel()
    assert most <= 8
    assert not children()


async def test_what_a_function_started_dies_with_it(user: Path, tmp_path: Path) -> None:
    async with judging(function=f"{user}:moody", timeout_seconds=2) as judge:
        (outcome,) = await judge([sample("children", str(tmp_path / "pid"))])
    assert "no reward after 2 s" in str(outcome)
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it lives on"
        await asyncio.sleep(0.05)


async def test_processes_that_are_killed_while_idle_fail_no_sample(user: Path) -> None:
    async with judging(workers=2, function=f"{user}:good") as judge:
        for _ in range(2):
            assert await judge([sample("abc")]) == [(3.0, {})]
            for child in children():
                child.kill()
            await asyncio.sleep(0.5)
        assert await judge([sample("ab")] * 4) == [(2.0, {})] * 4


@pytest.mark.parametrize("name", ["good", "all_inside"])
async def test_processes_that_a_check_has_started_are_there_for_the_first_samples(
    user: Path, name: str
) -> None:
    judge = Judge(Reward(function=f"{user}:{name}"), workers=3)
    await judge.check()
    while len(started := {child.pid for child in children()}) < 3:
        await asyncio.sleep(0.05)
    outcomes = await asyncio.gather(*(judge([sample("abc", "1")]) for _ in range(6)))
    assert all(isinstance(outcome, tuple) for [outcome] in outcomes)
    assert {child.pid for child in children()} == started
    await judge.close()
    assert not children()


async def test_processes_that_a_check_has_started_end_unused(user: Path) -> None:
    judge = Judge(Reward(function=f"{user}:good"), workers=3)
    await judge.check()
    await judge.close()
    assert not children()


async def test_processes_die_with_a_worker_that_is_killed(user: Path, tmp_path: Path) -> None:
    script = (
        "import asyncio\nfrom sluice.api import Reward\nfrom sluice.rewards import RewardInput\n"
        "from sluice.rewards.judging.judge import Judge\n"
        f"asyncio.run(Judge(Reward(function='{user}:moody'), workers=1)([RewardInput('p', "
        "'hang')]))\n"
    )
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, cwd=Path(__file__).parents[3]
    )
    end = time.monotonic() + 30
    while not (processes := psutil.Process(worker.pid).children()) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)  # it hangs in the function by now
    os.kill(worker.pid, signal.SIGKILL)
    await worker.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=60)
    assert processes
    assert not alive


async def test_coroutine_functions_run_side_by_side_in_one_process(user: Path) -> None:
    async with judging(function=f"{user}:all_inside", timeout_seconds=60) as judge:
        outcomes = await judge(
            [sample(str(i), "50") for i in range(50)]
        )  # each waits until all 50 have begun
        assert len(children()) == 1
    assert outcomes == [(0.5, {"score": 0.5})] * 50


async def test_one_bad_coroutine_fails_alone(user: Path) -> None:
    words = ["a", "raise", "wait", "die", "b"]
    async with judging(function=f"{user}:later", timeout_seconds=1.5) as judge:
        a, raised, waited, died, b = await judge([sample(w) for w in words])
    assert a == b == (0.5, {"score": 0.5})
    assert "raised ValueError" in str(raised)
    assert "no reward after 1.5 s" in str(waited)
    assert "its process died (exit code 3)" in str(died)


async def test_a_coroutine_that_blocks_the_others_fails_alone(user: Path) -> None:
    async with judging(function=f"{user}:later", timeout_seconds=1) as judge:
        a, blocked, b = await judge([sample(w) for w in ("a", "block", "b")])
    assert a == b == (0.5, {"score": 0.5})
    assert "no reward after 1 s" in str(blocked)


async def test_group_rewards(user: Path) -> None:
    group = [sample("a"), sample("b")]
    async with judging(function=f"{user}:ranks", group=True) as judge:
        assert await judge(group) == [(0.0, {}), (1.0, {})]
    async with judging(function=f"{user}:ranks_later", group=True) as judge:
        assert await judge(group) == [(0.0, {}), (0.0, {})]
    async with judging(function=f"{user}:mixed", group=True) as judge:
        good, bad = await judge(group)
        assert good == (1.0, {"score": 1.0})
        assert "expected a number" in str(bad)
    async with judging(function=f"{user}:short", group=True) as judge:
        assert all("expected a list of 2 rewards" in str(o) for o in await judge(group))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{file}:nothing", "has no function 'nothing'; it has Path, good"),
        ("/no/such.py:f", "there is no file"),
        ("a.b.c", "No module"),
    ],
)
async def test_a_wrong_path_is_said_at_the_start_and_for_every_sample(
    user: Path, path: str, message: str
) -> None:
    judge = Judge(Reward(function=path.format(file=user)), workers=1)
    try:
        with pytest.raises(RewardError, match=message):
            await judge.check()
        (outcome,) = await judge([sample("a")])
        assert isinstance(outcome, RewardError)
        assert re.search(message, str(outcome))
    finally:
        await judge.close()


async def test_a_function_that_needs_more_memory_to_load_says_the_limit(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(
        "table = bytearray(1 << 30)\ndef score(sample): return float(len(table))\n"
    )
    path = f"{tmp_path}/large.py:score"
    async with judging(function=path) as judge:
        assert await judge([sample("a")]) == [(float(1 << 30), {})]
    async with judging(function=path, sandbox={"memory": "1Gi"}) as judge:
        (outcome,) = await judge([sample("a")])
    assert str(outcome) == (
        f"{path}: cannot import {tmp_path}/large.py: MemoryError: a judging process may take 1 GiB "
        "(spec.reward.sandbox.memory)"
    )


async def test_user_code_uses_one_core_unless_the_job_says_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of many cores gives `import numpy` more threads than their limit has memory for."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    (tmp_path / "cores.py").write_text(
        "import os\nvariables = ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS')\n"
        "def score(sample): return float(''.join(os.environ[each] for each in variables))\n"
    )
    async with judging(function=f"{tmp_path}/cores.py:score") as judge:
        assert await judge([sample("a")]) == [(13.0, {})]


async def test_a_row_may_name_its_own_reward(user: Path) -> None:
    rows = [
        sample("it is 4", "4", rm_type="contains"),
        sample(r"\boxed{\frac{8}{2}}", "4", rm_type="math"),
        sample("it is 4", "4", rm_type="nope"),
        sample("four"),
        sample("4", None, rm_type="exact_match"),
        sample("4", "4", rm_type="remote_rm"),
    ]
    async with judging(function=f"{user}:good") as judge:
        contains, math, nope, own, unlabelled, remote = await judge(rows)
    assert (contains, math[0], own) == ((1.0, {}), 1.0, (4.0, {}))
    assert "no reward is called 'nope'" in str(nope)
    assert "label: exact_match needs a text" in str(unlabelled)
    assert "remote_rm needs reward.url" in str(remote)


async def test_mathematics_that_never_ends_fails_alone() -> None:
    rows = [
        sample(r"\boxed{9^{9^{9^{9}}}}", "3"),
        sample(r"\boxed{3}", "3"),
        sample(r"\boxed{x+1}", "1+x"),
    ]
    async with judging(type="math", timeout_seconds=20) as judge:
        tower, *rest = await judge(rows)
    assert [reward for reward, _ in rest] == [1.0, 1.0]
    assert isinstance(tower, RewardError) or tower[0] == 0.0


async def test_the_default_key_and_dapos_parts() -> None:
    async with judging(type="dapo") as judge:
        parts = {"score": 1.0, "acc": 1.0, "pred": answer_number("4")}
        assert await judge([sample("Answer: 4", "4")]) == [(1.0, parts)]
        assert await judge([sample("4", "4")]) == [(-1.0, {"score": -1.0, "acc": 0.0})]
    async with judging(type="dapo", key="acc") as judge:
        ((reward, _),) = await judge([sample("Answer: 5", "4")])
        assert reward == 0.0


async def test_the_answer_to_mathematics_is_read_in_worker_and_pool() -> None:
    async with judging(type="math", workers=1) as judge:
        right, other = await judge(
            [sample(r"so \boxed{\frac12}", "0.5"), sample(r"\boxed{\frac{1}{2}}", "3")]
        )
    assert (right[0], other[0]) == (1.0, 0.0)
    assert right[1] == other[1] == {"pred": answer_number(hendrycks(r"\frac12"))}


async def test_a_function_that_writes_into_the_judges_channel_fails_its_sample(
    tmp_path: Path,
) -> None:
    (tmp_path / "forger.py").write_text(
        "import os\n"
        "def forged(sample):\n"
        "    for n in range(3, 20):\n"
        "        try: os.write(n, sample.response.encode() + b'\\n')\n"
        "        except OSError: pass\n"
        "    return 1.0\n"
    )
    async with judging(function=f"{tmp_path}/forger.py:forged", timeout_seconds=5) as judge:
        for line in (
            "{}",
            "[]",
            "no json",
            '{"id": 77, "outcomes": []}',
            '{"id": 4, "outcomes": [[NaN, {}]]}',
        ):
            (outcome,) = await judge([sample(line)])
            assert isinstance(outcome, RewardError), line
            assert outcome.reason == "invalid"


async def test_closing_ends_what_waits(user: Path) -> None:
    judge = Judge(Reward(function=f"{user}:moody"), workers=1)
    waiting = asyncio.create_task(judge([sample("hang"), sample("hang")]))
    await asyncio.sleep(0.5)
    await judge.close()
    assert [str(outcome) for outcome in await waiting] == ["the judge was closed"] * 2
    assert not children()
