"""An episode's turns as a tree of tokens, and the branches of it that are trained.

A turn continues another one where its context begins with all tokens of that one, context and
answer: then the sampled tokens are kept, and `added` is what came between. Any other turn starts
anew with its whole context. So a history that a client changes, drops or re-orders makes a branch.

A branch is the way from a first turn to one that nobody continues. Branches are in the order of
their sampled tokens, most first; a turn is trained in the first branch that has it, and is context
in the others. So every sampled token is trained once.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sluice.samples.sample import Experts, Float32, Int32, Sample, TokenSequence, WeightSpan
from sluice.samples.turns import BRANCH_TURNS, ENVIRONMENT, MODEL, TURNS, records_of

Record = dict[str, Any]
"""A turn as a sample's metadata hold it."""


def _int32(ids: Iterable[int] = ()) -> Int32:
    return np.fromiter(ids, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Turn:
    """An answer of the model.

    parent: the turn that it continues. added: [n] tokens of its context behind the parent's, or all
    of them. tokens, log_probs: [m] as sampled. spans: weight versions, counted from the first of
    `tokens`. finish: stop or length; empty: unfinished. stop: the stop string that ended it.
    answered: its client has it, or is about to. experts: of context and answer
    (`Sample.routed_experts`). reward: its own, where it was given one. aside: its client did not
    ask for it.
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
    aside: bool = False

    @property
    def path(self) -> list[Turn]:
        """The turns from the first one to this one."""
        path, turn = [self], self.parent
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    @property
    def context(self) -> Int32:
        """The tokens that the engine sees before it answers."""
        return np.concatenate([self.parent.whole, self.added]) if self.parent else self.added

    @property
    def whole(self) -> Int32:
        """Context and answer."""
        return np.concatenate([part for turn in self.path for part in (turn.added, turn.tokens)])

    @property
    def prompt_length(self) -> int:
        """Tokens before the first answer of its branch."""
        return len(self.path[0].added)


@dataclass(frozen=True, slots=True)
class Branch:
    """A sequence to train on. turns: from the first to the last. trained: those that no earlier
    branch has.
    """

    turns: Sequence[Turn]
    trained: frozenset[Turn]

    @property
    def sampled(self) -> int:
        """Its sampled tokens, those of context too."""
        return sum(len(turn.tokens) for turn in self.turns)

    def write(self, sequence: TokenSequence, numbers: Mapping[Turn, int]) -> list[Record]:
        """Put the branch into a sequence: tokens, masks, log-probs, versions. Returns its turns, by
        these numbers.
        """
        first = self.turns[0]
        sequence.cut(0)
        sequence.tokens, sequence.routed_experts = first.added, self.turns[-1].experts
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
            records.append(record | {"turn": numbers[turn]})
        return records


@dataclass(slots=True)
class Conversation:
    """The turns of an episode, in the order in which they began."""

    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def of(cls, sample: Sample, seat: str = "") -> Conversation:
        """The turns that an interrupted play has left of this seat in its sample, for the same
        requests to find again.
        """
        turns: dict[int, Turn] = {}
        for sequence, records in zip(sample.sequences, records_of(sample.metadata), strict=True):
            if sequence.seat == seat:
                _read(sequence, records, turns)
        return cls([turns[number] for number in sorted(turns)])

    def continued(self, ids: Sequence[int]) -> Turn | None:
        """The turn with the most tokens with all of which `ids` begin."""
        best, length, tokens = None, 0, _int32(ids)
        for turn in [*self.turns]:  # a thread may ask while others come and go
            whole = turn.whole if turn.finish else _int32()
            if length < len(whole) <= len(ids) and np.array_equal(whole, tokens[: len(whole)]):
                best, length = turn, len(whole)
        return best

    def turn(self, parent: Turn | None, added: Sequence[int]) -> Turn:
        """The turn at this context: one that waits for its client (an earlier play has left it, or
        its answer was lost on the way), else a new one.
        """
        tokens = _int32(added)
        for turn in self.turns:
            waits = not turn.answered and turn.parent is parent
            if waits and np.array_equal(turn.added, tokens):
                turn.answered = True
                return turn
        turn = Turn(parent, tokens, answered=True)
        self.turns.append(turn)
        return turn

    def forget(self, turn: Turn) -> None:
        """Drop a turn of which nothing was sampled, with its context."""
        if not len(turn.tokens):
            self.turns.remove(turn)

    def release(self, turn: Turn) -> None:
        """Drop the context of a turn that had no room: nobody goes on from it."""
        if not len(turn.tokens):
            turn.added = _int32()

    def counts_with(self, turn: Turn) -> tuple[int, int]:
        """(turns, branches) of the conversation once this turn is in it."""
        turns = [each for each in self.turns if each.finish or each is turn]
        begun = {id(each.parent) for each in turns}
        return len(turns), sum(id(each) not in begun for each in turns)

    def asked(self) -> list[Turn]:
        """The turns that the client has, in the order in which they began."""
        return [turn for turn in self.turns if turn.answered and turn.finish and not turn.aside]

    def branches(self, *, waiting: bool = False) -> list[Branch]:
        """The branches, those with the most sampled tokens first. waiting: as in `write`."""
        kept = [turn for turn in self.turns if (turn.answered or waiting) and len(turn.tokens)]
        parents = {turn.parent for turn in kept}
        paths = [turn.path for turn in kept if turn not in parents]
        paths.sort(key=lambda path: -sum(len(turn.tokens) for turn in path))
        branches, trained = [], frozenset[Turn]()
        for path in paths:
            branches.append(Branch(path, frozenset(path) - trained))
            trained |= frozenset(path)
        return branches


def write(
    conversations: Mapping[str, Conversation], sample: Sample, *, waiting: bool = False
) -> int:
    """Put the branches of all seats' conversations into a sample, the one with the most sampled
    tokens as its own. Returns how many there are.

    waiting: with turns that no client has asked for, as an interrupted play leaves them.
    """
    branches = [
        (seat, branch)
        for seat, conversation in conversations.items()
        for branch in conversation.branches(waiting=waiting)
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


def _read(sequence: TokenSequence, records: Iterable[Record], turns: dict[int, Turn]) -> None:
    """Add the turns of a sequence, by their numbers, to those of earlier ones."""
    parent, at, added = None, 0, sequence.tokens[: sequence.prompt_length]
    response = sequence.tokens[sequence.prompt_length :]
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
                _between(sequence.weight_versions, at, end),
                record["finish"],
                record.get("stop"),
            )
            parent, added = turns.setdefault(record["turn"], turn), _int32()
        at = end
    if parent is not None:
        parent.experts = sequence.routed_experts


def _between(spans: Iterable[WeightSpan], start: int, end: int) -> list[WeightSpan]:
    """The spans of tokens [start, end), counted from start."""
    return [
        WeightSpan(span.version, max(span.start, start) - start, min(span.end, end) - start)
        for span in spans
        if span.start < end and span.end > start
    ]
