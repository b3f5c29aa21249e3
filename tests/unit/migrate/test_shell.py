"""Scripts are parsed as bash does, and never run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_migrate.bash.lexer import ScriptError
from sluice_migrate.bash.script import Argument, read_script

ASSIGNED = "A=a; B='b c'; LIST=(1 'two words' \"$A\"); N=$((2 * 3)); EMPTY=\n"


def words(text: str, **given_: str) -> list[str]:
    return [word.text for word in read_script(text, given_).commands[-1].words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x $A $B", ["x", "a", "b", "c"]),
        ('x "$B" ${B} "${A}-$A"', ["x", "b c", "b", "c", "a-a"]),
        ("x ${LIST[@]} \"${LIST[@]}\"", ["x", "1", "two", "words", "a", "1", "two words", "a"]),
        ("x '$A' \\$A \"\\$A\"", ["x", "$A", "$A", "$A"]),
        ("x ${NONE:-$A} ${NONE:-\"p q\"} ${A:-z}", ["x", "a", "p q", "a"]),
        ('x "${NONE:-a b}"', ["x", "a b"]),
        ("x $((N + 1)) $(((N + 1) * 2)) $((${N} / 4)) $(($N - 10))", ["x", "7", "14", "1", "-4"]),
        ("x $EMPTY '' \"\" \"$EMPTY\"", ["x", "", "", ""]),
        ("x \\\n  --a 1 \\\n  --b", ["x", "--a", "1", "--b"]),
        ("x a # b\n", ["x", "a"]),
        ("x a#b", ["x", "a#b"]),
        ("x > out 2>&1 y < in", ["x", "y"]),
        ("LIST+=(4); x ${LIST[@]}", ["x", "1", "two", "words", "a", "4"]),
        ("A+=b; x $A", ["x", "ab"]),
        ("export A=z B=y\nx $A$B", ["x", "zy"]),
        ("LIST=(\n  1 # one\n  # --two 2\n  3\n)\nx ${LIST[@]}", ["x", "1", "3"]),
        ("cat <<EOF\nx 'not closed\nEOF\ny", ["y"]),
        ("cat <<'EOF' > f\n$(rm -rf /)\nEOF\ny", ["y"]),
        ("if [ 1 ]; then x a; fi", ["x", "a"]),
        ("x $@ $1 end", ["x", "end"]),
        ("RUN=1 x a", ["x", "a"]),
        ("x '{\"a\": {\"b\": 1}}' a=[1,2] b={c:1}", ["x", '{"a": {"b": 1}}', "a=[1,2]", "b={c:1}"]),
    ],
)  # fmt: skip
def test_words_are_split_as_bash_does(text: str, expected: list[str]) -> None:
    assert words(ASSIGNED + text) == expected


@settings(deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
        max_size=6,
    )
)
def test_quoted_words_are_read_unchanged(given_words: list[str]) -> None:
    assert words(" ".join(["x", *map(shlex.quote, given_words)])) == ["x", *given_words]
    assert words(f'LIST=({" ".join(map(shlex.quote, given_words))}); x "${{LIST[@]}}"') == [
        "x",
        *given_words,
    ]


@settings(deadline=None, max_examples=300)
@given(st.text("ax$\"'\\`(){}[]@#=:-+ \n;|&<>0", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read_script(text)
    except ScriptError as error:
        refused = str(error)
    else:
        refused = "never closed"
    assert "never closed" in refused


WORDS = (
    "if ", "then ", "elif ", "else ", "fi", "case ", " in ", "esac", ";;", "for ", "while ", "do ",
    "done", "{ ", "}", "((", "))", "[[ ", " ]]", "[ ", " ]", "$((", "$(", "${A", "${A:-", "${A%",
    "${A//", "${#", "${!A}", "[@]", "A=", "A+=(", "f()", "&&", "||", "!", "|", ";", "\n", " ", "x",
    "1", "a", "-gt ", "=~ ", "*", "?", "[", "]", ")", "(", "'", '"', "/", ":", "<<E", ">", "local ",
    "source ", "return", "exit", "break", "echo ", "seq ", "printf -v ", "set -- ", "1+", "N++",
)  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(WORDS), max_size=25).map("".join))
def test_any_mixture_of_a_shells_words_is_read_or_refused(text: str) -> None:
    try:
        read_script(text)
    except ScriptError as error:
        refused = str(error)
    else:
        refused = "never closed"
    assert "never closed" in refused


@settings(deadline=None)
@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: (
            st.tuples(inner, st.sampled_from("+-*"), inner).map("".join) | inner.map("({})".format)
        ),
    )
)
def test_arithmetic_agrees_with_python(expression: str) -> None:
    assert words(f"x $(({expression}))")[1] == str(eval(expression))


def test_programs_are_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    script = f"A=$(touch {marker}); B=`touch {marker}`; x $A $((`touch {marker}`)) ; touch {marker}"
    arguments = read_script(script).commands[0].words
    assert not marker.exists()
    assert arguments[1].missing == (f"$(touch {marker})",)


def test_an_unset_variable_keeps_its_name() -> None:
    arguments = read_script("x ${BASE}/data $((N + 1)) ${A%b}").commands[0].words
    assert arguments[1] == Argument("${BASE}/data", 1, ("BASE",))
    assert (arguments[2].text, arguments[2].missing) == ("$((N + 1))", ("N",))
    assert (arguments[3].text, arguments[3].missing) == ("${A%b}", ("A",))


def test_given_variables_win_over_the_script() -> None:
    assert words("A=1; x $A ${B:-2}", A="9", B="8") == ["x", "9", "8"]


def test_a_value_set_under_an_unknown_condition_is_reported() -> None:
    arguments = read_script("A=1\nif [ -d x ]; then\n A=2\nfi\nB=3\nx $A $B").commands[-1].words
    assert [(word.text, word.conditional) for word in arguments[1:]] == [("2", ("A",)), ("3", ())]


def test_lines_are_counted() -> None:
    arguments = (
        read_script("# one\nLIST=(\n a\n 'b\nc' d\n)\nx \\\n \"${LIST[@]}\" \\\n y")
        .commands[0]
        .words
    )
    assert [(word.text, word.line) for word in arguments] == [
        ("x", 7),
        ("a", 3),
        ("b\nc", 4),
        ("d", 5),
        ("y", 9),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nx 'b", "line 2: ' is opened here"),
        ('x "b', 'line 1: " is opened here'),
        ("x $(b", r"line 1: \( is opened here"),
        ("A=(1\n2", r"line 1: \( is opened here"),
        ("x ${b", "line 1: { is opened here"),
    ],
)
def test_an_unclosed_construct_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        read_script(text)
