"""An agent's conversation as a tree of turns, and the branches of it that are trained.

A turn continues another one if its context begins with all tokens of that one, context and answer,
and their placeholders stand for the same images.
The sampled tokens are then kept, and `added` holds the tokens in between. Any other turn starts
anew with its whole context. So if a client changes, drops or reorders its history, that makes a
branch.

A branch is the path from a first turn to a turn that no other turn continues. Branches are ordered
by their number of sampled tokens, largest first. A turn is trained in the first branch that
contains it, and is context in the others, so every sampled token is trained once.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from sluice.samples.sample import Experts, Float32, Int32, Sample, TokenSequence, WeightSpan
from sluice.samples.turns import (
    BRANCH_TURNS,
    ENVIRONMENT,
    IMAGE_TOKENS,
    IMAGES,
    MODEL,
    TURNS,
    records_of,
)

Record = dict[str, Any]  # a turn in a sample's metadata


def _int32(ids: Iterable[int] = ()) -> Int32:
    return np.fromiter(ids, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Turn:
    """An answer of the model, and the context tokens that are new with it.

    Parameters
    ----------
    parent
        The turn that this one continues, or None.
    added
        [n] context tokens after the parent's tokens; all of the context without a parent.
    tokens, log_probs
        [m] sampled tokens and their log-probs.
    spans
        Weight versions of `tokens`.
    finish
        "stop" or "length"; empty while the turn is unfinished.
    stop
        The stop string that ended the turn.
    answered
        True if the client has the answer, or is about to.
    experts
        Experts that context and answer were routed to (`Sample.routed_experts`).
    reward
        Reward of this turn alone.
    is_summary
        True if the gateway asked for this turn, to summarise the history.
    images
        Digests of the images of `added`, in the order of their placeholders, one token each.
    image_tokens
        Tokens that these images add once each placeholder is as long as its image.
    cached_tokens
        Tokens of the context that the engine had in its prefix cache.

    """

    parent: Turn | None
    added: Int32
    tokens: Int32 = field(default_factory=_int32)
    log_probs: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[WeightSpan] = field(default_factory=list)
    finish: str = ""
    stop: str | None = None
    answered: bool = False
    experts: Experts | None = None
    reward: float = 0.0
    is_summary: bool = False
    images: tuple[str, ...] = ()
    image_tokens: int = 0
    cached_tokens: int = 0

    @property
    def path(self) -> list[Turn]:
        """The turns from the first turn of the branch to this one."""
        path, turn = [self], self.parent
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    @property
    def context(self) -> Int32:
        """The tokens that the engine sees before it answers."""
        return np.concatenate([self.parent.all_tokens, self.added]) if self.parent else self.added

    @property
    def all_tokens(self) -> Int32:
        """The tokens of context and answer."""
        return np.concatenate([part for turn in self.path for part in (turn.added, turn.tokens)])

    @property
    def all_images(self) -> tuple[str, ...]:
        """The digests of the images of the context, in the order of their placeholders."""
        return tuple(digest for turn in self.path for digest in turn.images)

    @property
    def added_length(self) -> int:
        """The number of tokens of `added`, once each placeholder is as long as its image."""
        return len(self.added) + self.image_tokens

    @property
    def context_length(self) -> int:
        """The number of tokens before the answer, with those of images."""
        return sum(turn.added_length + len(turn.tokens) for turn in self.path) - len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first answer of the branch, with those of images."""
        return self.path[0].added_length


@dataclass(frozen=True, slots=True)
class Branch:
    """A sequence to train on."""

    turns: Sequence[Turn]
    trained: frozenset[Turn]  # the turns that no earlier branch contains

    @property
    def sampled(self) -> int:
        """The number of sampled tokens, including those that are context here."""
        return sum(len(turn.tokens) for turn in self.turns)

    def write(self, sequence: TokenSequence, numbers: Mapping[Turn, int]) -> list[Record]:
        """Write tokens, masks, log-probs and versions into a sequence.

        Returns the records of the turns, with their `numbers`.
        """
        first = self.turns[0]
        sequence.cut(0)
        sequence.tokens, sequence.routed_experts = first.added, self.turns[-1].experts
        sequence.images = list(self.turns[-1].all_images)
        sequence.image_tokens = sum(turn.image_tokens for turn in self.turns)
        records: list[Record] = []
        for turn in self.turns:
            if turn is not first:
                version = sequence.weight_versions[-1].version if sequence.weight_versions else 0
                n = len(turn.added)
                spans = [WeightSpan(version, 0, n)] if n else []
                sequence.append(turn.added.tolist(), [], spans, trainable=False)
                records.append({"by": ENVIRONMENT, "length": n, "finish": "stop"})
            sequence.append(
                turn.tokens.tolist(),
                turn.log_probs.tolist(),
                turn.spans,
                trainable=turn in self.trained,
            )
            record: Record = {"by": MODEL, "length": len(turn.tokens), "finish": turn.finish}
            record |= {"stop": turn.stop} if turn.stop else {}
            record |= {"reward": turn.reward} if turn.reward else {}
            if turn.images:  # those before this turn; `_read_turns` needs them
                record |= {IMAGES: len(turn.images), IMAGE_TOKENS: turn.image_tokens}
            records.append(record | {"turn": numbers[turn]})
        return records


