"""A reward model behind an unmodified SGLang server (`--is-embedding`), through /classify.

/classify takes `{"text": [...]}` and returns `{"embedding": [outputs of the model's head], ...}`
for each text. Samples that are ready at the same time share a request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from sluice import input_checks
from sluice.api.groups.data import RewardModelSpec as Settings
from sluice.data.chat import PromptError, render
from sluice.data.messages import text_of
from sluice.input_checks import InputError
from sluice.rewards.types import RewardError, RewardInput, shown
from sluice.wire.json_endpoint import JsonEndpoint

_MOST_IN_A_REQUEST = 64
_REQUESTS = 8


class RewardModel:
    """A client of a reward model: `await model(sample)` returns the reward."""

    def __init__(self, settings: Settings, timeout_seconds: float) -> None:
        self._settings = settings
        self._endpoint = JsonEndpoint(
            f"{settings.url.rstrip('/')}/classify", timeout_seconds, RewardError
        )
        self._tokenizer: Any = None
        self._waiting: deque[tuple[str, asyncio.Future[float]]] = deque()
        self._requests: set[asyncio.Task[None]] = set()

    def load(self) -> None:
        """Load the tokenizer, if one is configured. Raises RewardError."""
        if self._settings.tokenizer is None or self._tokenizer is not None:
            return
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self._settings.tokenizer, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise RewardError(
                f"reward.model.tokenizer: {self._settings.tokenizer}: {error}", "unavailable"
            ) from error
        if not tokenizer.chat_template:
            raise RewardError(
                f"reward.model.tokenizer: {self._settings.tokenizer} has no chat template",
                "unavailable",
            )
        self._tokenizer = tokenizer

    async def __call__(self, sample: RewardInput) -> float:
        """Return the reward of a sample. Raises RewardError."""
        self.load()
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._text(sample), future))
        if len(self._requests) < _REQUESTS:
            task = asyncio.create_task(self._score())
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
        return await future

    async def close(self) -> None:
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        await self._endpoint.close()

    def _text(self, sample: RewardInput) -> str:
        """Return the text that the reward model reads. Raises RewardError."""
        messages = sample.prompt
        if self._tokenizer is None:
            said = (
                messages
                if isinstance(messages, str)
                else "\n".join(text_of(message.get("content")) for message in messages)
            )
            return said + sample.response
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        chat = [*messages, {"role": "assistant", "content": sample.response}]
        try:
            return render(self._tokenizer, chat, chat=True, opened=False)
        except PromptError as error:
            raise RewardError(f"reward.model.tokenizer: {error}", "invalid") from error

    async def _score(self) -> None:
        await asyncio.sleep(0)  # let samples of the same group join the request
        while self._waiting:
            count = min(len(self._waiting), _MOST_IN_A_REQUEST)
            batch = [self._waiting.popleft() for _ in range(count)]
            try:
                answer = await self._endpoint.post({"text": [text for text, _ in batch]})
                scores: list[float | RewardError] = list(self._read(answer, len(batch)))
            except RewardError as error:
                scores = [error] * len(batch)
            for (_, future), score in zip(batch, scores, strict=True):
                if future.done():
                    continue
                if isinstance(score, RewardError):
                    future.set_exception(score)
                else:
                    future.set_result(score)

    def _read(self, answer: Any, count: int) -> list[float | RewardError]:
        if not isinstance(answer, list) or len(answer) != count:
            raise RewardError(
                f"{self._endpoint.url}: expected a list of {count} answers, got {shown(answer)}",
                "invalid",
            )
        return [self._output(entry) for entry in answer]

    def _output(self, answer: Any) -> float | RewardError:
        outputs = answer.get("embedding") if isinstance(answer, dict) else None
        if not isinstance(outputs, list) or len(outputs) <= self._settings.output:
            return RewardError(
                f"{self._endpoint.url}: expected an embedding with more than "
                f"{self._settings.output} outputs (reward.model.output), got {shown(answer)}",
                "invalid",
            )
        score = outputs[self._settings.output]
        try:
            return input_checks.reward(score)
        except InputError as error:
            return RewardError(f"{self._endpoint.url}: {error}", "invalid")
