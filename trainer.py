"""How the policy learns: advantages, loss, gradients, and the loop around them.

An optimizer step takes rollouts, packs them into rows (packing.py) and moves the LoRA parameters once. Where it departs
from the textbook:

- The ratio is taken against the sampling replica's own logprobs: no second forward, no reference model, no KL term.
- The loss is normalised over the whole optimizer step, so it does not matter how the step is cut into rows or ranks.
- Rollouts with zero advantage stay in that normaliser but are not forwarded: their gradient is exactly zero.
- The head sees completion tokens only, a chunk at a time, and its gradient is written out by hand.

    python trainer.py --help
    torchrun --nproc-per-node=2 -- trainer.py --run ...    # each process takes half of the rows
"""

import dataclasses
import datetime
import io
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.tuners_utils import check_target_module_exists
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import bucket
import packing
import report
from config import SERVED_LORA_RANKS, Config, config_from, fail, flag, make_parser
from packing import Row, SegmentPlan, pack_rows, spread, to_device
from rewards import RewardError, RewardPool, load_rewards
from rollouts import PromptCursor, Rollout, Sampler, load_prompts

ADVANTAGE_EPS = 1e-4  # added to the group's std
ENTROPY_LOGITS = 2**20  # logits whose entropy is taken at a time on a CPU
CANARY_TOKENS = 16  # of the prompt and of the completion, in the sequence that checks a load


# --- the objective ---------------------------------------------------------------------------------------------------


def group_advantages(rewards: list[float | None], scale: str) -> list[float]:
    """Reward minus group mean, over the group's std (ddof=1) if scale is "group" (arXiv:2402.03300); 0.0 for None."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2 or min(scored) == max(scored):
        return [0.0] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))
    divisor = std + ADVANTAGE_EPS if scale == "group" else 1.0
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards]


def token_weights(rollouts: list[Rollout], cfg: Config) -> list[float]:
    """Weight of one token of each rollout in the loss of the step; tokens without a finite old logprob do not count."""
    lengths = [sum(map(math.isfinite, rollout.old_logprobs)) for rollout in rollouts]
    num_rollouts = sum(length > 0 for length in lengths)
    if cfg.loss_type == "token":  # mean over all tokens (arXiv:2503.14476)
        totals = [sum(lengths)] * len(lengths)
    elif cfg.loss_type == "sequence":  # mean over rollouts of the mean over tokens (arXiv:2402.03300)
        totals = [num_rollouts * length for length in lengths]
    else:  # dr_grpo: a constant per rollout (arXiv:2503.20783)
        totals = [num_rollouts * cfg.max_completion_tokens] * len(lengths)
    return [1 / total if total else 0.0 for total in totals]


def clipped_objective(
    log_ratio: torch.Tensor, advantages: torch.Tensor, cfg: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(ratio * A, clip(ratio) * A) of each token, and its derivative by the logprob; all (n,)."""
    ratio = log_ratio.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - cfg.eps_low, 1 + cfg.eps_high) * advantages
    slope = torch.where(plain <= clipped, plain, 0.0)  # d ratio / d logprob is the ratio itself
    return torch.minimum(plain, clipped), slope


# --- the policy ------------------------------------------------------------------------------------------------------


def check_lora(lora: LoraConfig, model: PreTrainedModel | None = None) -> None:
    """ValueError with reason and cure if replicas could not serve, or the trainer not reproduce, such an adapter."""
    keeps_base = (True, False, "gaussian", "orthogonal")
    refused = [
        (not 1 <= lora.r <= SERVED_LORA_RANKS[-1], f"rank {lora.r}: vLLM serves 1 to {SERVED_LORA_RANKS[-1]}"),
        (lora.rank_pattern or lora.alpha_pattern, "rank_pattern, alpha_pattern: vLLM reads one rank and one alpha"),
        (lora.use_dora, "use_dora: vLLM does not serve DoRA; set it to False"),
        (lora.modules_to_save, "modules_to_save: vLLM serves LoRA weights only; set it to None"),
        (lora.trainable_token_indices, "trainable_token_indices: vLLM serves LoRA weights only; set it to None"),
        (lora.target_parameters, "target_parameters: vLLM serves LoRA on modules only; use target_modules"),
        (lora.bias != "none" or lora.lora_bias, 'bias: vLLM does not serve a trained bias; set it to "none"'),
        (lora.lora_dropout, f"lora_dropout {lora.lora_dropout}: the ratio would not be 1 on-policy; set it to 0"),
        (lora.init_lora_weights not in keeps_base, f"init_lora_weights {lora.init_lora_weights}: it changes the base "
         "weights, and replicas would not know; set it to True"),
    ]  # fmt: skip
    outer = ["lm_head", "embed_tokens"]
    if model is not None:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        outer = [name for name, module in model.named_modules() if module in ends]
    hit = [name for name in outer if lora.target_modules and check_target_module_exists(lora, name)]
    refused.append((hit, f"on {', '.join(hit)}: replicas serve it on inner layers only; drop it from target_modules"))
    for bad, message in refused:
        if bad:
            raise ValueError(f"LoRA {message}")


