"""Generates the tokens of many requests together, a token for each at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sluice.engines.transformers.server.model import ServedModel
from sluice.engines.transformers.server.sampling import SamplingParameters, choose

PauseMode = Literal["in_place", "retract", "abort"]
# Token in places that no attention sees.
_PADDING = 0
# Tokens before the longest stop text that are decoded with it, because some tokenizers render the
# first token of a text in another way.
_STOP_MARGIN = 8


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, and the response so far."""

    rid: str
    prompt: list[int]
    parameters: SamplingParameters
    # Source of chance; None: the engine's.
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    # [version, first token, end] of the response's parts, as `WeightSpan`.
    spans: list[list[Any]] = field(default_factory=list)
    # `stop`, `length` or `abort`; empty while it runs.
    finish: str = ""
    matched_stop: str | None = None
    answer: Future[dict[str, Any]] = field(default_factory=Future)

    def append(self, token: int, log_prob: float, version: str) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append([version, len(self.tokens) - 1, len(self.tokens)])
        self.spans[-1][2] = len(self.tokens)

    def fail(self, error: Exception) -> None:
        """Answer with an error that is the engine's. A request that has ended stays as it is."""
        if not self.finish:
            self.finish = "failed"
            reason = f"{type(error).__name__}: {error}"
            self.answer.set_exception(RuntimeError(f"the engine failed: {reason}"))

    def end(self, finish: str) -> None:
        """Answer with what there is. A request that has ended stays as it is."""
        if self.finish:
            return
        self.finish = finish
        self.answer.set_result(
            {
                "tokens": self.tokens,
                "log_probs": self.log_probs,
                "spans": self.spans,
                "finish": finish,
                "matched_stop": self.matched_stop,
            }
        )


