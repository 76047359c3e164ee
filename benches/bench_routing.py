"""Cold prefills and balance over prompts like the sanity set's, simulated with the proxy's own router."""

import argparse
import heapq
import random
from collections import Counter
from types import SimpleNamespace

from benches.figures import figure
from serving.routing import Router, block_hashes

GROUP = 8


def prompts_like_sanity(rng: random.Random, num: int = 1460) -> list[list[int]]:
    """Token ids of prompts: one template of 40 tokens before, 20 after, 30 to 300 of their own."""
    before, after = list(range(40)), list(range(100, 120))
    return [before + [rng.randrange(1000, 150_000) for _ in range(rng.randint(30, 300))] + after for _ in range(num)]


def simulate(num_rollouts: int, num_replicas: int, inflight: int, n: int, seed: int = 0) -> dict:
    """Route rollouts as a trainer asks for them, n a request: cold prefills per rollout, spread between replicas.

    A version moves every 512 finished rollouts, and is retired 5 versions later. A request is cold where its prompt was
    not served under its policy before. The template of all prompts is warm anyway and not counted.
    """
    rng = random.Random(seed)
    prompts, router = prompts_like_sanity(rng), Router(500_000)
    replicas = [SimpleNamespace(id=i, bit=1 << i, inflight=0) for i in range(num_replicas)]
    everyone, running, warm, load = (1 << num_replicas) - 1, [], set(), Counter()
    version = finished = cold = 0
    clock_s = 0.0
    for i in range(num_rollouts // n):
        if i * n % (GROUP * len(prompts)) == 0:
            epoch = rng.sample(range(len(prompts)), len(prompts))
        index = epoch[i * n // GROUP % len(prompts)]
        while len(running) * n >= inflight:
            clock_s, _, replica = heapq.heappop(running)
            replica.inflight -= n
            finished += n
            if finished // 512 > version:
                version = finished // 512
                router.forget_policy(f"v{version - 5}")
        hashes = block_hashes(f"v{version}", prompts[index], 16)
        replica = router.choose(hashes, replicas, everyone, 16)
        router.note(f"v{version}", hashes, replica.bit)
        cold += (version, index, replica.id) not in warm
        warm.add((version, index, replica.id))
        load[replica.id] += n
        replica.inflight += n
        heapq.heappush(running, (clock_s + rng.uniform(2, 6), i, replica))
    mean = sum(load.values()) / num_replicas
    return {"cold": cold / num_rollouts, "spread": max(abs(num - mean) for num in load.values()) / mean,
            "counts": dict(router.counts)}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py routing`."""
    parser.add_argument("--num-rollouts", type=int, default=64_728)


def run(args: argparse.Namespace) -> list[dict]:
    """Rollouts over 1,460 prompts, one by one (as TRL asks) and in groups."""
    figures = []
    for name, n, aim in (("single requests", 1, 13.6), ("groups of 8", GROUP, 12.5)):
        for num_replicas in (2, 4):
            seen = simulate(args.num_rollouts, num_replicas, 384, n)
            label = f"{num_replicas} replicas, {name}"
            figures.append(
                figure(f"{label}: cold prefills per rollout", 100 * seen["cold"], aim, "%", **seen["counts"])
            )
            figures.append(figure(f"{label}: spread of completions", 100 * seen["spread"], 2, "%"))
    return figures
