"""The texts of episodes, turn by turn, for people who read samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.data.chat import load_tokenizer
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Sample, SampleGroup, TokenSequence
from sluice.samples.turns import ENVIRONMENT, IMAGES, MODEL, TURNS, records_of
from sluice.telemetry import logs

Decode = Callable[[list[int]], str]
# Tokens of a turn whose text is kept. The loop waits while texts are decoded.
MOST_TOKENS = 1024
_CUT = " ... ({} more tokens)"
# What a turn of the model tells beside its text.
_FIELDS = ("turn", "finish", "stop", "reward")


# Key of a transcript in the record of a sample.
KEY = "transcript"


@dataclass
class LazyDecoder:
    """Decodes tokens with the model's tokenizer, which is loaded when it is first needed.

    Texts are empty if the trainer has no tokenizer, because training does not need one.
    """

    directory: Path
    trust_remote_code: bool

    def __call__(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens)) if self._tokenizer else ""

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            return load_tokenizer(self.directory, trust_remote_code=self.trust_remote_code)
        except ConfigurationError as error:
            logs.get().warning("transcripts of episodes have no texts", reason=str(error))
            return None


def chosen(group: SampleGroup) -> list[Sample]:
    """Return the episodes of a group that get a transcript: the best one and the worst one."""
    episodes = [sample for sample in group.samples if sample.metadata.get(TURNS)]
    episodes.sort(key=lambda sample: sample.reward or 0.0)
    return episodes if len(episodes) < 2 else [episodes[-1], episodes[0]]


def transcript(sample: Sample, decode: Decode) -> list[dict[str, Any]]:
    """Return the turns of an episode's sequences, each turn once.

    An entry is a sequence: its `seat`, if the job has seats; the number of the turn that it
    continues (`after`), if it is a branch; and its `turns` with text and number of tokens.
    """
    entries: list[dict[str, Any]] = []
    seen: set[int] = set()
    for sequence, records in zip(sample.sequences, records_of(sample.metadata), strict=False):
        first = max((i + 1 for i, r in enumerate(records) if r.get("turn") in seen), default=0)
        entry: dict[str, Any] = {"turns": list(_turns(sequence, records, decode, first))}
        if first:
            entry["after"] = records[first - 1]["turn"]
        if sequence.seat:
            entry["seat"] = sequence.seat
        entries.append(entry)
        seen |= {record["turn"] for record in records if "turn" in record}
    return entries


def _turns(
    sequence: TokenSequence, records: Sequence[Mapping[str, Any]], decode: Decode, first: int
) -> Iterator[dict[str, Any]]:
    """Yield the turns from record `first` on; from 0 on with the prompt before them."""
    tokens, images = sequence.tokens.tolist(), iter(sequence.images)
    at = sequence.prompt_length
    of_records = sum(record.get(IMAGES, 0) for record in records)
    shown = list(islice(images, max(len(sequence.images) - of_records, 0)))
    if not first:
        yield _turn(ENVIRONMENT, tokens[:at], decode, shown)
    for index, record in enumerate(records):
        end = at + record["length"]
        shown = list(islice(images, record.get(IMAGES, 0)))
        if index >= first:
            fields = {name: record[name] for name in _FIELDS if name in record}
            kept = fields if record["by"] == MODEL else {}
            yield _turn(record["by"], tokens[at:end], decode, shown) | kept
        at = end


def _turn(by: str, tokens: list[int], decode: Decode, images: Sequence[str]) -> dict[str, Any]:
    text = decode(tokens[:MOST_TOKENS])
    text += _CUT.format(len(tokens) - MOST_TOKENS) if len(tokens) > MOST_TOKENS else ""
    shown = {"images": list(images)} if images else {}
    return {"by": by, "text": text, "tokens": len(tokens), **shown}
