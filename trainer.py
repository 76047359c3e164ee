"""How the policy learns: advantages, loss, the gradient of a step, and the loop around them.

An optimizer step takes rollouts, packs them into rows (policy/packing.py) and moves the LoRA parameters once. Where it
departs from the textbook:

- The ratio is taken against the sampling replica's own logprobs: no second forward, no reference model, no KL term.
- The loss is normalised over the whole optimizer step, so it does not matter how the step is cut into rows.
- Rollouts with zero advantage stay in that normaliser but are not forwarded: their gradient is exactly zero.
- The head sees completion tokens only, a chunk at a time, and its gradient is written out by hand (policy/head.py).

    python trainer.py --help
    python trainer.py --plot runs/NAME [runs/OTHER ...]    # draw the curves again, of several runs over each other
"""

import dataclasses
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
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from peft import PeftModel
from transformers import AutoTokenizer

import bucket
from config import Config, changed_settings, config_from, fail, make_parser
from policy.head import check_packing, flat_gradient, row_flops, row_gradient, row_logprobs
from policy.lora import adapter_config, adapter_state, add_lora, load_adapter_state, load_base, lora_parameters
from policy.packing import Row, pack
from prompts import load_prompts
from report import training as report
from rewards import RewardError, RewardPool, load_rewards
from rollouts import PromptCursor, Rollout, Sampler

ADVANTAGE_EPS = 1e-4  # added to the group's std
CANARY_TOKENS = 16  # of the prompt and of the completion, in the sequence that checks a load
MAX_BAD_STEPS = 5  # in a row with a non-finite loss or gradient, before the run stops
SUMS = ("loss", "tokens", "ratio", "kl", "entropy", "clip_ratio/low", "clip_ratio/high")  # kl: k3 of KL(old || new)


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


