"""`sluice init` writes tasks that can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.api import load_job
from sluice.data import chat
from sluice.data.chat import context_length, load_tokenizer
from sluice.data.files import read_source
from sluice.data.rows import parse_row
from sluice_cli.init.command import job_name
from sluice_cli.init.tiny_model import UNKNOWN
from tests.small_tasks import TASKS, write
from tests.unit.cli.conftest import Sluice


def test_a_new_task_is_valid(tmp_path: Path, sluice: Sluice) -> None:
    result = sluice("init", tmp_path / "my task", "--yes", "--steps", 7)
    assert result.exit_code == 0, result.output
    assert f"next: sluice validate {tmp_path}/my task/job.yaml --deep" in result.output
    checked = sluice("validate", tmp_path / "my task/job.yaml")
    assert "RLJob default/my-task is valid: grpo, 7 steps of 32 x 8 samples" in checked.output


def test_the_tiny_model_can_read_any_text(tmp_path: Path, sluice: Sluice) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "Größe von 3 Äpfeln?", "answer": 3}) + "\n")
    assert sluice("init", tmp_path / "mine", "--data", rows, "-y").exit_code == 0
    source = load_job(tmp_path / "mine/job.yaml").spec.data.prompts[0]
    assert (source.path, source.prompt_key, source.label_key) == (
        "train.jsonl",
        "question",
        "answer",
    )
    result = sluice("validate", tmp_path / "mine/job.yaml", "--deep")
    assert result.exit_code == 0, result.output
    assert "train.jsonl:1: 4 tokens\nGröße von 3 Äpfeln?" in result.output
    assert "reward of the label 3 as the answer to" in result.output
    assert result.output.rstrip().endswith(": 1")


def test_prompts_without_labels_are_read_as_bytes(tmp_path: Path, sluice: Sluice) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Größe?"}) + "\n")
    assert sluice("init", tmp_path / "mine", "--data", rows, "-y").exit_code == 0
    tokenizer = load_tokenizer(tmp_path / "mine/model")
    assert tokenizer.decode(tokenizer.encode("anything: 大")) == "anything: 大"


@pytest.mark.parametrize("name", TASKS)
def test_the_tiny_model_can_say_every_answer(tmp_path: Path, sluice: Sluice, name: str) -> None:
    file = write(name, tmp_path)
    assert sluice("init", tmp_path / "mine", "--data", file, "-y").exit_code == 0
    spec = load_job(tmp_path / "mine/job.yaml").spec
    tokenizer = load_tokenizer(tmp_path / "mine/model")
    for located in read_source(str(file)):
        row = parse_row(located.row, spec.data.prompts[0])
        prompt = chat.encode(tokenizer, row.prompt, chat=False)
        answer = tokenizer.encode(str(row.label))
        assert tokenizer.decode(answer) == str(row.label)
        assert tokenizer.convert_tokens_to_ids(UNKNOWN) not in prompt + answer
        longest = spec.rollout.sampling.max_response_tokens
        assert len(answer) < longest, "there is room for the end"
        assert len(prompt) + longest <= context_length(tmp_path / "mine/model")
    result = sluice("validate", tmp_path / "mine/job.yaml", "--deep")
    assert result.exit_code == 0, result.output
    assert "the answer to" in result.output
    assert result.output.rstrip().endswith(": 1")


@pytest.mark.parametrize(
    ("prompts", "held_out"),
    [
        pytest.param([f"p{i}" for i in range(200)], 20, id="a tenth"),
        pytest.param([f"p{i}" for i in range(2000)], 64, id="no more than 64"),
        pytest.param([f"p{i % 20}" for i in range(200)], 2, id="by prompt"),
        pytest.param([f"p{i}" for i in range(9)], 0, id="too few"),
    ],
)
def test_prompts_are_held_out(
    tmp_path: Path, sluice: Sluice, prompts: list[str], held_out: int
) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": prompt, "label": str(i)} for i, prompt in enumerate(prompts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sluice("init", tmp_path / "mine", "--data", file, "-y").exit_code == 0
    parts = [
        [located.row for located in read_source(str(path))] if path.exists() else []
        for path in (tmp_path / "mine/train.jsonl", tmp_path / "mine/eval.jsonl")
    ]
    assert sorted(parts[0] + parts[1], key=lambda row: int(row["label"])) == rows
    kept, held = ({row["prompt"] for row in part} for part in parts)
    assert (len(held), kept & held) == (held_out, set())
    spec = load_job(tmp_path / "mine/job.yaml").spec
    datasets = spec.evaluation.datasets if spec.evaluation else []
    assert [dataset.path for dataset in datasets] == ["eval.jsonl"] * bool(held_out)


@pytest.mark.parametrize(
    ("gpus", "shared", "trainer"), [(0, False, 0), (1, True, 1), (4, False, 3)], ids=str
)
def test_gpus_are_divided_between_trainer_and_engine(
    tmp_path: Path, written_task: Path, sluice: Sluice, gpus: int, shared: bool, trainer: int
) -> None:
    words = ("init", tmp_path / "mine", "--model", written_task / "model", "--gpus", gpus, "-y")
    assert sluice(*words).exit_code == 0
    spec = load_job(tmp_path / "mine/job.yaml").spec
    assert spec.model.path == str((written_task / "model").resolve())
    assert (spec.trainer.colocate, spec.trainer.gpus_per_node) == (shared, trainer)
    assert "What is " in (tmp_path / "mine/train.jsonl").read_text()


def test_a_model_with_a_chat_template_uses_it(
    tmp_path: Path, written_task: Path, sluice: Sluice
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert sluice("init", tmp_path / "mine", "--model", model, "-y").exit_code == 0
    spec = load_job(tmp_path / "mine/job.yaml").spec
    assert spec.data.prompts[0].apply_chat_template
    assert spec.evaluation is not None
    assert spec.evaluation.datasets[0].apply_chat_template


def test_an_adapter_learns_at_a_higher_rate(
    tmp_path: Path, written_task: Path, sluice: Sluice
) -> None:
    specs = {}
    for name, more in (("all", ()), ("adapter", ("--lora",))):
        words = ("init", tmp_path / name, "--model", written_task / "model", *more, "-y")
        assert sluice(*words).exit_code == 0
        specs[name] = load_job(tmp_path / name / "job.yaml").spec.trainer
    assert specs["all"].lora is None
    assert specs["adapter"].lora is not None
    assert specs["adapter"].lora.rank == 32
    assert specs["adapter"].optimizer.lr == pytest.approx(10 * specs["all"].optimizer.lr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["{here}/new", "--lora"],
            "--lora adapts a trained model: name it with --model",
            id="an adapter of nothing",
        ),
        pytest.param(["{here}"], "{here} is not empty; expected a new directory", id="full"),
        pytest.param(
            ["{here}/new", "--data", "{here}/none.jsonl"],
            "--data {here}/none.jsonl: no such file or directory",
            id="no data",
        ),
        pytest.param(
            ["{here}/new", "--data", "{here}/wrong.jsonl"],
            "--data {here}/wrong.jsonl:2: prompt: expected a text or a list of chat messages",
            id="a wrong row",
        ),
        pytest.param(
            ["{here}/new", "--data", "{here}/rows.jsonl"],
            "no column looks like a prompt; the first row has 'x'; rename one to 'prompt'",
            id="no prompt",
        ),
    ],
)
def test_init_refuses_what_it_cannot_use(
    tmp_path: Path, sluice: Sluice, words: list[str], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    result = sluice("init", *(word.format(here=tmp_path) for word in words), "-y")
    assert result.exit_code == 2
    assert message.format(here=tmp_path) in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("directory", "name"),
    [("My Task_2", "my-task-2"), ("2024", "task-2024"), ("x" * 60, "x" * 40)],
    ids=str,
)
def test_a_directory_gives_the_job_its_name(tmp_path: Path, directory: str, name: str) -> None:
    assert job_name(tmp_path / directory) == name


def test_a_task_of_pairs_is_valid_and_needs_no_engine(tmp_path: Path, sluice: Sluice) -> None:
    result = sluice("init", tmp_path / "mine", "--yes", "--pairs")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "mine/reward.py").exists()
    checked = sluice("validate", tmp_path / "mine/job.yaml", "--deep")
    assert checked.exit_code == 0, checked.output
    spec = load_job(tmp_path / "mine/job.yaml").spec
    assert (spec.algorithm.loss.type, spec.replicas) == ("dpo", 0)
    assert spec.evaluation is not None
    assert [source.path for source in spec.evaluation.held_out] == ["eval.jsonl"]


def test_pairs_of_a_file_are_split_and_the_model_can_say_both_answers(
    tmp_path: Path, sluice: Sluice
) -> None:
    rows = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{i}?", "chosen": "yes 大", "rejected": "no"} for i in range(20)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert sluice("init", tmp_path / "mine", "--data", rows, "-y", "--pairs").exit_code == 0
    tokenizer = load_tokenizer(tmp_path / "mine/model")
    assert UNKNOWN not in tokenizer.tokenize("yes 大 no")
    train, test = (
        [row.row["prompt"] for row in read_source(str(tmp_path / "mine" / f"{name}.jsonl"))]
        for name in ("train", "eval")
    )
    assert (len(train), len(test)) == (18, 2)
    assert not {*train} & {*test}


def test_a_row_that_is_no_pair_is_named(tmp_path: Path, sluice: Sluice) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "label": "b"}) + "\n")
    result = sluice("init", tmp_path / "mine", "--data", rows, "-y", "--pairs")
    assert result.exit_code == 2
    assert "rows.jsonl:1: no column 'chosen'" in result.output
