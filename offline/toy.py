"""Where the model of the offline demo comes from: a small Qwen2 that adds two numbers, right 20-50 % of the time.

It is trained from nothing in about a minute on two CPU cores, once, and cached. Two kinds of answer are in its data:

    47+85=7+5=12,4+8+1=13,\\boxed{132}      40 %: shows its work, digit by digit, and is right
    47+85=\\boxed{129}                      60 %: a bare guess, up to 8 off, and mostly wrong

So at temperature 1 it starts right about 40 % of the time, and GRPO can teach it to always show its work.

The directory holds what any model directory holds (config, safetensors, a fast tokenizer), and in `train.jsonl` the
prompts with their answers; vLLM serves it. There is one token per character of the task, and one for `\\boxed{`.

    python toy.py              # build into ~/.cache (XDG_CACHE_HOME) if it is not there, and measure it
    python toy.py --out DIR    # build into DIR
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

PAD, EOS, BOX = "<pad>", "<eos>", "\\boxed{"
VOCABULARY = [PAD, EOS, *"0123456789+=,", BOX, "}"]
SEED = 0
SHOWN_SHARE = 0.4  # of the training answers show their work
MAX_GUESS_ERROR = 8  # a bare guess is off by at most this much
STEPS, BATCH, WARMUP_STEPS, LEARNING_RATE = 500, 128, 30, 4e-3
RIGHT_RANGE = (0.2, 0.5)  # where GRPO has signal in nearly every group


def shown_work(a: int, b: int) -> str:
    """The right answer to `a+b=` with its digits added one by one: `7+5=12,4+8+1=13,\\boxed{132}`."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    return f"{a % 10}+{b % 10}={ones},{a // 10}+{b // 10}+{ones // 10}={tens},{BOX}{a + b}}}"


def bare_guess(a: int, b: int, rng: random.Random) -> str:
    """An answer to `a+b=` that is at most MAX_GUESS_ERROR off: `\\boxed{129}`."""
    return f"{BOX}{a + b + rng.randint(-MAX_GUESS_ERROR, MAX_GUESS_ERROR)}}}"


def make_tokenizer() -> Qwen2Tokenizer:
    """A fast tokenizer with one token per character of the task, and one for `\\boxed{`; it drops other characters."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Qwen2Tokenizer(vocab=ids, merges=[], unk_token=PAD, pad_token=PAD, eos_token=EOS)
    tokenizer.add_tokens([AddedToken(BOX, special=False, normalized=False)])  # found before the text is split
    return tokenizer


def make_model() -> Qwen2ForCausalLM:
    """The untrained model, 0.3 million parameters in fp32."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, bos_token_id=None,
        pad_token_id=VOCABULARY.index(PAD), eos_token_id=VOCABULARY.index(EOS), dtype="float32",
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_part(texts: list[str], tokenizer: Qwen2Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) padded on the right, and labels (B, T) that are -100 on prompt and padding."""
    batch = tokenizer([text + EOS for text in texts], padding=True, return_tensors="pt")
    is_prompt = torch.arange(batch.input_ids.shape[1]) < len("10+10=")
    return batch.input_ids, batch.input_ids.masked_fill(is_prompt | (batch.attention_mask == 0), -100)


def make_batch(tokenizer: Qwen2Tokenizer, rng: random.Random) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of both kinds of answer; apart, because one is much shorter than the other."""
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(BATCH)]
    num_shown = round(SHOWN_SHARE * BATCH)
    shown = [f"{a}+{b}={shown_work(a, b)}" for a, b in pairs[:num_shown]]
    guessed = [f"{a}+{b}={bare_guess(a, b, rng)}" for a, b in pairs[num_shown:]]
    return [make_part(shown, tokenizer), make_part(guessed, tokenizer)]


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    """Teach `model` the two kinds of answer, in place; shows its progress on stderr."""
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(STEPS):
        warm, done = min(1.0, (step + 1) / WARMUP_STEPS), step / STEPS
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * done))
        parts = make_batch(tokenizer, rng)
        num_tokens = sum(int((labels != -100).sum()) for _, labels in parts)
        losses = []
        for ids, labels in parts:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=num_tokens, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            print(f"toy model: step {step + 1}/{STEPS}, loss {sum(losses):.3f}", file=sys.stderr, flush=True)


@torch.no_grad()
def share_right(directory: Path, num_samples: int = 1024) -> float:
    """How often the model in `directory` is right, sampled at temperature 1 on random prompts of its train.jsonl."""
    tokenizer = Qwen2Tokenizer.from_pretrained(directory)
    model = Qwen2ForCausalLM.from_pretrained(directory).eval()
    rows = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    rows = random.Random(SEED).sample(rows, num_samples)
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    torch.manual_seed(SEED)
    out = model.generate(batch.input_ids, max_new_tokens=40, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    texts = tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    boxed = [re.findall(r"\\boxed\{(\d+)\}", text) for text in texts]
    return sum(found == [row["answer"]] for found, row in zip(boxed, rows, strict=True)) / num_samples


def build(directory: Path) -> None:
    """Train the model, save it with tokenizer and train.jsonl; RuntimeError if it is not right 20-50 % of the time."""
    disable_progress_bar()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the same sums everywhere; and a second thread would wait where other processes run
    tokenizer, model = make_tokenizer(), make_model()
    train(model, tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    (directory / "train.jsonl").write_text("\n".join(rows) + "\n")
    right = share_right(directory)
    if not RIGHT_RANGE[0] <= right <= RIGHT_RANGE[1]:
        raise RuntimeError(f"toy model in {directory}: right {right:.0%} of the time, not 20-50 %: change its recipe")


def cached_model() -> Path:
    """The directory of the toy model; builds it first if this file's recipe has not been built yet."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-grpo-lora"
    root.mkdir(parents=True, exist_ok=True)
    directory, partial = root / f"toy-{recipe}", root / f"toy-{recipe}.partial"
    with open(root / f"toy-{recipe}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits for the first one's model
        if not directory.exists():
            shutil.rmtree(partial, ignore_errors=True)
            build(partial)
            partial.rename(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory to build into (default: the cache)")
    out = parser.parse_args().out
    began = time.monotonic()
    if out:
        build(out)
    directory = out or cached_model()
    took_s = time.monotonic() - began
    print(f"{directory}: right {share_right(directory):.1%} of the time at temperature 1 ({took_s:.0f} s)")


if __name__ == "__main__":
    main()
