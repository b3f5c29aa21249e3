"""Prompts -> token ids, with a real tokenizer and its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJob
from sluice.data.chat import PromptError
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Purpose
from sluice_rollout.prompts import PromptEncoder, PromptTooLongError
from tests.integration.engines import CONTEXT

WORD = 8  # id of w0000
USER, ASSISTANT = 3, 4
Make = Callable[..., PromptEncoder]


@pytest.fixture
def encoder(model: Path) -> Make:
    def make(
        directory: Path = model, spec: dict[str, Any] | None = None, **data: Any
    ) -> PromptEncoder:
        sources = [
            {"path": "/data/plain.jsonl"},
            {"path": "/data/chat.jsonl", "applyChatTemplate": True},
        ]
        changes, spec = (
            spec or {},
            {
                "model": {"path": str(directory)},
                "data": {"prompts": sources} | data,
                "reward": {"type": "f1"},
                "trainer": {"steps": 1},
                "rollout": {"sampling": {"maxResponseTokens": 96}},
            },
        )
        job = RLJob.model_validate({"metadata": {"name": "job"}, "spec": spec | changes})
        return PromptEncoder(job.spec, directory)

    return make


def test_plain_text(encoder: Make) -> None:
    assert encoder().encode(Prompt(0, "w0001 w0000", dataset="plain")) == [WORD + 1, WORD]


def test_plain_text_of_a_chat_source_is_a_users_message(encoder: Make) -> None:
    assert encoder().encode(Prompt(0, "w0001", dataset="chat")) == [USER, WORD + 1, ASSISTANT]


def test_messages_always_go_through_the_template(encoder: Make) -> None:
    messages = [{"role": "user", "content": "w0002"}, {"role": "assistant", "content": "w0003"}]
    expected = [USER, WORD + 2, ASSISTANT, WORD + 3, ASSISTANT]
    assert encoder().encode(Prompt(0, messages, dataset="plain")) == expected


def test_the_template_is_told_of_tools(encoder: Make) -> None:
    prompt = Prompt(0, "w0001", tools=[{"name": "w0009"}], dataset="chat")
    assert encoder().encode(prompt) == [USER, WORD + 1, WORD + 9, ASSISTANT]


def test_what_messages_say_about_losses_is_not_for_the_template(encoder: Make) -> None:
    messages = [{"role": "user", "content": "w0002", "step_loss_mask": 0, "loss_mask": 0}]
    prompts = encoder()
    prompts.tokenizer.chat_template = "{{ messages[0].keys() | join(' ') }}"
    assert (
        prompts.tokenizer.decode(prompts.encode(Prompt(0, messages))) == "<unused> <unused>"
    )  # role, content
    assert "loss_mask" in messages[0]


def test_the_template_gets_the_variables_of_its_source(encoder: Make) -> None:
    prompts = encoder(
        prompts=[
            {
                "path": "/data/chat.jsonl",
                "applyChatTemplate": True,
                "chatTemplateArgs": {"n": "w0003"},
            }
        ]
    )
    prompts.tokenizer.chat_template = "{{ n }} {{ messages[0].content }}"
    assert prompts.encode(Prompt(0, "w0001", dataset="chat")) == [WORD + 3, WORD + 1]


def test_a_prompt_that_the_template_refuses_is_named(encoder: Make) -> None:
    prompts = encoder()
    prompts.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        PromptError, match="chat row 7: the chat template refuses the prompt: roles must alternate"
    ):
        prompts.encode(Prompt(0, "w0001", dataset="chat", row=7))


def test_a_prompt_that_leaves_no_room_for_its_response_is_too_long(encoder: Make) -> None:
    longest = CONTEXT - 96
    assert len(encoder().encode(Prompt(0, "w0001 " * longest))) == longest
    message = rf"plain row 7: the prompt has {longest + 1} tokens, at most {longest} fit"
    with pytest.raises(PromptTooLongError, match=message):
        encoder().encode(Prompt(0, "w0001 " * (longest + 1), dataset="plain", row=7))


def test_the_jobs_own_limit_goes_before(encoder: Make) -> None:
    assert len(encoder(maxPromptTokens=2).encode(Prompt(0, "w0001 w0002"))) == 2
    with pytest.raises(PromptTooLongError, match="has 3 tokens, at most 2 fit"):
        encoder(maxPromptTokens=2).encode(Prompt(0, "w0001 w0002 w0003"))


def test_special_tokens_are_left_out_of_the_text(encoder: Make) -> None:
    assert encoder().decode([WORD, 1, WORD + 1]).split() == ["w0000", "w0001"]


def test_a_directory_without_a_tokenizer_is_a_configuration_error(
    encoder: Make, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigurationError, match=f"spec.model.path: {tmp_path} has no tokenizer"):
        encoder(tmp_path)


def test_a_directory_without_a_config_is_a_configuration_error(
    encoder: Make, model: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    with pytest.raises(ConfigurationError, match=r"spec\.model\.path: .*config\.json"):
        encoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"rollout": {"sampling": {"maxResponseTokens": CONTEXT}}},
            rf"^spec\.rollout\.sampling\.maxResponseTokens: {CONTEXT} tokens and a prompt do not "
            r"fit into the context "
            rf"of {CONTEXT} tokens \(config\.json of the model\): expected at most {CONTEXT - 1}$",
            id="the model's context",
        ),
        pytest.param(
            {
                "rollout": {
                    "sampling": {"maxResponseTokens": 96},
                    "engineArgs": {"context-length": 96},
                }
            },
            r"maxResponseTokens: 96 tokens .* of 96 tokens \(rollout\.engineArgs\): expected at "
            r"most 95",
            id="the engine's arguments",
        ),
        pytest.param(
            {"evaluation": {"datasets": [{"path": "e", "sampling": {"maxResponseTokens": 9999}}]}},
            r"^spec\.evaluation\.datasets\[0\]\.sampling\.maxResponseTokens: 9999 tokens",
            id="an evaluation's",
        ),
    ],
)
def test_responses_that_leave_no_room_for_any_prompt_are_a_configuration_error(
    encoder: Make, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        encoder(spec=changes)


def test_an_engine_with_another_context_is_kept_to(encoder: Make) -> None:
    prompts = encoder()
    prompts.fit(None)
    prompts.fit(100)
    with pytest.raises(PromptTooLongError, match="has 5 tokens, at most 4 fit"):
        prompts.encode(Prompt(0, "w0001 " * 5, dataset="plain"))
    with pytest.raises(ConfigurationError, match=r"context of 96 tokens \(as the engine reports\)"):
        prompts.fit(96)


def test_the_longer_responses_of_an_evaluation_leave_its_prompts_less_room(encoder: Make) -> None:
    prompts = encoder(
        spec={
            "evaluation": {
                "datasets": [{"path": "e"}],
                "sampling": {"maxResponseTokens": CONTEXT - 2},
            }
        }
    )
    prompt = Prompt(0, "w0001 w0002 w0003", dataset="e")
    assert len(prompts.encode(prompt)) == 3
    prompt.purpose = Purpose.EVALUATE
    with pytest.raises(PromptTooLongError, match="has 3 tokens, at most 2 fit"):
        prompts.encode(prompt)
