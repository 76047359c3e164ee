"""A run whose trainer, replicas or launcher are killed: it resumes, it goes on, or nothing of it is left."""

import json
import os
import re
import signal
import subprocess

import pytest
from conftest import is_near, wait_for
from test_end_to_end import command, launch, processes_of, rows_of

import bucket

pytestmark = pytest.mark.slow


def test_a_run_whose_trainer_was_killed_resumes_from_its_checkpoint(tmp_path, toy_dir):
    run_dir = tmp_path / "killed"
    first = subprocess.Popen(command(tmp_path, "killed", "--max-steps=500"), stdout=subprocess.PIPE, text=True)
    wait_for(lambda: any((p / "complete").exists() for p in (run_dir / "checkpoints").glob("*")))
    trainer = next(p for p in processes_of(run_dir) if any("trainer.py" in word for word in p.cmdline()))
    trainer.kill()
    output, _ = first.communicate(timeout=60)
    assert first.returncode != 0
    assert processes_of(run_dir) == []
    steps_seen = [int(step) for step in re.findall(r"^step (\d+)/", output, re.MULTILINE)]
    saved = bucket.newest_checkpoint(run_dir)[0]
    step = bucket.checkpoint_key(saved.name)[1]
    assert step <= steps_seen[-1] <= step + 2

    output = launch(tmp_path, "killed", f"--max-steps={step + 2}")
    assert f"resuming from {saved}" in output
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, step + 3))
    versions = [int(p.name.rsplit("-v", 1)[1]) for p in (run_dir / "adapters").iterdir()]
    assert max(versions) == step + 1  # the count of syncs goes on: one per step, none after the last
    assert len(list((run_dir / "attempts").glob("*.json"))) == 2
    assert rows[-1]["sample/trained_tokens_total"] == sum(
        round(row["completions/mean_length"] * row["batch/samples"]) for row in rows
    )


@pytest.mark.parametrize("moment", ["replicas start", "training"])
def test_ctrl_c_ends_everything_within_ten_seconds(tmp_path, toy_dir, moment):
    run_dir = tmp_path / "stopped"
    process = subprocess.Popen(
        command(tmp_path, "stopped", "--max-steps=500"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if moment == "training":
        wait_for(lambda: any("step 2/" in path.read_text() for path in run_dir.glob("jobs/trainer*.log")))
    else:
        wait_for(lambda: len(list(run_dir.glob("jobs/replica*.json"))) == 2)
    assert processes_of(run_dir)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "stopping" in output
    assert processes_of(run_dir) == []
    if moment == "training":
        assert bucket.newest_checkpoint(run_dir)[0], "what was learned is saved"


def test_a_replica_that_dies_is_replaced_and_the_run_completes(tmp_path, toy_dir):
    run_dir = tmp_path / "lost"
    process = subprocess.Popen(command(tmp_path, "lost", "--max-steps=12"), stdout=subprocess.PIPE, text=True)
    wait_for(lambda: any("step 2/" in path.read_text() for path in run_dir.glob("jobs/trainer*.log")))
    job = json.loads(next(run_dir.glob("jobs/replica1*.json")).read_text())
    os.killpg(job["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "replica 1" in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["replica_restarts"] == 1
    for row in rows_of(run_dir):
        assert is_near(row)
