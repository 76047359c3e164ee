"""Scoring: throughput, false positives, and what answers that hang or eat memory cost."""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rewards
from benches.figures import figure

SANITY_SET = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "sanity_math_1460.jsonl"
WORKING = "Let us call the unknown $x$. Then $\\frac{x}{2} + 3 = 7$ and so on, as the problem says.\n" * 20
HANGS, EATS_MEMORY = "a completion that hangs", "a completion that eats memory"


def sanity_groups(path: Path, group_size: int) -> list[tuple[list[str], str]]:
    """(completions, gold) of each problem: half box the gold, half the golds of the next problems."""
    golds = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    half = group_size // 2
    groups = []
    for i, gold in enumerate(golds):
        answers = [gold] * half + [golds[(i + k) % len(golds)] for k in range(1, group_size - half + 1)]
        groups.append(([f"{WORKING}The answer is $\\boxed{{{answer}}}$." for answer in answers], gold))
    return groups


def hostile(completions: list[str], **columns) -> list[float | None]:
    """math_reward, but some completions hang or eat all memory, as symbolic algebra can."""
    hoard = []
    while HANGS in completions or EATS_MEMORY in completions:
        hoard += [bytearray(2**24)] if EATS_MEMORY in completions else []
    return rewards.math_reward(completions, **columns)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py rewards`."""
    parser.add_argument("--sanity-set", type=Path, default=SANITY_SET, help="JSON lines with an `answer` each")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=3.0)


def run(args: argparse.Namespace) -> list[dict]:
    """What scoring costs: completions per second, the share that needs math-verify, latency, what a bad one costs."""
    groups = sanity_groups(Path(args.sanity_set), group_size=8)
    num_scored = sum(len(completions) for completions, _ in groups)
    pool = rewards.RewardPool(rewards.math_reward, workers=args.workers, timeout_s=args.timeout_s)

    pool.score(*groups[0][:1], {"answer": "0"})  # waits until the workers have started
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:  # as rollouts do: several groups at a time
        scored = list(threads.map(lambda group: pool.score(group[0], {"answer": group[1]}), groups))
    seconds = time.perf_counter() - start

    latencies_ms = []
    for completions, gold in groups[::20]:
        for completion in completions[3:5]:
            begin = time.perf_counter()
            pool.score([completion], {"answer": gold})
            latencies_ms.append(1000 * (time.perf_counter() - begin))

    golds = [gold for _, gold in groups]
    others = zip(golds, golds[1:] + golds[:1], scored, strict=True)
    false_positives = sum(
        rewards_of[4] == 1 and rewards.normalise(gold) != rewards.normalise(other) for gold, other, rewards_of in others
    )

    pool.close()

    pool = rewards.RewardPool(hostile, workers=args.workers, timeout_s=args.timeout_s)
    bad, answers = [HANGS] * 5 + [EATS_MEMORY] * 2, [str(i) for i in range(20)]
    begin = time.perf_counter()
    completions = bad + [rf"\boxed{{{answer}}}" for answer in answers]
    among_bad = pool.score(completions, {"answer": ["5"] * len(bad) + answers})
    among_bad_s = time.perf_counter() - begin
    pool.close()

    num_golds, num_right = len(groups), sum(rewards_of[0] == 1 for rewards_of in scored)
    latencies_ms.sort()
    return [
        figure("golds of the sanity set, boxed, that score 1", num_right, num_golds, "", True),
        figure("next problem's gold scored 1, where they differ", false_positives, 0),
        figure("right among 5 that hang and 2 that eat memory", among_bad[len(bad) :].count(1.0), 20, "", True),
        figure("that group's time", among_bad_s, 5 * args.timeout_s, "s", timeouts=pool.timeouts),
        figure("completions per second", num_scored / seconds, 2000, "/s", True, workers=args.workers,
               math_verify_frac=math_verify_share(groups), p50_ms=latencies_ms[len(latencies_ms) // 2],
               p99_ms=latencies_ms[int(0.99 * len(latencies_ms))]),
    ]  # fmt: skip


def math_verify_share(groups: list[tuple[list[str], str]]) -> float:
    """Share of the completions whose verdict needs math-verify, on every tenth problem."""
    rewards.same_math.cache_clear()
    asked, num_completions = 0, 0
    for completions, gold in groups[::10]:
        for completion in completions:
            before = rewards.same_math.cache_info()
            rewards.grade(completion, gold)
            after = rewards.same_math.cache_info()
            asked += after.hits + after.misses > before.hits + before.misses
            num_completions += 1
    return asked / num_completions
