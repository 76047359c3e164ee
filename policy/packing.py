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

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

FLEX_BLOCK = 128  # tokens; flex attention skips blocks of this size
ROW_SHAPES = 8  # how many lengths rows have on CUDA
PAIRS_PER_CALL = 50_000  # an attention call on a CPU costs about as much as this many query-key pairs


class Sample(Protocol):
    """What packing needs of a rollout."""

    prompt: list[int]  # token ids (P,)
    completion: list[int]  # token ids (T,)
    old_logprobs: list[float]  # (T,); nan where there is none
    advantage: float


class Row(NamedTuple):
    """One forward of T tokens, n of them of completions, in S segments; whoever has the base model can compute it.

    A segment attends causally to itself, and before that to all of its prompt, if that lies elsewhere.
    """

    tokens: torch.Tensor  # (T,)
    positions: torch.Tensor  # (T,) in the sample
    segments: torch.Tensor  # (S, 4) start, end, and its prompt's; start twice if there is no prompt elsewhere
    predictors: torch.Tensor  # (n,) where in the row each completion token is predicted
    targets: torch.Tensor  # (n,) the completion tokens
    old_logprobs: torch.Tensor  # (n,) nan where there is none: such a token does not count
    advantages: torch.Tensor  # (n,)
    weights: torch.Tensor  # (n,) in the loss of the step
    lengths: torch.Tensor  # (C,) of the completions, in the order in which they lie in the row
    members: torch.Tensor  # (C,) which of the packed samples each of them is


# --- which samples share a row ---------------------------------------------------------------------------------------


