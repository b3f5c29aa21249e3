"""A script is read to its end, and values that are not known are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice_migrate.bash.reading import read
from sluice_migrate.bash.script import read_script
from tests.unit.migrate.import_tools import run, slime, spec_of, unwrapped, verl


def last(text: str, **environment: str) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    words = read_script(text, environment).commands[-1].words
    return [(word.text, word.missing, word.conditional) for word in words[1:]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1; if [ -d /d ]; then A=2; fi; x $A", ("2", (), ("A",))),
        ("A=1; command -v tool && A=2; x $A", ("2", (), ("A",))),
        ("[ -f f ] || A=2; x $A", ("2", (), ("A",))),
        ("while tool; do A=2; done; x $A", ("2", (), ("A",))),
        ("case $(tool) in a) A=1 ;; b) A=2 ;; esac; x $A", ("2", (), ("A",))),
        ("[ $(tool) -gt 0 ] && A=2; x $A", ("2", (), ("A",))),
        ("A=1; if [ $U ]; then A=2; fi; x $A", ("1", (), ())),
        ("D=${D:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}; x $D", ("gpu", (), ())),
        ("read -r A < f; x $A", ("${A}", ("A",), ())),
        ("mapfile -t A < f; x \"$A\"", ("${A}", ("A",), ())),
        ("x $(tool | tail -1)", ("$(tool | tail -1)", ("$(tool | tail -1)",), ())),
        ("x $(tool && echo a || echo b)", ("$(tool && echo a || echo b)",) * 1
         + (("$(tool && echo a || echo b)",), ())),
        ("x $(date +%s)/$U", ("$(date +%s)/${U}", ("$(date +%s)", "U"), ())),
        ("A=$U/a; x ${A%/*} ", ("${A%/*}", ("U",), ())),
        ("x $((N * 2))", ("$((N * 2))", ("N",), ())),
        ("x ${A@Q}", ("${A@Q}", ("${A@Q}",), ())),
        ("x ${U:?must be set}", ("${U}", ("U",), ())),
        ("A=(1 2); x ${A[N]}", ("${A[N]}", ("N",), ())),
        ("x ~/data", ("~/data", (), ())),
    ],
    ids=["a folder", "a program there or not", "a file", "a loop", "a case", "a number", "unset",
         "other hardware", "read", "mapfile", "a pipe", "an answer", "two unknowns", "cut",
         "arithmetic", "transformed", "must be set", "an element", "home"],
)  # fmt: skip
def test_values_that_only_the_machine_knows_are_reported(
    text: str, expected: tuple[str, tuple[str, ...], tuple[str, ...]]
) -> None:
    assert last(text) == [expected]


def test_home_is_set_by_the_user() -> None:
    text = "A=~/a; x ~ $A ${U:-~/b} \"${U:-~}\" '~' p=~"
    assert [word for word, _, _ in last(text, HOME="/home/me")] == [
        "/home/me", "/home/me/a", "/home/me/b", "~", "~", "p=~",
    ]  # fmt: skip


def test_an_unknown_word_does_not_affect_the_others() -> None:
    assert last('ARGS="a=1 b=$U c=$(date +%s) d=2"; x $ARGS') == [
        ("a=1", (), ()),
        ("b=${U}", ("U",), ()),
        ("c=$(date +%s)", ("$(date +%s)",), ()),
        ("d=2", (), ()),
    ]


def test_a_script_is_not_read_after_its_exit() -> None:
    script = read_script("x 1\nif [ a = a ]; then x 2; exit 0; fi\nx 3")
    assert [command.words[1].text for command in script.commands] == ["1", "2"]
    script = read_script(
        'if [ $# -lt 2 ]; then echo usage; exit 1; fi\nx "$1"\n[ -f f ] && exit\nx 2'
    )
    assert [command.words[1].text for command in script.commands[1:]] == ["", "2"]
    assert [(remark.line, remark.subject) for remark in script.remarks] == [(1, "exit 1")]


def test_an_endless_loop_ends() -> None:
    script = read_script("while true; do A=1; done; x")
    assert [remark.text for remark in script.remarks] == ["is too long to be read here"]


@pytest.mark.parametrize(
    "text",
    [
        "A=ab; while true; do A=$A$A; done",
        "A=(1); while true; do A+=(${A[@]}); done",
        "A=$(seq 1 9999999999)",
        "x {1..9999}{1..9999}",
    ],
    ids=["a text", "a list", "numbers", "braces"],
)
def test_a_script_cannot_fill_the_memory(text: str) -> None:
    script = read_script(text)
    assert sum(len(value.text) for value in script.variables.values.values()) < 1 << 20
    assert all(len(command.words) < 10 for command in script.commands)


def test_a_sourced_file_is_read_if_it_exists(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/model.sh").write_text("ARGS=(--layers ${LAYERS:-2})\nx sourced\n")
    path = tmp_path / "run.sh"
    path.write_text(
        'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'LAYERS=7 source "${DIR}/lib/model.sh"\nsource /no/such/file.sh\n'
        'x "${ARGS[@]}" ${LAYERS:-d}'
    )
    script = read(path.read_text(), path, {})
    words = [[word.text for word in command.words[1:]] for command in script.commands]
    assert words == [["sourced"], ["--layers", "7", "d"]]
    assert script.sourced == ["/no/such/file.sh"]


def test_an_empty_value_takes_the_default(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'BATCH=""\nSAMPLES=\npython3 train.py --hf-checkpoint /m --prompt-data /d/a.jsonl '
        "--rm-type f1 --num-rollout 2 --rollout-batch-size ${BATCH:-3} "
        "--n-samples-per-prompt ${SAMPLES:-4}\n"
    )
    rollout = spec_of(run("slime", script))["rollout"]
    assert (rollout["batchSize"], rollout["samplesPerPrompt"]) == (3, 4)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            'if [ -z "$NODES" ]; then exit 2; fi',
            "exit 2 (line 1): the script ends here without further arguments",
        ),
        ("eval $THINGS", "eval (line 1): is not read here; import with --exact to run it"),
        ("ls $THINGS", "$THINGS (line 1): not set, so it is left out, as bash does"),
        ("export ASCEND_RT_VISIBLE_DEVICES=0", "written for Huawei NPUs"),
        ("python3 train.py --lr 9", "train.py (line 2): the script starts 2 trainings; this is"),
    ],
    ids=["an end", "eval", "an unset variable", "other hardware", "several trainings"],
)  # fmt: skip
def test_differences_to_bash_are_reported(before: str, message: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"{before}\npython3 train.py --hf-checkpoint /m --prompt-data /d/a.jsonl --rm-type f1 "
        "--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4\n"
    )
    assert message in unwrapped(run("slime", script))


def test_a_training_under_an_unknown_condition_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "if [ -f /a ]; then\n python3 train.py --hf-checkpoint /m --prompt-data /d/a.jsonl "
        "--rm-type f1 --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4\nfi\n"
    )
    assert "starts under a condition that only the machine can decide" in unwrapped(
        run("slime", script)
    )


def test_an_unset_variable_after_an_option_is_reported(tmp_path: Path) -> None:
    result = slime(tmp_path, "--lr $LR --seed 42 $MORE")
    assert (
        "--lr ${LR} (line 1): the value is not in the script: set $LR with --var" in result.stdout
    )
    assert "$MORE (line 1): not set, so it is left out" in result.stdout


def test_options_of_hydra_may_be_two_words() -> None:
    said = unwrapped(verl("algorithm.adv_estimator=gae --config-name 'own_trainer.yaml'"))
    assert "own_trainer.yaml is not read" in said


@pytest.mark.parametrize(
    ("mark", "environment", "expected"),
    [
        (".git", {}, "TMP/data"),
        ("", {"PWD": "/work"}, "/work/data"),
        ("", {}, "${PWD}/data"),
    ],
    ids=["a project", "a folder that is given", "nobody knows"],
)
def test_a_script_starts_in_its_project_or_in_an_unknown_folder(
    tmp_path: Path, mark: str, environment: dict[str, str], expected: str
) -> None:
    (tmp_path / "examples").mkdir()
    if mark:
        (tmp_path / mark).mkdir()
    path = tmp_path / "examples/run.sh"
    path.write_text('PROJECT_DIR="$(pwd)"\nx "$PROJECT_DIR/data" "$PWD/data"\n')
    [command] = read(path.read_text(), path, environment).commands
    assert [word.text for word in command.words[1:]] == [expected.replace("TMP", str(tmp_path))] * 2
    assert [word.missing for word in command.words[1:]] == [
        ("PWD",) if expected.startswith("$") else ()
    ] * 2


def test_cd_continues_from_a_folder_that_is_not_known() -> None:
    script = read_script('cd a\nx "$(pwd)"\ncd ../..\nx "$(pwd)"\ncd /b\nx "$(pwd)"\n')
    words = [command.words[1] for command in script.commands if command.words[0].text == "x"]
    assert [word.text for word in words] == ["${PWD}/a", "$(pwd)", "/b"]
    assert [bool(word.missing) for word in words] == [True, True, False]
