"""Prompt files: every format, slice and chunk size gives the rows that plain Python gives."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sluice.api.groups.data import PromptSource
from sluice.data import json_list
from sluice.data.files import files_of, read_file, read_source
from sluice.data.json_list import read_json_list
from sluice.data.rows import parse_row
from sluice.data.writers import Writer
from sluice.runtime.pod_env import ConfigurationError
from sluice_buffer.sources.readers import open_table

numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
rows = st.dictionaries(st.text(max_size=8), values, max_size=4)
bounds = st.none() | st.integers(-12, 12)
spaces = st.text(" \t\n\r", max_size=3)


def write(path: Path, records: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records), newline=""
        )
    else:
        path.write_text(json.dumps(records, ensure_ascii=False), newline="")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.sampled_from([".jsonl", ".json"]), st.lists(rows, max_size=5)),
        min_size=1,
        max_size=3,
    ),
    bounds,
    bounds,
)
def test_any_mix_of_files_and_slices_gives_what_python_gives(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[tuple[str, list[dict[str, Any]]]],
    a: int | None,
    b: int | None,
) -> None:
    directory = tmp_path_factory.mktemp("mix")
    for number, (ending, records) in enumerate(files):
        write(directory / f"{number}{ending}", records)
    everything = [row for _, records in files for row in records]
    text = f"{directory}@[{'' if a is None else a}:{'' if b is None else b}]"
    assert [record.row for record in read_source(text)] == everything[a:b]
    if everything[a:b]:
        table = open_table(text, lambda _: None, directory)
        assert [table.row(i) for i in range(len(table))] == everything[a:b]
        assert [table.number(i) for i in range(len(table))] == list(range(len(everything)))[a:b]
        table.close()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(rows | values, max_size=6),
    st.lists(spaces, min_size=1, max_size=9),
    st.integers(1, 40),
)
@example([{"a": 1}, 12, -0.5, 1e-9, -1e300, "x"], [""], 1)
def test_a_list_is_read_alike_in_chunks_of_any_size(
    entries: list[Any], gaps: list[str], chunk: int
) -> None:
    text, at = gaps[0] + "[", []
    for number, entry in enumerate(entries):
        text += ("," if number else "") + gaps[number % len(gaps)]
        at.append((text.count("\n") + 1, len(text) - text.rfind("\n")))
        text += json.dumps(entry, ensure_ascii=bool(number % 2)) + gaps[(number + 1) % len(gaps)]
    text += "]" + gaps[-1]
    old, json_list._CHUNK = json_list._CHUNK, chunk
    try:
        located = list(read_json_list(io.BytesIO(text.encode()), "x.json"))
    finally:
        json_list._CHUNK = old
    assert [entry for entry, _, _ in located] == entries
    assert [(line, column) for _, line, column in located] == at


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20], ids=str)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"prompt": "x"}',
            r"x\.json:1:1: expected a list of rows, found '{'; if every line is a row, call the "
            r"file",
        ),
        ("", r"x\.json:1:1: expected a list of rows, found ''"),
        ('[{"a": 1},\n {"b" 2}]', r"x\.json:2:7: not valid JSON: Expecting ':' delimiter"),
        (
            '[{"a": 1}\n {"b": 2}]',
            r"x\.json:2:2: not valid JSON: expected , or \] after a row, found {",
        ),
        ('[{"a": 1},\n', r"x\.json:2:1: not valid JSON: Expecting value"),
        ('[{"a": "x', r"x\.json:1:8: not valid JSON: Unterminated string"),
        (
            "[1, 2",
            r"x\.json:1:6: not valid JSON: expected , or \] after a row, found the end of the "
            r"file",
        ),
        ("[1,]", r"x\.json:1:4: not valid JSON: Expecting value"),
        ("[] x", r"x\.json:1:4: not valid JSON: the list is followed by more text"),
    ],
)
def test_a_broken_list_is_refused_with_line_and_column(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str, chunk: int
) -> None:
    monkeypatch.setattr(json_list, "_CHUNK", chunk)
    with pytest.raises(ConfigurationError, match=message):
        list(read_json_list(io.BytesIO(text.encode()), "x.json"))


def test_an_error_at_the_beginning_is_found_without_reading_all() -> None:
    file = io.BytesIO(b'[{"a" 1},' + b" " * (64 << 20) + b"]")
    with pytest.raises(ConfigurationError, match="x:1:7"):
        list(read_json_list(file, "x"))
    assert file.tell() <= 2 << 20


def test_an_invalid_byte_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"a": "\xff"}]')
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(ConfigurationError, match=r"a\.json: not UTF-8 text: .* near byte 8"):
        list(read_file(tmp_path / "a.json"))
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:2: not UTF-8 text"):
        list(read_file(tmp_path / "a.jsonl"))


def test_a_row_that_is_no_object_is_named_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n\n[1]\n")
    (tmp_path / "a.json").write_text("[{},\n  3]")
    with pytest.raises(
        ConfigurationError, match=r"a\.jsonl:3: a row must be an object, found list"
    ):
        list(read_file(tmp_path / "a.jsonl"))
    with pytest.raises(
        ConfigurationError, match=r"a\.json:2:3: a row must be an object, found int"
    ):
        list(read_file(tmp_path / "a.json"))


def test_a_row_knows_its_position(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"a": 1}\n{"a": 2}\n')
    (tmp_path / "b.json").write_text('[\n{"a": 3}]')
    pq.write_table(pa.Table.from_pylist([{"a": 4}]), tmp_path / "c.parquet")
    located = list(read_source(str(tmp_path)))
    assert [(record.row["a"], record.number) for record in located] == [
        (1, 0),
        (2, 1),
        (3, 0),
        (4, 0),
    ]
    assert [record.where.rpartition("/")[2] for record in located] == [
        "a.jsonl:2",
        "a.jsonl:3",
        "b.json:2",
        "c.parquet: row 0",
    ]


def test_parquet_rows_have_only_the_fields_that_were_given(tmp_path: Path) -> None:
    given_rows = [
        {"prompt": [{"role": "user", "content": "x"}], "label": "1", "metadata": {"a": 1}},
        {
            "prompt": [{"role": "tool", "content": "y", "name": "f"}],
            "label": None,
            "metadata": {"b": {"c": 2}},
        },
    ]
    pq.write_table(pa.Table.from_pylist(given_rows), tmp_path / "a.parquet")
    assert [record.row for record in read_file(tmp_path / "a.parquet")] == given_rows


def test_a_parquet_file_is_sliced_from_its_end(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"a": i} for i in range(3000)]), tmp_path / "a.parquet")
    assert [record.row["a"] for record in read_source(f"{tmp_path}/a.parquet@[-2:]")] == [
        2998,
        2999,
    ]


def test_files_of_a_directory_come_by_name(tmp_path: Path) -> None:
    hidden = ("._a.parquet", ".b.jsonl", "_metadata.parquet")
    for name in ("b.jsonl", "a.parquet", "c.json", "notes.txt", *hidden):
        (tmp_path / name).touch()
    assert [path.name for path in files_of(tmp_path)] == ["a.parquet", "b.jsonl", "c.json"]


present: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | numbers | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=9)},
        optional={"name": st.text(max_size=5), "step_loss_mask": st.sampled_from([0, 1])},
    ),
    min_size=1,
    max_size=3,
)
prompt_rows = st.fixed_dictionaries(
    {"prompt": messages, "label": st.none() | st.text(max_size=9)},
    optional={
        "metadata": st.dictionaries(st.text(max_size=5), present, max_size=4),
        "id": st.integers(0, 9),
    },
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(prompt_rows, min_size=1, max_size=6))
def test_a_prompt_means_the_same_in_parquet(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]
) -> None:
    directory = tmp_path_factory.mktemp("parquet")
    with Writer(directory / "rows.parquet") as writer:
        for row in records:
            writer.write(row)
    source = PromptSource(path="rows.parquet")
    read = [parse_row(located.row, source) for located in read_file(directory / "rows.parquet")]
    assert read == [parse_row(row, source) for row in records]
