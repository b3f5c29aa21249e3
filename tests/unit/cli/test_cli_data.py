"""`sluice data`: inspect prompt files and make others from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from sluice.api.groups.data import PromptSource
from sluice.data.files import read_source
from sluice.data.rows import parse_row
from sluice.data.transform import chosen, to_slime, to_verl
from sluice.runtime.extras import install_command
from sluice_cli.main import app
from tests.chat import assistant, save, user

VERL: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1 = ?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3, "split": "train"},
}
SLIME: dict[str, Any] = {
    "prompt": "2 + 2 = ?",
    "label": "4",
    "metadata": {"rm_type": "math"},
    "id": 7,
}
SOURCE = PromptSource(path="x.jsonl")


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*words: Any) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, words)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [located.row for located in read_source(str(path))]


def test_inspect_counts_rows_formats_and_lengths(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "rows.jsonl", [VERL, SLIME, SLIME, {"text": "x"}, {"prompt": "no label"}]
    )
    result = run("inspect", path, "--json")
    assert result.exit_code == 1
    stats = json.loads(result.stdout)
    assert (stats["rows"], stats["broken"], stats["labels"], stats["duplicates"]) == (5, 1, 3, 1)
    assert stats["shapes"] == {"slime": 3, "verl": 1}
    assert stats["rewards"] == {"math": 2, "gsm8k": 1, "set by the job": 1}
    assert stats["problems"] == [
        f"{path}:4: no column 'prompt' or 'input'; the row has 'text'; did you mean promptKey: "
        "text?"
    ]
    assert sum(count for _, _, count in stats["histogram"]) == 4
    assert stats["lengths"]["max"] == len(json.dumps(VERL["prompt"]))


def test_inspect_as_text(tmp_path: Path) -> None:
    result = run("inspect", lines(tmp_path / "rows.jsonl", [VERL, VERL]))
    assert result.exit_code == 0
    for text in (
        "2 rows",
        "verl",
        "openai/gsm8k",
        "2 (100%)",
        "gsm8k",
        "1 of 2 rows repeat an earlier prompt",
        "first prompt",
    ):
        assert text in result.stdout


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_rows_survive_every_format(tmp_path: Path, ending: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}]
    rows = [SLIME | {"tools": tools}, SLIME | {"metadata": {"deep": {"a": [1, 2]}}, "tools": []}]
    path = lines(tmp_path / "rows.jsonl", rows)
    result = run("convert", path, tmp_path / f"out{ending}", "--json")
    assert json.loads(result.stdout) == {"rows": 2, "file": str(tmp_path / f"out{ending}")}
    converted = rows_of(tmp_path / f"out{ending}")
    assert [parse_row(row, SOURCE) for row in converted] == [parse_row(row, SOURCE) for row in rows]


def test_parquet_keeps_an_object_whose_fields_have_no_type_as_text(tmp_path: Path) -> None:
    rows = [SLIME | {"metadata": {"a": 1}}, SLIME | {"metadata": {"a": "x"}}]
    assert (
        run("convert", lines(tmp_path / "rows.jsonl", rows), tmp_path / "out.parquet").exit_code
        == 0
    )
    assert pq.read_table(tmp_path / "out.parquet")["metadata"].to_pylist() == [
        '{"a": 1}',
        '{"a": "x"}',
    ]
    assert [parse_row(row, SOURCE).metadata for row in rows_of(tmp_path / "out.parquet")] == [
        {"a": 1},
        {"a": "x"},
    ]


def test_parquet_refuses_labels_of_two_types(tmp_path: Path) -> None:
    rows = [SLIME | {"label": 1}, SLIME | {"label": "one"}]
    result = run("convert", lines(tmp_path / "rows.jsonl", rows), tmp_path / "out.parquet")
    assert result.exit_code == 2
    assert "column 'label' has values of several types" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_verl_rows_become_slime_rows_and_come_back() -> None:
    middle = to_slime(VERL, SOURCE)
    assert middle == {
        "prompt": VERL["prompt"],
        "label": "2",
        "metadata": {
            "data_source": "openai/gsm8k",
            "ability": "math",
            "index": 3,
            "split": "train",
        },
    }
    assert to_verl(middle, SOURCE, 0, "other") == VERL


@settings(deadline=None)
@given(
    st.text(min_size=1)
    | st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), min_size=1),
    st.none() | st.text() | st.integers(),
    st.dictionaries(
        st.sampled_from(["data_source", "ability", "rm_type", "x", "index"]), st.text(min_size=1)
    ),
)
def test_a_reward_sees_the_same_after_conversion_to_verl(
    prompt: Any, label: Any, metadata: dict[str, str]
) -> None:
    before = parse_row({"prompt": prompt, "label": label, "metadata": metadata}, SOURCE)
    after = parse_row(
        to_verl({"prompt": prompt, "label": label, "metadata": metadata}, SOURCE, 5, "mine"), SOURCE
    )
    assert after.label == before.label
    assert after.metadata.items() >= before.metadata.items()
    assert after.prompt == (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )


def test_convert_names_the_unusable_row(tmp_path: Path) -> None:
    result = run(
        "convert",
        lines(tmp_path / "rows.jsonl", [SLIME, {"x": 1}]),
        tmp_path / "out.json",
        "--to",
        "verl",
    )
    assert result.exit_code == 2
    assert (
        f"error: {tmp_path}/rows.jsonl:2: no column 'prompt' or 'input'; the row has 'x'"
        in result.output
    )
    assert not (tmp_path / "out.json").exists()


def test_files_are_overwritten_only_with_force(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [SLIME])
    (tmp_path / "out.json").write_text("mine")
    refused = run("convert", path, tmp_path / "out.json")
    assert (refused.exit_code, (tmp_path / "out.json").read_text()) == (2, "mine")
    assert "the file exists already; --force overwrites it" in refused.output
    assert run("convert", path, tmp_path / "out.json", "--force").exit_code == 0
    assert rows_of(tmp_path / "out.json") == [SLIME]


def test_a_file_may_be_converted_into_itself(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [SLIME] * 3)
    assert run("convert", f"{path}@[1:]", path, "--force").exit_code == 0
    assert rows_of(Path(path)) == [SLIME] * 2


def test_uids_depend_on_prompt_and_label(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "rows.jsonl", [VERL, SLIME, VERL, SLIME | {"metadata": {"uid": "mine"}}]
    )
    assert run("add-uid", path, tmp_path / "out.jsonl").exit_code == 0
    uids = [parse_row(row, SOURCE).metadata["uid"] for row in rows_of(tmp_path / "out.jsonl")]
    assert uids[2] == f"{uids[0]}-1"
    assert uids[3] == "mine"
    assert len(set(uids)) == 4
    assert run("add-uid", tmp_path / "out.jsonl", tmp_path / "again.jsonl").exit_code == 0
    assert rows_of(tmp_path / "again.jsonl") == rows_of(tmp_path / "out.jsonl")


@settings(max_examples=50)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 5))
def test_a_choice_has_the_requested_size(total: int, count: int, seed: int) -> None:
    count = min(count, total)
    choices = list(chosen(total, count, seed))
    assert (len(choices), sum(choices)) == (total, count)
    assert list(chosen(total, count, seed)) == choices


def test_every_row_is_chosen_equally_often() -> None:
    times = [
        sum(column) for column in zip(*(chosen(10, 3, seed) for seed in range(3000)), strict=True)
    ]
    assert all(810 < count < 990 for count in times)  # expected 900, standard deviation 25


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(2, 40), st.integers(0, 3))
def test_a_split_has_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, total: int, seed: int
) -> None:
    directory = tmp_path_factory.mktemp("split")
    path = lines(directory / "rows.jsonl", [{"prompt": str(i)} for i in range(total)])
    train, test = directory / "train.jsonl", directory / "test.jsonl"
    result = run(
        "split", path, "--train", train, "--test", test, "--test-rows", 1, "--seed", seed, "--json"
    )
    assert json.loads(result.stdout)["test"]["rows"] == 1
    kept, held = ([int(row["prompt"]) for row in rows_of(part)] for part in (train, test))
    assert kept == sorted(kept)
    assert sorted(kept + held) == list(range(total))


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--test-rows", "5"], "5 of 2 rows"), (["--test-rows", "0.01"], "0 of 2 rows")],
    ids=["more than all", "less than one"],
)
def test_a_split_with_an_empty_part_is_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    path = lines(tmp_path / "rows.jsonl", [SLIME, SLIME])
    result = run(
        "split", path, "--train", tmp_path / "a.jsonl", "--test", tmp_path / "b.jsonl", *options
    )
    assert (result.exit_code, message in result.output) == (2, True)
    assert not (tmp_path / "a.jsonl").exists()


GENERATOR = """\
def counting(start=0, word="n"):
    while True:
        yield {"prompt": f"{word} {start}", "label": start + 1}
        start += 1