class LoraProduct(torch.autograd.Function):
    """x W' + bias + scaling * x A' B' for a frozen W: one pass over the output, and only x is kept for the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, lora_a, lora_b, scaling):
        a, b = lora_a.to(x.dtype), lora_b.to(x.dtype)
        low = (a @ x.flatten(0, -2).T) * scaling  # (r, T): thin matrices are fast this way round
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        output = F.linear(x, weight, bias)
        output.flatten(0, -2).addmm_(low.T, b.T)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, weight, a, b, low = ctx.saved_tensors
        x, rows = x.flatten(0, -2), grad.flatten(0, -2)  # (T, in), (T, out)
        grad_low = (b.T @ rows.T) * ctx.scaling  # (r, T)
        grad_a, grad_b = (grad_low @ x).float(), (low @ rows).T.float()
        if not ctx.needs_input_grad[0]:
            return None, None, None, grad_a, grad_b, None
        grad_x = grad @ weight
        grad_x.flatten(0, -2).addmm_(grad_low.T, a)
        return grad_x, None, None, grad_a, grad_b, None


class LoraLinear(PeftLinear):
    """PEFT's layer in the dtype of the base, as replicas compute it; PEFT's own forward copies x and output to fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out)."""
        base, a, b = self.base_layer, self.lora_A["default"].weight, self.lora_B["default"].weight
        return LoraProduct.apply(x, base.weight, base.bias, a, b, self.scaling["default"])


def load_policy(cfg: Config, device: torch.device | str) -> PeftModel:
    """The base model, frozen and in cfg.dtype, with a fresh LoRA adapter in fp32; ValueError if it cannot be packed."""
    model = add_lora(AutoModelForCausalLM.from_pretrained(cfg.model, dtype=getattr(torch, cfg.dtype)), cfg, device)
    check_packing(model, cfg)
    return model


def add_lora(base: PreTrainedModel, cfg: Config, device: torch.device | str) -> PeftModel:
    """`base` frozen on device, with a LoRA adapter on all inner linear layers that depends on cfg.seed only."""
    lora = LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    check_lora(lora, base)
    AttentionInterface.register("packed", packing.packed_attention)
    base.set_attn_implementation("packed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        model = get_peft_model(base, lora).to(device)  # PEFT keeps the adapter in fp32
    for layer in model.modules():
        if type(layer) is PeftLinear:
            layer.__class__ = LoraLinear
    if cfg.gradient_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:  # each length of a row is compiled with and without a backward
        torch._dynamo.config.recompile_limit = 4 * packing.ROW_SHAPES
    if on_cuda and cfg.compile:
        for layer in getattr(base, base.base_model_prefix).layers:
            layer.compile(dynamic=False)
    return model.train(cfg.gradient_checkpointing)  # transformers checkpoints in training mode only


def lora_parameters(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The trained parameters under the names that PEFT saves them by."""
    return {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}


def adapter_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """Copies of the LoRA tensors on the CPU, as adapter_model.safetensors holds them."""
    return {name: p.detach().to("cpu", copy=True) for name, p in lora_parameters(model).items()}


@torch.no_grad()
def load_adapter_state(model: PeftModel, state: dict[str, torch.Tensor]) -> None:
    """Put saved LoRA tensors into the model; ValueError if they are not this model's."""
    parameters = lora_parameters(model)
    wrong = {name for name in state.keys() & parameters.keys() if state[name].shape != parameters[name].shape}
    wrong |= state.keys() ^ parameters.keys()
    if wrong:
        raise ValueError(f"saved adapter does not fit the model, {len(wrong)} tensors differ, such as {min(wrong)}: "
                         "resume with the model and the LoRA flags it was saved with")  # fmt: skip
    for name, parameter in parameters.items():
        parameter.copy_(state[name])


# --- the gradient of a row -------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """What the loss needs of n completion tokens; all (n,)."""

    tokens: torch.Tensor
    old_logprobs: torch.Tensor  # 0 where there is none
    counted: torch.Tensor  # 1 where there is an old logprob, else 0
    advantages: torch.Tensor
    weights: torch.Tensor  # in the loss of the step


class PackedRow(NamedTuple):
    """What the device needs of a row of T tokens, n of them of completions."""

    tokens: torch.Tensor  # (1, T)
    positions: torch.Tensor  # (1, T)
    predictors: torch.Tensor  # (n,) where in the row each completion token is predicted
    plan: SegmentPlan | BlockMask
    targets: Targets


def pack_row(
    row: Row, rollouts: list[Rollout], weights: list[float], cfg: Config, device: torch.device, flex: bool
) -> PackedRow:
    """A row on device, for flex attention (padded) or for SDPA; weights: of one token of each rollout."""
    layout = packing.lay_out(row, rollouts)
    num_tokens = packing.padded_length(len(layout.tokens), cfg.token_budget) if flex else len(layout.tokens)
    padding = [0] * (num_tokens - len(layout.tokens))
    members = [i for piece in row for i in piece]
    lengths = torch.tensor([len(rollouts[i].completion) for i in members])
    old_logprobs = torch.tensor([logprob for i in members for logprob in rollouts[i].old_logprobs])
    counted = old_logprobs.isfinite()
    tensors = (
        torch.tensor([layout.tokens + padding]),
        torch.tensor([layout.positions + padding]),
        torch.tensor(layout.predictors),
        torch.tensor([token for i in members for token in rollouts[i].completion]),
        old_logprobs.where(counted, 0.0),  # selected before any exp: inf and nan would survive a product with 0
        counted.float(),
        torch.tensor([rollouts[i].advantage for i in members]).repeat_interleave(lengths),
        torch.tensor([weights[i] for i in members]).repeat_interleave(lengths) * counted,
    )
    tokens, positions, predictors, *targets = (to_device(tensor, device) for tensor in tensors)
    segments = layout.segments
    plan = packing.block_mask(segments, num_tokens, device) if flex else packing.segment_plan(segments)
    return PackedRow(tokens, positions, predictors, plan, Targets(*targets))


