"""From a row to its gradient: the forward, and a head that never holds more than a chunk of logits.

A row of 16,000 tokens with a vocabulary of 152,000 would have 10 GB of logits. Here they exist for completion tokens
only, LOGITS_CHUNK at a time, and their gradient is written out by hand: softmax has d logprob / d logit = one-hot minus
probability. The loss is handed in: what it says of each token's logprob is all that is needed.
"""

from collections.abc import Callable
from functools import cache

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from config import Config
from policy import packing
from policy.lora import lora_parameters
from policy.packing import Row, to_device

LOGITS_CHUNK = 2048  # completion tokens whose logits exist at a time
ENTROPY_LOGITS = 2**20  # logits whose entropy is taken at a time on a CPU

# (logprobs, entropies, old_logprobs, advantages, weights), all (n,), to the sums that a step's metrics are made of, and
# the loss's derivative by the logprobs (n,)
Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def row_hidden(model: PeftModel, row: Row, cfg: Config, flex: bool = torch.cuda.is_available()) -> torch.Tensor:
    """The hidden states (n, d) that predict the row's completion tokens; by flex attention, or by SDPA."""
    base = model.get_base_model()
    device = base.get_input_embeddings().weight.device
    tokens, positions = row.tokens, row.positions
    if flex:
        num_tokens = packing.padded_length(len(tokens), cfg.token_budget)
        plan = packing.block_mask(row.segments, num_tokens, device)
        tokens, positions = (torch.nn.functional.pad(t, (0, num_tokens - len(t))) for t in (tokens, positions))
    else:
        plan = packing.segment_plan([tuple(segment) for segment in row.segments.tolist()])
    backbone = getattr(base, base.base_model_prefix)
    tokens, positions = to_device(tokens, device)[None], to_device(positions, device)[None]
    output = backbone(input_ids=tokens, position_ids=positions, plan=plan, use_cache=False)
    return output.last_hidden_state[0].index_select(0, to_device(row.predictors, device))


