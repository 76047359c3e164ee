"""The gradient step against plain transformers, PEFT and autograd; on a GPU, its MFU."""

import argparse
import copy
import dataclasses
import json
import multiprocessing
import random
import re
import statistics
import time
from functools import partial
from pathlib import Path

import psutil
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import rewards
import trainer
from benches.figures import figure
from config import LOCAL, Config, fail
from offline import toy
from policy import head, lora
from policy.packing import Row
from rollouts import Rollout

SHAPES = {
    "0.1b": {
        "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
    "qwen2.5-math-1.5b": {
        "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
H200_BF16_FLOPS = 989e12  # dense, per second
TRL_MFU = 0.235  # the post's


def make_base(shape: str, **changes) -> Qwen2ForCausalLM:
    """An architecture with random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape] | {"max_position_embeddings": 4096} | changes))


# --- rollouts --------------------------------------------------------------------------------------------------------


def made_up(vocab: int, groups: int, prompt: int, median: int, spread: float, longest: int) -> list[Rollout]:
    """Groups of 8 random completions of lognormal length, half of each group right."""
    rng = random.Random(0)
    rollouts = []
    for group in range(groups):
        ids = [rng.randrange(vocab) for _ in range(prompt)]
        for k in range(8):
            length = min(longest, max(1, round(median * rng.lognormvariate(0, spread))))
            completion = [rng.randrange(vocab) for _ in range(length)]
            rollouts.append(Rollout(group, ids, completion, [-1.0] * length, float(k % 2), 1.0 - 2.0 * (k % 2), 0))
    return rollouts


@torch.no_grad()
def toy_rollouts(directory: Path, groups: int) -> list[Rollout]:
    """What the toy model really answers, scored by rewards.py, every group with signal."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = Qwen2ForCausalLM.from_pretrained(directory).eval()
    rows = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    rollouts = []
    torch.manual_seed(0)
    for row in random.Random(0).sample(rows, 2 * groups):
        prompt = tokenizer(row["prompt"], return_tensors="pt").input_ids
        out = model.generate(prompt, max_new_tokens=40, do_sample=True, num_return_sequences=8, top_k=0, top_p=1.0)
        answers = [ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else ids
                   for ids in out[:, prompt.shape[1] :].tolist()]  # fmt: skip
        scores = [rewards.grade(tokenizer.decode(ids, skip_special_tokens=True), row["answer"]) for ids in answers]
        for ids, score, advantage in zip(answers, scores, trainer.group_advantages(scores, "group"), strict=True):
            if advantage:
                old = [-0.5] * len(ids)
                rollouts.append(Rollout(len(rollouts) // 8, prompt[0].tolist(), ids, old, score, advantage, 0))
    return rollouts[: 8 * groups]


# --- what it is compared to: transformers, PEFT and autograd alone ---------------------------------------------------


def plain_policy(base: Qwen2ForCausalLM, cfg: Config):
    """PEFT's LoRA and transformers' SDPA, as a first script would have them."""
    options = LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    base.set_attn_implementation("sdpa")
    return get_peft_model(base, options)


def plain_step(model, rollouts: list[Rollout], cfg: Config, batch_size: int) -> None:
    """The same gradient (loss_type token): batches of batch_size sequences, padded on the right to the longest."""
    model.zero_grad()
    num_tokens = sum(len(rollout.completion) for rollout in rollouts)
    for start in range(0, len(rollouts), batch_size):
        batch = rollouts[start : start + batch_size]
        samples = [rollout.prompt + rollout.completion for rollout in batch]
        width = max(map(len, samples))
        ids = torch.tensor([sample + [0] * (width - len(sample)) for sample in samples])
        mask = torch.tensor([[1] * len(sample) + [0] * (width - len(sample)) for sample in samples])
        logits = model(input_ids=ids, attention_mask=mask if batch_size > 1 else None, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1] / cfg.temperature, -1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = 0.0
        for rollout, values in zip(batch, logprobs, strict=True):
            begin = len(rollout.prompt) - 1
            ratio = (values[begin : begin + len(rollout.completion)] - torch.tensor(rollout.old_logprobs)).exp()
            bounded = ratio.clamp(1 - cfg.eps_low, 1 + cfg.eps_high)
            loss = loss - torch.minimum(ratio * rollout.advantage, bounded * rollout.advantage).sum() / num_tokens
        loss.backward()


def gradient_of(model) -> torch.Tensor:
    """All LoRA gradients in one vector, ordered by name."""
    return torch.cat([p.grad.flatten() for _, p in sorted(lora.lora_parameters(model).items())])


def times(steps: dict, rounds: int) -> dict[str, float]:
    """Seconds of each step: the fastest of several rounds in which they take turns, so that all see one machine."""
    taken = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - began)
    return {name: min(values) for name, values in taken.items()}


# --- the figures -----------------------------------------------------------------------------------------------------


def packing_figures(label: str, base, rollouts, cfg: Config, aims: dict[int, float], rounds: int) -> list[dict]:
    """Packed rows with shared prompts against batches of so many sequences; all must have the same gradient."""
    plain_base = copy.deepcopy(base)
    model, plain = lora.add_lora(base, cfg, "cpu"), plain_policy(plain_base, cfg)
    lora.load_adapter_state(plain, {name: torch.from_numpy(t) for name, t in lora.adapter_state(model).items()})
    steps = {size: partial(plain_step, plain, rollouts, cfg, size) for size in aims}
    steps["packed"] = partial(trainer.policy_gradient, model, rollouts, cfg)
    taken = times(steps, rounds)
    gap = (gradient_of(plain) - gradient_of(model)).abs().max().item() / gradient_of(model).abs().max().item()
    if gap > 1e-4:
        raise RuntimeError(f"{label}: the gradients differ by {gap:.1e}, their times cannot be compared")
    tokens = sum(len(rollout.completion) for rollout in rollouts)
    names = {1: "one sequence per forward", 8: "a padded batch"}
    return [
        figure(f"{label}, packed against {names[size]}", taken[size] / taken["packed"], aim, "x", True,
               packed_tok_s=tokens / taken["packed"], other_tok_s=tokens / taken[size], gradient_gap=gap)
        for size, aim in aims.items()
    ]  # fmt: skip


def sharing_figure(cfg: Config, rounds: int) -> dict:
    """Prompts four times longer than completions; unshared: each completion has a prompt of its own."""
    shared = made_up(32_000, 1, 192, 48, 0.0, 48)
    unshared = [dataclasses.replace(r, prompt=[k, *r.prompt[1:]]) for k, r in enumerate(shared)]
    model = lora.add_lora(make_base("0.1b"), cfg, "cpu")
    taken = times({name: partial(trainer.policy_gradient, model, rollouts, cfg)
                   for name, rollouts in (("unshared", unshared), ("shared", shared))}, rounds)  # fmt: skip
    faster = taken["unshared"] / taken["shared"]
    return figure("0.1B shape, prompts 4x the completions: shared against not", faster, 2.5, "x", True,
                  shared_s=taken["shared"], unshared_s=taken["unshared"])  # fmt: skip


def skipping_figure(base, rollouts: list[Rollout], cfg: Config, rounds: int) -> dict:
    """Half of the groups without signal."""
    flat = set(sorted({rollout.group for rollout in rollouts})[::2])
    half = [dataclasses.replace(r, advantage=0.0) if r.group in flat else r for r in rollouts]
    model = lora.add_lora(base, cfg, "cpu")
    taken = times({name: partial(trainer.policy_gradient, model, step, cfg)
                   for name, step in (("all", rollouts), ("skipped", half))}, rounds)  # fmt: skip
    return figure("toy model, half of the groups without signal: step time", taken["skipped"] / taken["all"], 0.6, "x",
                  False, skipped_s=taken["skipped"], all_s=taken["all"])  # fmt: skip


def head_memory(queue, tokens: int, vocab: int, hidden: int) -> None:
    """In a process of its own: bytes that the head and the loss of one row add to its weights and inputs."""
    torch.set_num_threads(1)
    layer = torch.nn.Linear(hidden, vocab, bias=False).requires_grad_(False)
    states, zeros, none = torch.randn(tokens, hidden), torch.zeros(tokens), torch.zeros(0)
    row = Row(none, none, none, none, torch.randint(vocab, (tokens,)), zeros - 12, zeros + 1, zeros + 1, none, none)
    before = psutil.Process().memory_info().rss
    head.head_gradient(states, row, layer, partial(trainer.policy_loss, cfg=Config()), 1.0)
    peak_kib = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
    queue.put(int(peak_kib) * 1024 - before)


def memory_figure() -> dict:
    """The memory of the head at its default chunk."""
    tokens, vocab = 8192, 151_936
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=head_memory, args=(queue, tokens, vocab, 128))
    process.start()
    added = queue.get(timeout=600) / 2**30
    process.join()
    return figure("152k vocabulary, 8k tokens: what head and loss add", added, 1.2, "GiB", False,
                  full_logits_gib=4 * tokens * vocab / 2**30, logits_chunk=head.LOGITS_CHUNK)  # fmt: skip


def bytes_figure() -> dict:
    """What a publish of the 1.5B shape at rank 1 weighs, against its weights in bf16."""
    with torch.device("meta"):
        base = make_base("qwen2.5-math-1.5b").to(torch.bfloat16)
        model = get_peft_model(base, LoraConfig(r=1, target_modules="all-linear"))
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
    full = sum(p.numel() for p in model.parameters() if not p.requires_grad) * 2
    return figure("1.5B shape, rank 1: bytes of a publish against all weights", 100 * adapter / full, 1.0, "%", False,
                  lora_mb=adapter / 1e6, full_mb=full / 1e6)  # fmt: skip


def gpu_figures(shape: str) -> list[dict]:
    """The post's recipe on random weights of `shape`, on CUDA."""
    if not torch.cuda.is_available():
        fail(f"--model-shape {shape}: needs a CUDA device; without it the CPU figures are measured")
    found = []
    for compile_layers in (False, True):
        cfg = Config(compile=compile_layers)
        with torch.device("cuda"):
            base = make_base(shape).to(torch.bfloat16)
        model = lora.add_lora(base, cfg, "cuda")
        rollouts = made_up(SHAPES[shape]["vocab_size"], 16, 150, 700, 0.6, cfg.max_completion_tokens)
        steps = [trainer.policy_gradient(model, rollouts, cfg) for _ in range(8)][3:]  # the first ones compile
        step_s = statistics.median(metrics["perf/fwd_bwd_s"] for metrics in steps)
        mfu = steps[0]["perf/flops"] / step_s / H200_BF16_FLOPS
        found.append(figure(f"{shape}, compile={compile_layers}: MFU (TRL {TRL_MFU:.1%})", 100 * mfu, 50.0, "%", True,
                            trained_tok_s=steps[0]["batch/trained_tokens"] / step_s, step_s=step_s,
                            peak_gib=torch.cuda.max_memory_allocated() / 2**30))  # fmt: skip
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py trainer`."""
    parser.add_argument("--model-shape", default="", choices=list(SHAPES), help="measure this shape on CUDA instead")


def run(args: argparse.Namespace) -> list[dict]:
    """Figures of the gradient step on a CPU, or of one shape on CUDA."""
    if args.model_shape:
        return gpu_figures(args.model_shape)
    torch.set_num_threads(1)  # the same for all that is compared
    toy_dir = toy.cached_model()
    toy_cfg, cfg = Config(**LOCAL), Config(dtype="float32", token_budget=4096)
    answers = toy_rollouts(toy_dir, 16)
    lengths = made_up(32_000, 2, 24, 96, 0.6, 600)
    toy_base = partial(Qwen2ForCausalLM.from_pretrained, toy_dir)
    return [
        *packing_figures("toy model, its own rollouts", toy_base(), answers, toy_cfg, {1: 4.0}, rounds=7),
        skipping_figure(toy_base(), answers, toy_cfg, rounds=15),
        *packing_figures("0.1B, lognormal lengths", make_base("0.1b"), lengths, cfg, {1: 1.1, 8: 1.5}, rounds=3),
        sharing_figure(cfg, rounds=3),
        memory_figure(),
        bytes_figure(),
    ]
