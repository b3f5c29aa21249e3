"""The tree of an episode: whatever a client does with its history, what was sampled is trained once
and in the context in which it was sampled."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.sample import Messages, Sample, WeightSpan
from sluice.wire import codec
from sluice_rollout.gateway.conversation import Conversation, Turn
from sluice_rollout.gateway.history import History, Place, Template
from sluice_rollout.turns import TURNS
from tests import chat

END = "<|im_end|>"
TEMPLATES = {name: Template(chat.tokenizer(getattr(chat, name))) for name in ("PLAIN", "REWRITING")}


def say(turn: Turn, ids: list[int], version: int = 0, finish: str = "stop") -> None:
    """The engine's answer at a turn. The log-prob of a token is its id, so that one shows whose it
    is."""
    turn.tokens = np.asarray(ids, np.int32)
    turn.log_probs = -np.asarray(ids, np.float32) - 1
    turn.spans = [WeightSpan(version, 0, len(ids))] if ids else []
    turn.finish = finish


class Client:
    """A program that talks with the gateway, and what the engine saw and said."""

    def __init__(self, template: Template, conversation: Conversation | None = None) -> None:
        self.conversation = conversation or Conversation()
        self.history = History(self.conversation, template)
        self.template = template
        self.seen: list[tuple[list[int], list[int]]] = []

    def place(self, messages: Messages) -> Place:
        return self.history.place(messages, None)

    def ask(self, messages: Messages, answer: str, finish: str = "stop") -> Messages:
        """The messages with the answer, as the client would send them next."""
        place = self.place(messages)
        turn = self.conversation.turn(place.parent, place.added)
        if not turn.finish:
            ending = END if finish == "stop" else ""
            say(turn, self.template.encode(answer + ending), len(self.seen), finish)
            self.seen.append((turn.context.tolist(), turn.tokens.tolist()))
        messages = [*messages, {"role": "assistant", "content": answer}]
        self.history.note(messages, None, turn, answer)
        return messages

    def samples(self) -> list[Sample]:
        samples = []
        for branch in self.conversation.branches():
            branch.write(sample := Sample(0))
            sample.check_tokens()
            samples.append(codec.sample_from_message(codec.sample_to_message(sample)))
        return samples


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def trained(sample: Sample) -> list[int]:
    response = sample.tokens[sample.prompt_length :]
    return [int(t) for t in response[sample.loss_mask.astype(bool)]]


def test_a_history_that_only_grows_is_one_sequence_of_what_was_sampled() -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "four  ")  # a template that trims would lose the blanks
    messages = client.ask(messages + user("3+3"), "six")
    (sample,) = client.samples()
    decode = client.template.tokenizer.decode
    assert decode(sample.tokens.tolist()) == (
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\nfour  <|im_end|>\n"
        "<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\nsix<|im_end|>"
    )
    assert decode(trained(sample)) == "four  <|im_end|>six<|im_end|>"
    assert [turn["by"] for turn in sample.metadata[TURNS]] == ["model", "environment", "model"]
    assert [span.version for span in sample.weight_versions] == [0, 1]


def test_an_answer_that_was_cut_off_is_ended_by_the_template() -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "fo", finish="length")
    client.ask(messages + user("on"), "ur")
    (sample,) = client.samples()
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
    first, second = client.samples()
    decode = client.template.tokenizer.decode
    assert decode(trained(first)) == "four<|im_end|>six, I think<|im_end|>"
    assert decode(trained(second)) == "yes<|im_end|>"
    assert client.place(longer + user("more")).rerendered == 0


def test_what_branches_share_is_trained_in_the_longest() -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "four")
    client.ask(messages + user("a"), "short")
    client.ask(messages + user("b"), "quite long")
    first, second = client.samples()
    decode = client.template.tokenizer.decode
    assert decode(trained(first)) == "four<|im_end|>quite long<|im_end|>"
    assert decode(trained(second)) == "short<|im_end|>"
    assert second.loss_mask[: len("four") + 1].tolist() == [0] * 5


def test_a_template_that_drops_earlier_thoughts_is_followed_and_counted() -> None:
    client = Client(TEMPLATES["REWRITING"])
    messages = client.ask(user("2+2"), "<think>\nwell\n</think>\n\nfour")
    place = client.place(messages + user("3+3"))
    assert place.parent is None
    assert place.rerendered == len(place.added)
    assert "well" not in client.template.tokenizer.decode(place.added)


def test_a_thought_is_kept_while_the_turns_tools_are_called() -> None:
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


def test_what_no_client_has_is_not_trained() -> None:
    client = Client(TEMPLATES["PLAIN"])
    client.ask(user("2+2"), "four")
    client.conversation.turns[0].answered = False
    assert client.samples() == []


@pytest.mark.parametrize("finish", ["stop", "", "length"])
def test_an_interrupted_play_is_found_again_in_its_sample(finish: str) -> None:
    client = Client(TEMPLATES["PLAIN"])
    messages = client.ask(user("2+2"), "four")
    client.ask(messages + user("3+3"), "si", finish=finish)
    (sample,) = client.samples()
    sample = codec.sample_from_message(codec.sample_to_message(sample))
    conversation = Conversation.of(sample)
    assert [turn.whole.tolist() for turn in conversation.turns] == [
        turn.whole.tolist() for turn in client.conversation.turns
    ]
    again = Client(TEMPLATES["PLAIN"], conversation)
    messages = again.ask(user("2+2"), "four")
    assert again.seen == []
    place = again.place(messages + user("3+3"))
    turn = conversation.turn(place.parent, place.added)
    assert (turn.finish, client.template.tokenizer.decode(turn.tokens)[:2]) == (finish, "si")


def play(client: Client, draw: random.Random, steps: int) -> None:
    """A client that goes on, goes back, changes, drops and re-orders what it was told."""
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
        text = thought + draw.choice(["", "a", " a ", "b\n"]) + draw.choice(["", str(step)])
        histories.append(client.ask(messages, text, draw.choice(["stop", "length"])))


@pytest.mark.parametrize("name", TEMPLATES)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_every_sampled_token_is_trained_once_in_the_context_that_the_engine_saw(
    name: str, seed: int, steps: int
) -> None:
    client = Client(TEMPLATES[name])
    play(client, random.Random(seed), steps)
    asked = {(tuple(context), tuple(said)) for context, said in client.seen if said}
    learned: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for sample in client.samples():
        tokens, start = sample.tokens.tolist(), sample.prompt_length
        for turn in sample.metadata[TURNS]:
            end = start + turn["length"]
            if turn["by"] == "model" and turn["length"]:
                pair = tuple(tokens[:start]), tuple(tokens[start:end])
                assert pair in asked, "the engine saw another context"
                at = slice(start - sample.prompt_length, end - sample.prompt_length)
                mask = sample.loss_mask[at]
                assert mask.min() == mask.max()
                if mask.all():
                    learned.append(pair)
                    assert (-sample.rollout_log_probs[at] - 1).tolist() == list(pair[1])
            start = end
    assert sum(len(said) for _, said in learned) == sum(len(said) for _, said in client.seen)
