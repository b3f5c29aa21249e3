"""Rows that user code makes become a file once; position n of it never changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.data import make
from sluice.runtime import user_code
from sluice.runtime.pod_env import ConfigurationError

CODE = """
import time

def counting(start=0):
    while True:
        yield {"prompt": f"{start} + 1 =", "label": str(start + 1)}
        start += 1

class Indexed:
    def __len__(self): return 2
    def __getitem__(self, position): return {"prompt": f"row {position}"}

def broken():
    yield {"prompt": "a"}
    raise OSError("the hub does not answer")

def lists():
    yield ["a"]

def number():
    return 3

def slow():
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass
    yield {}
"""


def spec(path: Path, name: str, **fields: Any) -> RLJobSpec:
    path.write_text(CODE)
    source = {"function": f"{path}:{name}", **fields}
    return RLJobSpec.model_validate(
        {
            "model": {"path": "/m"},
            "data": {"prompts": [{"source": source}]},
            "reward": {"type": "f1"},
            "trainer": {"steps": 1},
        }
    )


def written(job: RLJobSpec, directory: Path) -> list[Any]:
    make.make(job, directory)
    (file,) = directory.iterdir()
    assert str(file) == job.data.prompts[0].file(directory)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


def test_a_generator_gives_as_many_rows_as_are_wanted(tmp_path: Path, rows: Path) -> None:
    job = spec(tmp_path / "a.py", "counting", args={"start": 5}, rows=2)
    assert written(job, rows) == [
        {"prompt": "5 + 1 =", "label": "6"},
        {"prompt": "6 + 1 =", "label": "7"},
    ]
    assert job.data.prompts[0].source_name == "counting"


def test_a_data_set_that_is_indexed_gives_its_rows_in_order(tmp_path: Path, rows: Path) -> None:
    assert written(spec(tmp_path / "b.py", "Indexed"), rows) == [
        {"prompt": "row 0"},
        {"prompt": "row 1"},
    ]


def test_existing_rows_stay_whatever_the_code_would_give_now(tmp_path: Path, rows: Path) -> None:
    job = spec(tmp_path / "c.py", "counting", rows=3)
    first = written(job, rows)
    user_code.load.cache_clear()
    (tmp_path / "c.py").write_text("def counting():\n    yield {'prompt': 'another'}\n")
    assert written(job, rows) == first


def test_other_arguments_make_another_file(tmp_path: Path, rows: Path) -> None:
    for start in (1, 2):
        make.make(spec(tmp_path / "d.py", "counting", args={"start": start}, rows=1), rows)
    assert len(list(rows.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lists", r"spec.data.prompts\[0\].source: .*: row 0: a row must be a dict, found list"),
        ("number", "expected an iterable of rows, found int"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_code_without_rows_is_refused_by_its_field(
    tmp_path: Path, rows: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make.make(spec(tmp_path / f"e_{name}.py", name), rows)
    assert list(rows.iterdir()) == []


def test_code_that_raises_leaves_no_file_and_may_be_tried_again(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(OSError, match="the hub does not answer"):
        make.make(spec(tmp_path / "f.py", "broken"), rows)
    assert list(rows.iterdir()) == []


def process(
    tmp_path: Path, name: str, seconds: int = make.SECONDS
) -> subprocess.CompletedProcess[str]:
    job = {
        "metadata": {"name": "demo"},
        "spec": spec(tmp_path / "g.py", name, rows=2).model_dump(by_alias=True),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    env = {"SLUICE_JOB_FILE": str(tmp_path / "job.json"), "SLUICE_ROWS": str(tmp_path / "rows")}
    code = (
        f"import sluice.data.make as m; m.SECONDS = {seconds}; m.logs.run_blocking('buffer', "
        "m.main)"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("name", "seconds", "code", "last"),
    [
        ("counting", 60, 0, "rows made"),
        ("broken", 60, 1, "error: OSError: the hub does not answer"),
        ("lists", 60, 2, "a row must be a dict, found list"),
        (
            "slow",
            1,
            2,
            "making the rows took more than 1 s; write the file beforehand with `sluice data "
            "materialise`",
        ),
    ],
)
def test_exit_code_and_last_line_of_the_process(
    tmp_path: Path, rows: Path, name: str, seconds: int, code: int, last: str
) -> None:
    ended = process(tmp_path, name, seconds)
    assert (ended.returncode, last in ended.stderr.splitlines()[-1]) == (code, True), ended.stderr
