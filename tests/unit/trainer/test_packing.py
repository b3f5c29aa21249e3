"""Packing into micro-batches and rows, and the layout of a packed row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.samples.sample import Sample, TokenSequence, WeightSpan
from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.batch.sequences import (
    Sequence,
    TrainSequence,
    equalise,
    micro_batch_members,
    pack,
)
from sluice_trainer.megatron.model import attention
from sluice_trainer.megatron.model.layout import (
    LONG,
    Packing,
    RowSplit,
    Span,
    dense_layout,
    packing,
)
from sluice_trainer.megatron.step.learner import micro_batch, train_micro_batch

CPU = torch.device("cpu")
Lengths = st.lists(st.integers(1, 60), max_size=40)


@given(Lengths, st.integers(1, 80))
def test_every_sequence_is_packed_exactly_once(lengths: list[int], cap: int) -> None:
    assert sorted(i for members in pack(lengths, cap) for i in members) == list(range(len(lengths)))


@given(Lengths, st.integers(1, 80))
def test_the_cap_holds_except_for_one_long_sequence_alone(lengths: list[int], cap: int) -> None:
    for members in pack(lengths, cap):
        assert len(members) == 1 or sum(lengths[i] for i in members) <= cap


@given(Lengths, st.integers(1, 80))
def test_at_most_one_micro_batch_is_less_than_half_full(lengths: list[int], cap: int) -> None:
    filled = [sum(lengths[i] for i in members) for members in pack(lengths, cap)]
    assert sum(tokens * 2 <= cap for tokens in filled) <= 1


def test_packing_is_first_fit_longest_first() -> None:
    assert pack([3, 9, 4, 6], 10) == [[1], [2, 3], [0]]


@given(Lengths, st.integers(1, 80), st.integers(0, 10))
def test_equalise_keeps_the_sequences(lengths: list[int], cap: int, more: int) -> None:
    bins = pack(lengths, cap)
    result = equalise(bins, len(bins) + more)
    assert len(result) == len(bins) + more
    assert sorted(i for members in result for i in members) == list(range(len(lengths)))


def test_equalise_splits_before_it_adds_empty_ones() -> None:
    assert equalise([[0, 1, 2]], 2) == [[0], [1, 2]]
    assert equalise([[0]], 3) == [[0], [], []]
    assert equalise([], 1) == [[]]


def test_equalise_does_not_join_micro_batches() -> None:
    with pytest.raises(ValueError, match="2 micro-batches cannot become 1"):
        equalise([[0], [1]], 1)


def pairs(lengths: list[tuple[int, int]]) -> list[TrainSequence]:
    return [
        TrainSequence(
            np.zeros(length + 1, np.int32),
            length,
            loss_mask=np.ones(length, np.uint8),
            rollout_log_probs=np.zeros(length, np.float32),
            advantage=0.0,
            group_id=group,
            branch=branch,
        )
        for group, both in enumerate(lengths)
        for branch, length in enumerate(both)
    ]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=20),
    st.integers(1, 80),
    st.integers(0, 5),
)
def test_the_sequences_of_a_sample_stay_in_one_micro_batch(
    lengths: list[tuple[int, int]], cap: int, more: int
) -> None:
    shard = pairs(lengths)
    bins = micro_batch_members(shard, cap, lambda own: own + more, whole_samples=True)
    assert sorted(i for members in bins for i in members) == list(range(len(shard)))
    for members in bins:
        assert members == sorted(members)
        assert [i // 2 for i in members[::2]] == [i // 2 for i in members[1::2]]
        assert len(members) <= 2 or sum(len(shard[i].tokens) for i in members) <= cap


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_row_holds_all_but_the_last_token_of_each_sequence() -> None:
    shard = [
        Sequence(ints(10, 11, 12), 2),
        Sequence(ints(20, 21), 1),
        Sequence(ints(30, 31, 32, 33), 1),
    ]
    batch = micro_batch(shard, [0, 2], CPU)
    assert batch.tokens.tolist() == [10, 11, 30, 31, 32]
    assert batch.packing.positions.tolist() == [0, 1, 0, 1, 2]
    (span,) = batch.packing.spans
    assert [starts.tolist() for starts in span.starts] == [[0, 2, 5]] * 2
    assert span.longest == (3, 3)


def test_each_response_token_is_predicted_from_the_position_before_it() -> None:
    shard = [Sequence(ints(10, 11, 12), 2), Sequence(ints(30, 31, 32, 33), 1)]
    batch = micro_batch(shard, [0, 1], CPU)
    assert batch.predicting.tolist() == [0, 1, 4]
    assert batch.targets.tolist() == [11, 12, 33]
    assert batch.sequence.tolist() == [0, 0, 1]
    assert [part.tolist() for part in batch.split(torch.tensor([1.0, 2.0, 3.0]))] == [[1, 2], [3]]


@pytest.mark.parametrize("members", [[], [0], [1]], ids=str)
def test_a_row_without_a_response_is_one_token(members: list[int]) -> None:
    batch = micro_batch([Sequence(ints(5), 0), Sequence(ints(), 0)], members, CPU)
    assert batch.tokens.tolist() == [0]
    assert batch.targets.numel() == 0


def test_a_row_is_padded_by_a_separate_sequence() -> None:
    batch = micro_batch([Sequence(ints(1, 2, 3, 4), 2)], [0], CPU, split=RowSplit(tensor=4))
    assert batch.tokens.tolist() == [1, 2, 3, 0]
    assert batch.packing.lengths == (3, 1)
    assert batch.targets.tolist() == [3, 4]


def test_a_response_needs_a_prompt() -> None:
    with pytest.raises(ValueError, match="at least one prompt token"):
        Sequence(ints(1, 2), 2)


def train_sequence(
    length: int, mask: list[int], advantage: float | np.ndarray = 1.5
) -> TrainSequence:
    responses = len(mask)
    return TrainSequence(
        np.arange(length, dtype=np.int32),
        responses,
        np.array(mask, np.uint8),
        np.full(responses, -1.0, np.float32),
        advantage,
    )


def test_wrong_lengths_are_refused_with_the_name_of_the_field() -> None:
    with pytest.raises(
        ValueError, match="group 3 sample 2: loss_mask has 1 entries for 2 response tokens"
    ):
        TrainSequence(
            ints(1, 2, 3),
            2,
            np.ones(1, np.uint8),
            np.zeros(2, np.float32),
            0.0,
            group_id=3,
            index=2,
        )


def test_loss_inputs_line_up_with_targets() -> None:
    per_token = np.array([4.0, 5.0], np.float32)
    shard = [train_sequence(5, [1, 0, 1]), train_sequence(4, [1, 1], per_token)]
    batch = train_micro_batch(shard, [0, 1], BatchTotals(4, 10), "sequence_mean", CPU)
    assert batch.loss is not None
    assert batch.loss.advantages.tolist() == [1.5, 1.5, 1.5, 4, 5]
    assert batch.loss.loss_weights.tolist() == pytest.approx([1 / 8, 0, 1 / 8, 1 / 8, 1 / 8])
    assert batch.loss.old_log_probs is None


def test_a_masked_tokens_rollout_log_prob_is_dropped() -> None:
    broken = TrainSequence(
        ints(1, 2, 3), 2, np.array([1, 0], np.uint8), np.array([-1, np.nan], np.float32), 1.0
    )
    batch = train_micro_batch([broken], [0], BatchTotals(1, 1), "token_mean", CPU)
    assert batch.loss is not None
    assert batch.loss.rollout_log_probs.tolist() == [-1, 0]


def test_tokens_sampled_by_the_current_weights_are_marked() -> None:
    sample = Sample(0, tokens=ints(1))
    sample.append([2, 3, 4], [0.0] * 3, [WeightSpan(6, 0, 1), WeightSpan(7, 1, 3)])
    sequences = [
        sequence for v in (7, 8) for sequence in TrainSequence.from_sample(0, sample, 1.0, v)
    ]
    batch = train_micro_batch(sequences, [0, 1], BatchTotals(2, 6), "token_mean", CPU)
    assert batch.loss is not None
    assert batch.loss.on_policy_mask is not None
    assert batch.loss.on_policy_mask.tolist() == [0, 1, 1, 0, 0, 0]


def test_a_sample_becomes_one_sequence_and_one_for_each_branch() -> None:
    sample = Sample(4, tokens=ints(1), branches=[TokenSequence(tokens=ints(1, 2))])
    sample.append([2, 3], [-1.0, -2.0], [WeightSpan(6, 0, 2)])
    sample.branches[0].append([5], [], [WeightSpan(6, 0, 1)], trainable=False)
    sample.branches[0].append([6], [-3.0], [WeightSpan(7, 0, 1)])
    first, second = TrainSequence.from_sample(9, sample, -0.5, version=7)
    for sequence in (first, second):
        assert (sequence.group_id, sequence.index, sequence.advantage) == (9, 4, -0.5)
    assert (first.branch, first.tokens.tolist(), first.trained_elsewhere) == (0, [1, 2, 3], 1)
    assert (second.branch, second.tokens.tolist(), second.trained_elsewhere) == (1, [1, 2, 5, 6], 2)
    assert second.rollout_log_probs.tolist() == [0, -3]
    assert second.on_policy_mask is not None
    assert second.on_policy_mask.tolist() == [0, 1]


@pytest.mark.parametrize("routed", [True, False], ids=["replayed", "not requested"])
def test_experts_of_an_engine_come_along_if_they_are_replayed(routed: bool) -> None:
    sample = Sample(0, tokens=ints(1))
    sample.append([2, 3], [0.0] * 2, [WeightSpan(6, 0, 2)])
    sample.routed_experts = np.array([[0], [1]], np.uint8)
    (sequence,) = TrainSequence.from_sample(0, sample, 1.0, routed=routed)
    assert (sequence.experts is not None) == routed


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_the_dense_layout_restores_every_token(lengths: list[int]) -> None:
    layout = dense_layout(tuple(lengths), CPU)
    row = torch.arange(sum(lengths))
    padded = torch.cat([row[bucket].flatten() for bucket in layout.buckets])
    assert torch.equal(padded[layout.restore], row)


def test_short_sequences_share_a_bucket() -> None:
    layout = dense_layout((3, 16, 17, 30, 100, 128), CPU)
    assert [tuple(bucket.shape) for bucket in layout.buckets] == [(2, 16), (2, 30), (2, 128)]


def test_positions_restart_with_each_sequence() -> None:
    assert packing([2, 1, 3], CPU).positions.tolist() == [0, 1, 0, 0, 1, 2]


def test_each_context_rank_holds_a_piece_from_the_front_and_its_mirror_image() -> None:
    assert [RowSplit(context=2, rank=rank).local(8).tolist() for rank in range(2)] == [
        [0, 1, 6, 7],
        [2, 3, 4, 5],
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(2, 4), st.integers(1, 2))
def test_the_shares_of_context_ranks_make_up_the_row(
    lengths: list[int], context: int, tensor: int
) -> None:
    lengths = [*lengths, -sum(lengths) % (2 * context * tensor) or 2 * context * tensor]
    splits = [RowSplit(tensor, context, rank) for rank in range(context)]
    shares = [packing(lengths, CPU, split) for split in splits]
    held = torch.cat([split.local(sum(lengths)) for split in splits])
    assert all(len(share.positions) * context == sum(lengths) for share in shares)
    for share in shares:
        assert share.restore is not None
        assert held[share.restore].tolist() == list(range(sum(lengths)))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(2, 4))
def test_each_query_sees_exactly_its_past(lengths: list[int], context: int) -> None:
    lengths = [*lengths, -sum(lengths) % (2 * context) or 2 * context]
    begins = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    for rank in range(context):
        split = RowSplit(context=context, rank=rank)
        held = split.local(sum(lengths)).tolist()
        for span in packing(lengths, CPU, split).spans:
            for sequence in range(len(span.starts[0]) - 1):
                queries = range(int(span.starts[0][sequence]), int(span.starts[0][sequence + 1]))
                first, last = int(span.starts[1][sequence]), int(span.starts[1][sequence + 1])
                for query in queries:
                    place = held[span.queries[0] + query]
                    newest = span.keys[0] + last - (queries.stop - query)  # aligned at the end
                    assert (span.keys[0] + first, newest) == (begins[place], place)


def test_a_share_predicts_its_own_response_tokens() -> None:
    shard = [Sequence(ints(10, 11, 12, 13), 2), Sequence(ints(30, 31, 32, 33, 34, 35), 3)]
    whole = micro_batch(shard, [0, 1], CPU)
    shares = [
        micro_batch(shard, [0, 1], CPU, split=RowSplit(context=2, rank=rank)) for rank in range(2)
    ]
    gathered = torch.full_like(whole.targets, -1)
    for share in shares:
        assert share.local_positions is not None
        assert share.sequence.tolist() == whole.sequence.tolist()
        gathered[share.local_positions] = share.targets
        before = share.tokens[share.predicting]
        assert before.tolist() == whole.tokens[whole.predicting[share.local_positions]].tolist()
    assert gathered.tolist() == whole.targets.tolist()


@pytest.mark.parametrize("context", [2, 3])
def test_context_shares_attend_as_the_whole_row_does(context: int) -> None:
    lengths = [20, 3, 50, 31]
    lengths.append(-sum(lengths) % (2 * context) or 2 * context)
    row = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(row, heads, 8, generator=generator) for heads in (4, 2, 2))
    whole = attention._padded_attention(q, k, v, packing(lengths, CPU).dense, 0.3)
    for rank in range(context):
        split = RowSplit(context=context, rank=rank)
        held = split.local(row)
        share = attention._attend_by_span(q[held], k, v, packing(lengths, CPU, split), 0.3)
        assert torch.allclose(share, whole[held], atol=1e-5)


def test_a_long_sequence_has_a_separate_span() -> None:
    lengths = [LONG, 10, 20, LONG + 1, LONG, 5]
    spans = packing(lengths, CPU).spans
    assert [span.queries for span in spans] == [span.keys for span in spans]
    sizes = [span.queries[1] - span.queries[0] for span in spans]
    assert sizes == [LONG, 30, LONG + 1, LONG, 5]
    assert [span.long for span in spans] == [True, False, True, True, False]
    assert spans[1].starts[0].tolist() == [0, 10, 30]


def test_a_share_of_a_long_sequence_has_a_long_span_if_its_queries_see_many_keys() -> None:
    shares = [
        packing([2 * LONG - 16, 16], CPU, RowSplit(context=2, rank=rank)).spans for rank in range(2)
    ]
    half, whole = LONG // 2, 2 * LONG  # a piece, and the row
    assert [[(span.queries, span.keys, span.long) for span in share] for share in shares] == [
        [((0, half), (0, half), False), ((half, LONG), (0, whole), False)],
        [((0, half), (0, LONG), False), ((half, LONG), (0, 3 * half), False)],
    ]
    longer = packing([8 * LONG - 16, 16], CPU, RowSplit(context=4, rank=0)).spans
    assert [(span.queries, span.keys, span.long) for span in longer] == [
        ((0, LONG), (0, LONG), True),
        ((LONG, 2 * LONG - 16), (0, 8 * LONG - 16), True),
        ((2 * LONG - 16, 2 * LONG), (8 * LONG - 16, 8 * LONG), False),
    ]


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(8, 16), (9, 17), (11, 30), (24, 33), (1, 9)],
    ids=["half", "odd", "a third", "most", "one query"],
)
def test_a_padded_rectangle_and_a_padded_square_are_the_end_of_a_sequence(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int
) -> None:
    monkeypatch.setattr(attention, "GRAIN", 8)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(size, heads, 16, generator=generator).requires_grad_()
        for size, heads in ((queries, 4), (keys, 2), (keys, 2))
    )
    attended = attention._cudnn_attention(q, k, v, 0.3)
    expected = attention._attend_by_span(q, k, v, _end_of(queries, keys), 0.3)
    torch.testing.assert_close(attended, expected)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (attended, expected)]
    torch.testing.assert_close(*gradients)


def _end_of(queries: int, keys: int) -> Packing:
    query_bounds, key_bounds = (torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys))
    span = Span((0, queries), (0, keys), (query_bounds, key_bounds), (queries, keys))
    return Packing(qkv_format="sbhd", lengths=(keys,), spans=(span,))
