import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.api.groups.data import Data, Evaluation, PromptSource, parse_path
from sluice.data.files import read_file
from sluice.data.rows import RowError, parse_row
from sluice.data.writers import Writer
from sluice.runtime.pod_env import ConfigurationError
from sluice.wire import codec
from sluice_buffer.group import TRAINING, GroupKey
from sluice_buffer.sources.prompts import Prompts
from sluice_buffer.sources.readers import open_table

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1 = ?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 3},
}


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def prompts(tmp_path: Path, *sources: dict[str, Any], **data: Any) -> Prompts:
    return Prompts(Data.model_validate({"prompts": list(sources), **data}), None, tmp_path)


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def source(**fields: Any) -> PromptSource:
    return PromptSource.model_validate({"path": "x.jsonl", **fields})


def test_a_verl_row_is_told_by_its_columns() -> None:
    row = parse_row(VERL, source())
    assert row.prompt == VERL["prompt"]
    assert row.label == "2"
    assert row.metadata == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "split": "train",
        "index": 3,
    }


def test_what_verl_keeps_for_tools_goes_into_the_metadata() -> None:
    tools = {"calculator": {"create_kwargs": {"answer": "2"}}}
    row = parse_row(
        VERL | {"extra_info": {"need_tools_kwargs": True, "tools_kwargs": tools}}, source()
    )
    assert row.metadata["tools_kwargs"] == tools


def test_a_call_of_a_tool_needs_no_content() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    messages = [
        {"role": "user", "content": "x", "step_loss_mask": 0},
        call,
        {"role": "tool", "content": "1"},
    ]
    expected = [messages[0], {key: call[key] for key in ("role", "tool_calls")}, messages[2]]
    assert parse_row({"prompt": messages}, source()).prompt == expected


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_fields_that_are_null_count_as_absent_in_every_format(tmp_path: Path, ending: str) -> None:
    arguments = '{"city": null}'
    call = {"id": None, "function": {"name": "f", "arguments": arguments}}
    row = {
        "prompt": [
            {"role": "user", "content": "x", "name": None, "tool_calls": None},
            {"role": "assistant", "content": None, "name": None, "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": None}}],
    }
    with Writer(tmp_path / f"rows{ending}") as writer:
        writer.write(row)
    [located] = read_file(tmp_path / f"rows{ending}")
    parsed = parse_row(located.row, source())
    assert isinstance(parsed.prompt, list)
    [question, called] = parsed.prompt
    assert question == {"role": "user", "content": "x"}
    assert called.keys() == {"role", "tool_calls"}
    assert called["tool_calls"][0]["function"]["arguments"] == arguments
    assert parsed.tools == [{"type": "function", "function": {"name": "f"}}]


def test_a_slime_row_is_told_by_its_columns() -> None:
    tools = [{"type": "function"}]
    row = parse_row(
        {"input": "hi", "label": 3, "metadata": {"rm_type": "f1"}, "tools": json.dumps(tools)},
        source(),
    )
    assert (row.prompt, row.label, row.metadata, row.tools) == ("hi", 3, {"rm_type": "f1"}, tools)


