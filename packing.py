"""How rollouts become rows: which tokens share a forward, and which of them see each other.

A row is one forward: up to `token_budget` tokens without padding. The completions of a group lie behind one copy of
their prompt, so a prompt is computed once, not `group_size` times:

    tokens     p p p a a b b b q q c      prompt p with completions a and b, prompt q with completion c
    positions  0 1 2 3 4 3 4 5 0 1 2      in the sample, so each completion is computed as if it stood alone
    a sees     1 1 1 1 1 . . . . . .      its prompt, and causally itself
    b sees     1 1 1 . . 1 1 1 . . .

On a CPU segments of similar length go through one SDPA call, their prompt's keys and values in front. On CUDA the row
goes through flex attention with a block mask, padded to one of a few lengths because each is compiled once.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from rollouts import Rollout

FLEX_BLOCK = 128  # tokens; flex attention skips blocks of this size
ROW_SHAPES = 8  # how many lengths rows have on CUDA
PAIRS_PER_CALL = 50_000  # an attention call on a CPU costs about as much as this many query-key pairs

Row = list[list[int]]  # numbers of rollouts; those of an inner list, a piece, share one copy of their prompt


# --- which rollouts share a row --------------------------------------------------------------------------------------


def spread(costs: list[float], num_bins: int) -> list[list[int]]:
    """Numbers of the items in each bin, the bins about equally heavy: the largest item first, to the lightest bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0.0] * num_bins
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        lightest = loads.index(min(loads))
        bins[lightest].append(item)
        loads[lightest] += costs[item]
    return bins


