"""The toy model: where GRPO has signal, an ordinary model directory, and built once whoever asks for it."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import toy
from rewards import math_reward


@pytest.fixture
def quick_recipe(monkeypatch, tmp_path):
    """A recipe of two steps, whose model may be as bad as it likes, with an empty cache."""
    monkeypatch.setattr(toy, "STEPS", 2)
    monkeypatch.setattr(toy, "RIGHT_RANGE", (0, 1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_shown_work_adds_digit_by_digit():
    assert toy.shown_work(47, 85) == "7+5=12,4+8+1=13,\\boxed{132}"
    assert toy.shown_work(42, 31) == "2+1=3,4+3+0=7,\\boxed{73}"


def test_bare_guess_is_at_most_8_off_and_rarely_right():
    rng = random.Random(1)
    guesses = {toy.bare_guess(47, 85, rng) for _ in range(2000)}
    assert guesses == {f"\\boxed{{{value}}}" for value in range(124, 141)}


def test_model_is_right_20_to_50_percent_of_the_time(toy_dir):
    assert 0.2 <= toy.share_right(toy_dir) <= 0.5


def test_tokenizer_gives_back_exactly_the_characters(toy_dir):
    tokenizer = AutoTokenizer.from_pretrained(toy_dir)
    text = "47+85=" + toy.shown_work(47, 85)
    ids = tokenizer(text).input_ids
    assert ids[:6] == [6, 9, 12, 10, 7, 13]  # no bos; one token per character
    assert len(ids) == len(text) - len("boxed{")  # \boxed{ is one token
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(toy_dir).config.vocab_size


def test_completions_end_with_eos_and_are_scored_like_any_other(toy_dir):
    tokenizer, model = AutoTokenizer.from_pretrained(toy_dir), AutoModelForCausalLM.from_pretrained(toy_dir)
    torch.manual_seed(0)
    prompts = tokenizer(["47+85="] * 64, return_tensors="pt").input_ids
    sampled = model.generate(prompts, max_new_tokens=40, do_sample=True, top_k=0)[:, 6:]
    assert (sampled == tokenizer.eos_token_id).any(1).float().mean() > 0.95
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    right = [text.endswith("\\boxed{132}") for text in texts]
    assert 0 < sum(right) < 64
    assert math_reward(texts, ["132"] * 64) == right


def test_train_file_has_prompts_and_answers(toy_dir):
    rows = [json.loads(line) for line in (toy_dir / "train.jsonl").read_text().splitlines()]
    assert {"prompt": "47+85=", "answer": "132"} in rows
    assert len(rows) == 90 * 90


def test_build_is_repeatable(quick_recipe, tmp_path):
    for name in ("one", "two"):
        toy.build(tmp_path / name)
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_model_that_is_not_in_the_range_is_an_error(quick_recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(toy, "RIGHT_RANGE", (0.2, 0.5))
    with pytest.raises(RuntimeError, match="not 20-50 %: change its recipe"):
        toy.build(tmp_path / "bad")


def test_two_at_once_get_one_whole_model_and_a_half_built_one_is_not_used(quick_recipe, tmp_path, capfd):
    root = tmp_path / "cache" / "async-grpo-lora"
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: toy.cached_model(), range(2))
    assert first == second
    assert first.parent == root
    saved_at = (first / "model.safetensors").stat().st_mtime_ns

    first.rename(root / f"{first.name}.partial")  # as if the build had been killed
    (root / f"{first.name}.partial" / "train.jsonl").unlink()
    assert toy.cached_model() == first
    assert (first / "train.jsonl").exists()
    assert (first / "model.safetensors").stat().st_mtime_ns > saved_at
