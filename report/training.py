"""What a run did: the line after each step, the bottleneck, the summary, the curves, the model card.

All of it is made from the rows of metrics.jsonl, one dict per optimizer step, so it can be made again later:

    python trainer.py --plot runs/NAME [runs/OTHER ...]
"""

import dataclasses
import json
import statistics
import threading
from pathlib import Path

from config import Config, fresh_samples, queue_size, served_rank

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "T4": 65e12}


def step_line(row: dict, cfg: Config, recent_s: float) -> str:
    """One line for the console; launch.py reads it. recent_s: seconds per step lately, for the time left."""
    left_s = int(recent_s * (cfg.max_steps - row["step"]))
    ratio = f"{row['ratio']:.4f}" if "ratio" in row else "-"
    return (
        f"step {row['step']}/{cfg.max_steps}  reward {row['reward/mean']:.3f}  ratio {ratio}  "
        f"staleness {row['sample/staleness_mean']:.1f}  {row['perf/trained_tok_s']:,.0f} tok/s  "
        f"{row['perf/step_s']:.2f} s/step  left {left_s // 60}:{left_s % 60:02d}"
    )


def mean_of(rows: list[dict], key: str) -> float:
    """Mean of a metric over the rows that have it; 0 if none has."""
    return statistics.fmean(values) if (values := [row[key] for row in rows if key in row]) else 0.0


def step_metrics(trained: list, rows: list, sums: dict[str, float], cfg: Config) -> dict[str, float]:
    """The metrics of a step from its rollouts, its packed rows, and the sums of the loss over their tokens."""
    metrics = {
        "loss": sums["loss"],
        "batch/samples": len(trained),
        "batch/trained_tokens": sum(len(rollout.completion) for rollout in trained),
        "batch/rows": len(rows),
    }
    if trained:
        metrics["batch/zero_advantage_frac"] = sum(rollout.advantage == 0 for rollout in trained) / len(trained)
    if rows:
        prompts = sum(len(rollout.prompt) for rollout in trained if rollout.advantage != 0)
        held, tokens = sum(len(row.tokens) - len(row.targets) for row in rows), sum(len(row.tokens) for row in rows)
        metrics["batch/samples_per_row"] = sum(len(row.lengths) for row in rows) / len(rows)
        metrics["batch/row_fill"] = tokens / (len(rows) * cfg.token_budget)
        metrics["batch/prefix_shared_frac"] = 1 - held / prompts  # of the prompt tokens
    if sums["tokens"]:
        metrics |= {name: total / sums["tokens"] for name, total in sums.items() if name not in ("loss", "tokens")}
    return metrics


def signal(rollouts: list) -> dict[str, float]:
    """Whether a step's groups can teach anything: metrics of their rewards, and of what was cut."""
    groups: dict[int, list] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    rewards = [r.reward for r in rollouts if r.reward is not None]
    metrics = {
        "batch/signal_frac": sum(any(r.advantage for r in group) for group in groups.values()) / len(groups),
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
    }
    for name, cut in (("cut", True), ("finished", False)):
        own = [r.reward for r in rollouts if r.truncated == cut and r.reward is not None]
        if own:
            metrics[f"reward/mean_{name}"] = statistics.fmean(own)
    if not metrics["batch/signal_frac"]:
        metrics["example"] = (
            f"{rollouts[0].text[-200:]!r} with gold {str(rollouts[0].gold)[:100]!r} got {rollouts[0].reward}"
        )
    return metrics


def completions(rollouts: list, policies: dict[int, str], tokenizer) -> list[dict]:
    """A step's completions to be read by people. policies: version -> name."""
    return [
        {"prompt": tokenizer.decode(r.prompt), "text": r.text, "gold": str(r.gold), "reward": r.reward,
         "rewards": r.scores, "policy": policies[r.version], "finish_reason": "length" if r.truncated else "stop"}
        for r in rollouts
    ]  # fmt: skip