def fill(sizes: list[int], capacity: int) -> list[list[int]]:
    """Numbers of the items in each of the fewest bins that hold them, about equally heavy; no item may exceed capacity.

    The largest item comes first, and each goes to the lightest bin.
    """
    for num_bins in range(max(1, -(-sum(sizes) // capacity)), len(sizes) + 1):
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        loads = [0] * num_bins
        for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
            lightest = loads.index(min(loads))
            bins[lightest].append(item)
            loads[lightest] += sizes[item]
        if max(loads) <= capacity:
            return bins
    return []


def pack(samples: Sequence[Sample], weights: list[float], token_budget: int) -> list[Row]:
    """Rows of at most token_budget tokens that hold each sample once; ValueError if one alone does not fit.

    A group stays together if a row can hold it; otherwise each row it is split over repeats its prompt.
    weights: of one token of each sample in the loss.
    """
    longest = max((len(sample.prompt) + len(sample.completion) for sample in samples), default=0)
    if longest > token_budget:
        raise ValueError(f"a sample of {longest} tokens does not fit a row: raise --token-budget {token_budget}")
    groups: dict[tuple, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(tuple(sample.prompt), []).append(i)
    pieces, sizes = [], []  # the members of a group that share a copy of their prompt
    for prompt, members in groups.items():
        lengths = [len(samples[i].completion) for i in members]
        for piece in fill(lengths, token_budget - len(prompt)):
            pieces.append([members[k] for k in piece])
            sizes.append(len(prompt) + sum(lengths[k] for k in piece))
    return [lay_out([pieces[k] for k in row], samples, weights) for row in fill(sizes, token_budget)]


def lay_out(pieces: list[list[int]], samples: Sequence[Sample], weights: list[float]) -> Row:
    """A row of these pieces: each prompt, followed by the completions that share it."""
    tokens, positions, segments, predictors = [], [], [], []
    for piece in pieces:
        prompt, start = samples[piece[0]].prompt, len(tokens)
        end = start + len(prompt)
        tokens += prompt
        positions += range(len(prompt))
        if len(piece) > 1:
            segments.append((start, end, start, start))
        for i in piece:
            completion, begin = samples[i].completion, len(tokens)
            tokens += completion
            positions += range(len(prompt), len(prompt) + len(completion))
            predictors += [end - 1, *range(begin, len(tokens) - 1)]
            alone = (start, len(tokens), start, start)
            segments.append((begin, len(tokens), start, end) if len(piece) > 1 else alone)
    members = [i for piece in pieces for i in piece]
    lengths = torch.tensor([len(samples[i].completion) for i in members])
    return Row(
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(segments),
        torch.tensor(predictors),
        torch.tensor([token for i in members for token in samples[i].completion]),
        torch.tensor([logprob for i in members for logprob in samples[i].old_logprobs]),
        torch.tensor([samples[i].advantage for i in members]).repeat_interleave(lengths),
        torch.tensor([weights[i] for i in members]).repeat_interleave(lengths),
        lengths,
        torch.tensor(members),
    )


def num_pairs(row: Row) -> int:
    """How many pairs of query and key a row's attention has."""
    own, prompt = row.segments[:, 1] - row.segments[:, 0], row.segments[:, 3] - row.segments[:, 2]
    return int((own * (own + 1) // 2 + own * prompt).sum())


# --- who sees whom ---------------------------------------------------------------------------------------------------


class SegmentBatch(NamedTuple):
    """Segments that one SDPA call computes together: B of them, padded to Q queries and K keys."""

    queries: torch.Tensor  # (B * Q,) where in the row
    keys: torch.Tensor  # (B * K,) where in the row
    visible: torch.Tensor  # (B, 1, Q, K) which query sees which key


class SegmentPlan(NamedTuple):
    batches: list[SegmentBatch]
    order: torch.Tensor  # (T,) where in the batches' outputs each token of the row is


def group_segments(segments: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Segments of similar shape together, as long as padding them costs less than another attention call."""

    def shape(segment: tuple[int, ...]) -> tuple[int, int]:  # numbers of keys and queries
        start, end, prompt_start, prompt_end = segment
        return end - start + prompt_end - prompt_start, end - start

    groups: list[list[tuple[int, ...]]] = []
    for segment in sorted(segments, key=lambda segment: (*shape(segment), segment), reverse=True):
        shapes = [shape(other) for other in [*(groups[-1] if groups else []), segment]]
        padded = len(shapes) * max(keys for keys, _ in shapes) * max(queries for _, queries in shapes)
        if not groups or padded - sum(keys * queries for keys, queries in shapes) > PAIRS_PER_CALL * len(groups[-1]):
            groups.append([])
        groups[-1].append(segment)
    return groups


def segment_plan(segments: list[tuple[int, ...]]) -> SegmentPlan:
    """How SDPA computes a row's attention, without a mask over all pairs of the row's tokens."""
    batches, order, offset = [], {}, 0
    for group in group_segments(segments):
        num_queries = max(end - start for start, end, _, _ in group)
        num_keys = max(end - start + prompt_end - prompt_start for start, end, prompt_start, prompt_end in group)
        queries, keys, last_seen = [], [], []
        for start, end, prompt_start, prompt_end in group:
            own, prompt = range(start, end), range(prompt_start, prompt_end)
            order |= zip(own, range(offset, offset + len(own)), strict=True)
            offset += num_queries
            queries += [*own, *[start] * (num_queries - len(own))]
            keys += [*prompt, *own, *[start] * (num_keys - len(prompt) - len(own))]
            last_seen.append(range(len(prompt), len(prompt) + num_queries))  # what padding sees is thrown away
        visible = torch.arange(num_keys) <= torch.tensor(last_seen)[:, None, :, None]
        batches.append(SegmentBatch(torch.tensor(queries), torch.tensor(keys), visible))
    return SegmentPlan(batches, torch.tensor([order[i] for i in range(len(order))]))


def padded_length(num_tokens: int, token_budget: int) -> int:
    """The length that a row is padded to for flex attention: one of ROW_SHAPES, in whole blocks."""
    step = -(-token_budget // (ROW_SHAPES * FLEX_BLOCK)) * FLEX_BLOCK
    return -(-num_tokens // step) * step


def block_mask(segments: torch.Tensor, num_tokens: int, device: torch.device) -> BlockMask:
    """The same for flex attention; what follows the last segment is padding and sees padding only."""
    owner, prompt = torch.full((2, num_tokens), -1)
    for number, (start, end, _, _) in enumerate(segments.tolist()):
        owner[start:end] = number
    for start, end, prompt_start, _ in segments.tolist():
        prompt[start:end] = owner[prompt_start]
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
