"""Rows with given answers: which they are, their tokens, and which of these are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from sluice.api.groups.data import PromptSource
from sluice.data.answers import Encoded, cut, encode, parse_answer
from sluice.data.chat import PromptError, stop_tokens
from sluice.data.rows import RowError
from tests.chat import MARKED, OPENING, PLAIN, REWRITING, assistant, tokenizer, user

SOURCE = PromptSource(path="rows.jsonl")
CHAT = [user("hi"), assistant("yo"), user("and"), assistant("bye")]


def encoded(
    row: dict[str, Any], template: str | None = PLAIN, source: PromptSource = SOURCE, **more: Any
) -> Encoded:
    example = encode(tokenizer(template), parse_answer(row, source), **more)
    assert len(example.mask) == len(example.tokens)
    assert example.mask[0] == 0, "nothing predicts the first token"
    return example


def text(example: Encoded) -> str:
    return str(tokenizer().decode(example.tokens))


def trained(example: Encoded) -> list[str]:
    """Texts of the runs of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, mask in zip(example.tokens, example.mask, strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [str(tokenizer().decode(run)) for run in runs if run]


def test_the_assistants_messages_are_trained_with_what_ends_them() -> None:
    example = encoded({"messages": CHAT})
    assert text(example) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\nbye<|im_end|>\n"
    )
    assert trained(example) == ["yo<|im_end|>", "bye<|im_end|>"]
    assert example.answer == "yo<|im_end|>bye<|im_end|>"


