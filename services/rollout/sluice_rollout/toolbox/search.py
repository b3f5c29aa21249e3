"""Search in the user's documents, or with the user's retriever."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from sluice.samples.sample import Float32, Int32
from sluice_rollout.toolbox.base import ToolUnavailableError, body_of, definition_of, shortened

_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75
_ANSWER_BYTES = 4 << 20
_TRIES = 3
_PAUSE_SECONDS = 0.5
_ABOUT = "Search for documents. The answer is the best of them."


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return _WORD.findall(text.lower())


class Index:
    """Okapi BM25 over documents (Robertson and Zaragoza 2009, eq. 3.15); k1 = 1.5, b = 0.75.

    The idf is Lucene's, which is never negative.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(words(text)) for text in texts]
        self.size = len(texts)
        lengths = np.array([sum(count.values()) for count in counts], np.float32)
        self._norm = _K1 * (1 - _B + _B * lengths / max(float(lengths.mean()), 1.0))
        postings: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, n in count.items():
                postings.setdefault(word, []).append((number, n))
        self._postings: dict[str, tuple[Int32, Float32]] = {
            word: (np.array([d for d, _ in entries], np.int32), self._weights(entries))
            for word, entries in postings.items()
        }

    def _weights(self, postings: list[tuple[int, int]]) -> Float32:
        """Return the scores that a word adds to the documents that have it."""
        idf = np.log1p((self.size - len(postings) + 0.5) / (len(postings) + 0.5))
        n = np.array([count for _, count in postings], np.float32)
        norm = self._norm[[number for number, _ in postings]]
        return np.asarray(idf * n * (_K1 + 1) / (n + norm), np.float32)

    def best(self, query: str, count: int) -> list[int]:
        """Return the numbers of the best documents, best first; of equal ones the first.

        Documents without a word of the query are left out.
        """
        scores = np.zeros(self.size, np.float32)
        for word in words(query):
            if word in self._postings:
                numbers, weights = self._postings[word]
                scores[numbers] += weights
        order = np.argsort(-scores, kind="stable")[:count]
        return [int(number) for number in order if scores[number] > 0]


def documents(paths: Iterable[Path]) -> list[str]:
    """Read the documents of JSON-lines files: `contents` (search-R1's), or `title` and `text`.

    Raises ValueError with the file and the line.
    """
    return [
        _document(line, f"{path}:{number}")
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip()
    ]


def _document(line: str, position: str) -> str:
    try:
        row = json.loads(line)
        text = row.get("contents") or f"{row.get('title', '')}\n{row['text']}"
        return str(text).strip()
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{position}: expected an object with `contents`, or with `text` and a `title`: {error}"
        ) from error


def shown(texts: Iterable[str]) -> str:
    """Format documents as search-R1 does: the first line is the title."""
    parts = [text.partition("\n") for text in texts]
    return "\n".join(
        f"Doc {number} (Title: {title.strip()}) {rest.strip()}"
        for number, (title, _, rest) in enumerate(parts, 1)
    )


@dataclass
class Search:
    """The tool `search`: BM25 over JSON-lines files, in the worker's memory."""

    paths: str | Path | Sequence[str | Path]
    name: str = "search"
    # Most documents, and characters, of an answer.
    top_k: int = 3
    longest: int = 4096

    @cached_property
    def texts(self) -> list[str]:
        paths = [self.paths] if isinstance(self.paths, str | Path) else self.paths
        return documents(map(Path, paths))

    @cached_property
    def index(self) -> Index:
        return Index(self.texts)

    @property
    def definition(self) -> dict[str, Any]:
        return definition_of(self.name, _ABOUT, query="Words to look for.")

    def session(self) -> Callable[..., str]:
        """Return the function of the tool. It keeps no state."""
        _ = self.index
        return self.search

    def search(self, query: str) -> str:
        """Return the best documents, as text."""
        best = [self.texts[number] for number in self.index.best(str(query), self.top_k)]
        return shortened(shown(best), self.longest) if best else "no document has these words"


@dataclass(slots=True)
class Retriever:
    """The tool `search`, answered by a retrieval server such as search-R1's.

    The request is `{"queries": [text], "topk": n, "return_scores": true}`, and the answer
    `{"result": [[{"document": {"contents": text}, "score": number}]]}`.
    """

    url: str
    name: str = "search"
    top_k: int = 3
    longest: int = 4096
    # Time limit of one attempt.
    seconds: float = 10.0
    definition: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.definition = definition_of(self.name, _ABOUT, query="Words to look for.")

    def session(self) -> Callable[..., Any]:
        """Return the function of the tool. It keeps no state."""
        return self.search

    async def search(self, query: str) -> str:
        """Return the best documents, as text. Raises ToolUnavailableError if the server is away."""
        body = {"queries": [str(query)], "topk": self.top_k, "return_scores": True}
        error: Exception | None = None
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_PAUSE_SECONDS)
            try:
                answer = await self._ask(body)
                texts = [entry["document"]["contents"] for entry in answer["result"][0]]
                return shortened(shown(texts), self.longest) if texts else "no document"
            except (aiohttp.ClientError, TimeoutError, OSError) as reason:
                error = reason
            except (ValueError, KeyError, IndexError, TypeError) as reason:
                raise ToolUnavailableError(
                    f"{self.url}: expected search-R1's answer: {type(reason).__name__}: {reason}"
                ) from reason
        raise ToolUnavailableError(f"{self.url}: {type(error).__name__}: {error}") from error

    async def _ask(self, body: dict[str, Any]) -> Any:
        limit = aiohttp.ClientTimeout(total=self.seconds)
        async with (
            aiohttp.ClientSession(timeout=limit, raise_for_status=True) as session,
            session.post(self.url, json=body) as response,
        ):
            return json.loads(await body_of(response, _ANSWER_BYTES))
