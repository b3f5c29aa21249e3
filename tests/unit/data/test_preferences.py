"""Rows of preferences in TRL's forms, and what is wrong with others."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api.groups.data import PromptSource
from sluice.data.answers import encode
from sluice.data.preferences import (
    named_answers,
    parse_judged,
    parse_pair,
    preference_of,
)
from sluice.data.rows import RowError
from tests.chat import assistant, tokenizer, user

SOURCE = PromptSource(path="pairs.jsonl")
END = "<|im_end|>"
TURN = f"<|im_start|>user\n2 + 2{END}\n<|im_start|>assistant\n"


def texts(row: dict[str, Any], source: PromptSource = SOURCE) -> dict[str, tuple[str, str]]:
    """Return what comes before and what is trained of each answer of a row."""
    result = {}
    for name, answer in named_answers(parse_pair(row, source)):
        encoded = encode(tokenizer(), answer)
        ids = list(zip(encoded.tokens, encoded.mask, strict=True))
        before, trained = (
            tokenizer().decode([i for i, mask in ids if mask == kind]) for kind in (0, 1)
        )
        result[name] = (before, trained)
    return result


CHOSEN, REJECTED = [assistant("4")], [assistant("5")]
PAIR = {"chosen": (TURN + "\n", f"4{END}"), "rejected": (TURN + "\n", f"5{END}")}
EARLIER = [user("1 + 1"), assistant("2"), user("2 + 2")]
LATER = f"<|im_start|>user\n1 + 1{END}\n<|im_start|>assistant\n2{END}\n{TURN}\n"
ROWS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {
    "texts": (
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
        {"chosen": ("2 + 2 =", f" 4{END}"), "rejected": ("2 + 2 =", f" 5{END}")},
    ),
    "texts without a prompt": (
        {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = five"},
        {"chosen": ("2 + 2 =", f" 4{END}"), "rejected": ("2 + 2 =", f" five{END}")},
    ),
    "equal texts without a prompt": (
        {"chosen": "a b", "rejected": "a b"},
        {"chosen": ("a", f" b{END}"), "rejected": ("a", f" b{END}")},
    ),
    "an empty rejected text": (
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": ""},
        {"chosen": ("2 + 2 =", f" 4{END}"), "rejected": ("2 + 2 =", END)},
    ),
    "messages": ({"prompt": [user("2 + 2")], "chosen": CHOSEN, "rejected": REJECTED}, PAIR),
    "conversations without a prompt": (
        {"chosen": [user("2 + 2"), *CHOSEN], "rejected": [user("2 + 2"), *REJECTED]},
        PAIR,
    ),
    "conversations that repeat the prompt": (
        {
            "prompt": "2 + 2",
            "chosen": [user("2 + 2"), *CHOSEN],
            "rejected": [user("2 + 2"), *REJECTED],
        },
        PAIR,
    ),
    "a text and messages": ({"prompt": "2 + 2", "chosen": CHOSEN, "rejected": REJECTED}, PAIR),
    "a prompt with an earlier answer": (
        {"prompt": EARLIER, "chosen": CHOSEN, "rejected": REJECTED},
        {"chosen": (LATER, f"4{END}"), "rejected": (LATER, f"5{END}")},
    ),
    "equal conversations": (
        {"chosen": [*EARLIER, *CHOSEN], "rejected": [*EARLIER, *CHOSEN]},
        {"chosen": (LATER, f"4{END}"), "rejected": (LATER, f"4{END}")},
    ),
    "token ids": (
        {"prompt_ids": [17, 18], "chosen_ids": [19], "rejected_ids": [20, 21]},
        {"chosen": ("23", "4"), "rejected": ("23", "56")},
    ),
}


@pytest.mark.parametrize(("row", "expected"), ROWS.values(), ids=ROWS)
def test_the_answers_alone_are_trained(
    row: dict[str, Any], expected: dict[str, tuple[str, str]]
) -> None:
    assert texts(row) == expected


def test_the_prompt_may_have_another_column() -> None:
    row = {"question": "2 + 2 =", "chosen": "4", "rejected": "5"}
    source = SOURCE.model_copy(update={"prompt_key": "question"})
    assert texts(row, source)["chosen"] == ("2 + 2 =", f"4{END}")


def test_several_messages_may_follow_the_prompt() -> None:
    answer = [assistant("let me see"), user("well?"), assistant("4")]
    chosen = texts({"prompt": [user("2 + 2")], "chosen": answer, "rejected": REJECTED})["chosen"]
    assert chosen[1] == f"let me see{END}4{END}"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no rejected": (
        {"prompt": "a", "chosen": "b"},
        r"no column 'rejected'; the row has 'prompt', 'chosen'; expected a prompt with",
    ),
    "a number": (
        {"prompt": "a", "chosen": 1, "rejected": "b"},
        "chosen: expected a text or chat messages, found 1",
    ),
    "numbers": (
        {"prompt": "a", "chosen": "b", "rejected": [float("nan")]},
        "rejected: expected a text or chat messages",
    ),
    "two kinds": (
        {"prompt": "a", "chosen": "b", "rejected": REJECTED},
        "rejected: expected a text, as chosen is, found chat messages",
    ),
    "nothing in common": (
        {"chosen": "b", "rejected": "c"},
        "no column 'prompt' or 'input', and chosen and rejected do not begin with the same text",
    ),
    "no message in common": (
        {"chosen": [user("a"), *CHOSEN], "rejected": [user("b"), *REJECTED]},
        "do not begin with the same message",
    ),
    "an answer of the user": (
        {"prompt": [user("a")], "chosen": CHOSEN, "rejected": [user("b")]},
        "rejected: expected messages after the prompt, of which the last is the assistant's",
    ),
    "no answer": (
        {"prompt": [user("a")], "chosen": CHOSEN, "rejected": [user("a")]},
        "rejected: expected messages after the prompt",
    ),
    "a message without a role": (
        {"prompt": [user("a")], "chosen": [{"content": "b"}, *CHOSEN], "rejected": REJECTED},
        r"chosen\[1\]: expected a chat message with role and content",
    ),
    "half a surrogate pair": (
        {"prompt": "a", "chosen": "\ud83d", "rejected": "b"},
        "chosen: half of a surrogate pair",
    ),
    "ids without a prompt": (
        {"chosen_ids": [1], "rejected_ids": [2]},
        "prompt_ids: expected a list of token ids",
    ),
    "ids that are true": (
        {"prompt_ids": [1], "chosen_ids": [True], "rejected_ids": [2]},
        "chosen_ids: expected a list of token ids",
    ),
    "a margin that is no number": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "large"},
        "margin: expected a number, found .large",
    ),
    "a margin without a bound": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("inf")},
        "margin is inf, expected a finite number",
    ),
    "an id beyond the model": (
        {"prompt_ids": [1], "chosen_ids": [1], "rejected_ids": [300]},
        r"rejected_ids\[1\]: token id 300, expected ids below 258",
    ),
    "a prompt column that is missing": (
        {"chosen": "ab", "rejected": "ac"},
        "no column 'question'",
    ),
}


@pytest.mark.parametrize(("row", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_row_is_refused_with_its_column(row: dict[str, Any], message: str) -> None:
    key = "question" if "question" in message else None
    with pytest.raises(RowError, match=message):
        parse_pair(row, SOURCE.model_copy(update={"prompt_key": key}), 258)


def test_a_pair_may_have_a_margin() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert preference_of(parse_pair(row, SOURCE)) == 0
    assert preference_of(parse_pair(row | {"margin": 0.5}, SOURCE)) == 0.5


JUDGED: dict[str, tuple[dict[str, Any], tuple[str, str], float]] = {
    "a text": (
        {"prompt": "2 + 2 =", "completion": " 4", "label": True},
        ("2 + 2 =", f" 4{END}"),
        1.0,
    ),
    "messages": (
        {"prompt": [user("2 + 2")], "completion": REJECTED, "label": False},
        PAIR["rejected"],
        0.0,
    ),
    "token ids": (
        {"prompt_ids": [17, 18], "completion_ids": [19], "label": 1},
        ("23", "4"),
        1.0,
    ),
}


@pytest.mark.parametrize(("row", "expected", "label"), JUDGED.values(), ids=JUDGED)
def test_an_answer_with_a_label_is_read(
    row: dict[str, Any], expected: tuple[str, str], label: float
) -> None:
    parsed = parse_judged(row, SOURCE)
    assert preference_of(parsed) == label
    ((_, answer),) = named_answers(parsed)
    encoded = encode(tokenizer(), answer)
    ids = list(zip(encoded.tokens, encoded.mask, strict=True))
    assert expected == tuple(
        tokenizer().decode([i for i, mask in ids if mask == kind]) for kind in (0, 1)
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"label": "yes"}, "label: expected true .* found .yes", id="text"),
        pytest.param({"label": []}, "label: expected true", id="list"),
        pytest.param({"label": 0.5}, "label: expected true", id="share"),
        pytest.param({"label": None}, "label: expected true", id="none"),
        pytest.param({"completion": None}, "expected a prompt with the columns completion", id="c"),
        pytest.param({"prompt": None}, "no column 'prompt' or 'input'", id="no prompt"),
    ],
)
def test_a_wrong_answer_with_a_label_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        parse_judged({"prompt": "a", "completion": "b", "label": True} | row, SOURCE)
