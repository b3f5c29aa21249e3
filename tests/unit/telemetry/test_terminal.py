"""Untrusted text is escaped, so that a terminal shows it and does not act on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.telemetry.terminal import block, escaped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("step 1\tüß漢\u3000字 👍", "step 1\tüß漢\u3000字 👍", id="text"),
        pytest.param("\x1b]52;c;aGk=\x07", "\\x1b]52;c;aGk=\\x07", id="OSC 52, the clipboard"),
        pytest.param("\x1b[2J", "\\x1b[2J", id="CSI 2J, an empty screen"),
        pytest.param("\x9b2J", "\\x9b2J", id="CSI as one character"),
        pytest.param("a\rb\x08c", "a\\rb\\x08c", id="overwriting"),
        pytest.param("a\u202eb", "a\\u202eb", id="right to left"),
        pytest.param("a\nb\u2028c", "a\\nb\\u2028c", id="lines"),
        pytest.param("\ud83d", "\\ud83d", id="half of a surrogate pair"),
    ],
)
def test_a_text_is_shown(text: str, shown: str) -> None:
    assert escaped(text) == shown


@given(st.text(st.characters()))
def test_no_text_moves_a_terminals_cursor(text: str) -> None:
    shown = escaped(text)
    assert len(shown.splitlines()) <= 1
    assert not any(
        ord(character) < 32 or 127 <= ord(character) < 160
        for character in shown
        if character not in "\t\xa0"
    )
    shown.encode()


def test_untrusted_lines_do_not_look_like_lines_of_sluice() -> None:
    assert block("one\n2026-01-31T12:00:00Z info done\x1b[2J") == (
        "    one\n    2026-01-31T12:00:00Z info done\\x1b[2J"
    )