class Batch:
    """Requests that run together, and those that wait.

    The rows of a batch are computed from their first token whenever it is formed anew: when there
    are requests waiting and half of the rows are free, and when a pause has dropped what was
    computed. So rows never move in the model's cache, whatever kind the model has.
    """

    def __init__(self, model: ServedModel, rows: int) -> None:
        """Rows: most requests that run together."""
        self.model, self._most = model, rows
        # Held while a token is computed, and by whoever changes weights.
        self.weights = threading.Lock()
        self._wake = threading.Condition()
        self._waiting: list[Request] = []
        self._rows: list[Request] = []
        self._cache: Any = None
        self._mask = torch.empty(0)
        self._paused_since: float | None = None
        self._stopped = False
        self._generator = torch.Generator(model.device)
        self._generator.seed()
        self.generated_tokens = 0

    @property
    def running(self) -> int:
        return sum(not row.finish for row in self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def paused_seconds(self) -> float:
        since = self._paused_since
        return 0.0 if since is None else time.monotonic() - since

    def add(self, rid: str, prompt: list[int], parameters: SamplingParameters) -> Request:
        seed, generator = parameters.sampling_seed, None
        if seed is not None:
            generator = torch.Generator(self.model.device).manual_seed(seed)
        request = Request(rid, prompt, parameters, generator)
        with self._wake:
            self._waiting.append(request)
            self._wake.notify_all()
        return request

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """End requests; they answer with the tokens that they have."""
        with self._wake:
            for request in (*self._rows, *self._waiting):
                if chosen(request):
                    request.end("abort")
            self._waiting = [request for request in self._waiting if not request.finish]

    def pause(self, mode: PauseMode) -> None:
        """Stop after the token that is being computed.

        in_place: what was computed stays. retract: it is computed again at the end of the pause.
        abort: running requests end.
        """
        with self._wake:
            if self._paused_since is None:
                self._paused_since = time.monotonic()
        with self.weights:
            pass  # the last token has been computed
        if mode == "abort":
            self.abort(lambda _: True)
        if mode != "in_place":
            self.forget()

    def resume(self) -> None:
        with self._wake:
            self._paused_since = None
            self._wake.notify_all()

    def forget(self) -> None:
        """Drop what was computed for the running requests; it is computed again."""
        with self.weights:
            self._cache = None

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify_all()

    def run(self) -> None:
        """Generate until `stop`, in the only thread that computes tokens."""
        while self._wait_for_work():
            try:
                with self.weights:
                    if self._paused_since is None:
                        self._step()
            except Exception as error:
                # The model's code failed, or memory is used up: those who wait hear of it.
                self._fail(error)

    def _wait_for_work(self) -> bool:
        """Return True when there is something to compute; False once stopped."""
        with self._wake:
            while not self._stopped:
                if self._paused_since is None and (self.running or self._waiting):
                    return True
                self._wake.wait()
        return False

    def _fail(self, error: Exception) -> None:
        with self._wake:
            failed, self._rows, self._cache = self._rows, [], None
        for request in failed:
            request.fail(error)

    def _step(self) -> None:
        """Compute one token of each row."""
        with self._wake:
            if self._cache is None or (self._waiting and 2 * self.running <= self._most):
                self._form()
        if not self._rows:
            return
        logits = self.model.next_logits(self._ids(), self._mask, self._cache)
        self._cache = logits.cache
        with self._wake:  # an abort answers with whole tokens
            for row, scores in zip(self._rows, logits.scores, strict=True):
                if not row.finish:
                    self._take_or_fail(row, scores)
            alive = [[float(not row.finish)] for row in self._rows]
            if not self.running:
                self._rows, self._cache = [], None  # frees the memory of the cache
                return
        self._mask = torch.cat([self._mask, torch.tensor(alive, device=self.model.device)], 1)

    def _form(self) -> None:
        """Let waiting requests join; then all rows have to be computed."""
        rows = [row for row in self._rows if not row.finish]
        free = self._most - len(rows)
        joining, self._waiting = self._waiting[:free], self._waiting[free:]
        self._rows, self._cache = [*rows, *joining], None
        lengths = torch.tensor([len(row.prompt) + len(row.tokens) for row in self._rows])
        longest = int(lengths.max()) if self._rows else 0
        padding = (longest - lengths)[:, None]
        self._mask = (torch.arange(longest) >= padding).float().to(self.model.device)

    def _ids(self) -> Tensor:
        """Return the [rows, t] tokens to compute: the newest ones, or all, padded on the left."""
        if self._cache is not None:
            newest = [row.tokens[-1] if not row.finish else _PADDING for row in self._rows]
            ids = torch.tensor(newest)[:, None]
        else:
            whole = [torch.tensor(row.prompt + row.tokens) for row in self._rows]
            ids = pad_sequence(whole, True, _PADDING, padding_side="left")
        return ids.to(self.model.device)

    def _take_or_fail(self, row: Request, scores: Tensor) -> None:
        try:
            self._take(row, scores)
        except Exception as error:  # such as logits that are not finite: the other rows go on
            row.fail(error)

    def _take(self, row: Request, scores: Tensor) -> None:
        """Draw the next token of a row, and end the row if it is the last one."""
        chosen = row.parameters
        ends = chosen.stop_token_ids | (frozenset() if chosen.ignore_eos else self.model.ends)
        if len(row.tokens) < chosen.min_new_tokens:
            scores = scores.index_fill(-1, torch.tensor([*ends], device=scores.device).int(), -1e9)
        token, log_prob = choose(scores, chosen, row.generator or self._generator)
        row.append(token, log_prob, self.model.version)
        self.generated_tokens += 1
        if token in ends:
            row.end("stop")
        elif stop := self._stopped_by(row):
            row.matched_stop = stop
            row.end("stop")
        elif self._is_full(row):
            row.end("length")

    def _stopped_by(self, row: Request) -> str:
        """Return the stop text that the newest token completes; empty if none."""
        stops = row.parameters.stop
        if not stops or len(row.tokens) < row.parameters.min_new_tokens:
            return ""
        # Each token has at least a byte. Older tokens cannot belong to a stop that ends now.
        reach = max(len(stop.encode()) for stop in stops) + _STOP_MARGIN
        text = self.model.decode(row.tokens[-reach:])
        return next((stop for stop in stops if stop in text), "")

    def _is_full(self, row: Request) -> bool:
        length = len(row.prompt) + len(row.tokens)
        return (
            len(row.tokens) >= row.parameters.max_new_tokens or length >= self.model.context_tokens
        )