def test_marks_of_a_template_are_used() -> None:
    assert trained(encoded({"messages": CHAT}, MARKED)) == ["yo<|im_end|>", "bye<|im_end|>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("key", ["loss_mask", "step_loss_mask"])
def test_a_message_may_say_that_it_is_not_trained(template: str, key: str) -> None:
    messages = [user("hi"), assistant("yo", **{key: 0}), user("and"), assistant("bye", **{key: 1})]
    (only,) = trained(encoded({"messages": messages}, template))
    assert only.startswith("bye")
    assert "loss_mask" not in text(encoded({"messages": messages}, template))


def test_an_answer_that_is_rendered_differently_once_others_follow() -> None:
    """Qwen3 gives an empty thought to the last answer alone: training sees what the model will
    see.
    """
    example = encoded({"messages": CHAT}, REWRITING)
    assert trained(example) == ["yo<|im_end|>", "<think>\n\n</think>\n\nbye<|im_end|>"]
    assert "<think>" not in text(example).split("bye")[0].split("and")[0]


def test_a_template_that_drops_reasoning_is_refused_unless_that_answer_is_masked() -> None:
    thought = "<think>\nhm\n</think>\n\nyo"
    messages = [
        user("hi"),
        assistant(thought),
        user("and"),
        assistant("<think>\nah\n</think>\n\nbye"),
    ]
    with pytest.raises(
        PromptError, match=r"messages\[1\]: the chat template leaves out part of this answer"
    ):
        encoded({"messages": messages}, REWRITING)
    messages[1]["loss_mask"] = 0
    assert trained(encoded({"messages": messages}, REWRITING)) == [
        "<think>\nah\n</think>\n\nbye<|im_end|>"
    ]
    assert trained(encoded({"messages": [*messages[:1], assistant(thought)]}, REWRITING)) == [
        f"{thought}<|im_end|>"
    ]


def test_a_template_that_opens_answers_differently_than_it_writes_them_is_refused() -> None:
    with pytest.raises(
        PromptError,
        match=r"messages\[1\]: .* differently once the answer is there.*chatTemplateArgs",
    ):
        encoded({"messages": CHAT}, REWRITING, arguments={"enable_thinking": False})
    single = encoded({"messages": CHAT[:2]}, REWRITING, arguments={"enable_thinking": False})
    assert trained(single) == ["yo<|im_end|>"], (
        "the thought is the template's, the answer the model's"
    )


@pytest.mark.parametrize(
    "answer",
    [assistant("<think>hm</think>yo"), assistant("yo", reasoning_content="hm")],
    ids=["in the content", "apart"],
)
def test_a_thought_that_the_generation_prompt_opens_is_not_lost(answer: dict[str, Any]) -> None:
    row = {"messages": [user("hi"), answer]}
    assert trained(encoded(row, OPENING)) == ["hm\n</think>\n\nyo<|im_end|>"]


@pytest.mark.parametrize(
    "content", ["assistant", "<think>hm</think>yo"], ids=["a word of the opening", "a thought"]
)
def test_an_answer_that_the_template_drops_is_not_taken_for_its_opening(content: str) -> None:
    dropping = OPENING.replace("+ thought +", "+").replace("{{- content +", "{{-")
    with pytest.raises(PromptError, match="leaves out part of this answer"):
        encoded({"messages": [user("hi"), assistant(content)]}, dropping)


def test_tools_and_arguments_go_to_the_template() -> None:
    example = encoded({"messages": CHAT[:2], "tools": [{"name": "clock"}]})
    assert text(example).startswith('<|im_start|>system\n[{"name": "clock"}]')
    assert trained(example) == ["yo<|im_end|>"]


def test_a_conversation_need_not_end_with_an_answer() -> None:
    assert trained(encoded({"messages": CHAT[:3]})) == ["yo<|im_end|>"]


def test_a_prompt_and_its_label() -> None:
    example = encoded({"prompt": "2 + 2 =", "label": " 4"})
    assert text(example) == "2 + 2 = 4<|im_end|>"
    assert trained(example) == [" 4<|im_end|>"]
    named = PromptSource(path="r.jsonl", prompt_key="question", label_key="answer")
    chat = encoded({"question": "2 + 2?", "answer": "4"}, source=named, chat_text=True)
    assert text(chat) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    assert trained(chat) == ["4<|im_end|>"]
    messages = encoded({"prompt": CHAT[:3], "label": "so long"})
    assert trained(messages) == ["so long<|im_end|>"], "only the label is asked for"


def test_an_answer_starts_at_a_boundary_between_tokens() -> None:
    """No token holds the end of the prompt and the begin of the answer, as when a model writes."""
    example = encoded({"messages": [user("hi"), assistant("\n\nyo")]})
    assert trained(example) == ["\n\nyo<|im_end|>"]


@pytest.mark.parametrize(
    ("side", "tokens", "mask"),
    [("left", [7, 8, 9], [0, 0, 1]), ("right", [5, 6, 7], [0, 0, 1])],
)
def test_a_row_that_is_cut(
    side: Literal["left", "right"], tokens: list[int], mask: list[int]
) -> None:
    """The first token is never trained: no token before it could predict it."""
    row = Encoded([5, 6, 7, 8, 9], [0, 0, 1, 0, 1], "x")
    assert cut(row, 3, side) == Encoded(tokens, mask)
    assert cut(row, 5, side) == row


def test_rows_that_are_encoded_already_need_no_tokenizer() -> None:
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 1], "messages": "anything"}
    example = encode(None, parse_answer(row, SOURCE))
    assert (example.tokens, example.mask) == ([5, 6, 7, 8], [0, 0, 1, 1])
    assert parse_answer(
        {"ids": [1, 2], "loss_mask": [0, 1]}, PromptSource(path="r.jsonl", prompt_key="ids")
    ).tokens


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [user("hi")]}, "messages: no answer to learn from"),
        ({"prompt": "hi"}, "prompt: no answer to learn from"),
        ({"prompt": "hi", "label": 4}, "label: expected the answer as a text, found 4"),
        ({"prompt": "hi", "label": ""}, "label: expected the answer as a text"),
        ({"dialogue": CHAT}, "the row has 'dialogue'"),
        ({"tokens": [1, 2]}, "loss_mask: expected a list of 0 and 1, as long as tokens (2)"),
        ({"tokens": [1, 2], "loss_mask": [1]}, "loss_mask: expected"),
        ({"tokens": [1, 2], "loss_mask": [0, 2]}, "loss_mask: expected"),
        ({"tokens": [1, -2], "loss_mask": [0, 1]}, "tokens: a token id is negative"),
        (
            {"messages": [user("hi"), assistant("yo", loss_mask=2)]},
            "messages[1]: loss_mask: expected 0 or 1",
        ),
    ],
    ids=str,
)
def test_a_row_without_an_answer_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as raised:
        parse_answer(row, SOURCE)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": CHAT}, None, "has no chat template"),
        (
            {"messages": [assistant("yo"), user("hi"), assistant("bye")]},
            PLAIN,
            "messages[0]: this answer has no message before it",
        ),
        ({"messages": CHAT}, "{{ raise_exception('no') }}", "the chat template refuses"),
        ({"messages": CHAT}, MARKED + "{{ raise_exception('no') }}", "the chat template refuses"),
        (
            {"messages": [user("hi"), assistant("yo"), assistant("still", loss_mask=0)]},
            MARKED.replace("{{ '\\n' }}", ""),
            "",
        ),
    ],
)
def test_a_template_that_does_not_fit_is_refused(
    row: dict[str, Any], template: str | None, message: str
) -> None:
    if not message:
        assert trained(encoded(row, template)) == ["yo<|im_end|>"]
        return
    with pytest.raises(PromptError) as raised:
        encoded(row, template)
    assert message in str(raised.value)


