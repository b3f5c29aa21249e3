"""Random conversations that are compacted: what is trained is what the engine was given and said.

Every token that the engine samples gets a log-prob of its own, by which it is found again.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from sluice.engines.protocol import Generation
from sluice.samples.sample import Messages, Prompt, Sample, SampleStatus, WeightSpan
from sluice.wire import codec
from sluice_rollout.episode import Episode
from tests.unit.gateway.gateway_tools import (
    counter_value,
    episode_runner,
    open_registry,
    token_ids,
)
from tests.unit.rollout.scripted_engine import PARAMS, Script

TOKENS, STEPS, EPISODES = 500, 14, 12
END = token_ids("<|im_end|>")
DROP: dict[str, Any] = {"overflow": "drop_tool_results", "turnTokens": 20}
SUMMARISE: dict[str, Any] = {
    "overflow": "summarise",
    "turnTokens": 20,
    "summary": {"prompt": "sum up!", "tokens": 30, "most": 3},
}


class Sampled(NamedTuple):
    """A token that the engine has sampled: after which tokens, and by which weights."""

    context: list[int]
    token: int
    version: int


class RandomEngine(Script):
    """Answers with random words. Some answers are cut off by an update of its weights."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw
        self.sampled: dict[float, Sampled] = {}

    async def generate(
        self, rid: str, input_ids: list[int], sampling: dict[str, Any], **_: Any
    ) -> Generation:
        letters = "".join(self.draw.choices("abcd \n", k=self.draw.randint(1, 25)))
        tokens, finish = token_ids(letters), "stop"
        if self.draw.random() < 0.15:
            finish = "abort"
        else:
            tokens = [*tokens, *END]
        if len(tokens) > sampling["max_new_tokens"]:
            tokens, finish = tokens[: sampling["max_new_tokens"]], "length"
        log_probs = []
        for at, token in enumerate(tokens):
            log_probs.append(-1.0 - len(self.sampled))
            context = [*input_ids, *tokens[:at]]
            self.sampled[log_probs[-1]] = Sampled(context, token, self.version)
        spans = [WeightSpan(self.version, 0, len(tokens))]
        self.version += finish == "abort"
        return Generation(tokens, log_probs, spans, finish, None)


class RandomClient:
    """Asks with its whole history, which it sometimes cuts, changes or asks again."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.refused = 0

    async def __call__(self, episode: Episode) -> None:
        gateway, messages = episode.gateway, [self._message("system"), self._message("user")]
        headers = {"Authorization": f"Bearer {gateway.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(STEPS):
                body = {"model": "any", "messages": messages}
                url = f"{gateway.base_url}/chat/completions"
                async with session.post(url, json=body) as answer:
                    document = await answer.json()
                if answer.status == 200:
                    messages = self._next([*messages, document["choices"][0]["message"]])
                    continue
                assert document["error"]["code"] == "context_length_exceeded"
                self.refused += 1
                messages = messages[:2]

    def _next(self, messages: Messages) -> Messages:
        choice = self.draw.random()
        if choice < 0.05:  # asks again from an earlier place
            return messages[: self.draw.randrange(2, len(messages) + 1)]
        if choice < 0.1:  # changes what was said
            at = self.draw.randrange(1, len(messages))
            return [*messages[:at], messages[at] | {"content": "changed"}, *messages[at + 1 :]]
        role = "user" if choice < 0.25 else "tool"
        return [*messages, self._message(role)]

    def _message(self, role: str) -> dict[str, Any]:
        text = "".join(self.draw.choices("wxyz ", k=self.draw.randint(1, 120)))
        return {"role": role, "content": text} | ({"tool_call_id": "c"} if role == "tool" else {})


def check(sample: Sample, engine: RandomEngine, limit: int = TOKENS) -> None:
    """Check each token of each sequence, after a round trip through the wire format."""
    sample = codec.sample_from_message(codec.sample_to_message(sample))
    sample.check_tokens()
    trained: Counter[float] = Counter()
    for sequence in sample.sequences:
        tokens, start = sequence.tokens.tolist(), sequence.prompt_length
        assert sequence.response_length <= limit
        versions = {
            at: span.version
            for span in sequence.weight_versions
            for at in range(span.start, span.end)
        }
        for at, (mask, log_prob) in enumerate(
            zip(sequence.loss_mask.tolist(), sequence.rollout_log_probs.tolist(), strict=True)
        ):
            if mask:
                trained[log_prob] += 1
                seen = engine.sampled[log_prob]
                assert (tokens[: start + at], tokens[start + at]) == (seen.context, seen.token)
                assert versions[at] == seen.version
    assert trained == dict.fromkeys(engine.sampled, 1), "each sampled token is trained once"


@pytest.mark.parametrize("limits", [DROP, SUMMARISE], ids=["drop_tool_results", "summarise"])
async def test_compacted_conversations_train_each_token_once_as_it_was_sampled(
    limits: dict[str, Any], tmp_path: Path
) -> None:
    counted = ("dropped_results", {}) if limits is DROP else ("summaries", {"outcome": "ok"})
    before, branches = counter_value(counted[0], **counted[1]), 0
    async with open_registry(tmp_path, rollout__limits=limits) as registry:
        for seed in range(EPISODES):
            draw = random.Random(seed)
            engine, client = RandomEngine(draw), RandomClient(draw)
            runner = episode_runner(registry, client, engine)
            params = PARAMS | {"max_new_tokens": TOKENS}
            sample = await runner(Prompt(seed, "?"), [1], Sample(0), params)
            assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED), sample.error
            check(sample, engine)
            branches += len(sample.sequences)
    assert counter_value(counted[0], **counted[1]) - before > EPISODES, "histories were compacted"
    assert branches > 2 * EPISODES
