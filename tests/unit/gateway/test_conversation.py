"""Conversations as trees: every sampled token is trained once, in the context it was sampled in.

This holds whatever a client does with its history.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.samples.sample import Messages, Sample, TokenSequence, WeightSpan
from sluice.samples.turns import BRANCH_TURNS, TURNS
from sluice.wire import codec
from sluice_rollout.gateway.conversation import Conversation, Turn, write_branches
from sluice_rollout.gateway.history import Continuation, History, Template
from tests import chat

END = "<|im_end|>"
TEMPLATES = {name: Template(chat.tokenizer(getattr(chat, name))) for name in ("PLAIN", "REWRITING")}


def say(turn: Turn, ids: list[int], version: int = 0, finish: str = "stop") -> None:
    """Make the engine's answer at a turn. The log-prob of each token is its id, to recognise it."""
    turn.tokens = np.asarray(ids, np.int32)
    turn.log_probs = -np.asarray(ids, np.float32) - 1
    turn.spans = [WeightSpan(version, 0, len(ids))] if ids else []
    turn.finish = finish


class Client:
    """A client of the gateway, with a record of what the engine saw and generated."""

    def __init__(self, template: Template, conversation: Conversation | None = None) -> None:
        self.conversation = conversation or Conversation()
        self.history = History(self.conversation, template)
        self.template = template
        self.seen: list[tuple[list[int], list[int]]] = []

    def place(self, messages: Messages) -> Continuation:
        return self.history.continue_messages(messages, None)

    def ask(self, messages: Messages, answer: str, finish: str = "stop") -> Messages:
        """Return the messages with the answer, as the client sends them next."""
        place = self.place(messages)
        turn = self.conversation.turn_at(place.parent, place.added)
        if not turn.finish:
            ending = END if finish == "stop" else ""
            say(turn, self.template.encode(answer + ending), len(self.seen), finish)
            self.seen.append((turn.context.tolist(), turn.tokens.tolist()))
        messages = [*messages, {"role": "assistant", "content": answer}]
        self.history.remember(messages, None, turn, answer)
        return messages

    def sample(self, *, with_unanswered: bool = False) -> Sample:
        """Return the episode's sample after a round trip through the wire format."""
        write_branches(
            {"": self.conversation}, sample := Sample(0), with_unanswered=with_unanswered
        )
        sample.check_tokens()
        return codec.sample_from_message(codec.sample_to_message(sample))

    def sequences(self) -> list[TokenSequence]:
        sample = self.sample()
        return sample.sequences if TURNS in sample.metadata else []


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def trained(sequence: TokenSequence) -> list[int]:
    response = sequence.tokens[sequence.prompt_length :]
    return [int(t) for t in response[sequence.loss_mask.astype(bool)]]


def turns(sample: Sample) -> list[list[dict[str, Any]]]:
    return [sample.metadata.get(TURNS, []), *sample.metadata.get(BRANCH_TURNS, [])]


def test_a_history_that_only_grows_is_one_sequence_of_what_was_sampled() -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "four  ")  # a template that trims would lose the blanks
    messages = client.ask(messages + user("3+3"), "six")
    sample = client.sample()
    assert not sample.branches
    decode = client.template.tokenizer.decode
    assert decode(sample.tokens.tolist()) == (
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\nfour  <|im_end|>\n"
        "<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\nsix<|im_end|>"
    )
    assert decode(trained(sample)) == "four  <|im_end|>six<|im_end|>"
    assert [turn["by"] for turn in sample.metadata[TURNS]] == ["model", "environment", "model"]
    assert [span.version for span in sample.weight_versions] == [0, 1]


def test_the_last_turn_knows_the_experts_of_all_that_came_before() -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "four")
    client.ask(messages + user("3+3"), "six")
    for turn in client.conversation.turns:
        turn.experts = np.arange(len(turn.all_tokens) - 1, dtype=np.uint8)[:, None]
    sample = client.sample()
    np.testing.assert_array_equal(sample.routed_experts, turn.experts)
    again = Conversation.from_sample(sample).turns[-1]
    np.testing.assert_array_equal(again.experts, turn.experts)


def test_an_answer_that_was_cut_off_is_ended_by_the_template() -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "fo", finish="length")
    client.ask(messages + user("on"), "ur")
    sample = client.sample()
    assert client.template.tokenizer.decode(trained(sample)) == "four<|im_end|>"
    assert "fo<|im_end|>\n" in client.template.tokenizer.decode(sample.tokens.tolist())


def test_a_retold_history_makes_a_branch_and_is_counted() -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "four")
    longer = client.ask(messages + user("3+3"), "six, I think")
    changed = [*user("2+2"), {"role": "assistant", "content": "4"}, *user("and?")]
    place = client.place(changed)
    assert place.parent is None
    assert place.rerendered == len(place.added)
    client.ask(changed, "yes")
    first, second = client.sequences()
    decode = client.template.tokenizer.decode
    assert decode(trained(first)) == "four<|im_end|>six, I think<|im_end|>"
    assert decode(trained(second)) == "yes<|im_end|>"
    assert client.place(longer + user("more")).rerendered == 0


def test_what_branches_share_is_trained_in_the_longest() -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "four")
    client.ask(messages + user("a"), "short")
    client.ask(messages + user("b"), "quite long")
    first, second = client.sequences()
    decode = client.template.tokenizer.decode
    assert decode(trained(first)) == "four<|im_end|>quite long<|im_end|>"
    assert decode(trained(second)) == "short<|im_end|>"
    assert second.loss_mask[: len("four") + 1].tolist() == [0] * 5