def test_marks_that_match_no_message_cannot_be_masked() -> None:
    template = MARKED.replace(
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}", "a{% endgeneration %}b"
    )
    twice = template.replace(
        "{% endgeneration %}b", "{% endgeneration %}b{% generation %}c{% endgeneration %}"
    )
    assert trained(encoded({"messages": CHAT}, twice)) == ["a", "c", "a", "c<|im_end|>"]
    with pytest.raises(PromptError, match="marks 4 texts for 2 messages"):
        encoded({"messages": [*CHAT[:3], assistant("bye", loss_mask=0)]}, twice)


def test_an_answer_needs_an_end_token() -> None:
    with pytest.raises(PromptError, match="no end token"):
        encode(tokenizer(eos_token=None), parse_answer({"prompt": "hi", "label": "yo"}, SOURCE))


def test_a_label_that_ends_its_turn_gets_no_second_end() -> None:
    assert trained(encoded({"prompt": "2 + 2 =", "label": " 4<|im_end|>"})) == [" 4<|im_end|>"]
    row = {"prompt": [user("hi")], "label": "yo<|user|>"}
    assert trained(encoded(row, ROLES, stops=["<|user|>"])) == ["yo<|user|>"]


ROLES = """
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
PROSE = """
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


@pytest.mark.parametrize(
    ("template", "stops", "expected"),
    [
        pytest.param(ROLES, ["<|user|>"], ["yo<|user|>", "bye<|im_end|>"], id="the next role ends"),
        pytest.param(ROLES, [], ["yo", "bye<|im_end|>"], id="the next role ends nothing"),
        pytest.param(PROSE, [], ["yo", "bye<|im_end|>"], id="no special token at all"),
    ],
)
def test_a_template_that_writes_no_end(
    template: str, stops: list[str], expected: list[str]
) -> None:
    assert trained(encoded({"messages": CHAT}, template, stops=stops)) == expected


def test_a_row_in_which_no_answer_ends_is_refused() -> None:
    for template in (ROLES, PROSE, MARKED.replace("+ '<|im_end|>'", "")):
        with pytest.raises(PromptError, match="the model would not learn to stop"):
            encoded({"messages": CHAT[:3]}, template)


def test_engines_end_a_turn_at_the_tokens_of_the_configuration(tmp_path: Path) -> None:
    """GLM-4.5's ends with the token of the next role."""
    model = tokenizer(ROLES, additional_special_tokens=["<|user|>", "<|observation|>"])
    ids = model.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert stop_tokens(model, tmp_path) == ["<|im_end|>"]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids[0]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[1]]}))
    assert stop_tokens(model, tmp_path) == ["<|im_end|>", "<|observation|>", "<|user|>"]