class Fixed:
    def __iter__(self):
        return iter([{"prompt": "a"}, ["b"]])

def raising():
    yield {"prompt": "a"}
    raise KeyError("b")

def nobody():
    return []
"""


def test_materialise_writes_the_rows_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GENERATOR)
    result = run("materialise", f"{tmp_path}/mine.py:counting", tmp_path / "out.jsonl", "--rows", 3,
                 "--arg", "start=5", "--arg", "word=max")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [row["prompt"] for row in rows_of(tmp_path / "out.jsonl")] == ["max 5", "max 6", "max 7"]


def test_seeds_writes_a_row_for_each_seed(tmp_path: Path) -> None:
    words = ["--rows", 3, "--first", 40, "--prompt", "Cross the lake."]
    result = run("seeds", tmp_path / "rows.jsonl", *words)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "rows.jsonl")
    assert {row["prompt"] for row in rows} == {"Cross the lake."}
    assert [row["metadata"]["reset"]["seed"] for row in rows] == [40, 41, 42]
    assert run("seeds", tmp_path / "none.jsonl", *words, "--rows", 0).exit_code == 2


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nothing", [], "has no function 'nothing'; it has counting, Fixed, "),
        ("counting", ["--arg", "end=1"], "unexpected keyword argument 'end'"),
        ("counting", ["--arg", "end"], "--arg end: expected name=value"),
        ("Fixed", [], "row 1: a row must be a dict, found list"),
        ("raising", [], "raising raised KeyError after 1 rows ("),
        ("nobody", [], "nobody yielded no rows"),
    ],
    ids=[
        "no such function",
        "unknown argument",
        "argument without value",
        "row of another type",
        "exception",
        "no rows",
    ],
)
def test_materialise_refuses_functions_without_rows(
    tmp_path: Path, name: str, arguments: list[str], message: str
) -> None:
    (tmp_path / f"mine_{name}.py").write_text(GENERATOR)
    result = run(
        "materialise", f"{tmp_path}/mine_{name}.py:{name}", tmp_path / "out.jsonl", *arguments
    )
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert not (tmp_path / "out.jsonl").exists()


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if tools %}<tools> {% "
    "endif %}<assistant>"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer: one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return directory


def test_inspect_counts_tokens_with_the_template_of_the_model(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": "a b c"}, VERL, SLIME | {"prompt": "x " * 20, "tools": [{"name": "f"}]}]
    path = lines(tmp_path / "rows.jsonl", rows)
    stats = json.loads(
        run("inspect", path, "--model", model, "--chat", "--max-prompt-tokens", 9, "--json").stdout
    )
    assert stats["unit"] == "tokens"
    assert (stats["lengths"]["min"], stats["lengths"]["median"], stats["lengths"]["max"]) == (
        5,
        7,
        23,
    )
    assert stats["example"] == "<user> a b c <assistant>"
    assert (stats["longer"], stats["tooLong"]) == (1, [f"{path}:3: 23"])


def test_a_prompt_that_the_template_refuses_is_a_problem(tmp_path: Path, model: Path) -> None:
    strict = tmp_path / "strict"
    strict.mkdir()
    for file in model.iterdir():
        (strict / file.name).write_bytes(file.read_bytes())
    (strict / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    path = lines(tmp_path / "rows.jsonl", [SLIME])
    result = run("inspect", path, "--model", strict, "--chat", "--json")
    assert (result.exit_code, json.loads(result.stdout)["problems"]) == (
        1, [f"{path}:1: the chat template refuses the prompt: no system"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such.jsonl"], "/no/such.jsonl: no such prompt file"),
        (["{rows}", "--max-prompt-tokens", "5"], "--max-prompt-tokens needs --model"),
        (["{rows}", "--model", "/no/model"], "/no/model has no tokenizer"),
        (["{rows}@[5:]"], "no rows"),
    ],
    ids=["no such file", "limit without model", "no tokenizer", "empty slice"],
)
def test_inspect_refuses_what_it_cannot_read(
    tmp_path: Path, words: list[str], message: str
) -> None:
    path = lines(tmp_path / "rows.jsonl", [SLIME])
    result = run("inspect", *(word.format(rows=path) for word in words))
    assert (result.exit_code, message in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [("pyarrow", [], "buffer"), ("transformers", ["--model", "."], "rollout")],
    ids=["parquet", "model"],
)
def test_data_names_a_missing_library_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, options: list[str], extra: str
) -> None:
    (tmp_path / "rows.parquet").touch()
    monkeypatch.setitem(sys.modules, module, None)
    result = run("inspect", tmp_path / "rows.parquet", *options)
    assert (result.exit_code, result.output) == (
        2,
        f"error: {module} is missing: {install_command(extra)}\n",
    )


def test_inspect_shows_which_part_of_given_answers_is_trained(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save(tmp_path / "model")
    rows = [
        {"messages": [user("hi"), assistant("no", loss_mask=0), user("well"), assistant("yo")]},
        {"prompt": "1 + 1 =", "label": " 2"},
        {"messages": [user("hi"), assistant("no", loss_mask=0)]},
        {"messages": [user("hi")]},
    ]
    path = lines(tmp_path / "rows.jsonl", rows)
    result = run("inspect", path, "--sft", "--model", model, "--json")
    assert result.exit_code == 1
    stats = json.loads(result.stdout)
    assert stats["example"].endswith(
        "<|im_start|>user\nwell<|im_end|>\n<|im_start|>assistant\n«yo<|im_end|>»\n"
    )
    assert "«no" not in stats["example"]
    assert (stats["rows"], stats["broken"]) == (4, 2)
    assert stats["problems"][0] == f"{path}:3: no token of the row is trained"
    assert "no answer to learn from" in stats["problems"][1]


@pytest.mark.parametrize(
    ("longest", "side", "example", "broken"),
    [
        pytest.param(24, "right", "«yes", 0, id="the end of the answer goes"),
        pytest.param(3, "right", None, 1, id="nothing of the answer is left"),
        pytest.param(3, "left", "<|im_end|>»\n", 0, id="the prompt goes"),
    ],
)
def test_inspect_cuts_answers_as_training_does(
    tmp_path: Path, longest: int, side: str, example: str | None, broken: int
) -> None:
    (tmp_path / "model").mkdir()
    model = save(tmp_path / "model")
    path = lines(tmp_path / "rows.jsonl", [{"messages": [user("a"), assistant("yes " * 40)]}])
    limits = ("--max-prompt-tokens", str(longest), "--truncation", side)
    result = run("inspect", path, "--sft", "--model", model, "--json", *limits)
    stats = json.loads(result.stdout)
    assert stats["broken"] == broken
    if example is None:
        assert stats["problems"] == [f"{path}:1: no token of the row is trained"]
    else:
        assert stats["longer"] == 1
        assert example in stats["example"]


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        pytest.param(["--sft"], "--max-prompt-tokens", id="no length"),
        pytest.param([], "--sft", id="prompts are not cut"),
    ],
)
def test_truncation_says_what_it_needs(tmp_path: Path, options: list[str], lacking: str) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"messages": []}])
    result = run("inspect", path, "--truncation", "left", *options)
    assert result.exit_code == 2
    assert f"--truncation needs {lacking}" in result.output
