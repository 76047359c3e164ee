"""The toy model: where GRPO has signal, an ordinary model directory, and built once whoever asks for it."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from offline import toy


@pytest.fixture
def quick_recipe(monkeypatch, tmp_path):
    """A recipe of two steps, whose model may be as bad as it likes, with an empty cache."""
    monkeypatch.setattr(toy, "STEPS", 2)
    monkeypatch.setattr(toy, "RIGHT_RANGE", (0, 1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_answers_add_digit_by_digit_or_guess_at_most_8_off():
    assert toy.shown_work(47, 85) == "7+5=12,4+8+1=13,\\boxed{132}"
    assert toy.shown_work(42, 31) == "2+1=3,4+3+0=7,\\boxed{73}"
    rng = random.Random(1)
    assert {toy.bare_guess(47, 85, rng) for _ in range(2000)} == {f"\\boxed{{{value}}}" for value in range(124, 141)}


def test_model_directory_has_signal_prompts_with_answers_and_a_token_per_character(toy_dir):
    assert 0.2 <= toy.share_right(toy_dir) <= 0.5
    rows = [json.loads(line) for line in (toy_dir / "train.jsonl").read_text().splitlines()]
    assert {"prompt": "47+85=", "answer": "132"} in rows
    assert len(rows) == 90 * 90
    tokenizer, text = AutoTokenizer.from_pretrained(toy_dir), "47+85=" + toy.shown_work(47, 85)
    ids = tokenizer(text).input_ids
    assert ids[:6] == [6, 9, 12, 10, 7, 13]  # no bos
    assert len(ids) == len(text) - len("boxed{")  # \boxed{ is one token
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(toy_dir).config.vocab_size


def test_model_that_is_not_in_the_range_is_an_error(quick_recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(toy, "RIGHT_RANGE", (0.2, 0.5))
    with pytest.raises(RuntimeError, match="not 20-50 %: change its recipe"):
        toy.build(tmp_path / "bad")


def test_two_at_once_get_one_whole_model_and_a_half_built_one_is_built_again_the_same(quick_recipe):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: toy.cached_model(), range(2))
    assert first == second
    weights = (first / "model.safetensors").read_bytes()
    partial = first.rename(first.with_name(f"{first.name}.partial"))  # as if the build had been killed
    (partial / "train.jsonl").unlink()
    assert toy.cached_model() == first
    assert (first / "train.jsonl").exists()
    assert (first / "model.safetensors").read_bytes() == weights