def row_hidden(model: PeftModel, row: PackedRow) -> torch.Tensor:
    """The hidden states (n, d) that predict the row's completion tokens."""
    base = model.get_base_model()
    backbone = getattr(base, base.base_model_prefix)
    output = backbone(input_ids=row.tokens, position_ids=row.positions, plan=row.plan, use_cache=False)
    return output.last_hidden_state[0].index_select(0, row.predictors)


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


SUMS = ("loss", "tokens", "ratio", "kl", "entropy", "clip_ratio/low", "clip_ratio/high")  # kl: k3 of KL(old || new)


def loss_and_gradient(logits: torch.Tensor, targets: Targets, cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """SUMS over n tokens, and the gradient of their loss by the logits (n, V), which are overwritten."""
    logprobs, entropies, probs = token_stats(logits, targets.tokens, cfg.temperature)
    log_ratio = (logprobs - targets.old_logprobs) * targets.counted
    objective, slope = clipped_objective(log_ratio, targets.advantages, cfg)
    pull = -targets.weights * slope / cfg.temperature  # softmax: d logprob / d logit is one-hot minus probability
    gradient = probs.mul_(-pull[:, None]).scatter_add_(1, targets.tokens[:, None], pull[:, None])
    ratio = log_ratio.exp()
    low = (ratio < 1 - cfg.eps_low) & (targets.advantages < 0)
    high = (ratio > 1 + cfg.eps_high) & (targets.advantages > 0)
    counts = torch.stack([torch.ones_like(ratio), ratio, ratio - 1 - log_ratio, entropies, low, high])
    return torch.cat([(-targets.weights * objective).sum()[None], (counts * targets.counted).sum(-1)]), gradient


@cache
def compiled_loss():
    """`loss_and_gradient` as few kernels: there are more logits than anything else to read and write on CUDA."""
    return torch.compile(loss_and_gradient, dynamic=True)


@torch.no_grad()
def head_gradient(
    hidden: torch.Tensor, targets: Targets, head: torch.nn.Linear, cfg: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """SUMS over n tokens, and the gradient of their loss by the hidden states (n, d)."""
    differentiate = compiled_loss() if hidden.is_cuda else loss_and_gradient
    sums, gradient = torch.zeros(len(SUMS), device=hidden.device), torch.empty_like(hidden)
    for start in range(0, len(hidden), cfg.logits_chunk):
        part = slice(start, start + cfg.logits_chunk)
        chunk_sums, by_logits = differentiate(head(hidden[part]), Targets(*(t[part] for t in targets)), cfg)
        sums += chunk_sums
        torch.mm(by_logits.to(hidden.dtype), head.weight, out=gradient[part])
        del by_logits  # before the logits of the next chunk exist
    return sums, gradient


@torch.no_grad()
def completion_logprobs(model: PeftModel, rollouts: list[Rollout], cfg: Config) -> list[torch.Tensor]:
    """Logprobs (T,) of each rollout's completion under the policy at cfg.temperature, on the CPU in fp32."""
    device = next(iter(lora_parameters(model).values())).device
    head = model.get_base_model().get_output_embeddings()
    result: dict[int, torch.Tensor] = {}
    for row in pack_rows(rollouts, cfg.token_budget, cfg.share_prompts):
        packed = pack_row(row, rollouts, [0.0] * len(rollouts), cfg, device, flex=device.type == "cuda")
        chunks = [part.split(cfg.logits_chunk) for part in (row_hidden(model, packed), packed.targets.tokens)]
        logprobs = [token_stats(head(part), tokens, cfg.temperature)[0] for part, tokens in zip(*chunks, strict=True)]
        members = [i for piece in row for i in piece]
        parts = torch.cat(logprobs).cpu().split([len(rollouts[i].completion) for i in members])
        result |= zip(members, parts, strict=True)
    return [result[i] for i in range(len(rollouts))]


@torch.no_grad()
def check_packing(model: PeftModel, cfg: Config) -> None:
    """ValueError if packed rows do not give the logprobs of the model's own forward, as where logits are scaled."""
    base = model.get_base_model()
    device = next(base.parameters()).device
    prompt, *completions = ([(31 * n + 7 * i) % base.config.vocab_size for i in range(8)] for n in range(3))
    rollouts = [Rollout(0, prompt, completion, [0.0] * 8, 0.0, 0.0, 0) for completion in completions]
    packed = torch.stack(completion_logprobs(model, rollouts, cfg))
    base.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt + completion for completion in completions], device=device)
    logits = base(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].float() / cfg.temperature
    base.set_attn_implementation("packed")
    own = torch.log_softmax(logits, -1).gather(-1, ids[:, len(prompt) :, None])[..., 0].cpu()
    gap = (packed - own).abs().mean().item()
    if not gap < (1e-3 if cfg.dtype == "float32" else 0.1):
        raise ValueError(f"{type(base).__name__}: the logprobs of packed rows are off by {gap:.3f}, so this trainer "
                         "does not fit the architecture: choose one like Qwen2, Qwen3 or Llama")  # fmt: skip


