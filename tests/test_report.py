"""report/training.py: the line after a step, the bottleneck, the summary, the curves."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config
from jobs.log import STEP
from report import training as report

CFG = Config()


def row(step: int, **changes) -> dict:
    """A step of a trainer that never waits and whose queue is nearly full."""
    return {
        "step": step, "reward/mean": 0.5, "ratio": 1.0, "batch/samples": 128, "batch/samples_per_row": 12.0,
        "perf/step_s": 10.0, "perf/rollout_wait_s": 0.1, "perf/weight_sync_stall_s": 0.0, "perf/trained_tok_s": 16000.0,
        "perf/wall_s": 10.0 * step, "rollout/backpressure_s": 15.0, "rollout/inflight": 250,
        "rollout/inflight_limit": 256, "rollout/generated_tok_s": 16000.0, "rollout/generated_tokens_total": 900,
        "sample/queue_size": 476, "sample/staleness_mean": 1.0, "sample/dropped_stale_total": 0,
        "sample/trained_tokens_total": 800, "publish/num_total": 3, "batch/signal_frac": 0.5, "reward/std": 0.4,
        "reward/unscorable": 0, "completions/truncated_frac": 0.0,
    } | changes  # fmt: skip


def rows(**changes) -> list[dict]:
    return [row(step, **changes) for step in range(1, 11)]


WAITS = {"perf/rollout_wait_s": 4.0, "sample/queue_size": 3}
NO_SIGNAL = {"batch/signal_frac": 0.0, "reward/mean": 0.0, "example": "'so 5' with gold '5' got 0.0"}


@pytest.mark.parametrize(
    ("changes", "settings", "begins", "cure"),
    [
        (
            {"batch/samples_per_row": 1.0},
            {},
            "trainer-bound: queue 476/512",
            "1.0 samples per row: raise --token-budget",
        ),
        ({}, {"gradient_checkpointing": True}, "trainer-bound", "--no-gradient-checkpointing"),
        ({}, {}, "trainer-bound", "--trainer-flavor"),
        (
            WAITS,
            {},
            "rollout-bound: queue 3/512, waited 4.0 s of 10.0 s",
            "raise --inflight-per-replica or add --replicas",
        ),
        (WAITS | {"rollout/inflight": 100}, {}, "rollout-bound", "100/256 in flight: add --replicas"),
        (
            WAITS | {"sample/queue_size": 20, "rollout/inflight": 100},
            {"max_staleness": 1},
            "rollout-bound",
            "raise --max-st",
        ),
        ({"perf/weight_sync_stall_s": 2.0}, {}, "sync-bound: 2.00 s of 10.0 s", "raise --sync-every"),
        (NO_SIGNAL, {}, "no group had a signal in 10 steps: mean reward 0.000, 0% cut", "--system-prompt"),  # F15
        (
            NO_SIGNAL | {"completions/truncated_frac": 0.93},
            {},
            "no group",
            "93% cut at --max-completion-tokens; 'so 5' with",
        ),
        (NO_SIGNAL | {"completions/truncated_frac": 0.93}, {}, "no group", "raise --max-completion-tokens 3000"),
        (NO_SIGNAL | {"batch/samples": 1, "reward/unscorable": 127}, {}, "no group", "--answer-column"),
        (NO_SIGNAL | {"reward/mean": 1.0}, {}, "no group", "every completion of a group scores alike"),
        (NO_SIGNAL, {"reward": "mine:f"}, "no group", "no completion is right"),
    ],
)
def test_the_diagnosis_names_the_limiting_side_and_the_flag_to_turn(changes, settings, begins, cure):
    text = report.diagnose(rows(**changes), dataclasses.replace(CFG, **settings))
    assert text.startswith(begins)
    assert cure in text


@pytest.mark.parametrize(
    ("changes", "topics"),
    [
        ({}, set()),
        ({"completions/truncated_frac": 0.9, "reward/mean_cut": 0.0, "reward/mean_finished": -1.0}, {"cut"}),  # F25
        ({"reward/std": 0.001}, {"std"}),
        ({"reward/mean": 1.0, "batch/signal_frac": 0.01}, {"solved"}),
    ],
)
def test_what_goes_wrong_slowly_is_said_in_words(changes, topics):
    assert report.warnings(rows(**changes)).keys() == topics


def test_slow_snapshots_and_stale_rollouts_are_named_first():
    assert report.diagnose(rows(**{"perf/weight_sync_stall_s": 1.0}), CFG).startswith("sync-bound")
    waits_longer = {"perf/weight_sync_stall_s": 1.0, "perf/rollout_wait_s": 4.0}
    assert report.diagnose(rows(**waits_longer), CFG).startswith("rollout-bound")
    dropping = [row(step, **{"sample/dropped_stale_total": 40 * step}) for step in range(1, 11)]
    assert report.diagnose(dropping, CFG).startswith("stale: 360 completions")


def test_the_summary_holds_the_first_five_and_last_ten_steps(tmp_path):
    (tmp_path / "replicas.json").write_text('{"restarts": 2}')
    many = [row(step, **{"reward/mean": step / 100, "ratio": 1 + step / 1000}) for step in range(1, 31)]
    del many[4]["ratio"]  # a step without signal has none
    summary = report.summarize(many, [0.1, 0.3, 0.2], tmp_path)
    assert summary["reward_first"] == 0.03
    assert summary["reward_last"] == 0.255
    assert (summary["ratio_min"], summary["ratio_max"]) == (1.001, 1.03)
    assert (summary["steps"], summary["publish_s_p50"], summary["replica_restarts"]) == (30, 0.2, 2)


def test_a_run_without_a_step_has_a_summary_too(tmp_path):
    assert report.summarize([], [], tmp_path)["ratio_mean"] is None


def test_the_launcher_reads_the_line_that_the_trainer_prints():
    line = report.step_line(row(7), dataclasses.replace(CFG, max_steps=10), recent_s=30.0)
    step = STEP.match(line)
    assert (step.group(1), step.group(2)) == ("7", "10")
    assert re.search(r"reward 0\.500  ratio 1\.0000 .* left 1:30$", line)
    assert STEP.match(report.step_line({k: v for k, v in row(7).items() if k != "ratio"}, CFG, 1.0))


def test_curves_of_one_run_or_of_several_are_drawn(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows()))
    assert report.plot_runs([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert (tmp_path / "one" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_metrics_is_named(tmp_path):
    with pytest.raises(ValueError, match="give the directory of a run"):
        report.plot_runs([str(tmp_path)])


def test_a_run_that_is_not_there_is_one_line_of_the_command():
    command = [sys.executable, str(Path(__file__).parent.parent / "trainer.py"), "--plot", "no/such/run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("error: no/such/run/metrics.jsonl does not exist")