def test_columns_can_be_named() -> None:
    columns = {"q": "hi", "a": "x", "m": {"k": 1}, "t": []}
    row = parse_row(columns, source(promptKey="q", labelKey="a", metadataKey="m", toolsKey="t"))
    assert (row.prompt, row.label, row.metadata, row.tools) == ("hi", "x", {"k": 1}, None)


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"text": "x"}, {}, "no column 'prompt' or 'input'; the row has 'text'"),
        (
            {"prompt": 3},
            {},
            "prompt: expected a text or a list of chat messages with role and content, found 3",
        ),
        ({"prompt": []}, {}, "prompt: expected a text or a list"),
        (
            {"prompt": [{"content": "x"}]},
            {},
            r"prompt\[0\]: expected a chat message with role and content",
        ),
        ({"prompt": [{"role": "user"}]}, {}, r"prompt\[0\]: content: expected a text, found null"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            {},
            r"prompt\[0\]: content: .* data.images",
        ),
        (
            {
                "prompt": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "y", "step_loss_mask": 2},
                ]
            },
            {},
            r"prompt\[1\]: step_loss_mask: expected 0 or 1, found 2",
        ),
        (
            {"prompt": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            {},
            r"prompt\[0\]: tool_calls\[0\]: expected \{function: \{name, arguments\}\}, found",
        ),
        (
            {
                "prompt": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}],
                    }
                ]
            },
            {},
            r"prompt\[0\]: tool_calls\[0\]: arguments: expected an object, or one as JSON text",
        ),
        (
            {"prompt": "<image> x", "images": [{"path": "a.png"}]},
            {},
            "images: the row has images",
        ),
        (
            {"question": "x", "id": 1},
            {},
            r"the row has 'question', 'id'; did you mean promptKey: question\?",
        ),
        ({"prompts": "x"}, {}, r"did you mean promptKey: prompts\?"),
        (
            {"prompt": "x", "solution": "1"},
            {"labelKey": "answer"},
            r"did you mean labelKey: solution\?",
        ),
        (
            {"prompt": "x", "tools": ["search"]},
            {},
            r'tools\[0\]: expected the definition of a tool.*"search"',
        ),
        ({"prompt": ""}, {}, "prompt: the prompt is empty"),
        ({"prompt": "x"}, {"labelKey": "answer"}, "no column 'answer'; the row has 'prompt'"),
        ({"prompt": "x", "metadata": [1]}, {}, r"metadata: expected an object, found \[1\]"),
        ({"prompt": "x", "tools": "{"}, {}, "tools: not valid JSON"),
        ({"prompt": "x", "tools": {}}, {}, "tools: expected a list, found {}"),
        ({"prompt": "a\ud83d"}, {}, r"^prompt: half of a surrogate pair, \\ud83d, at character 1"),
        ({"q": "a\ud83d"}, {"promptKey": "q"}, "^q: half of a surrogate pair"),
        ({"prompt": [{"role": "\ud83d"}]}, {}, r"^prompt\[0\].role: half of a surrogate pair"),
        ({"prompt": "x", "label": {"a": "\ud83d"}}, {}, "^label.a: half of a surrogate pair"),
        ({"prompt": "x", "label": float("nan")}, {}, "^label: nan is not a finite number"),
        ({"prompt": "x", "label": 10**4300}, {}, "^label: an integer of more than 4300 digits"),
        ({"prompt": "x", "metadata": {"a": deep(64)}}, {}, "^metadata.a.*: nested more than 64"),
        ({"prompt": "x", "metadata": '{"a":"\\ud83d"}'}, {}, "^metadata.a: half of a surrogate"),
        ({"prompt": "x", "metadata": '{"a":' + "9" * 5000 + "}"}, {}, "^metadata: an integer of"),
        ({"prompt": "x", "metadata": "[" * 9999}, {}, "^metadata: nested more than 64 deep"),
        ({"prompt": "x", "tools": [{"type": "\ud83d"}]}, {}, r"^tools\[0\].type: half of a"),
        (VERL | {"extra_info": {"a": "\ud83d"}}, {}, "^extra_info.a: half of a surrogate pair"),
        (VERL | {"reward_model": {"ground_truth": "\ud83d"}}, {}, "^reward_model.ground_truth: h"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(
    row: dict[str, Any], keys: dict[str, str], message: str
) -> None:
    with pytest.raises(RowError, match=message):
        parse_row(row, source(**keys))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "x"}, "", "{broken"],
            "rows.jsonl:3:2: not valid JSON: Expecting property name",
        ),
        ([{"prompt": "x"}, {"text": "y"}], "rows.jsonl:2: no column 'prompt' or 'input'"),
        (["[1]"], "rows.jsonl:1: a row must be an object, found list"),
        (
            [{"prompt": "x"}, r'{"prompt":"max \ud83d 3 =","label":"7"}'],
            "rows.jsonl:2: prompt: half of a surrogate pair",
        ),
        ([""], "rows.jsonl: no rows"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        prompts(tmp_path, {"path": lines(tmp_path / "rows.jsonl", rows)})


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        ("a.jsonl", "a.jsonl", slice(None)),
        ("a.jsonl@[2:5]", "a.jsonl", slice(2, 5)),
        ("a.jsonl@[-3:]", "a.jsonl", slice(-3, None)),
        ("dir@x/a.json@[:-1]", "dir@x/a.json", slice(None, -1)),
    ],
)
def test_slices(text: str, path: str, part: slice) -> None:
    assert parse_path(text) == (Path(path), part)