def test_text_that_a_template_renders_anew_is_encoded_anew_and_counted() -> None:
    client = Client(TEMPLATES["REWRITING"])
    messages = client.ask(user("2+2"), "<think>\nwell\n</think>\n\nfour")
    place = client.place(messages + user("3+3"))
    assert place.parent is None
    assert place.rerendered == len(place.added)
    assert "well" not in client.template.tokenizer.decode(place.added)


def test_a_thought_is_kept_while_its_tools_are_called() -> None:
    client = Client(TEMPLATES["REWRITING"])
    messages = client.ask(user("2+2"), "<think>\nwell\n</think>\n\ncall")
    place = client.place([*messages, {"role": "tool", "content": "4"}])
    assert place.parent is client.conversation.turns[0]
    assert place.rerendered == 0
    assert client.template.tokenizer.decode(place.added) == (
        "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_whose_answer_never_arrived_is_given_to_who_asks_again() -> None:
    client = Client(TEMPLATES["PLAIN"])
    client.ask(user("2+2"), "four")
    client.conversation.turns[0].answered = False
    client.ask(user("2+2"), "this is not asked")
    assert len(client.seen) == 1
    client.ask(user("2+2"), "but a second call is")
    assert len(client.seen) == 2


def test_a_turn_that_no_client_has_received_is_not_trained() -> None:
    client = Client(TEMPLATES["PLAIN"])
    client.ask(user("2+2"), "four")
    client.conversation.turns[0].answered = False
    assert client.sequences() == []


@pytest.mark.parametrize("finish", ["stop", "", "length"])
def test_turns_of_an_interrupted_episode_are_found_in_its_sample(finish: str) -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "four")
    client.ask(messages + user("3+3"), "si", finish=finish)
    conversation = Conversation.from_sample(client.sample())
    assert [turn.all_tokens.tolist() for turn in conversation.turns] == [
        turn.all_tokens.tolist() for turn in client.conversation.turns
    ]
    again = Client(TEMPLATES["PLAIN"], conversation)
    messages = again.ask(user("2+2"), "four")
    assert again.seen == []
    place = again.place(messages + user("3+3"))
    turn = conversation.turn_at(place.parent, place.added)
    assert (turn.finish, client.template.tokenizer.decode(turn.tokens)[:2]) == (finish, "si")


def play(client: Client, draw: random.Random, steps: int, *, distinct: bool = False) -> None:
    """Play a client that continues, goes back, changes, drops and reorders its history.

    With `distinct`, no two turns are alike.
    """
    histories: list[Messages] = [user("start")]
    for step in range(steps):
        messages = list(draw.choice(histories))
        match draw.randrange(6):
            case 0:
                messages = messages[: draw.randrange(1, len(messages) + 1)]
            case 1:
                del messages[draw.randrange(len(messages))]
            case 2:
                at = draw.randrange(len(messages))
                messages[at] = {**messages[at], "content": draw.choice(["", "a", "<think>b"])}
            case 3:
                draw.shuffle(messages)
        messages += user(draw.choice(["", "x", " y "]))
        thought = draw.choice(["", "<think>\nt\n</think>\n\n", "<think>t</think>"])
        number = str(step) if distinct else draw.choice(["", str(step)])
        text = thought + draw.choice(["", "a", " a ", "b\n"]) + number
        histories.append(client.ask(messages, text, draw.choice(["stop", "length"])))


histories = (
    pytest.mark.parametrize("name", TEMPLATES),
    given(seed=st.integers(0, 2**32), steps=st.integers(1, 12)),
    settings(max_examples=60, deadline=None),
)


def over_histories(test: Callable[..., None]) -> Callable[..., None]:
    for decorate in reversed(histories):
        test = decorate(test)
    return test


@over_histories
def test_every_sampled_token_is_trained_once_in_the_context_that_the_engine_saw(
    name: str, seed: int, steps: int
) -> None:
    client = Client(TEMPLATES[name])
    play(client, random.Random(seed), steps)
    numbers = {(tuple(context), tuple(said)): n for n, (context, said) in enumerate(client.seen)}
    learned: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    sample = client.sample()
    for sequence, records in zip(sample.sequences, turns(sample), strict=True):
        tokens, start = sequence.tokens.tolist(), sequence.prompt_length
        for turn in records:
            end = start + turn["length"]
            if turn["by"] == "model":
                pair = tuple(tokens[:start]), tuple(tokens[start:end])
                assert pair in numbers, "the engine saw another context"
                at = slice(start - sequence.prompt_length, end - sequence.prompt_length)
                trains = turn["turn"] not in learned
                assert sequence.loss_mask[at].tolist() == [trains] * turn["length"]
                if trains and turn["length"]:
                    learned[turn["turn"]] = pair
                    assert (-sequence.rollout_log_probs[at] - 1).tolist() == list(pair[1])
                    assert client.seen[version(sequence, at)] == tuple(map(list, pair))
            start = end
    assert sorted(learned.values()) == sorted((tuple(c), tuple(s)) for c, s in client.seen if s)


def version(sequence: TokenSequence, at: slice) -> int:
    """Return the weight version of response tokens: the number of the turn that sampled them."""
    (version,) = (
        s.version for s in sequence.weight_versions if s.start < at.stop and s.end > at.start
    )
    return version


@over_histories
def test_branches_of_an_interrupted_episode_are_found_in_its_sample(
    name: str, seed: int, steps: int
) -> None:
    client = Client(TEMPLATES[name])
    play(client, random.Random(seed), steps, distinct=True)
    again = Client(TEMPLATES[name], Conversation.from_sample(client.sample(with_unanswered=True)))
    play(again, random.Random(seed), steps, distinct=True)
    assert [said for _, said in again.seen if said] == []
    assert sorted(map(trained, again.sequences())) == sorted(map(trained, client.sequences()))