def show_completions(text: str, step: int, num: int = 3) -> str:
    """A few completions of a file that `completions` wrote: the best, the worst, and between."""
    rows = sorted(map(json.loads, text.splitlines()), key=lambda row: row["reward"] or 0.0)
    shown = [rows[i * (len(rows) - 1) // max(1, num - 1)] for i in range(min(num, len(rows)))]
    return "\n".join(
        f"--- step {step}, {row['policy']}, finish {row['finish_reason']}, reward {row['reward']} {row['rewards']}, "
        f"gold {row['gold']}\n{row['prompt']}\n>>> {row['text']}"
        for row in shown
    )


def no_signal(rows: list[dict], cfg: Config) -> str:
    """What to say of steps in which no group had a signal: the figures, one completion, the likely cause, the cure."""
    reward, cut = mean_of(rows, "reward/mean"), mean_of(rows, "completions/truncated_frac")
    samples = mean_of(rows, "batch/samples") + mean_of(rows, "reward/unscorable")
    unscorable = mean_of(rows, "reward/unscorable") / max(1, samples)
    example = rows[-1].get("example", "")
    if unscorable > 0.5:
        cure = f"{unscorable:.0%} could not be scored: does --answer-column {cfg.answer_column} hold the golds?"
    elif cut > 0.5:
        cure = f"raise --max-completion-tokens {cfg.max_completion_tokens}: what is cut cannot be right"
    elif "math_reward" in cfg.reward and reward == 0 and "boxed" not in example:
        cure = "completions have no \\boxed{...}: ask for one with --system-prompt, or take another --reward"
    elif reward > 0:
        cure = "every completion of a group scores alike: take harder prompts, or a --reward that tells them apart"
    else:
        cure = "no completion is right: compare the gold's spelling, or take easier prompts or a stronger --model"
    return (f"no group had a signal in {len(rows)} steps: mean reward {reward:.3f}, {cut:.0%} cut at "
            f"--max-completion-tokens; {example}; {cure}")  # fmt: skip


def warnings(rows: list[dict]) -> dict[str, str]:
    """What is worth saying once of these steps, by topic."""
    found, std = {}, mean_of(rows, "reward/std")
    cut, finished = mean_of(rows, "reward/mean_cut"), mean_of(rows, "reward/mean_finished")
    if mean_of(rows, "completions/truncated_frac") > 0.05 and cut > finished:
        found["cut"] = (
            f"warning: cut completions score {cut:.3f}, finished ones {finished:.3f}: the policy is paid for never "
            "stopping: use --truncated zero or mask, or a reward that reads its column `truncated`"
        )
    if 0 < std < 0.01:
        found["std"] = (
            f"warning: rewards hardly differ (std {std:.4f}), and --scale-rewards group makes much of little: is this "
            "difference what you want to teach?"
        )
    if rows[-1]["reward/mean"] > 0.99 and mean_of(rows, "batch/signal_frac") < 0.05:
        found["solved"] = "warning: nearly all groups are solved: there is little left to learn from these prompts"
    return found


def diagnose(rows: list[dict], cfg: Config) -> str:
    """Which side limits the run over these steps, the figures that say so, and the flag to turn."""
    if not mean_of(rows, "batch/signal_frac"):
        return no_signal(rows, cfg)
    step_s, wait_s = mean_of(rows, "perf/step_s"), mean_of(rows, "perf/rollout_wait_s")
    stall_s, pressure_s = mean_of(rows, "perf/weight_sync_stall_s"), mean_of(rows, "rollout/backpressure_s")
    queued, per_row = mean_of(rows, "sample/queue_size"), mean_of(rows, "batch/samples_per_row")
    dropped = rows[-1]["sample/dropped_stale_total"] - rows[0]["sample/dropped_stale_total"]
    figures = f"queue {queued:.0f}/{queue_size(cfg)}, waited {wait_s:.1f} s of {step_s:.1f} s per step"
    if stall_s > max(wait_s, 0.05 * step_s):
        return f"sync-bound: {stall_s:.2f} s of {step_s:.1f} s per step go to snapshots: raise --sync-every"
    if dropped > 0.05 * mean_of(rows, "batch/samples") * len(rows) and cfg.max_staleness:  # with 0 all of it is
        return f"stale: {dropped:.0f} completions were too old to train on ({figures}): lower --queue-size"
    if wait_s > 0.1 * step_s:
        inflight, limit = mean_of(rows, "rollout/inflight"), mean_of(rows, "rollout/inflight_limit")
        cure = "raise --inflight-per-replica or add --replicas" if inflight >= 0.9 * limit else "add --replicas"
        if limit > fresh_samples(cfg) <= inflight + queued + 2 * cfg.group_size:  # replicas wait so nothing is stale
            cure = "raise --max-staleness or --batch-size: more would be too old when its turn comes"
        return f"rollout-bound: {figures}, {inflight:.0f}/{limit:.0f} in flight: {cure}"
    if cfg.gradient_checkpointing:
        return f"trainer-bound: {figures}, backpressure {pressure_s:.1f} s: try --no-gradient-checkpointing"
    if 0 < per_row < 4:
        return f"trainer-bound: {figures}, {per_row:.1f} samples per row: raise --token-budget"
    return f"trainer-bound: {figures}, backpressure {pressure_s:.1f} s: give the trainer a faster --trainer-flavor"


def summarize(rows: list[dict], publish_s: list[float], directory: Path) -> dict:
    """What summary.json holds. Rewards are means over the first 5 and the last 10 steps; times in seconds."""
    try:
        replica_restarts = json.loads((directory / "replicas.json").read_text())["restarts"]  # as the launcher says
    except (OSError, ValueError, KeyError):
        replica_restarts = 0
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    last = rows[-1] if rows else {}
    return {
        "steps": last.get("step", 0),
        "reward_first": round(mean_of(rows[:5], "reward/mean"), 4),
        "reward_last": round(mean_of(rows[-10:], "reward/mean"), 4),
        "ratio_mean": round(statistics.fmean(ratios), 6) if ratios else None,
        "ratio_min": round(min(ratios), 6) if ratios else None,
        "ratio_max": round(max(ratios), 6) if ratios else None,
        "dropped_stale": last.get("sample/dropped_stale_total", 0),
        "num_publishes": last.get("publish/num_total", 0),
        "publish_s_p50": round(statistics.median(publish_s), 3) if publish_s else None,
        "wall_s": round(last.get("perf/wall_s", 0.0), 1),
        "trained_tokens": last.get("sample/trained_tokens_total", 0),
        "generated_tokens": last.get("rollout/generated_tokens_total", 0),
        "replica_restarts": replica_restarts,
    }


def peak_flops(gpu: str, dtype: str) -> float:
    """Dense matrix FLOP/s of a GPU in bfloat16 or float16 by its datasheet (a tenth of it counts for float32)."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), 989e12)
    return peak / 10 if dtype == "float32" else peak


class Tracker:
    """A run in trackio, continued if it is there; what goes wrong after the start never stops the training."""

    def __init__(self, cfg: Config):
        """ValueError if there is no trackio, no such Space, or no network."""
        try:
            import trackio

            self.run = trackio.init(
                "async-grpo-lora", cfg.run, space_id=cfg.track_space or None, private=True, embed=False,
                config=dataclasses.asdict(cfg), resume="allow", auto_log_cpu=False,
            )  # fmt: skip
        except Exception as error:
            raise ValueError(f"--track trackio: {type(error).__name__}: {error}; pip install trackio, or leave it out"
                             ) from error  # fmt: skip

    def log(self, row: dict) -> None:
        """Hand over a step's metrics."""
        try:
            if self.run:
                self.run.log(row, step=row["step"])
        except Exception as error:
            print(f"metrics no longer go to trackio: {type(error).__name__}: {error}", flush=True)
            self.run = None

    def finish(self, timeout_s: float) -> None:
        """Send what is left, for timeout_s at most."""
        if self.run:
            thread = threading.Thread(target=self.run.finish, daemon=True)
            thread.start()
            thread.join(timeout_s)


def to_jsonl(rows: list[dict]) -> bytes:
    """One line of JSON per row."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics file; ValueError if it is not there."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the directory of a run")
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot_runs(directories: list[str]) -> int:
    """Draw the curves of one run, or of several over each other, into the first one's directory; or ValueError."""
    runs = {Path(d).resolve().name: read_rows(Path(d, "metrics.jsonl")) for d in directories}
    path = Path(directories[0], "curves.png")
    plot(runs, path)
    print(path)
    return 0


def plot(runs: dict[str, list[dict]], path: Path) -> None:
    """Draw reward, ratio, step time, queue and staleness, and tokens per second of one or several runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 7.5), layout="constrained")
    panels = {
        "reward": ["reward/mean"],
        "ratio (1 = replicas serve the trainer's weights)": ["ratio"],
        "seconds per step": ["perf/step_s", "perf/fwd_bwd_s", "perf/rollout_wait_s", "perf/weight_sync_stall_s"],
        "waiting completions": ["sample/queue_size", "rollout/inflight"],
        "staleness in policy versions": ["sample/staleness_mean"],
        "tokens per second": ["perf/trained_tok_s", "rollout/generated_tok_s"],
    }
    for axis, (title, keys) in zip(axes.flat, panels.items(), strict=True):
        for name, rows in runs.items():
            for key in keys:
                points = [(row["step"], row[key]) for row in rows if key in row]
                label = " ".join([*([name] if len(runs) > 1 else []), *([key] if len(keys) > 1 else [])])
                axis.plot(*zip(*points, strict=True), label=label or None) if points else None
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
        axis.ticklabel_format(axis="y", useOffset=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def last_words(directory: Path, summary: dict) -> str:
    """What is said at the end of a complete run: what was learned, and where things are."""
    shown = directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
    return (
        f"done: {summary['steps']} steps in {summary['wall_s']:.0f} s, mean reward {summary['reward_first']:.3f} "
        f"(first 5 steps) -> {summary['reward_last']:.3f} (last 10), ratio {summary['ratio_mean']}, "
        f"{summary['num_publishes']} publishes, {summary['dropped_stale']} stale completions dropped\n"
        f"adapter: {shown / 'final'}\ncurves:  {shown / 'curves.png'}\nmetrics: {shown / 'metrics.jsonl'}"
    )


def model_card(cfg: Config, summary: dict) -> str:
    """README.md of the final adapter."""
    return f"""---
base_model: {cfg.model}
library_name: peft
tags: [grpo, lora]
---

# {cfg.run}

LoRA adapter (rank {cfg.lora_rank}, alpha {cfg.lora_alpha}) for `{cfg.model}`, trained with asynchronous GRPO on
`{cfg.dataset}` for {summary["steps"]} steps of {cfg.batch_size} completions. Mean reward of the first 5 steps:
{summary["reward_first"]}; of the last 10: {summary["reward_last"]}. This directory has the tokenizer too.

```
vllm serve {cfg.model} --enable-lora --max-lora-rank {served_rank(cfg.lora_rank)} --lora-modules {cfg.run}=DIRECTORY
```

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

directory = "DIRECTORY"  # of this file
tokenizer = AutoTokenizer.from_pretrained(directory)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{cfg.model}"), directory)
```
"""