# --- the gradient of a step ------------------------------------------------------------------------------------------


def policy_gradient(
    model: PeftModel, rollouts: list[Rollout], cfg: Config, rank: int = 0, world_size: int = 1
) -> dict[str, float]:
    """Set .grad of the LoRA parameters to the gradient of one optimizer step, and return its metrics.

    Every rank gets all rollouts of the step and computes its share of the rows. Rollouts whose reward is None do not
    exist for the loss. Metrics of what was forwarded are absent if nothing was.
    """
    began = time.perf_counter()
    trained = [rollout for rollout in rollouts if rollout.reward is not None]
    weights = token_weights(trained, cfg)
    scale = max(weights, default=0.0) or 1.0  # applied to the sum: a backward in fp16 would lose such small numbers
    kept = [i for i, rollout in enumerate(trained) if rollout.advantage != 0 or not cfg.skip_zero_advantage]
    forwarded, weights = [trained[i] for i in kept], [weights[i] / scale for i in kept]
    rows = pack_rows(forwarded, cfg.token_budget, cfg.share_prompts, world_size)
    flops = [row_flops(row, forwarded, model) for row in rows]

    gradient = flat_gradient(model)
    sums = torch.zeros(len(SUMS), device=gradient.device)
    head = model.get_base_model().get_output_embeddings()
    for number in spread(flops, world_size)[rank]:
        row = pack_row(rows[number], forwarded, weights, cfg, gradient.device, flex=gradient.is_cuda)
        hidden = row_hidden(model, row)
        row_sums, by_hidden = head_gradient(hidden, row.targets, head, cfg)
        hidden.backward(by_hidden)
        sums += row_sums
    if world_size > 1:
        dist.all_reduce(gradient)
        dist.all_reduce(sums)
    gradient *= scale
    sums[0] *= scale
    metrics = step_metrics(trained, forwarded, rows, dict(zip(SUMS, sums.tolist(), strict=True)), cfg)
    return metrics | {"perf/flops": sum(flops), "perf/fwd_bwd_s": time.perf_counter() - began}


def flat_gradient(model: PeftModel) -> torch.Tensor:
    """One tensor of zeros that holds the .grad of all LoRA parameters, so that ranks exchange it in one message."""
    parameters = list(lora_parameters(model).values())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def row_flops(row: Row, rollouts: list[Rollout], model: PeftModel) -> int:
    """Floating point operations of a row's forward and backward; frozen weights need no gradient: 4 each, not 6."""
    base = model.get_base_model()
    config, head = base.config, base.get_output_embeddings().weight.numel()
    linear = sum(module.weight.numel() for module in base.modules() if isinstance(module, torch.nn.Linear)) - head
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * packing.row_pairs(row, rollouts)
    completions = sum(len(rollouts[i].completion) for piece in row for i in piece)
    return 4 * linear * packing.row_tokens(row, rollouts) + 4 * head * completions + 12 * attention


def step_metrics(
    trained: list[Rollout], forwarded: list[Rollout], rows: list[Row], sums: dict[str, float], cfg: Config
) -> dict[str, float]:
    """The metrics of a step from its rollouts, its rows, and SUMS over all forwarded tokens."""
    metrics = {
        "loss": sums["loss"],
        "batch/samples": len(trained),
        "batch/trained_tokens": sum(len(rollout.completion) for rollout in trained),
        "batch/rows": len(rows),
    }
    if trained:
        metrics["batch/zero_advantage_frac"] = sum(rollout.advantage == 0 for rollout in trained) / len(trained)
    if forwarded:
        prompts = sum(len(rollout.prompt) for rollout in forwarded)
        held = sum(len(forwarded[piece[0]].prompt) for row in rows for piece in row)
        tokens = sum(packing.row_tokens(row, forwarded) for row in rows)
        metrics["batch/samples_per_row"] = len(forwarded) / len(rows)
        metrics["batch/row_fill"] = tokens / (len(rows) * cfg.token_budget)
        metrics["batch/prefix_shared_frac"] = 1 - held / prompts  # of the prompt tokens
    if sums["tokens"]:
        metrics |= {name: sums[name] / sums["tokens"] for name in SUMS[2:]}
    return metrics


# --- the optimizer step ----------------------------------------------------------------------------------------------


def optimizer_for(model: PeftModel, cfg: Config) -> torch.optim.AdamW:
    """AdamW over the LoRA parameters, with moments in fp32 like them."""
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    parameters = lora_parameters(model).values()
    return torch.optim.AdamW(parameters, lr=cfg.learning_rate, betas=betas, weight_decay=cfg.weight_decay)


