"""Layout of sequences in a packed row, or in one rank's share of it, for each kind of attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from sluice_trainer.megatron.model.rotary import Rotary

# Sequences of this many tokens, and parts of sequences with as many pairs of query and key, get a
# separate call of a kernel without packing.
LONG = 4096

# Dense attention pads sequences to multiples of this, and above four times this to powers of two.
BUCKET = 16


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Position of a rank among those that share a row.

    The row is split over `context` ranks, of which this is number `rank`; each share is split over
    `tensor` ranks.
    """

    tensor: int = 1
    context: int = 1
    rank: int = 0

    @property
    def multiple(self) -> int:
        """The length of a row must be a multiple of this."""
        return self.tensor if self.context == 1 else 2 * self.context * self.tensor

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the pieces [start, end) of a row of this length that this rank holds, in order."""
        if self.context == 1:
            return [(0, length)]
        pieces, size = 2 * self.context, length // (2 * self.context)
        return [(piece * size, (piece + 1) * size) for piece in (self.rank, pieces - 1 - self.rank)]

    def local(self, length: int) -> Tensor:
        """Return the positions in the row of the tokens that this rank holds, [share] int64."""
        return torch.cat([torch.arange(start, end) for start, end in self.spans(length)])


@dataclass(frozen=True, slots=True)
class Span:
    """A run of queries and the keys that they may see.

    Query i of n is aligned with key m - n + i.

    Attributes
    ----------
    queries
        [start, end) among this rank's queries.
    keys
        [start, end) in the whole row.
    starts
        Bounds of the sequences within queries and within keys, [sequences + 1] int32 each.
    longest
        Queries and keys of the longest sequence.

    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    starts: tuple[Tensor, Tensor]
    longest: tuple[int, int]

    @property
    def long(self) -> bool:
        """True for a single sequence, or the end of one, that merits a separate call."""
        return len(self.starts[0]) == 2 and _is_long(*self.longest)


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Layout of the sequences in a row of tokens, passed through Megatron with the row.

    `qkv_format` stays "sbhd": Megatron treats the row as one ordinary sequence.

    Attributes
    ----------
    positions
        [share] int64, positions of this rank's tokens within their sequences.
    lengths
        Lengths of the sequences in the whole row.
    spans
        Runs of this rank's queries.
    restore
        [row] int64, index of each token of the row in the concatenated shares of all ranks; None:
        this rank has the whole row.
    experts
        Experts of this rank's tokens, as in `MicroBatch.experts`.
    record
        Collects the experts that the mixtures choose, layer by layer; None: not recorded.

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
        """Return the rotation of the tokens, computed once for all layers."""
        if self._cos_sin is None:
            self._cos_sin = rotary.cos_sin(self.positions)
        return self._cos_sin

    @property
    def varlen(self) -> VarlenLayout:
        """Bounds for FlashAttention of a whole row, computed once for all layers."""
        if self._varlen is None:
            ends = torch.cumsum(torch.tensor(self.lengths), 0)
            starts = F.pad(ends, (1, 0)).to(self.positions.device, torch.int32)
            self._varlen = VarlenLayout(starts, max(self.lengths))
        return self._varlen

    @property
    def paged(self) -> PagedLayout:
        """Layout for an engine's attention over a whole row, computed once for all layers."""
        if self._paged is None:
            self._paged = paged_layout(self.lengths, self.positions.device)
        return self._paged

    @property
    def dense(self) -> DenseLayout:
        """Layout for padded attention, computed once for all layers."""
        if self._dense is None:
            self._dense = dense_layout(self.lengths, self.positions.device)
        return self._dense


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Bounds of concatenated sequences, for FlashAttention.

    starts: [sequences + 1] int32. longest: tokens of the longest sequence.
    """

    starts: Tensor
    longest: int


def packing(lengths: list[int], device: torch.device, split: RowSplit | None = None) -> Packing:
    """Return the packing of sequences of these lengths, in order.

    Parameters
    ----------
    lengths
        Their sum must be a multiple of `split.multiple`.
    device
        Device of the tensors.
    split
        This rank's share of the row; None: all of it.

    """
    split = split or RowSplit()
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = torch.cumsum(sizes, 0)
    row = int(ends[-1])
    # Position in the row minus the start of the token's sequence.
    positions = torch.arange(row) - torch.repeat_interleave(ends - sizes, sizes)
    restore = None
    if split.context > 1:
        shares = [
            RowSplit(split.tensor, split.context, rank).local(row) for rank in range(split.context)
        ]
        # The inverse of the order in which the ranks' shares are gathered.
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
    """Return (queries, keys) of each sequence with queries in [start, end) of the row.

    The last query of a portion sees all of its keys.
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
    """Group the portions into runs.

    Each long one alone, the ones between two long ones together.
    """
    # The key of a long portion is its index, so it equals no neighbour's.
    grouped = groupby(enumerate(portions), lambda entry: entry[0] if _is_long(*entry[1]) else None)
    return [[portion for _, portion in run] for _, run in grouped]


def _span(portions: list[tuple[int, int]], start: int, offset: int, device: torch.device) -> Span:
    """Return the span of these portions' queries.

    start: position of the first query in the row. offset: its position among this rank's queries.
    """
    queries, keys = zip(*portions, strict=True)
    end = start + sum(queries)

    def starts(sizes: tuple[int, ...]) -> Tensor:
        return F.pad(torch.cumsum(torch.tensor(sizes), 0), (1, 0)).to(device, torch.int32)

    rows = (offset, offset + sum(queries)), (end - sum(keys), end)
    return Span(*rows, (starts(queries), starts(keys)), (max(queries), max(keys)))


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Layout of sequences for an engine's paged attention.

    starts, lengths, rows: [sequences] int32. table: [sequences, longest] int32, position of every
    token.
    """

    starts: Tensor
    lengths: Tensor
    rows: Tensor
    table: Tensor


def paged_layout(lengths: tuple[int, ...], device: torch.device) -> PagedLayout:
    """Return the paged layout of concatenated sequences."""
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.cumsum(sizes, 0, dtype=torch.int32) - sizes
    rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
    tokens = torch.arange(max(lengths), dtype=torch.int32, device=device)
    return PagedLayout(starts, sizes, rows, starts[:, None] + tokens)


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A packed row as a few padded batches of similar lengths.

    Attributes
    ----------
    buckets
        Per bucket [sequences, padded length] int64, the token at each position; padding repeats
        token 0.
    restore
        [tokens] int64, index of each token in the concatenation of the flattened buckets.

    """

    buckets: tuple[Tensor, ...]
    restore: Tensor


def dense_layout(lengths: tuple[int, ...], device: torch.device) -> DenseLayout:
    """Group sequences by padded length."""
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
