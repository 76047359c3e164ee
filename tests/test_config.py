"""config.py: what can be set, and what is refused before anything starts."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from config import (
    LOCAL,
    Config,
    config_from,
    make_parser,
    max_loras,
    problems,
    queue_size,
    served_rank,
    to_flags,
)

ROOT = Path(__file__).resolve().parent.parent


def with_(**changes) -> Config:
    return dataclasses.replace(Config(), **changes)


def test_both_default_configurations_can_run():
    assert problems(Config()) == []
    assert problems(with_(**LOCAL)) == []


def test_the_defaults_are_the_recipe_of_the_post():
    cfg = Config()
    assert (cfg.model, cfg.dataset) == ("Qwen/Qwen2.5-Math-1.5B", "sail/Sanity-Test-R1D-1.5B")
    assert (cfg.lora_rank, cfg.lora_alpha, cfg.learning_rate) == (1, 2, 4e-5)
    assert (cfg.adam_beta1, cfg.adam_beta2) == (0.9, 0.95)
    assert (cfg.group_size, cfg.batch_size, cfg.temperature) == (8, 128, 1.0)
    assert (cfg.max_completion_tokens, cfg.max_model_len) == (3000, 4096)
    assert (cfg.max_staleness, cfg.sync_every, cfg.token_budget) == (4, 4, 16384)
    assert (cfg.gradient_checkpointing, cfg.inflight_per_replica) == (False, 128)
    assert (cfg.max_steps, cfg.save_every) == (500, 50)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group_size": 1}, "--group-size"),
        ({"batch_size": 100}, "--group-size 8"),
        ({"replicas": 0}, "--replicas"),
        ({"replicas": -1}, "--replicas"),
        ({"lora_rank": 513}, "--lora-rank"),
        ({"max_loras": 5}, "--max-loras"),  # A21: four stale versions, the newest, and the one being loaded
        ({"top_p": 0.9}, "--top-p"),  # B10: truncated logprobs cannot be reproduced
        ({"track": "wandb"}, "--track"),
        ({"track_space": "me/curves"}, "--track trackio"),
        ({"top_k": 2}, "--top-k"),
        ({"min_p": 0.1}, "--min-p"),
        ({"temperature": 0.0}, "--temperature"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"learning_rate": float("inf")}, "--learning-rate"),
        ({"max_completion_tokens": 4096}, "--max-completion-tokens"),
        ({"token_budget": 4095}, "--token-budget"),
        ({"queue_size": 64}, "--queue-size"),
        ({"inflight_per_replica": 7}, "--inflight-per-replica"),
        ({"loss_type": "mean"}, "--loss-type"),
        ({"run": "a/b"}, "--run"),
        ({"run": "-x"}, "--run"),
        ({"reward": "rewards.py"}, "--reward"),
        ({"port": 70000}, "--port"),
        ({"idle_shutdown_min": 0.1}, "--idle-shutdown-min"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_the_name_of_its_flag(changes, named):
    found = problems(with_(**changes))
    assert len(found) == 1
    assert named in found[0]


def test_ranks_are_rounded_up_to_what_vllm_serves():
    # A08
    wanted = {1: 1, 4: 8, 8: 8, 12: 16, 200: 256, 300: 320, 512: 512, 513: None}
    assert {rank: served_rank(rank) for rank in wanted} == wanted


def test_adapter_slots_hold_the_staleness_window_and_one_more_load():
    assert max_loras(with_(max_staleness=4)) == 6
    assert max_loras(with_(max_staleness=4, max_loras=9)) == 9


def test_the_queue_holds_no_more_than_stays_fresh():
    assert queue_size(with_(max_staleness=4, sync_every=4)) == 4 * 128  # 9 more batches would stay fresh, 4 are enough
    assert queue_size(with_(max_staleness=4, sync_every=1)) == 128  # another one is in flight
    assert queue_size(with_(max_staleness=0, sync_every=1)) == 128
    assert queue_size(with_(queue_size=200)) == 200


def test_flags_make_the_same_configuration_again():
    cfg = with_(run="r1", max_steps=7, takeover=True, share_prompts=False, learning_rate=1e-3, model="/a b/c")
    again = config_from(make_parser("").parse_args(to_flags(cfg)))
    assert again == cfg


def test_every_field_has_a_flag_with_a_help_text():
    text = make_parser("").format_help()
    for field in dataclasses.fields(Config):
        assert "--" + field.name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-step", "5"], "--max-step"),  # abbreviations would hide typing errors
        (["--no-such-flag"], "--no-such-flag"),
        (["--max-steps", "many"], "--max-steps"),
        (["--group-size=1"], "--group-size 1"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(flags, named):
    code = f"import config; config.config_from(config.make_parser('').parse_args({flags!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert run.stderr.startswith("error: ")
    assert named in run.stderr