def optimizer_step(
    model: PeftModel, optimizer: torch.optim.Optimizer, cfg: Config, loss: float = 0.0
) -> tuple[float, bool]:
    """Clip and step: the gradient's norm and True, or False and no step if it or the loss is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(lora_parameters(model).values(), cfg.max_grad_norm).item()
    ok = math.isfinite(norm) and math.isfinite(loss)
    if ok:
        optimizer.step()
    optimizer.zero_grad()
    return norm, ok


# --- checkpoints -----------------------------------------------------------------------------------------------------

FIXED = ("model", "dataset", "seed", "lora_rank", "lora_alpha", "group_size")  # a resumed run must have these unchanged


def checkpoint_files(
    model: PeftModel, optimizer: torch.optim.Optimizer, state: dict, rows: list[dict]
) -> dict[str, bytes]:
    """Everything a resumed run needs, copied now and written later; the directory is also a loadable adapter."""
    return {
        **bucket.adapter_files(numpy_state(model), adapter_config(model)),
        "optimizer.pt": to_bytes(optimizer.state_dict()),
        "rng.pt": to_bytes(torch.get_rng_state()),
        "state.json": json.dumps(state).encode(),
        "metrics.jsonl": to_jsonl(rows),
    }


def restore(model: PeftModel, optimizer: torch.optim.Optimizer, directory: Path, cfg: Config) -> dict:
    """Put a checkpoint into model, optimizer and RNG; returns its state. ValueError if it is of another recipe."""
    state = json.loads((directory / "state.json").read_text())
    for name in FIXED:
        if state["config"][name] != getattr(cfg, name):
            raise ValueError(
                f"{flag(name)} {getattr(cfg, name)}: run {cfg.run} was started with {state['config'][name]}; "
                "use that, or another --run"
            )
    tensors = safetensors.torch.load_file(directory / bucket.ADAPTER_WEIGHTS)
    load_adapter_state(model, tensors)
    optimizer.load_state_dict(torch.load(directory / "optimizer.pt", weights_only=True))
    torch.set_rng_state(torch.load(directory / "rng.pt", weights_only=True))
    return state


def to_bytes(value) -> bytes:
    """A value as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def to_jsonl(rows: list[dict]) -> bytes:
    """One line of JSON per row."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def numpy_state(model: PeftModel) -> dict[str, np.ndarray]:
    """The LoRA tensors on the CPU."""
    return {name: tensor.numpy() for name, tensor in adapter_state(model).items()}


def adapter_config(model: PeftModel) -> dict:
    """adapter_config.json as PEFT writes it."""
    with tempfile.TemporaryDirectory() as directory:
        model.peft_config["default"].save_pretrained(directory)
        return json.loads(Path(directory, bucket.ADAPTER_CONFIG).read_text()) | {"inference_mode": True}


# --- what rank 0 holds -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run as rank 0 sees it: the lease on it, where completions come from, where adapters and metrics go."""

    cfg: Config
    directory: Path
    lease: bucket.Lease
    publisher: bucket.Publisher
    sampler: Sampler
    rows: list[dict]  # metrics of all steps so far, those before a resume too
    checkpoints: bucket.Worker = field(default_factory=lambda: bucket.Worker("checkpoints"))
    journal: bucket.Worker = field(default_factory=lambda: bucket.Worker("journal"))
    trackio: bucket.Worker = field(default_factory=lambda: bucket.Worker("trackio"))
    stopped: threading.Event = field(default_factory=threading.Event)
    saved: Path | None = None  # the newest checkpoint of this run
    batch_version: int = 0  # the policy version of the weights for which the step's batch was taken
    snapshot_step: int = 0  # optimizer steps in what was handed to the publisher last
    bad_steps: int = 0  # in a row
    failed_saves: int = 0  # in a row
    before: dict = field(default_factory=dict)  # the last row before a resume: totals go on from there
    started: float = field(default_factory=time.monotonic)
    tracker: Any = None  # trackio's run, if metrics go there too

    def superseded(self) -> bool:
        """Whether another trainer has this run now: nothing that belongs to the run as a whole may be written then."""
        silent_s = time.monotonic() - self.lease.written_s  # others take a trainer without heartbeats for dead
        lost = silent_s > 60 * self.cfg.idle_shutdown_min
        return lost or self.lease.superseded_by is not None or self.publisher.superseded

    def why_stop(self) -> str:
        """Why training cannot go on; '' if it can."""
        if self.superseded():
            newer = self.lease.superseded_by
            return f"attempt {newer} has taken over this run" if newer else "this attempt has lost its hold on the run"
        if self.publisher.failures >= self.cfg.max_failed_publishes:
            return f"{self.publisher.failures} publishes in a row failed: {self.publisher.last_error}"
        if self.bad_steps >= self.cfg.max_bad_steps:
            return f"{self.bad_steps} steps in a row had a non-finite loss or gradient: lower --learning-rate"
        if self.sampler.error:
            return f"sampling failed: {self.sampler.error}"
        for worker in (self.publisher.worker, self.publisher.cleaner, self.checkpoints, self.journal):
            if worker.error:
                return f"a background write failed: {type(worker.error).__name__}: {worker.error}"
        return "asked to stop" if self.stopped.is_set() else ""

    def publish_if_due(self, step: int, model: PeftModel, rollouts: list[Rollout]) -> None:
        """Every sync_every steps hand a snapshot of the adapter to the publisher; training goes on at once.

        Asked after each step, and while the trainer waits for rollouts: they may be waiting for this publish. While one
        runs none is taken (later weights are newer); after one that failed there is another, at growing pauses.
        """
        publisher, sync_every = self.publisher, self.cfg.sync_every
        pause_s = self.cfg.load_retry_s * 2 ** (2 + publisher.failures)
        again = publisher.failures and time.monotonic() - publisher.failed_s > pause_s
        due = step // sync_every > self.snapshot_step // sync_every
        if (due or again) and not publisher.worker.busy and step < self.cfg.max_steps:
            self.snapshot_step = step
            publisher.submit(step, numpy_state(model), canary(model, rollouts, self.cfg))

    def version(self, step: int) -> int:
        """The policy version of the weights after this step, live or not yet: staleness is measured from it."""
        live, sync_every = self.publisher.policy.version, self.cfg.sync_every  # failed publishes used up versions too
        return live + step // sync_every - self.publisher.step_of[live] // sync_every

    def save(self, step: int, model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
        """Hand a snapshot of everything to the checkpoint writer."""
        state = {"step": step, "cursor": self.sampler.cursor.state(), "config": dataclasses.asdict(self.cfg)}
        files = checkpoint_files(model, optimizer, state, self.rows)

        def write() -> None:
            try:
                self.saved = bucket.save_checkpoint(self.directory, self.lease.attempt, step, files, self.cfg)
                self.failed_saves = 0
            except (bucket.PublishError, OSError) as error:
                self.failed_saves += 1
                print(f"the checkpoint of step {step} was not saved: {error}", flush=True)
                if self.failed_saves >= self.cfg.max_failed_publishes:
                    raise

        self.checkpoints.submit(write)

    def write_metrics(self) -> None:
        """Hand the rows to the journal: this attempt's own file, and the run's, which they make anew each time."""
        data, own = to_jsonl(self.rows), self.directory / "metrics" / f"a{self.lease.attempt}.jsonl"

        def write() -> None:
            try:
                own.parent.mkdir(exist_ok=True)
                bucket.write_file(own, data)
                if not self.superseded():
                    bucket.write_file(self.directory / "metrics.jsonl", data)
            except OSError as error:  # the next write has these rows too
                print(f"metrics were not written: {error}", flush=True)

        self.journal.submit(write)

    def track(self, row: dict) -> None:
        """Hand a step's metrics to trackio; whatever goes wrong there, the run goes on without it."""
        try:
            self.tracker.log(row, step=row["step"])
        except Exception as error:
            print(f"metrics no longer go to trackio: {type(error).__name__}: {error}", flush=True)
            self.tracker = None

    def total(self, name: str, value: float) -> float:
        """A count of this attempt on top of what the attempts before it counted."""
        return self.before.get(name, 0) + value


def open_run(cfg: Config, lease: bucket.Lease, model: PeftModel, state: dict, found: Path | None) -> Run:
    """Prompts, rewards, publisher and sampler of a run; the restored (or fresh) policy is live when this returns."""
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    prompts, too_long = load_prompts(cfg, tokenizer)
    print(f"{len(prompts)} prompts; {too_long} that leave no room for a completion are left out", flush=True)
    directory = Path(cfg.bucket).absolute() / cfg.run
    shapes = {name: tuple(parameter.shape) for name, parameter in lora_parameters(model).items()}
    publisher = bucket.Publisher(directory, lease, cfg, adapter_config(model), shapes)
    cursor = PromptCursor(len(prompts), cfg.seed, state["cursor"])
    pool = RewardPool(load_rewards(cfg.reward), cfg.reward_workers, cfg.reward_timeout_s, cfg.reward_memory_mb)
    sampler = Sampler(cfg, prompts, cursor, lambda: publisher.policy, pool, publisher.reload)
    rows = report.read_rows(found / "metrics.jsonl") if found else []
    before = rows[-1] if rows else {}
    run = Run(cfg, directory, lease, publisher, sampler, rows, saved=found, before=before, snapshot_step=state["step"])
    run.tracker = open_tracker(cfg)
    signal.signal(signal.SIGTERM, lambda *_: run.stopped.set())
    signal.signal(signal.SIGINT, lambda *_: run.stopped.set())
    first = [Rollout(0, prompts[0].ids, prompts[0].ids[:1], [0.0], None, 0.0, 0)]
    while not publisher.publish(state["step"], numpy_state(model), canary(model, first, cfg)):
        if run.why_stop():
            raise bucket.PublishError(f"the first policy did not become live: {run.why_stop()}")
        run.stopped.wait(10 * cfg.load_retry_s)
    for name in publisher.collect_leftovers():
        print(f"deleting {name}, left by an ended attempt", flush=True)
    sampler.start()
    return run


def open_tracker(cfg: Config) -> Any:
    """The run in trackio that metrics go to (--track trackio), continued if it is there; None without one."""
    if not cfg.track:
        return None
    try:
        import trackio

        return trackio.init("async-grpo-lora", cfg.run, space_id=cfg.track_space or None, private=True, embed=False,
                            config=dataclasses.asdict(cfg), resume="allow", auto_log_cpu=False)  # fmt: skip
    except Exception as error:  # no trackio, no such Space, no network
        raise ValueError(f"--track trackio: {type(error).__name__}: {error}; pip install trackio, or leave it out"
                         ) from error  # fmt: skip


def canary(model: PeftModel, rollouts: list[Rollout], cfg: Config) -> dict:
    """A short token sequence and the trainer's logprobs for it, which a replica with the same weights must repeat."""
    ids = rollouts[0].prompt[-CANARY_TOKENS:] + rollouts[0].completion[:CANARY_TOKENS]
    probe = Rollout(0, ids[:1], ids[1:], [0.0] * (len(ids) - 1), None, 0.0, 0)
    logprobs = completion_logprobs(model, [probe], dataclasses.replace(cfg, temperature=1.0))[0]
    return {"token_ids": ids, "logprobs": logprobs.tolist()}


# --- the loop --------------------------------------------------------------------------------------------------------


def train(cfg: Config, lease: bucket.Lease | None, rank: int, world_size: int, device: torch.device) -> int:
    """Train until max_steps or until something says stop; the exit code. Only rank 0 has a lease."""
    directory = Path(cfg.bucket).absolute() / cfg.run
    found = from_rank_0(find_checkpoint(directory, cfg) if lease else None, world_size)
    transformers.utils.logging.disable_progress_bar()
    model = load_policy(cfg, device)
    optimizer = optimizer_for(model, cfg)
    state = {"step": 0, "cursor": None}
    if found:
        load = partial(restore, model, optimizer, found, cfg)
        state = bucket.with_deadline(load, cfg.publish_timeout_s, f"reading {found}")
    run = open_run(cfg, lease, model, state, found) if lease else None
    step, rollouts = state["step"], []
    while step < cfg.max_steps:
        began = time.perf_counter()
        groups, stop = from_rank_0(next_batch(run, step, model, rollouts) if run else None, world_size)
        if stop:
            break
        waited_s = time.perf_counter() - began
        rollouts = with_advantages(groups, cfg)
        metrics = policy_gradient(model, rollouts, cfg, rank, world_size)
        metrics["grad_norm"], ok = optimizer_step(model, optimizer, cfg, metrics["loss"])
        step += 1
        if not run:
            continue
        run.bad_steps = 0 if ok else run.bad_steps + 1
        run.sampler.cursor.done([group[0].group for group in groups])
        snapshot_began = time.perf_counter()
        run.publish_if_due(step, model, rollouts)
        metrics["perf/weight_sync_stall_s"] = time.perf_counter() - snapshot_began
        metrics |= {"perf/rollout_wait_s": waited_s, "perf/step_s": time.perf_counter() - began}
        record(run, step, metrics, rollouts)
        if step % cfg.save_every == 0 or step == cfg.max_steps:
            run.save(step, model, optimizer)
    return finish(run, step, model, optimizer) if run else 0


def find_checkpoint(directory: Path, cfg: Config) -> Path | None:
    """The newest complete checkpoint of a run; says what is resumed and what was skipped."""
    search = partial(bucket.newest_checkpoint, directory)
    found, skipped = bucket.with_deadline(search, cfg.publish_timeout_s, f"looking for checkpoints in {directory}")
    for line in skipped:
        print(f"skipped checkpoint {line}", flush=True)
    if found:
        print(f"resuming from {found}", flush=True)
    return found


def from_rank_0(value, world_size: int):
    """What rank 0 passed, on every rank."""
    if world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def next_batch(run: Run, step: int, model: PeftModel, rollouts: list[Rollout]) -> tuple[list[list[Rollout]], str]:
    """The groups of the step after this one and '', or what there is and why training stops; publishes meanwhile."""

    def keep_waiting() -> bool:
        run.publish_if_due(step, model, rollouts)
        return not run.why_stop()

    run.batch_version = run.version(step)
    groups = run.sampler.batch(run.cfg.batch_size // run.cfg.group_size, keep_waiting, run.batch_version)
    return groups, run.why_stop()


def with_advantages(groups: list[list[Rollout]], cfg: Config) -> list[Rollout]:
    """All rollouts of the groups, their advantages filled in."""
    rollouts = []
    for group in groups:
        advantages = group_advantages([rollout.reward for rollout in group], cfg.scale_rewards)
        rollouts += [dataclasses.replace(r, advantage=a) for r, a in zip(group, advantages, strict=True)]
    return rollouts


def record(run: Run, step: int, metrics: dict, rollouts: list[Rollout]) -> None:
    """Complete the step's row of metrics, print its line, and now and then write all rows and name the bottleneck."""
    sampler, publisher, step_s = run.sampler, run.publisher, metrics["perf/step_s"]
    flops, num_tokens = metrics.pop("perf/flops", 0.0), sum(len(r.completion) for r in rollouts)
    rewards = [r.reward for r in rollouts if r.reward is not None]
    generated = run.total("rollout/generated_tokens_total", sampler.generated_tokens)
    last = run.rows[-1] if run.rows else {}
    behind = [run.batch_version - r.version for r in rollouts]
    wall_s = run.total("perf/wall_s", time.monotonic() - run.started)
    row = {
        "step": step,
        "reward/mean": sum(rewards) / max(1, len(rewards)),
        "reward/unscorable": len(rollouts) - len(rewards),
        "reward/timeouts": sampler.pool.timeouts,
        **metrics,
        "perf/wall_s": wall_s,
        "perf/trained_tok_s": num_tokens / step_s,
        "perf/publish_s": publisher.seconds[-1],
        "rollout/generated_tokens_total": generated,
        "rollout/generated_tok_s": (generated - last.get("rollout/generated_tokens_total", 0))
        / max(step_s, wall_s - last.get("perf/wall_s", 0.0)),
        "rollout/backpressure_s": sampler.queue.take_backpressure_s(),
        "rollout/inflight": sampler.inflight,
        "rollout/inflight_limit": sampler.num_ready * run.cfg.inflight_per_replica,
        "rollout/failed_groups_total": run.total("rollout/failed_groups_total", sampler.failed_groups),
        "rollout/rejected_total": run.total("rollout/rejected_total", sampler.rejected),
        "sample/queue_size": sampler.queue.num_samples,
        "sample/staleness_mean": sum(behind) / len(behind),
        "sample/on_policy_frac": sum(publisher.step_of[r.version] == step - 1 for r in rollouts) / len(rollouts),
        "sample/dropped_stale_total": run.total("sample/dropped_stale_total", sampler.dropped_stale),
        "sample/trained_tokens_total": last.get("sample/trained_tokens_total", 0) + num_tokens,
        "completions/mean_length": num_tokens / len(rollouts),
        "completions/truncated_frac": sum(r.truncated for r in rollouts) / len(rollouts),
        "publish/num_total": run.total("publish/num_total", len(publisher.seconds)),
        "publish/failed_total": run.total("publish/failed_total", publisher.failed_total),
    }
    if flops and torch.cuda.is_available():
        num_gpus = dist.get_world_size() if dist.is_initialized() else 1
        row["perf/mfu"] = flops / step_s / peak_flops(run.cfg.dtype) / num_gpus
    run.rows.append(row)
    if run.tracker:
        run.track(row)
    recent = run.rows[-10:]
    print(report.step_line(row, run.cfg, report.mean_of(recent, "perf/step_s")), flush=True)
    if step % run.cfg.diagnose_every == 0:
        run.write_metrics()
        print(report.diagnose(run.rows[-run.cfg.diagnose_every :], run.cfg), flush=True)


def finish(run: Run, step: int, model: PeftModel, optimizer: torch.optim.Optimizer) -> int:
    """Save what there is, say where it is and what was learned; 0 if the run is complete, else why it stopped."""
    run.sampler.stop()
    reason, complete = run.why_stop(), step >= run.cfg.max_steps and not run.superseded()
    if not complete:
        run.save(step, model, optimizer)
    run.write_metrics()
    grace_s = 5.0 if run.stopped.is_set() else run.cfg.publish_timeout_s
    if run.tracker:
        run.trackio.submit(run.tracker.finish)
        run.trackio.flush(grace_s)
    done = run.checkpoints.flush(grace_s) and run.journal.flush(grace_s)
    where = f"checkpoint {run.saved}" if run.saved else "no checkpoint"
    if not complete:
        print(f"error: stopped at step {step}: {reason}; {where}{'' if done else ' (its writing hangs)'}", flush=True)
        return 143 if run.stopped.is_set() else 1
    run.publisher.worker.flush(grace_s)
    run.publisher.cleaner.flush(grace_s)
    try:
        write = partial(write_results, run, model)
        summary = bucket.with_deadline(write, run.cfg.publish_timeout_s, "writing the results")
    except (bucket.PublishError, OSError) as error:
        print(f"error: all {step} steps are done, but their results are not written: {error}; {where}", flush=True)
        return 1
    print(report.last_words(run.directory, summary), flush=True)
    return 0


def peak_flops(dtype: str) -> float:
    """Dense matrix FLOP/s of this GPU in bfloat16 or float16 by its datasheet (a tenth of it counts for float32)."""
    name = torch.cuda.get_device_name()
    known = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "T4": 65e12}
    peak = next((flops for part, flops in known.items() if part in name), 989e12)
    return peak / 10 if dtype == "float32" else peak


def write_results(run: Run, model: PeftModel) -> dict:
    """summary.json, curves.png, and final/: the adapter that users load, with a model card. Returns the summary."""
    summary = report.summarize(run.rows, run.publisher.seconds, replica_restarts(run.directory))
    bucket.write_file(run.directory / "summary.json", json.dumps(summary, indent=2).encode())
    with tempfile.TemporaryDirectory() as directory:  # drawn there and copied: a mount cannot seek
        report.plot({run.cfg.run: run.rows}, Path(directory, "curves.png"))
        bucket.write_file(run.directory / "curves.png", Path(directory, "curves.png").read_bytes())
    final = run.directory / "final"
    final.mkdir(exist_ok=True)
    files = bucket.adapter_files(numpy_state(model), adapter_config(model))
    for name, data in {**files, "README.md": report.model_card(run.cfg, summary).encode()}.items():
        bucket.write_file(final / name, data)
    return summary


def replica_restarts(directory: Path) -> int:
    """How many replicas the launcher has replaced, as it says in the bucket."""
    try:
        return json.loads((directory / "replicas.json").read_text())["restarts"]
    except (OSError, ValueError, KeyError):
        return 0


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--plot", nargs="+", metavar="RUN", help="draw the curves of these run directories, and stop")
    args = parser.parse_args()
    if args.plot:
        try:
            return report.plot_runs(args.plot)
        except ValueError as error:
            fail(f"--plot: {error}")
    cfg = config_from(args)
    if not cfg.run:
        fail("--run is missing: name the run")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT still asks transformers for it
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:  # the other ranks wait for rank 0's batch, however long that takes
        patience = datetime.timedelta(hours=cfg.timeout_h)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    lease = None
    try:
        lease = bucket.claim(Path(cfg.bucket).absolute() / cfg.run, cfg) if rank == 0 else None
        return train(cfg, lease, rank, world_size, device)
    except (ValueError, bucket.LeaseError) as error:
        fail(str(error))
    except (RewardError, bucket.PublishError) as error:
        print(f"error: {error}", flush=True)
        return 1
    finally:
        if lease:
            lease.release()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for replicas that are being cancelled