def test_rows_keep_their_number_in_the_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": str(i)} for i in range(10)])
    data = prompts(tmp_path, {"path": f"{path}@[-3:-1]"}, shuffle=False)
    messages = [data.message(GroupKey(TRAINING, i)) for i in range(3)]
    assert [(p.row, p.prompt_json, p.epoch) for p in messages] == [
        (7, '"7"', 0),
        (8, '"8"', 0),
        (7, '"7"', 1),
    ]


def test_a_slice_without_rows_is_an_error(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    with pytest.raises(ConfigurationError, match=r"no rows in this slice of 1"):
        prompts(tmp_path, {"path": f"{path}@[5:9]"})


def test_all_kinds_of_files_give_the_same_rows(tmp_path: Path) -> None:
    rows = [VERL | {"extra_info": {"index": i, "split": "train"}} for i in range(3)]
    directory = tmp_path / "data"
    directory.mkdir()
    lines(directory / "a.jsonl", rows)
    (directory / "b.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), directory / "c.parquet")
    table = open_table(str(directory), lambda row: None, tmp_path)
    assert len(table) == 9
    assert [table.row(i) for i in (8, 0, 4)] == [rows[2], rows[0], rows[1]]


def test_a_changed_file_changes_the_fingerprint(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    before = prompts(tmp_path, {"path": path}).fingerprint()
    assert prompts(tmp_path, {"path": path}).fingerprint() == before
    lines(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "c"}])
    assert prompts(tmp_path, {"path": path}).fingerprint() != before


def test_harbor_tasks_are_rows_whose_files_make_the_fingerprint(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "tasks" / name / "tests").mkdir(parents=True)
        for file in ("task.toml", "tests/test.sh"):
            (tmp_path / "tasks" / name / file).touch()
        (tmp_path / "tasks" / name / "instruction.md").write_text(name)
    data = prompts(tmp_path, {"path": f"{tmp_path}/tasks"}, shuffle=False)
    messages = [data.message(GroupKey(TRAINING, i)) for i in range(2)]
    assert [(p.row, p.prompt_json) for p in messages] == [(0, '"a"'), (1, '"b"')]
    table = open_table(f"{tmp_path}/tasks@[1:]", lambda row: None, tmp_path)
    assert (table.row(0)["prompt"], table.where(0)) == ("b", f"{tmp_path}/tasks/b")
    before = data.fingerprint()
    assert prompts(tmp_path, {"path": f"{tmp_path}/tasks"}, shuffle=False).fingerprint() == before
    (tmp_path / "tasks/a/tests/test.sh").write_text("exit 1")
    assert prompts(tmp_path, {"path": f"{tmp_path}/tasks"}, shuffle=False).fingerprint() != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "no such prompt file"),
        ("rows.csv", "expected a file that ends with"),
        ("empty", "no .jsonl"),
    ],
)
def test_what_cannot_be_opened_is_said(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=message):
        prompts(tmp_path, {"path": str(tmp_path / name)})


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    with pytest.raises(
        ConfigurationError,
        match=r"spec.data.prompts: 2 sources are called 'rows'; give each a different `name`",
    ):
        prompts(tmp_path, {"path": path}, {"path": path})