def token_stats(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs (n,) of tokens, entropies (n,) and probabilities (n, V) at the temperature of sampling.

    The logits (n, V) are overwritten: with a large vocabulary there is memory for one tensor of their size.
    """
    logits = logits.float()
    logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0]
    probs = logits.exp_()
    total = probs.sum(-1, keepdim=True)
    probs.div_(total)
    return logprobs - total[:, 0].log(), entropies_of(probs), probs


def entropies_of(probs: torch.Tensor) -> torch.Tensor:
    """Entropies (n,) of probabilities (n, V); on a CPU, where nothing fuses them, through a small scratch tensor."""
    if probs.is_cuda:
        return torch.special.entr(probs).sum(-1)
    num_rows = max(1, ENTROPY_LOGITS // probs.shape[1])
    scratch = torch.empty(num_rows, probs.shape[1])
    parts = [torch.special.entr(part, out=scratch[: len(part)]).sum(-1) for part in probs.split(num_rows)]
    return torch.cat(parts)


def logits_gradient(
    logits: torch.Tensor, tokens: torch.Tensor, per_token: list[torch.Tensor], loss: Loss, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss's sums over n tokens, and its gradient by the logits (n, V), which are overwritten."""
    logprobs, entropies, probs = token_stats(logits, tokens, temperature)
    sums, slope = loss(logprobs, entropies, *per_token)
    pull = slope / temperature
    return sums, probs.mul_(-pull[:, None]).scatter_add_(1, tokens[:, None], pull[:, None])


@cache
def compiled_gradient():
    """`logits_gradient` as few kernels: there are more logits than anything else to read and write on CUDA."""
    return torch.compile(logits_gradient, dynamic=True)


@torch.no_grad()
def head_gradient(
    hidden: torch.Tensor, row: Row, head: torch.nn.Linear, loss: Loss, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss's sums over the row's n completion tokens, and its gradient by their hidden states (n, d)."""
    differentiate = compiled_gradient() if hidden.is_cuda else logits_gradient
    tokens, *per_token = (
        to_device(t, hidden.device) for t in (row.targets, row.old_logprobs, row.advantages, row.weights)
    )
    sums, gradient = 0.0, torch.empty_like(hidden)
    for start in range(0, len(hidden), LOGITS_CHUNK):
        part = slice(start, start + LOGITS_CHUNK)
        logits = head(hidden[part])
        chunk_sums, by_logits = differentiate(logits, tokens[part], [t[part] for t in per_token], loss, temperature)
        sums = sums + chunk_sums
        torch.mm(by_logits.to(hidden.dtype), head.weight, out=gradient[part])
        del logits, by_logits  # before the logits of the next chunk exist
    return sums, gradient


def row_gradient(model: PeftModel, row: Row, loss: Loss, cfg: Config) -> torch.Tensor:
    """Add the gradient of a row's loss to .grad of the LoRA parameters; returns the loss's sums."""
    hidden = row_hidden(model, row, cfg)
    sums, by_hidden = head_gradient(hidden, row, model.get_base_model().get_output_embeddings(), loss, cfg.temperature)
    hidden.backward(by_hidden)
    return sums


@torch.no_grad()
def row_logprobs(model: PeftModel, row: Row, cfg: Config, temperature: float) -> list[torch.Tensor]:
    """Logprobs (T,) of each of the row's completions under the policy, on the CPU in fp32."""
    hidden, head = row_hidden(model, row, cfg), model.get_base_model().get_output_embeddings()
    chunks = zip(hidden.split(LOGITS_CHUNK), row.targets.to(hidden.device).split(LOGITS_CHUNK), strict=True)
    logprobs = [token_stats(head(part), tokens, temperature)[0] for part, tokens in chunks]
    return list(torch.cat(logprobs).cpu().split(row.lengths.tolist()))


def row_flops(row: Row, model: PeftModel) -> int:
    """Floating point operations of a row's forward and backward; frozen weights need no gradient: 4 each, not 6."""
    base = model.get_base_model()
    config, head = base.config, base.get_output_embeddings().weight.numel()
    linear = sum(module.weight.numel() for module in base.modules() if isinstance(module, torch.nn.Linear)) - head
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * packing.num_pairs(row)
    return 4 * linear * len(row.tokens) + 4 * head * len(row.targets) + 12 * attention


class Probe:
    """A sample of made-up tokens, to compare one way of computing logprobs with another."""

    def __init__(self, prompt: list[int], completion: list[int]):
        self.prompt, self.completion, self.advantage = prompt, completion, 0.0
        self.old_logprobs = [0.0] * len(completion)


@torch.no_grad()
def check_packing(model: PeftModel, cfg: Config) -> None:
    """ValueError if a packed row does not give the logprobs that the model's own forward gives each sample alone.

    One sample is long where rotary positions are scaled, since that may depend on the longest position in a forward.
    """
    base = model.get_base_model()
    scaled = (getattr(base.config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    lengths = (8, 8, cfg.max_model_len - 8 if scaled else 24)
    prompt, *completions = (
        [(31 * n + 7 * i) % base.config.vocab_size for i in range(k)] for n, k in enumerate((8, *lengths))
    )
    samples = [Probe(prompt, completion) for completion in completions]
    (row,) = packing.pack(samples, [0.0] * 3, 8 + sum(lengths))
    packed = dict(zip(row.members.tolist(), row_logprobs(model, row, cfg, cfg.temperature), strict=True))
    own = [own_logprobs(base, sample, cfg.temperature) for sample in samples]
    gap = max((packed[i] - own[i]).abs().mean().item() for i in range(3))
    if not gap < (1e-3 if cfg.dtype == "float32" else 0.1):
        which = (
            f"rotary positions are scaled ({base.config.rope_parameters['rope_type']})" if scaled else "logits differ"
        )
        raise ValueError(f"{type(base).__name__}: the logprobs of packed rows are off by {gap:.3f}: its {which}; "
                         "choose a model like Qwen2, Qwen3 or Llama")  # fmt: skip


def own_logprobs(base: PreTrainedModel, sample: Probe, temperature: float) -> torch.Tensor:
    """Logprobs (T,) of a sample's completion by the model's own forward, unpacked."""
    base.set_attn_implementation("sdpa")
    ids = torch.tensor([sample.prompt + sample.completion], device=base.get_input_embeddings().weight.device)
    logits = base(input_ids=ids, use_cache=False).logits[0, len(sample.prompt) - 1 : -1]
    base.set_attn_implementation("packed")
    return token_stats(logits, ids[0, len(sample.prompt) :], temperature)[0].cpu()


def flat_gradient(model: PeftModel) -> torch.Tensor:
    """One tensor of zeros that holds the .grad of all LoRA parameters."""
    parameters = list(lora_parameters(model).values())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
