"""What limits the system as replicas are added, simulated with the proxy's router and the trainer's own limits.

Replicas generate at a fixed speed however few completions they hold, the trainer takes a batch when there is one,
and a policy goes live --publish-s after its step. What the simulation does not know is the network between Jobs.
"""

import argparse
import dataclasses
import heapq
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

from benches.bench_routing import prompts_like_sanity
from benches.figures import figure
from config import Config, fresh_samples, max_loras
from rollouts import is_stale
from serving.routing import Router, block_hashes

FLEETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class World:
    """A run in simulated time; an event is (time in s, order, what, about what)."""

    cfg: Config
    args: argparse.Namespace
    num_replicas: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    router: Router = field(default_factory=lambda: Router(500_000))
    events: list = field(default_factory=list)
    queue: deque = field(default_factory=deque)  # versions of the groups that wait for the trainer
    load: Counter = field(default_factory=Counter)  # groups by replica
    now: float = 0.0
    num_events: int = 0
    inflight: int = 0
    version: int = 0
    step: int = 0
    training: bool = False
    waited_s: float = 0.0
    idle_since: float = 0.0
    staleness: int = 0
    dropped: int = 0
    peak_inflight: int = 0

    def __post_init__(self) -> None:
        self.replicas = [SimpleNamespace(id=i, bit=1 << i, inflight=0) for i in range(self.num_replicas)]
        self.prompts = prompts_like_sanity(self.rng)

    def at(self, delay_s: float, what: str, about: object = None) -> None:
        heapq.heappush(self.events, (self.now + delay_s, self.num_events, what, about))
        self.num_events += 1

    def sample(self) -> None:
        """Ask for groups as the sampler does: bounded by the replicas, by freshness and by the queue."""
        cfg, size = self.cfg, self.cfg.group_size
        fresh = fresh_samples(cfg) - size * len(self.queue)
        while self.inflight + size <= min(fresh, self.num_replicas * cfg.inflight_per_replica):
            name, prompt = f"v{self.version}", self.rng.choice(self.prompts)
            hashes = block_hashes(name, prompt)
            replica = self.router.choose(hashes, self.replicas, (1 << self.num_replicas) - 1, cfg.max_imbalance)
            self.router.note(name, hashes, replica.bit)
            replica.inflight += size
            self.inflight += size
            self.load[replica.id] += 1
            self.peak_inflight = max(self.peak_inflight, self.inflight)
            lengths = [self.rng.lognormvariate(self.args.log_length, 0.6) for _ in range(size)]
            longest = min(max(lengths), cfg.max_completion_tokens)  # the group is answered when its longest is done
            self.at(longest / self.args.token_s, "sampled", (replica, self.version))

    def train(self) -> None:
        """Take a batch if there is one; groups that are too old are dropped."""
        num_groups = self.cfg.batch_size // self.cfg.group_size
        trained = self.step // self.cfg.sync_every
        fresh = [v for v in self.queue if not is_stale(v, trained, self.cfg.max_staleness)]
        self.dropped += len(self.queue) - len(fresh)
        self.queue = deque(fresh)
        if self.training or len(self.queue) < num_groups:
            return
        self.waited_s += self.now - self.idle_since
        self.staleness += sum(trained - self.queue.popleft() for _ in range(num_groups))
        self.training = True
        self.at(self.args.step_s, "trained")

    def run(self) -> "World":
        """Simulate args.steps steps."""
        self.sample()
        while self.step < self.args.steps:
            self.now, _, what, about = heapq.heappop(self.events)
            if what == "sampled":
                replica, version = about
                replica.inflight -= self.cfg.group_size
                self.inflight -= self.cfg.group_size
                self.queue.append(version)
            elif what == "trained":
                self.step, self.training, self.idle_since = self.step + 1, False, self.now
                if self.step % self.cfg.sync_every == 0:
                    self.at(self.args.publish_s, "live")
            else:
                self.version += 1
                self.router.forget_policy(f"v{self.version - self.cfg.max_staleness - 1}")
            self.train()
            self.sample()
        return self


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py scale`."""
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=4.0, help="what a step of 128 completions takes the trainer")
    parser.add_argument("--token-s", type=float, default=60.0, help="tokens per second of one completion on a replica")
    parser.add_argument("--log-length", type=float, default=6.8, help="mean of the logarithm of a completion's length")
    parser.add_argument("--publish-s", type=float, default=12.0, help="from the step to the policy live everywhere")
    parser.add_argument("--proxy-ms", type=float, default=2.0, help="CPU of the proxy for a group of 8")
    parser.add_argument("--adapter-mb", type=float, default=4.7, help="of one publish: rank 1 on the 1.5B model")


def report(world: World) -> None:
    """One line of the table."""
    cfg, args, steps_per_s = world.cfg, world.args, world.step / world.now
    groups_per_s = sum(world.load.values()) / world.now
    publishes_per_h = 3600 * steps_per_s / cfg.sync_every
    print(f"{world.num_replicas:8d} {60 * steps_per_s:9.2f} {100 * world.waited_s / world.now:8.0f} % "
          f"{world.peak_inflight:9d}/{world.num_replicas * cfg.inflight_per_replica:<6d}"
          f"{world.staleness / (world.step * cfg.batch_size // cfg.group_size):6.1f} {world.dropped:8d} "
          f"{groups_per_s:9.1f} {groups_per_s * args.proxy_ms / 10:7.1f} % "
          f"{publishes_per_h * world.num_replicas * args.adapter_mb / 1000:10.2f}", flush=True)  # fmt: skip


def run(args: argparse.Namespace) -> list[dict]:
    """The recipe of config.py with 1 to 64 replicas, and with a batch that grows with them."""
    cfg, worlds = Config(), {}
    print(f"recipe of config.py: at most {fresh_samples(cfg):,} completions stay fresh, {max_loras(cfg)} adapter slots")
    title = "replicas steps/min  waiting  in flight/slots  stale  dropped  groups/s   proxy  GB/h read"
    print(title)
    for num in FLEETS:
        worlds[num] = World(cfg, args, num).run()
        report(worlds[num])
    print("batch 128 × replicas / 4, on a trainer that keeps its step time\n" + title)
    for num in FLEETS[2:]:
        grown = dataclasses.replace(cfg, batch_size=32 * num)
        worlds[-num] = World(grown, args, num).run()
        report(worlds[-num])
    last = worlds[-64]
    mean = sum(last.load.values()) / 64
    spread = max(abs(count - mean) for count in last.load.values()) / mean
    proxy = 100 * sum(last.load.values()) / last.now * args.proxy_ms / 1000
    dropped = max(100 * w.dropped / sum(w.load.values()) for w in worlds.values())
    return [
        figure("64 replicas, batch 2048: spread of groups between replicas", 100 * spread, 5, "%"),
        figure("the same: one core of the proxy", proxy, 50, "%"),
        figure("most groups dropped as stale, of any fleet", dropped, 3, "%"),
        figure("steps per minute of 64 replicas over 4, batch grown alike", last.step / last.now
               / (worlds[-4].step / worlds[-4].now), 0.95, "x", True),
    ]  # fmt: skip
