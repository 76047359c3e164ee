"""What a run did: the line after each step, the bottleneck, the summary, the curves, the model card.

All of it is made from the rows of metrics.jsonl, one dict per optimizer step, so it can be made again later:

    python trainer.py --plot runs/NAME [runs/OTHER ...]
"""

import json
import statistics
from pathlib import Path

from config import Config, fresh_samples, queue_size


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


def diagnose(rows: list[dict], cfg: Config) -> str:
    """Which side limits the run over these steps, the figures that say so, and the flag to turn."""
    step_s, wait_s = mean_of(rows, "perf/step_s"), mean_of(rows, "perf/rollout_wait_s")
    stall_s, pressure_s = mean_of(rows, "perf/weight_sync_stall_s"), mean_of(rows, "rollout/backpressure_s")
    queued, per_row = mean_of(rows, "sample/queue_size"), mean_of(rows, "batch/samples_per_row")
    dropped = rows[-1]["sample/dropped_stale_total"] - rows[0]["sample/dropped_stale_total"]
    trained = mean_of(rows, "batch/samples") * len(rows)
    figures = f"queue {queued:.0f}/{queue_size(cfg)}, waited {wait_s:.1f} s of {step_s:.1f} s per step"
    if stall_s > max(wait_s, 0.05 * step_s):
        return f"sync-bound: {stall_s:.2f} s of {step_s:.1f} s per step go to snapshots: raise --sync-every"
    if dropped > 0.05 * trained and cfg.max_staleness:  # with 0 all that is sampled ahead is dropped
        return f"stale: {dropped:.0f} completions were too old to train on ({figures}): lower --queue-size"
    if wait_s > 0.1 * step_s:
        inflight = mean_of(rows, "rollout/inflight")
        limit = mean_of(rows, "rollout/inflight_limit")
        cure = "raise --inflight-per-replica or add --replicas" if inflight >= 0.9 * limit else "add --replicas"
        if (
            limit > fresh_samples(cfg) <= inflight + queued + 2 * cfg.group_size
        ):  # replicas wait so that nothing is stale
            cure = "raise --max-staleness or --batch-size: more would be too old when its turn comes"
        return f"rollout-bound: {figures}, {inflight:.0f}/{limit:.0f} in flight: {cure}"
    if cfg.gradient_checkpointing:
        return f"trainer-bound: {figures}, backpressure {pressure_s:.1f} s: try --no-gradient-checkpointing"
    if 0 < per_row < 4:
        return f"trainer-bound: {figures}, {per_row:.1f} samples per row: raise --token-budget"
    return f"trainer-bound: {figures}, backpressure {pressure_s:.1f} s: give the trainer more GPUs (--trainer-flavor)"


def summarize(rows: list[dict], publish_s: list[float], replica_restarts: int) -> dict:
    """What summary.json holds. Rewards are means over the first 5 and the last 10 steps; times in seconds."""
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
{summary["reward_first"]}; of the last 10: {summary["reward_last"]}.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{cfg.model}"), "path/to/this/directory")
```
"""
