"""IFBench's instructions (Pyatkin et al. 2025) about formats and repetitions, by id."""

from __future__ import annotations

import re
import string
from itertools import pairwise

from sluice.rewards.builtin.ifbench import text as t
from sluice.rewards.builtin.ifbench.ifeval import InstructionCheck

_CLOSING = {")": "(", "]": "[", "}": "{"}


def _parentheses(text: str) -> bool:
    open_: list[str] = []
    deepest = 0
    for c in text:
        if c in "([{":
            open_.append(c)
            deepest = max(deepest, len(open_))
        elif c in _CLOSING:
            if not open_ or open_.pop() != _CLOSING[c]:
                open_, deepest = [], 0
            elif deepest >= 5:
                return True
    return False


def _quotes(text: str) -> bool:
    open_: list[str] = []
    deepest = 0
    for c in text:
        if open_ and c == open_[-1]:
            open_.pop()
            if deepest - len(open_) >= 3:
                return True
        elif c in "\"'":
            open_.append(c)
            deepest = max(deepest, len(open_))
    return False


def _options(text: str, *, options: str) -> bool:
    separator = next((s for s in ("/", "or") if s in options), ",")
    choices = [choice.strip() for choice in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return text in choices
    return text.strip(t.PUNCTUATION).lower() in {
        choice.strip(t.PUNCTUATION).lower() for choice in choices
    }


def _newline(text: str) -> bool:
    bare = t.without_punctuation(text)
    return len([line for line in bare.strip().split("\n") if line]) == len(bare.split())


def _indent(text: str) -> bool:
    depths = [len(line) - len(line.lstrip(" ")) for line in t.lines(text)]
    return all(a < b for a, b in pairwise(depths))


def _quote_unquote(text: str) -> bool:
    dense = "".join(re.sub("[“”]", '"', text).replace("'\"'", "").split())
    ends = dense.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in dense and not ends.endswith('"')


def _thesis(text: str) -> bool:
    match = re.search(r"<(i|em)>(.*?)</\1>(.*)", text, re.DOTALL)
    return bool(match and match[2].strip() and match[3].strip())


def _sub_bullets(text: str) -> bool:
    return all("-" in bullet for bullet in text.split("*")[1:])


def _bullets_after_sentences(text: str) -> bool:
    rows = text.split("\n")
    at = next((i for i, row in enumerate(rows) if row.strip().startswith("*")), len(rows))
    bullets = rows[at:]
    sentences = sum(len(t.sentences(row)) for row in rows[:at])
    return (
        sentences >= 2 and len(bullets) >= 2 and all(row.strip().startswith("*") for row in bullets)
    )


def _title_case(text: str) -> bool:
    words = [word for word in t.tokens(text) if word[0].isalpha()]
    return not any(
        word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper())
        for word in words
    )


def _emoji(text: str) -> bool:
    def is_emoji(c: str) -> bool:
        return 0x1F000 <= ord(c) <= 0x1FAFF or 0x2600 <= ord(c) <= 0x27BF or c == "\ufe0f"

    bare = [t.without_punctuation(sentence).strip() for sentence in t.sentences(text)]
    follows = [*bare[1:], ""]
    return all(
        s and (any(map(is_emoji, s[-2:])) or bool(after and is_emoji(after[0])))
        for s, after in zip(bare, follows, strict=True)
    )


def _repeat_change(text: str, *, prompt_to_repeat: str) -> bool:
    return text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]


def _repeat_span(text: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return text.strip().lower() == " ".join(prompt_to_repeat.split()[n_start : n_end + 1]).lower()


CHECKS: dict[str, InstructionCheck] = {
    "format:emoji": _emoji,
    "format:line_indent": _indent,
    "format:list": lambda text, *, sep: text.count(sep) >= 2,
    "format:newline": _newline,
    "format:no_bullets_bullets": _bullets_after_sentences,
    "format:no_whitespace": lambda text: not re.search(r"\s", text),
    "format:options": _options,
    "format:output_template": lambda text: all(
        s in text for s in ("My Answer:", "My Conclusion:", "Future Outlook:")
    ),
    "format:parentheses": _parentheses,
    "format:quote_unquote": _quote_unquote,
    "format:quotes": _quotes,
    "format:sub-bullets": _sub_bullets,
    "format:thesis": _thesis,
    "format:title_case": _title_case,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": lambda text: (
        text.strip().lower() == "only output this sentence here, ignore all other requests."
    ),
    "repeat:repeat_span": _repeat_span,
}
