"""A tracker gets each record of a run, whatever happens to it or to the trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sluice.telemetry import run_directory
from sluice.trackers.following import MOST_CHARACTERS, MOST_ROWS, Follower
from sluice.trackers.formats import metric_name, parameters, table
from sluice.trackers.run import Picture
from tests.unit.trackers.run_files import ROWS, add_evaluation, add_step, make_run


class Log:
    """Keeps what it is given; fails at a step."""

    def __init__(self, fails_at: int = -1) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails_at = fails_at

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step == self._fails_at:
            raise ConnectionError("no server")
        self.calls.append((step, dict(metrics)))

    def log_samples(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        self.calls.append((step, name, rows))

    def log_pictures(self, name: str, pictures: list[Picture], step: int) -> None:
        self.calls.append((step, name, [(p.path.name, p.caption) for p in pictures]))

    def log_file(self, path: Path) -> None:
        self.calls.append((path.name,))

    def close(self) -> None:
        raise AssertionError("a follower does not end a tracker")


def passed_on(directory: Path, every: int = 0) -> list[tuple[Any, ...]]:
    log = Log()
    Follower(directory, "log", every).pass_on(log)
    return log.calls


def test_metrics_evaluations_and_samples_come_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert passed_on(run) == []
    add_step(run, 1, loss=0.5)
    add_evaluation(run, 2, 0.75)
    assert passed_on(run, every=10) == [
        (1, {"rollout/raw_reward": 0.25, "loss": 0.5}),
        (1, "samples", ROWS),
        (2, {"eval/digits": 0.75}),
        (2, "samples/eval/digits", ROWS),
    ]
    assert passed_on(run, every=10) == []
    add_step(run, 2)
    assert passed_on(run, every=10) == [(2, {"rollout/raw_reward": 0.5})]


def test_a_tracker_that_fails_goes_on_where_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (1, 2, 3):
        add_step(run, step)
    log, follower = Log(fails_at=2), Follower(run, "log", 0)
    with pytest.raises(ConnectionError):
        follower.pass_on(log)
    assert [step for step, _ in log.calls] == [1]
    assert follower.left() == 2
    assert [step for step, _ in passed_on(run)] == [2, 3]
    assert Follower(run, "log", 0).left() == 0


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_step(run, 1)
    with (run / run_directory.METRICS).open("ab") as file:
        file.write(b'{"step": 2, "rollout')
    assert [step for step, _ in passed_on(run)] == [1]
    with (run / run_directory.METRICS).open("ab") as file:
        file.write(b'/raw_reward": 0.5}\n{"step": 3, "rol\n{"step": 4}\n')
    assert passed_on(run) == [(2, {"rollout/raw_reward": 0.5}), (4, {})], "step 3 was cut off"


def test_another_run_in_the_same_directory_begins_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (1, 2):
        add_step(run, step)
    assert len(passed_on(run)) == 2
    (run / run_directory.METRICS).unlink()
    add_step(run, 1)
    assert [step for step, _ in passed_on(run)] == [1]


def test_two_trackers_have_positions_of_their_own(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_step(run, 1)
    assert len(passed_on(run)) == 1
    other = Log()
    Follower(run, "other", 0).pass_on(other)
    assert len(other.calls) == 1


def test_tables_of_samples_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    long = "x" * (MOST_CHARACTERS + 7)
    rows = [{"prompt": [{"content": long}], "response": long, "reward": 0.5}] * (MOST_ROWS + 3)
    file = run / "samples/step_0000001.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    add_step(run, 1)
    _, (_, name, sent) = passed_on(run, every=1)
    assert (name, len(sent), sent[0]["reward"]) == ("samples", MOST_ROWS, 0.5)
    assert sent[0]["response"] == "x" * MOST_CHARACTERS + "... (7 more characters)"
    assert sent[0]["prompt"].startswith('[{"content": "xxx')
    assert sent[0]["prompt"].endswith("more characters)")
    assert capsys.readouterr().out == f"samples of step 1: {MOST_ROWS} of {MOST_ROWS + 3} rows\n"


def test_pictures_and_files_are_passed_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    pictures = run / "samples/images"
    pictures.mkdir()
    for digest in ("aa", "cc"):
        (pictures / f"{digest}.jpg").write_bytes(b"jpeg")
    rows = [{"response": "r", "images": ["aa", "bb"]}, {"response": "r", "images": ["cc"]}]
    (run / "samples/step_0000001.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    add_step(run, 1)
    log = Log()
    follower = Follower(run, "log", 1)
    follower.pass_on(log)
    assert log.calls[-1] == (
        1,
        "samples/pictures",
        [("aa.jpg", "row 0, image 0"), ("cc.jpg", "row 1, image 0")],
    ), "an image without a thumbnail has no picture"
    (run / "report.html").write_text("<p>")
    follower.pass_on_files(log)
    assert log.calls[-2:] == [("job.json",), ("report.html",)]


def test_a_table_has_the_columns_of_all_rows() -> None:
    columns, cells = table([{"a": [1, "ü"], "b": 1.5}, {"b": None, "c": "x"}])
    assert columns == ["a", "b", "c"]
    assert cells == [['[1, "ü"]', 1.5, None], [None, None, "x"]]


def test_a_spec_becomes_parameters_that_mlflow_takes() -> None:
    spec = {"model": {"path": "a/b"}, "steps": 3, "empty": {}, "long": "x" * 7000}
    assert dict(parameters(spec)) == {
        "model.path": "a/b",
        "steps": "3",
        "empty": "{}",
        "long": "x" * 6000,
    }
    assert metric_name("passrate/pass@4 (é)") == "passrate/pass_4 ___"