def policy_loss(
    logprobs: torch.Tensor, entropies: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor,
    weights: torch.Tensor, cfg: Config,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """SUMS over n tokens, and the derivative (n,) of the loss by their logprobs; all arguments (n,)."""
    counted = old_logprobs.isfinite()
    log_ratio = torch.where(counted, logprobs - old_logprobs, 0.0)  # selected before any exp: inf * 0 would be nan
    objective, slope = clipped_objective(log_ratio, advantages, cfg)
    ratio, weights = log_ratio.exp(), weights * counted
    low = (ratio < 1 - cfg.eps_low) & (advantages < 0)
    high = (ratio > 1 + cfg.eps_high) & (advantages > 0)
    counts = torch.stack([torch.ones_like(ratio), ratio, ratio - 1 - log_ratio, entropies, low, high])
    return torch.cat([-(weights * objective).sum()[None], (counts * counted).sum(-1)]), -weights * slope


# --- the gradient of a step ------------------------------------------------------------------------------------------


def gradient_of(model: PeftModel, rows: list[Row], cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Set .grad of the LoRA parameters to the gradient of these rows' loss; returns it as one tensor, and SUMS."""
    gradient = flat_gradient(model)
    sums = torch.zeros(len(SUMS), device=gradient.device)
    for row in rows:
        sums += row_gradient(model, row, partial(policy_loss, cfg=cfg), cfg)
    return gradient, sums


def policy_gradient(model: PeftModel, rollouts: list[Rollout], cfg: Config) -> dict[str, float]:
    """Set .grad of the LoRA parameters to the gradient of one optimizer step, and return its metrics.

    Rollouts whose reward is None do not exist for the loss. Metrics of what was forwarded are absent if nothing was.
    """
    began = time.perf_counter()
    trained = [rollout for rollout in rollouts if rollout.reward is not None]
    weights = token_weights(trained, cfg)
    scale = max(weights, default=0.0) or 1.0  # applied to the sum: a backward in fp16 would lose such small numbers
    kept = [i for i, rollout in enumerate(trained) if rollout.advantage != 0]
    rows = pack([trained[i] for i in kept], [weights[i] / scale for i in kept], cfg.token_budget)
    gradient, sums = gradient_of(model, rows, cfg)
    gradient *= scale
    sums[0] *= scale
    metrics = report.step_metrics(trained, rows, dict(zip(SUMS, sums.tolist(), strict=True)), cfg)
    flops = sum(row_flops(row, model) for row in rows)
    return metrics | {"perf/flops": flops, "perf/fwd_bwd_s": time.perf_counter() - began}


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


def canary(model: PeftModel, rollout: Rollout, cfg: Config) -> dict:
    """A short token sequence and the trainer's logprobs for it, which a replica with the same weights must repeat."""
    ids = rollout.prompt[-CANARY_TOKENS:] + rollout.completion[:CANARY_TOKENS]
    probe = dataclasses.replace(rollout, prompt=ids[:1], completion=ids[1:], old_logprobs=[0.0] * (len(ids) - 1))
    (row,) = pack([probe], [0.0], cfg.token_budget)
    return {"token_ids": ids, "logprobs": row_logprobs(model, row, cfg, temperature=1.0)[0].tolist()}


# --- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_files(
    model: PeftModel, optimizer: torch.optim.Optimizer, state: dict, rows: list[dict]
) -> dict[str, bytes]:
    """Everything a resumed run needs, copied now and written later; the directory is also a loadable adapter."""

    def to_bytes(value: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    return {
        **bucket.adapter_files(adapter_state(model), adapter_config(model)),
        "optimizer.pt": to_bytes(optimizer.state_dict()),
        "rng.pt": to_bytes(torch.get_rng_state()),
        "state.json": json.dumps(state).encode(),
        "metrics.jsonl": report.to_jsonl(rows),
    }


def restore(model: PeftModel, optimizer: torch.optim.Optimizer, directory: Path, cfg: Config) -> dict:
    """Put a checkpoint into model, optimizer and RNG; returns its state. ValueError if it is of another recipe.

    The settings are those of this start, not the checkpoint's; what differs is said.
    """
    state = json.loads((directory / "state.json").read_text())
    changed = changed_settings(state["config"], cfg)
    if changed:
        print(f"since step {state['step']} these settings have changed: {', '.join(changed)}", flush=True)
    load_adapter_state(model, safetensors.torch.load_file(directory / bucket.ADAPTER_WEIGHTS))
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(torch.load(directory / "optimizer.pt", weights_only=True))
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    torch.set_rng_state(torch.load(directory / "rng.pt", weights_only=True))
    return state


def find_checkpoint(directory: Path, cfg: Config) -> Path | None:
    """The newest complete checkpoint of a run; says what is resumed and what was skipped."""
    search = partial(bucket.newest_checkpoint, directory)
    found, skipped = bucket.with_deadline(search, cfg.publish_timeout_s, f"looking for checkpoints in {directory}")
    for line in skipped:
        print(f"skipped checkpoint {line}", flush=True)
    if found:
        print(f"resuming from {found}", flush=True)
    return found


# --- a run -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one start of the trainer holds: policy, sampler, publisher, and where steps and metrics have got to."""

    cfg: Config
    directory: Path
    lease: bucket.Lease
    tokenizer: Any
    model: PeftModel
    optimizer: torch.optim.Optimizer
    publisher: bucket.Publisher
    sampler: Sampler
    rows: list[dict]  # metrics of all steps so far, those before a resume too
    before: dict  # the last row before a resume: totals go on from there
    saved: Path | None  # the newest checkpoint of this run
    step: int  # optimizer steps done
    snapshot_step: int  # optimizer steps in what was handed to the publisher last
    writer: bucket.Worker = field(default_factory=lambda: bucket.Worker("checkpoints"))
    files: dict[Path, bucket.Worker] = field(default_factory=lambda: defaultdict(lambda: bucket.Worker("files")))
    tracker: report.Tracker | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    bad_steps: int = 0  # in a row
    steps_without_signal: int = 0  # in a row
    said: set[str] = field(default_factory=set)  # warnings, each once
    failed_saves: int = 0  # in a row
    started: float = field(default_factory=time.monotonic)

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
        if self.publisher.failures >= bucket.MAX_FAILED_PUBLISHES:
            return f"{self.publisher.failures} publishes in a row failed: {self.publisher.last_error}"
        if self.bad_steps >= MAX_BAD_STEPS:
            return f"{self.bad_steps} steps in a row had a non-finite loss or gradient: lower --learning-rate"
        if self.sampler.error:
            return f"sampling failed: {self.sampler.error}"
        if self.steps_without_signal >= self.cfg.max_steps_without_signal:
            return report.no_signal(self.rows[-self.steps_without_signal :], self.cfg)
        for worker in (self.publisher.worker, self.publisher.cleaner, self.writer):
            if worker.error:
                return f"a background write failed: {type(worker.error).__name__}: {worker.error}"
        return "asked to stop" if self.stopped.is_set() else ""

    def version(self) -> int:
        """The policy version of the trained weights, live or not yet: staleness is measured from it."""
        live, sync_every = self.publisher.policy.version, self.cfg.sync_every  # failed publishes used up versions too
        return live + self.step // sync_every - self.publisher.step_of[live] // sync_every

    def publish_if_due(self, rollout: Rollout) -> None:
        """Every sync_every steps hand a snapshot of the adapter to the publisher; training goes on at once.

        Asked after each step, and while the trainer waits for rollouts: they may be waiting for this publish. While one
        runs none is taken (later weights are newer); after one that failed there is another, at growing pauses.
        """
        publisher, sync_every = self.publisher, self.cfg.sync_every
        pause_s = bucket.LOAD_RETRY_S * 2**publisher.failures
        again = publisher.failures and time.monotonic() - publisher.failed_s > pause_s
        due = self.step // sync_every > self.snapshot_step // sync_every
        if (due or again) and not publisher.worker.busy and self.step < self.cfg.max_steps:
            self.snapshot_step = self.step
            publisher.submit(self.step, adapter_state(self.model), canary(self.model, rollout, self.cfg))

    def save(self) -> None:
        """Hand a snapshot of everything to the checkpoint writer."""
        step = self.step
        state = {"step": step, "cursor": self.sampler.cursor.state(), "config": dataclasses.asdict(self.cfg),
                 "dataset": self.sampler.fingerprint}  # fmt: skip
        files = checkpoint_files(self.model, self.optimizer, state, self.rows)

        def write() -> None:
            try:
                self.saved = bucket.save_checkpoint(self.directory, self.lease.attempt, step, files, self.cfg)
                bucket.write_file(self.directory / "config.json", json.dumps(state["config"]).encode())  # for launch.py
                self.failed_saves = 0
            except (bucket.PublishError, OSError) as error:
                self.failed_saves += 1
                print(f"the checkpoint of step {step} was not saved: {error}", flush=True)
                if self.failed_saves >= bucket.MAX_FAILED_PUBLISHES:
                    raise

        self.writer.submit(write)

    def write(self, name: str, rows: list[dict]) -> None:
        """Write a file of the run in the background; a failure is said, and costs nobody else anything."""
        path, data = self.directory / name, report.to_jsonl(rows)

        def task() -> None:
            try:
                path.parent.mkdir(exist_ok=True)
                bucket.write_file(path, data)
            except OSError as error:
                print(f"{name} was not written: {error}", flush=True)

        self.files[path.parent].submit(task)

    def write_metrics(self) -> None:
        """Write all rows: into this attempt's own file, and the run's."""
        self.write(f"metrics/a{self.lease.attempt}.jsonl", self.rows)
        if not self.superseded():
            self.write("metrics.jsonl", self.rows)


def open_run(cfg: Config, lease: bucket.Lease, device: torch.device) -> Run:
    """Policy, prompts, rewards, publisher and sampler of a run; the restored (or fresh) policy is live at its end."""
    directory = Path(cfg.bucket).absolute() / cfg.run
    found = find_checkpoint(directory, cfg)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    prompts, too_long = load_prompts(cfg, tokenizer)
    print(f"{len(prompts)} prompts; {len(too_long)} that leave no room for a completion are left out", flush=True)
    transformers.utils.logging.disable_progress_bar()
    model = add_lora(load_base(cfg), cfg, device)
    check_packing(model, cfg)
    optimizer, state = optimizer_for(model, cfg), {"step": 0, "cursor": None}
    if found:
        load = partial(restore, model, optimizer, found, cfg)
        state = bucket.with_deadline(load, cfg.publish_timeout_s, f"reading {found}")
    shapes = {name: tuple(parameter.shape) for name, parameter in lora_parameters(model).items()}
    publisher = bucket.Publisher(directory, lease, cfg, adapter_config(model), shapes)
    weights = [float(weight) for weight in cfg.reward_weights.split(",")] if cfg.reward_weights else None
    pool = RewardPool(load_rewards(cfg.reward), cfg.reward_workers, cfg.reward_timeout_s, weights)
    cursor = PromptCursor(len(prompts), cfg.seed, state["cursor"])
    sampler = Sampler(cfg, prompts, cursor, lambda: publisher.policy, pool, publisher.reload)
    rows = report.read_rows(found / "metrics.jsonl") if found else []
    before, step = rows[-1] if rows else {}, state["step"]
    run = Run(cfg, directory, lease, tokenizer, model, optimizer, publisher, sampler, rows, before, found, step, step)
    if state.get("dataset", sampler.fingerprint) != sampler.fingerprint:
        print(f"--dataset {cfg.dataset}: its content has changed since step {step}: from now on the new one is used",
              flush=True)  # fmt: skip
    run.tracker = report.Tracker(cfg) if cfg.track else None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: run.stopped.set())
    first = Rollout(0, prompts[0].ids, prompts[0].ids[:1], [0.0], None, 0.0, 0)
    while not publisher.publish(step, adapter_state(model), canary(model, first, cfg)):
        if run.why_stop():
            raise bucket.PublishError(f"the first policy did not become live: {run.why_stop()}")
        run.stopped.wait(10 * bucket.LOAD_RETRY_S)
    sampler.start()
    return run


# --- the loop --------------------------------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Train until max_steps or until something says stop; the exit code."""
    cfg, rollouts = run.cfg, [Rollout(0, [0], [0], [0.0], None, 0.0, 0)]
    num_groups = cfg.batch_size // cfg.group_size

    def keep_waiting() -> bool:
        run.publish_if_due(rollouts[0])
        return not run.why_stop()

    while run.step < cfg.max_steps:
        began, version = time.perf_counter(), run.version()
        groups = run.sampler.batch(num_groups, keep_waiting, version)
        if run.why_stop():
            break
        waited_s = time.perf_counter() - began
        rollouts = with_advantages(groups, cfg)
        metrics = policy_gradient(run.model, rollouts, cfg)
        metrics["grad_norm"], ok = optimizer_step(run.model, run.optimizer, cfg, metrics["loss"])
        run.step += 1
        run.bad_steps = 0 if ok else run.bad_steps + 1
        run.sampler.cursor.done([group[0].group for group in groups])
        snapshot_began = time.perf_counter()
        run.publish_if_due(rollouts[0])
        metrics["perf/weight_sync_stall_s"] = time.perf_counter() - snapshot_began
        metrics |= {"perf/rollout_wait_s": waited_s, "perf/step_s": time.perf_counter() - began}
        record(run, metrics, rollouts, version)
        if run.step % cfg.save_every == 0 or run.step == cfg.max_steps:
            run.save()
    return finish(run)


def with_advantages(groups: list[list[Rollout]], cfg: Config) -> list[Rollout]:
    """All rollouts of the groups, their advantages filled in."""
    rollouts = []
    for group in groups:
        advantages = group_advantages([rollout.reward for rollout in group], cfg.scale_rewards)
        rollouts += [dataclasses.replace(r, advantage=a) for r, a in zip(group, advantages, strict=True)]
    return rollouts


def record(run: Run, metrics: dict, rollouts: list[Rollout], version: int) -> None:
    """Complete the step's row of metrics, print its line, and now and then write all rows and name the bottleneck.

    version: the policy version of the weights for which the batch was taken.
    """
    cfg, publisher, last = run.cfg, run.publisher, run.rows[-1] if run.rows else {}
    step_s, num_tokens = metrics["perf/step_s"], sum(len(r.completion) for r in rollouts)
    rewards = [r.reward for r in rollouts if r.reward is not None]
    behind = [version - r.version for r in rollouts]
    wall_s = run.before.get("perf/wall_s", 0.0) + time.monotonic() - run.started
    totals = run.sampler.totals() | {
        "publish/num_total": len(publisher.seconds),
        "publish/failed_total": publisher.failed_total,
    }
    row = {
        "step": run.step,
        "reward/mean": sum(rewards) / max(1, len(rewards)),
        "reward/unscorable": len(rollouts) - len(rewards),
        **metrics,
        **run.sampler.gauges(),
        **{name: run.before.get(name, 0) + value for name, value in totals.items()},
        "perf/wall_s": wall_s,
        "perf/trained_tok_s": num_tokens / step_s,
        "perf/publish_s": publisher.seconds[-1],
        "sample/staleness_mean": sum(behind) / len(behind),
        "sample/on_policy_frac": sum(publisher.step_of[r.version] == run.step - 1 for r in rollouts) / len(rollouts),
        "sample/trained_tokens_total": last.get("sample/trained_tokens_total", 0) + num_tokens,
        "completions/mean_length": num_tokens / len(rollouts),
        "completions/truncated_frac": sum(r.truncated for r in rollouts) / len(rollouts),
        **report.signal(rollouts),
    }
    for name in rollouts[0].scores:
        values = [r.scores[name] for r in rollouts if r.scores[name] is not None]
        row[f"rewards/{name}/mean"] = sum(values) / max(1, len(values))
    generated = row["rollout/generated_tokens_total"] - last.get("rollout/generated_tokens_total", 0)
    row["rollout/generated_tok_s"] = generated / max(step_s, wall_s - last.get("perf/wall_s", 0.0))
    flops = row.pop("perf/flops")
    if torch.cuda.is_available():
        row["perf/mfu"] = flops / step_s / report.peak_flops(torch.cuda.get_device_name(), cfg.dtype)
    run.rows.append(row)
    if run.tracker:
        run.tracker.log(row)
    print(report.step_line(row, cfg, report.mean_of(run.rows[-10:], "perf/step_s")), flush=True)
    run.steps_without_signal = 0 if row["batch/signal_frac"] else run.steps_without_signal + 1
    if run.step % cfg.log_completions_every == 0:
        policies = {r.version: bucket.policy_name(cfg.run, run.lease.attempt, r.version) for r in rollouts}
        run.write(f"completions/step-{run.step}.jsonl", report.completions(rollouts, policies, run.tokenizer))
    if run.step % cfg.diagnose_every == 0:
        run.write_metrics()
        recent = run.rows[-cfg.diagnose_every :]
        print(report.diagnose(recent, cfg), flush=True)
        for topic, warning in report.warnings(recent).items():
            if topic not in run.said:
                print(warning, flush=True)
                run.said.add(topic)


def finish(run: Run) -> int:
    """Save what there is, say where it is and what was learned; 0 if the run is complete, else why it stopped."""
    run.sampler.stop()
    reason, complete = run.why_stop(), run.step >= run.cfg.max_steps and not run.superseded()
    run.sampler.pool.close()
    if not complete:
        run.save()
    run.write_metrics()
    grace_s = 5.0 if run.stopped.is_set() else run.cfg.publish_timeout_s
    if run.tracker:
        run.tracker.finish(grace_s)
    done = all(worker.flush(grace_s) for worker in (run.writer, *run.files.values()))
    where = f"checkpoint {run.saved}" if run.saved else "no checkpoint"
    if not complete:
        print(
            f"error: stopped at step {run.step}: {reason}; {where}{'' if done else ' (its writing hangs)'}", flush=True
        )
        return 143 if run.stopped.is_set() else 1
    for worker in (run.publisher.worker, run.publisher.cleaner):
        worker.flush(grace_s)
    try:
        write = partial(write_results, run)
        summary = bucket.with_deadline(write, run.cfg.publish_timeout_s, "writing the results")
    except (bucket.PublishError, OSError) as error:
        print(f"error: all {run.step} steps are done, but their results are not written: {error}; {where}", flush=True)
        return 1
    print(report.last_words(run.directory, summary), flush=True)
    return 0


def write_results(run: Run) -> dict:
    """summary.json, curves.png, and final/: the adapter that users load, with a model card. Returns the summary."""
    summary = report.summarize(run.rows, run.publisher.seconds, run.directory)
    bucket.write_file(run.directory / "summary.json", json.dumps(summary, indent=2).encode())
    with tempfile.TemporaryDirectory() as directory:  # drawn there and copied: a mount cannot seek
        report.plot({run.cfg.run: run.rows}, Path(directory, "curves.png"))
        bucket.write_file(run.directory / "curves.png", Path(directory, "curves.png").read_bytes())
    final = run.directory / "final"
    final.mkdir(exist_ok=True)
    files = bucket.adapter_files(adapter_state(run.model), adapter_config(run.model))
    with tempfile.TemporaryDirectory() as directory:
        run.tokenizer.save_pretrained(directory)
        files |= {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    for name, data in {**files, "README.md": report.model_card(run.cfg, summary).encode()}.items():
        bucket.write_file(final / name, data)
    return summary


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--plot", nargs="+", metavar="RUN", help="draw the curves of these run directories, and stop")
    args = parser.parse_args()
    cfg, lease = config_from(args), None
    try:
        if args.plot:
            return report.plot_runs(args.plot)
        if not cfg.run:
            fail("--run is missing: name the run")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT still asks transformers for it
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        lease = bucket.claim(Path(cfg.bucket).absolute() / cfg.run, cfg)
        return train(open_run(cfg, lease, device))
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