def test_a_source_named_alike_for_training_and_evaluation_must_be_rendered_alike(
    tmp_path: Path,
) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    data = Data.model_validate({"prompts": [{"path": path}]})
    evaluation = Evaluation.model_validate(
        {"datasets": [{"path": path, "applyChatTemplate": True}]}
    )
    with pytest.raises(
        ConfigurationError, match="'rows' is a source of prompts and of evaluation with different"
    ):
        Prompts(data, evaluation, tmp_path)


def test_a_source_comes_as_often_as_it_weighs(tmp_path: Path) -> None:
    often = lines(tmp_path / "often.jsonl", [{"prompt": f"often {i}"} for i in range(4)])
    seldom = lines(tmp_path / "seldom.jsonl", [{"prompt": f"seldom {i}"} for i in range(10)])
    data = prompts(
        tmp_path, {"path": often, "weight": 2}, {"path": f"{seldom}@[0:6]", "weight": 0.5}
    )
    messages = [data.message(GroupKey(TRAINING, i)) for i in range(22)]  # two epochs of 8 + 3
    assert [p.epoch for p in messages] == [0] * 11 + [1] * 11
    rows = Counter((p.dataset, p.row) for p in messages)
    assert rows == {("often", row): 4 for row in range(4)} | {
        ("seldom", row): 1 for row in range(6)
    }
    assert sum(p.dataset == "seldom" for p in messages[:11]) == 3


def test_sources_of_one_name_must_give_the_template_the_same(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    data = Data.model_validate({"prompts": [{"path": path}]})
    evaluation = Evaluation.model_validate(
        {"datasets": [{"path": path, "chatTemplateArgs": {"enable_thinking": False}}]}
    )
    with pytest.raises(
        ConfigurationError,
        match=r"'rows' is a source of prompts and .* with different chatTemplateArgs",
    ):
        Prompts(data, evaluation, tmp_path)


def test_a_broken_parquet_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigurationError, match="not a readable Parquet file"):
        prompts(tmp_path, {"path": str(tmp_path / "rows.parquet")})


def test_rows_that_the_jobs_own_code_made_are_read_from_the_storage(tmp_path: Path) -> None:
    entry = {"source": {"function": "tasks.py:additions", "args": {"digits": 2}}}
    prompt_source = PromptSource.model_validate(entry)
    (tmp_path / "rows").mkdir()
    lines(Path(prompt_source.file(tmp_path / "rows")), [{"prompt": "1 + 1 =", "label": "2"}])
    message = prompts(tmp_path, entry).message(GroupKey(TRAINING, 0))
    assert (message.dataset, message.prompt_json, message.label_json) == (
        "additions",
        '"1 + 1 ="',
        '"2"',
    )


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_column_that_nobody_reads_may_hold_anything(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = r'{"prompt": "x", "other": ["\ud83d", NaN]}'
    path.write_text(f"[{text}]" if name.endswith(".json") else text)
    table = prompts(tmp_path, {"path": str(path)})
    assert table.message(GroupKey(TRAINING, 0)).prompt_json == '"x"'


def test_a_prompt_that_a_worker_has_decoded_is_the_one_that_it_was_leased(tmp_path: Path) -> None:
    """A worker sends the prompt as it writes it, after it has read it."""
    rows = [
        VERL | {"extra_info": {"a": [1.0, 1e-7, 1e22, -0.0, 10**30, True, None, "ä\u2028"]}},
        {**VERL, "reward_model": {"ground_truth": 7.0}, "tools": [{"type": "function"}]},
        {"prompt": "x", "label": "", "metadata": "{}", "tools": "[]"},
    ]
    table = prompts(tmp_path, {"path": lines(tmp_path / "rows.jsonl", rows)}, shuffle=False)
    for group_id in range(3):
        key = GroupKey(TRAINING, group_id)
        echo = codec.prompt_to_message(codec.prompt_from_message(table.leased(key)))
        assert table.is_leased(key, echo)
        assert table.is_leased(key, echo), "it is read again where the lease is not remembered"
        echo.label_json = '"another"'
        assert not table.is_leased(key, echo)
