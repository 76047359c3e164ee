"""packing.py: which rollouts share a row, where their tokens lie, and who sees whom."""

import random

import pytest
import torch

from policy import packing
from rollouts import Rollout

CPU = torch.device("cpu")
# The row drawn in packing.py's docstring: prompt p with completions a and b, prompt q with completion c.
DRAWN = [([1, 1, 1], [2, 2]), ([1, 1, 1], [3, 3, 3]), ([4, 4], [5])]


def make(samples: list[tuple[list[int], list[int]]]) -> list[Rollout]:
    return [Rollout(0, prompt, completion, [0.0] * len(completion), 1.0, 1.0, 0) for prompt, completion in samples]


def of_lengths(*groups: tuple[int, list[int]]) -> list[Rollout]:
    """Rollouts of groups given as (prompt length, completion lengths)."""
    return make([([g] * prompt, [0] * length) for g, (prompt, lengths) in enumerate(groups) for length in lengths])


def mixed_groups(seed: int, num_groups: int = 7) -> list[Rollout]:
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 30), [rng.randint(1, 40) for _ in range(rng.randint(1, 8))]) for _ in range(num_groups)]
    return of_lengths(*sizes)


def test_fill_uses_the_fewest_bins_that_hold_the_items():
    assert packing.fill([6, 4, 5, 5], 10) == [[0, 1], [2, 3]]
    assert packing.fill([6, 6, 6], 10) == [[0], [1], [2]]  # 18 tokens, but no two fit together
    assert packing.fill([4, 7, 1, 5, 3], 10) == [[1, 4], [3, 0, 2]]  # the largest item to the lightest bin


def pack(rollouts: list[Rollout], token_budget: int) -> list[packing.Row]:
    return packing.pack(rollouts, [1.0] * len(rollouts), token_budget)


def drawn() -> packing.Row:
    return packing.lay_out([[0, 1], [2]], make(DRAWN), [0.5, 0.25, 1.0])


def test_a_group_that_fits_stays_together_and_holds_one_prompt():
    rollouts = of_lengths((4, [3, 3]), (5, [2, 2]))  # 10 and 9 tokens
    assert [row.members.tolist() for row in pack(rollouts, 12)] == [[0, 1], [2, 3]]
    assert [row.members.tolist() for row in pack(rollouts, 19)] == [[0, 1, 2, 3]]


def test_a_group_that_does_not_fit_is_split_evenly_and_repeats_its_prompt():
    rows = pack(of_lengths((4, [5, 5, 5, 5])), 15)  # 24 tokens; two rows of 4 + 5 + 5
    assert [row.members.tolist() for row in rows] == [[0, 2], [1, 3]]
    assert [len(row.tokens) for row in rows] == [14, 14]


def test_every_rollout_is_in_exactly_one_row_within_the_budget():
    for seed in range(20):
        rollouts = mixed_groups(seed)
        rows = pack(rollouts, 70)
        assert sorted(i for row in rows for i in row.members.tolist()) == list(range(len(rollouts)))
        assert max(len(row.tokens) for row in rows) <= 70


def test_a_sample_longer_than_a_row_is_an_error_that_names_the_flag():
    with pytest.raises(ValueError, match=r"sample of 9 tokens .*--token-budget"):
        pack(of_lengths((4, [5])), 8)
    assert pack([], 8) == []


def test_the_pairs_of_a_row_are_those_that_attention_computes():
    # p: 6 with itself; a: 2 * 3 + 3; b: 3 * 3 + 6; q and c together: 6
    assert packing.num_pairs(drawn()) == 6 + 9 + 15 + 6


def test_the_layout_is_the_one_in_the_docstring():
    row = drawn()
    assert row.tokens.tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]
    assert row.segments.tolist() == [[0, 3, 0, 0], [3, 5, 0, 3], [5, 8, 0, 3], [8, 11, 8, 8]]
    assert row.predictors.tolist() == [2, 3, 2, 5, 6, 9]  # a completion's first token is predicted by its prompt's end
    assert row.targets.tolist() == [2, 2, 3, 3, 3, 5]
    assert row.weights.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 1.0]
    assert row.lengths.tolist() == [2, 3, 1]


def visible_by_hand() -> torch.Tensor:
    rows = [
        "1..........", "11.........", "111........",  # p
        "1111.......", "11111......",  # a
        "111..1.....", "111..11....", "111..111...",  # b
        "........1..", "........11.", "........111",  # q and c
    ]  # fmt: skip
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def test_the_block_mask_shows_each_token_its_prompt_and_itself_only():
    mask_mod = packing.block_mask(drawn().segments, 128, CPU).mask_mod
    places = torch.arange(128)
    visible = mask_mod(None, None, places[:, None], places[None, :])
    assert torch.equal(visible[:11, :11], visible_by_hand())
    assert not visible[:11, 11:].any()
    assert not visible[11:, :11].any()  # padding
    assert visible.any(-1).all()  # a query without a key would be nan


def test_the_segment_plan_shows_the_same():
    plan = packing.segment_plan([tuple(segment) for segment in drawn().segments.tolist()])
    visible = torch.zeros(11, 11, dtype=torch.bool)
    flat = [(batch.queries.view(len(batch.visible), -1), batch.keys, batch.visible) for batch in plan.batches]
    queries = torch.cat([queries.flatten() for queries, _, _ in flat])
    seen = [
        (b, i, keys.view(len(mask), -1)[b, mask[b, 0, i]])
        for queries, keys, mask in flat
        for b in range(len(queries))
        for i in range(queries.shape[1])
    ]
    for token, place in enumerate(plan.order.tolist()):
        assert queries[place] == token
        visible[token, seen[place][2]] = True
    assert torch.equal(visible, visible_by_hand())


def test_short_segments_share_a_call_and_long_ones_of_other_lengths_do_not():
    short = [(0, 6, 0, 0), (6, 30, 0, 6), (30, 40, 0, 6)]
    assert len(packing.group_segments(short)) == 1
    long = [(0, 900, 0, 0), (900, 1200, 900, 900), (1200, 2090, 1200, 1200)]
    # 900 and 890 waste 900² - 890² = 17,900 pairs; 300 with them would waste hundreds of thousands
    assert packing.group_segments(long) == [[long[0], long[2]], [long[1]]]


def test_padded_lengths_are_few_and_whole_blocks():
    lengths = {packing.padded_length(n, 16384) for n in range(1, 16385)}
    assert lengths == {2048 * k for k in range(1, 9)}
    assert packing.padded_length(1, 1000) == 128