@dataclass(slots=True)
class Conversation:
    """The turns of an agent, in the order in which they began."""

    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def from_sample(cls, sample: Sample, seat: str = "") -> Conversation:
        """Restore the turns of a seat that an interrupted attempt left in a sample.

        When the agent repeats its requests, they find these turns.
        """
        turns: dict[int, Turn] = {}
        for sequence, records in zip(sample.sequences, records_of(sample.metadata), strict=True):
            if sequence.seat == seat:
                _read_turns(sequence, records, turns)
        return cls([turns[number] for number in sorted(turns)])

    def longest_continued(self, ids: Sequence[int], images: Sequence[str] = ()) -> Turn | None:
        """Find the longest turn of which all tokens are a prefix of `ids`.

        Its images must be the first ones of `images`, which are those of all placeholders.
        """
        best, length, tokens, all_images = None, 0, _int32(ids), tuple(images)
        for turn in [*self.turns]:  # a copy: this may run in a thread while turns come and go
            whole = turn.all_tokens if turn.finish else _int32()
            if length < len(whole) <= len(ids) and np.array_equal(whole, tokens[: len(whole)]):
                seen = turn.all_images
                if seen == all_images[: len(seen)]:
                    best, length = turn, len(whole)
        return best

    def turn_at(
        self,
        parent: Turn | None,
        added: Sequence[int],
        images: tuple[str, ...] = (),
        image_tokens: int = 0,
    ) -> Turn:
        """Return the turn at a context: an unanswered one if there is one, else a new one.

        A turn is unanswered if an earlier attempt left it, or if its client has disconnected.
        """
        tokens = _int32(added)
        for turn in self.turns:
            is_unanswered = not turn.answered and turn.parent is parent
            if is_unanswered and turn.images == images and np.array_equal(turn.added, tokens):
                turn.answered = True
                return turn
        turn = Turn(parent, tokens, answered=True, images=images, image_tokens=image_tokens)
        self.turns.append(turn)
        return turn

    def discard_if_empty(self, turn: Turn) -> None:
        """Remove a turn without sampled tokens."""
        if not len(turn.tokens):
            self.turns.remove(turn)

    def free_context(self, turn: Turn) -> None:
        """Free the context of a turn that had no room: no turn will continue it."""
        if not len(turn.tokens):
            turn.added, turn.images, turn.image_tokens = _int32(), (), 0

    def counts_including(self, turn: Turn) -> tuple[int, int]:
        """Count the turns and the branches of the conversation, including a new turn."""
        turns = [other for other in self.turns if other.finish or other is turn]
        continued = {id(other.parent) for other in turns}
        return len(turns), sum(id(other) not in continued for other in turns)

    def answered_turns(self) -> list[Turn]:
        """Return the turns that the client has, in the order in which they began."""
        return [
            turn for turn in self.turns if turn.answered and turn.finish and not turn.is_summary
        ]

    def branches(self, *, with_unanswered: bool = False) -> list[Branch]:
        """Return the branches, the one with the most sampled tokens first."""
        kept = [
            turn for turn in self.turns if (turn.answered or with_unanswered) and len(turn.tokens)
        ]
        parents = {turn.parent for turn in kept}
        paths = [turn.path for turn in kept if turn not in parents]
        paths.sort(key=lambda path: -sum(len(turn.tokens) for turn in path))
        branches, trained = [], frozenset[Turn]()
        for path in paths:
            branches.append(Branch(path, frozenset(path) - trained))
            trained |= frozenset(path)
        return branches


def write_branches(
    conversations: Mapping[str, Conversation], sample: Sample, *, with_unanswered: bool = False
) -> int:
    """Write the branches of all seats' conversations into a sample.

    The branch with the most sampled tokens becomes the sample's main sequence.

    Parameters
    ----------
    conversations
        Conversations by seat.
    sample
        The sample, whose earlier tokens and turns are replaced.
    with_unanswered
        Include turns that no client has received, so that the next attempt finds them.

    Returns
    -------
    The number of branches.

    """
    branches = [
        (seat, branch)
        for seat, conversation in conversations.items()
        for branch in conversation.branches(with_unanswered=with_unanswered)
    ]
    branches.sort(key=lambda pair: -pair[1].sampled)
    sample.cut(0)
    sample.branches = [TokenSequence() for _ in branches[1:]]
    turns = [turn for conversation in conversations.values() for turn in conversation.turns]
    numbers = {turn: number for number, turn in enumerate(turns)}
    records: list[list[Record]] = []
    for (seat, branch), sequence in zip(branches, sample.sequences, strict=False):
        records.append(branch.write(sequence, numbers))
        sequence.seat = seat
    kept = {k: v for k, v in sample.metadata.items() if k not in (TURNS, BRANCH_TURNS)}
    own = {TURNS: records[0]} if records else {}
    others = {BRANCH_TURNS: records[1:]} if records[1:] else {}
    sample.metadata = kept | own | others
    return len(branches)


def _read_turns(sequence: TokenSequence, records: Iterable[Record], turns: dict[int, Turn]) -> None:
    """Add the turns of a sequence to `turns`, by their numbers."""
    parent, at, added = None, 0, sequence.tokens[: sequence.prompt_length]
    response = sequence.tokens[sequence.prompt_length :]
    images = iter(sequence.images)
    for record in records:
        end = at + record["length"]
        if record["by"] == ENVIRONMENT:
            added = response[at:end]
        else:
            turn = Turn(
                parent,
                added,
                response[at:end],
                sequence.rollout_log_probs[at:end],
                _spans_between(sequence.weight_versions, at, end),
                record["finish"],
                record.get("stop"),
                images=tuple(islice(images, record.get(IMAGES, 0))),
                image_tokens=record.get(IMAGE_TOKENS, 0),
            )
            parent, added = turns.setdefault(record["turn"], turn), _int32()
        at = end
    if parent is not None:
        parent.experts = sequence.routed_experts


def _spans_between(spans: Iterable[WeightSpan], start: int, end: int) -> list[WeightSpan]:
    """Return the spans of tokens [start, end), relative to start."""
    return [
        WeightSpan(span.version, max(span.start, start) - start, min(span.end, end) - start)
        for span in spans
        if span.start < end and span.end > start
    ]