def fill(sizes: list[int], capacity: int, multiple: int = 1) -> list[list[int]]:
    """`spread` over the fewest bins, a multiple of `multiple`, so that none exceeds capacity; no item may."""
    fewest = -(-sum(sizes) // (capacity * multiple)) * multiple
    for num_bins in range(fewest, len(sizes) + multiple, multiple):
        bins = spread(sizes, num_bins)
        if max(sum(sizes[item] for item in items) for items in bins) <= capacity:
            break  # at the latest when every item has a bin of its own
    return [items for items in bins if items]


def pack_rows(rollouts: list[Rollout], token_budget: int, share_prompts: bool = True, num_ranks: int = 1) -> list[Row]:
    """Rows of at most token_budget tokens that hold each rollout once; ValueError if one alone does not fit.

    A group stays together if a row can hold it; otherwise each row it is split over repeats its prompt. The number of
    rows is a multiple of num_ranks where there are enough rollouts.
    """
    if not rollouts:
        return []
    longest = max(len(rollout.prompt) + len(rollout.completion) for rollout in rollouts)
    if longest > token_budget:
        raise ValueError(f"a sample of {longest} tokens does not fit a row: raise --token-budget {token_budget}")
    groups: dict[tuple, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        groups.setdefault(tuple(rollout.prompt) if share_prompts else (i,), []).append(i)
    share = -(-row_tokens(list(groups.values()), rollouts) // num_ranks)
    pieces: Row = []
    for members in groups.values():
        room = min(token_budget - len(rollouts[members[0]].prompt), max(longest, share))
        split = fill([len(rollouts[i].completion) for i in members], room)
        pieces += [[members[k] for k in piece] for piece in split]
    sizes = [row_tokens([piece], rollouts) for piece in pieces]
    return [[pieces[k] for k in row] for row in fill(sizes, token_budget, num_ranks)]


def row_tokens(row: Row, rollouts: list[Rollout]) -> int:
    """How many tokens a row holds."""
    prompts = sum(len(rollouts[piece[0]].prompt) for piece in row)
    return prompts + sum(len(rollouts[i].completion) for piece in row for i in piece)


def row_pairs(row: Row, rollouts: list[Rollout]) -> int:
    """How many pairs of query and key a row's attention has."""
    pairs = 0
    for piece in row:
        prompt = len(rollouts[piece[0]].prompt)
        lengths = [len(rollouts[i].completion) for i in piece]
        pairs += prompt * (prompt + 1) // 2 + sum(length * prompt + length * (length + 1) // 2 for length in lengths)
    return pairs


# --- where everything lies in it -------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """A run of tokens in a row that attends causally to itself, and before that to all of its prompt elsewhere."""

    start: int
    end: int
    prompt_start: int  # prompt_start = prompt_end = start: there is no prompt elsewhere
    prompt_end: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.end - self.start, self.end - self.start + self.prompt_end - self.prompt_start


class Layout(NamedTuple):
    """The places in a row of T tokens, n of them of completions."""

    tokens: list[int]  # (T,)
    positions: list[int]  # (T,) in the sample
    segments: list[Segment]
    predictors: list[int]  # (n,) where in the row each completion token is predicted


def lay_out(row: Row, rollouts: list[Rollout]) -> Layout:
    """Each prompt, followed by the completions that share it."""
    tokens, positions, segments, predictors = layout = Layout([], [], [], [])
    for piece in row:
        prompt, start = rollouts[piece[0]].prompt, len(tokens)
        end = start + len(prompt)
        tokens += prompt
        positions += range(len(prompt))
        if len(piece) > 1:
            segments.append(Segment(start, end, start, start))
        for i in piece:
            completion, begin = rollouts[i].completion, len(tokens)
            tokens += completion
            positions += range(len(prompt), len(prompt) + len(completion))
            predictors += [end - 1, *range(begin, len(tokens) - 1)]
            alone = Segment(start, len(tokens), start, start)
            segments.append(Segment(begin, len(tokens), start, end) if len(piece) > 1 else alone)
    return layout


def padded_length(num_tokens: int, token_budget: int) -> int:
    """The length that a row is padded to for flex attention: one of ROW_SHAPES, in whole blocks."""
    step = -(-token_budget // (ROW_SHAPES * FLEX_BLOCK)) * FLEX_BLOCK
    return -(-num_tokens // step) * step


# --- who sees whom ---------------------------------------------------------------------------------------------------


class SegmentBatch(NamedTuple):
    """Segments that one SDPA call computes together: B of them, padded to Q queries and K keys."""

    queries: torch.Tensor  # (B * Q,) where in the row
    keys: torch.Tensor  # (B * K,) where in the row
    visible: torch.Tensor  # (B, 1, Q, K) which query sees which key


class SegmentPlan(NamedTuple):
    batches: list[SegmentBatch]
    order: torch.Tensor  # (T,) where in the batches' outputs each token of the row is


def group_segments(segments: list[Segment]) -> list[list[Segment]]:
    """Segments of similar shape together, as long as padding them costs less than another attention call."""
    groups: list[list[Segment]] = []
    most_queries = most_keys = pairs = 0
    for segment in sorted(segments, key=lambda segment: (*segment.shape[::-1], segment), reverse=True):
        queries, keys = segment.shape
        size = len(groups[-1]) if groups else 0
        padded = (size + 1) * max(most_queries, queries) * max(most_keys, keys)
        if padded - pairs - queries * keys > PAIRS_PER_CALL * size or not groups:
            groups.append([])
            most_queries = most_keys = pairs = 0
        groups[-1].append(segment)
        most_queries, most_keys, pairs = max(most_queries, queries), max(most_keys, keys), pairs + queries * keys
    return groups


def segment_plan(segments: list[Segment]) -> SegmentPlan:
    """How SDPA computes a row's attention, without a mask over all pairs of the row's tokens."""
    batches, order, offset = [], {}, 0
    for group in group_segments(segments):
        num_queries = max(segment.shape[0] for segment in group)
        num_keys = max(segment.shape[1] for segment in group)
        queries, keys, last_seen = [], [], []
        for segment in group:
            own, prompt = range(segment.start, segment.end), range(segment.prompt_start, segment.prompt_end)
            order |= zip(own, range(offset, offset + len(own)), strict=True)
            offset += num_queries
            queries += [*own, *[segment.start] * (num_queries - len(own))]
            keys += [*prompt, *own, *[segment.start] * (num_keys - len(prompt) - len(own))]
            last_seen.append(range(len(prompt), len(prompt) + num_queries))  # what padding sees is thrown away
        visible = torch.arange(num_keys) <= torch.tensor(last_seen)[:, None, :, None]
        batches.append(SegmentBatch(torch.tensor(queries), torch.tensor(keys), visible))
    return SegmentPlan(batches, torch.tensor([order[i] for i in range(len(order))]))


def block_mask(segments: list[Segment], num_tokens: int, device: torch.device) -> BlockMask:
    """The same for flex attention; what follows the last segment is padding and sees padding only."""
    owner, prompt = torch.full((2, num_tokens), -1)
    for number, segment in enumerate(segments):
        owner[segment.start : segment.end] = number
    for segment in segments:
        prompt[segment.start : segment.end] = owner[segment.prompt_start]
    owner, prompt = to_device(owner, device), to_device(prompt, device)

    def visible(batch, head, q, k):
        return (k <= q) & ((owner[k] == owner[q]) | (owner[k] == prompt[q]))

    return create_block_mask(visible, None, None, num_tokens, num_tokens, device=device, BLOCK_SIZE=FLEX_BLOCK)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on device; from pinned memory, because any other copy to CUDA would wait for what runs there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@cache
def compiled_flex():
    """Flex attention as fused kernels, compiled once per length of a row, with and without a backward."""
    return torch.compile(flex_attention, dynamic=False)


def packed_attention(module, query, key, value, attention_mask, *, scaling, plan, **kwargs):
    """What transformers calls in every layer: query (1, H, T, D), key and value (1, H_kv, T, D) to (1, T, H, D).

    ValueError if the layer asks for anything but plain causal attention.
    """
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {name}, which packed rows lack: choose a model without it")
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if isinstance(plan, BlockMask):
        flex = compiled_flex() if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
        return flex(query, key, value, block_mask=plan, **options).transpose(1, 2), None
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (T, H, D)
    outputs = []
    for queries, keys, visible in plan.batches:
        q, k, v = (
            tensor.index_select(0, places).unflatten(0, (len(visible), -1)).transpose(1, 2)  # (B, H, Q or K, D)
            for tensor, places in ((query, queries), (key, keys), (value, keys))
        )
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, **options)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.order)[None], None
