"""Where sequences lie in a packed row, or in one rank's share of it, and how attention is best
computed over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from sluice_trainer.megatron.model.rotary import Rotary

LONG = 4096
"""Sequences of this many tokens get a call of their own, of a kernel that knows nothing of packing:
and parts of sequences whose queries times keys are as many."""

BUCKET = 16
"""Sequences are padded to multiples of this, and to powers of two above four times it, when
attention is dense."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a row is spread: over `context` ranks, of which this is number `rank`; each share over
    `tensor` ranks.
    """

    tensor: int = 1
    context: int = 1
    rank: int = 0

    @property
    def multiple(self) -> int:
        """A divisor of the length of a row."""
        return self.tensor if self.context == 1 else 2 * self.context * self.tensor

    def spans(self, length: int) -> list[tuple[int, int]]:
        """The pieces of a row of this length that this rank holds, in order: [start, end) each."""
        if self.context == 1:
            return [(0, length)]
        pieces, size = 2 * self.context, length // (2 * self.context)
        return [(piece * size, (piece + 1) * size) for piece in (self.rank, pieces - 1 - self.rank)]

    def local(self, length: int) -> Tensor:
        """[share] int64: which tokens of the row this rank holds."""
        return torch.cat([torch.arange(start, end) for start, end in self.spans(length)])


@dataclass(frozen=True, slots=True)
class Span:
    """A run of queries and the keys that they may see. Sizes are per sequence that has queries in
    it.

    queries, keys: [start, end) of them, among this rank's queries and in the whole row. Of queries
    and of keys, starts: [sequences + 1] int32, within those; longest: of a sequence. Query i of n
    is aligned with key m - n + i.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    starts: tuple[Tensor, Tensor]
    longest: tuple[int, int]

    @property
    def long(self) -> bool:
        """One sequence, or the end of one, that is worth a call of its own."""
        return len(self.starts[0]) == 2 and _is_long(*self.longest)


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Where sequences lie in a row of tokens.

    positions: [share] int64, of this rank's tokens, each within its sequence; lengths: of the
    sequences in the whole row. spans: this rank's queries. restore: [row] int64, where each token
    of the row lies among all ranks' shares; None: this rank has the whole row. experts: as
    `MicroBatch.experts`, of this rank's tokens. record: takes the experts that the mixtures choose
    for them, layer by layer; None: nobody asks. qkv_format stays "sbhd": Megatron treats the row as
    one ordinary sequence.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    lengths: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    restore: Tensor | None = None
    experts: Tensor | None = None
    record: list[Tensor] | None = None
    _varlen: VarlenLayout | None = None
    _dense: DenseLayout | None = None
    _paged: PagedLayout | None = None
    _cos_sin: tuple[Tensor, Tensor] | None = None

    def cos_sin(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """How far the tokens are turned; worked out once for all layers."""
        if self._cos_sin is None:
            self._cos_sin = rotary.cos_sin(self.positions)
        return self._cos_sin

    @property
    def varlen(self) -> VarlenLayout:
        """The sequences of a row that this rank has whole; worked out once for all layers."""
        if self._varlen is None:
            ends = torch.cumsum(torch.tensor(self.lengths), 0)
            starts = F.pad(ends, (1, 0)).to(self.positions.device, torch.int32)
            self._varlen = VarlenLayout(starts, max(self.lengths))
        return self._varlen

    @property
    def paged(self) -> PagedLayout:
        """Where sequences lie in a row that this rank has whole; worked out once for all layers."""
        if self._paged is None:
            self._paged = paged_layout(self.lengths, self.positions.device)
        return self._paged

    @property
    def dense(self) -> DenseLayout:
        """How to pad the row for dense attention; worked out once for all layers."""
        if self._dense is None:
            self._dense = dense_layout(self.lengths, self.positions.device)
        return self._dense


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Sequences end to end. starts: [sequences + 1] int32; longest: tokens of the longest one."""

    starts: Tensor
    longest: int


def packing(lengths: list[int], device: torch.device, split: Split | None = None) -> Packing:
    """The packing of sequences of these lengths, in order. Their sum is a multiple of
    `split.multiple`.
    """
    split = split or Split()
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    row = int(ends[-1])
    positions = torch.arange(row) - torch.repeat_interleave(ends - sizes, sizes)
    restore = None
    if split.context > 1:
        shares = [
            Split(split.tensor, split.context, rank).local(row) for rank in range(split.context)
        ]
        restore = torch.argsort(torch.cat(shares)).to(device)
        positions = positions[shares[split.rank]]
    offset, spans = 0, []
    for start, end in split.spans(row):
        at = start
        for run in _runs(_portions(lengths, start, end)):
            spans.append(span := _span(run, at, offset, device))
            at, offset = span.keys[1], span.queries[1]
    return Packing(
        qkv_format="sbhd",
        positions=positions.to(device),
        lengths=tuple(lengths),
        spans=tuple(spans),
        restore=restore,
    )


def _portions(lengths: list[int], start: int, end: int) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence with queries in [start, end) of the row. The last query sees
    all of the keys.
    """
    portions, begin = [], 0
    for length in lengths:
        low, high = max(begin, start), min(begin + length, end)
        if low < high:
            portions.append((high - low, high - begin))
        begin += length
    return portions


def _is_long(queries: int, keys: int) -> bool:
    return queries * keys >= LONG**2


def _runs(portions: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The portions in runs: a long one by itself (its number is its key), what lies between two of
    them together.
    """
    grouped = groupby(enumerate(portions), lambda entry: entry[0] if _is_long(*entry[1]) else None)
    return [[portion for _, portion in run] for _, run in grouped]


def _span(portions: list[tuple[int, int]], start: int, offset: int, device: torch.device) -> Span:
    """The queries of these portions, from `start` on in the row, which lie at `offset` among this
    rank's.
    """
    queries, keys = zip(*portions, strict=True)
    end = start + sum(queries)

    def starts(sizes: tuple[int, ...]) -> Tensor:
        return F.pad(torch.cumsum(torch.tensor(sizes), 0), (1, 0)).to(device, torch.int32)

    rows = (offset, offset + sum(queries)), (end - sum(keys), end)
    return Span(*rows, (starts(queries), starts(keys)), (max(queries), max(keys)))


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Where an engine's attention finds sequences: each [sequences] int32; table: [sequences,
    longest] int32, the place of every token.
    """

    starts: Tensor
    lengths: Tensor
    rows: Tensor
    table: Tensor


def paged_layout(lengths: tuple[int, ...], device: torch.device) -> PagedLayout:
    """Those of sequences end to end."""
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.cumsum(sizes, 0, dtype=torch.int32) - sizes
    rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
    tokens = torch.arange(max(lengths), dtype=torch.int32, device=device)
    return PagedLayout(starts, sizes, rows, starts[:, None] + tokens)


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A packed row as a few padded batches of similar lengths.

    buckets: per bucket [sequences, padded length] int64, the token at each place (a padded place
    repeats token 0); restore: [tokens] int64, where each token lies in the concatenation of the
    flattened buckets.
    """

    buckets: tuple[Tensor, ...]
    restore: Tensor


def dense_layout(lengths: tuple[int, ...], device: torch.device) -> DenseLayout:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    members: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        members.setdefault(_padded(length), []).append(sequence)
    buckets, restore, offset = [], torch.empty(starts[-1], dtype=torch.int64), 0
    for padded, sequences in sorted(members.items()):
        padded = min(padded, max(lengths[sequence] for sequence in sequences))
        first = torch.tensor([starts[sequence] for sequence in sequences])[:, None]
        size = torch.tensor([lengths[sequence] for sequence in sequences])[:, None]
        place = torch.arange(padded)[None, :]
        inside, token = place < size, first + place
        restore[token[inside]] = torch.arange(offset, offset + inside.numel()).view_as(inside)[
            inside
        ]
        buckets.append(torch.where(inside, token, 0).to(device))
        offset += inside.numel()
    return DenseLayout(tuple(buckets), restore.to(device))


def _padded(length: int) -> int:
    if length <= 4 * BUCKET:
        return -(-length // BUCKET) * BUCKET
    return 1 << (length - 1).bit_length()
