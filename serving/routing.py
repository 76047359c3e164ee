"""Prefix routing: which replica has a prompt's prefix in its cache.

As vLLM caches: prompts are cut into blocks of 16 tokens, hashes are chained and seeded with the policy's name. Replicas
are whatever has a `bit` of its own and `inflight`, its completions in flight.
"""

import array
from collections import OrderedDict
from typing import Any, NamedTuple

BLOCK_SIZE = 16  # tokens; vLLM's
MAX_TRACKED_BLOCKS = 500_000
MANY = -1  # different blocks followed; hash() never returns -1


def block_hashes(policy: str, ids: list[int] | None, block_size: int = BLOCK_SIZE) -> list[int]:
    """Hashes of the full blocks of a prompt, each chained to the one before and the first one to the policy."""
    try:
        data = array.array("I", ids or []).tobytes()
    except (TypeError, OverflowError):  # no token ids; vLLM will say so
        return []
    step = block_size * array.array("I").itemsize
    hashes, last = [], hash(policy)
    for start in range(0, len(data) - step + 1, step):
        last = hash((last, data[start : start + step]))
        hashes.append(last)
    return hashes


class Block(NamedTuple):
    owners: int  # bits of the replicas that served it
    follower: int | None  # the block seen after it, or MANY
    policy: str


class Router:
    """Remembers which replicas served which blocks: a bounded table, the least recently used blocks go first."""

    def __init__(self, max_blocks: int = MAX_TRACKED_BLOCKS):
        self.max_blocks = max_blocks
        self.blocks: OrderedDict[int, Block] = OrderedDict()
        self.counts = {"affinity": 0, "spilled": 0, "unmatched": 0}
        self.turn = 0

    def owners(self, hashes: list[int], everyone: int) -> int:
        """Bits of the replicas that hold the most blocks which are this prompt's own; 0 if none does.

        A block that every replica has served, or that different blocks follow, is common (a system prompt), and so are
        the blocks before it.
        """
        owners = 0
        for i, key in enumerate(hashes):
            block = self.blocks.get(key)
            if block is None or not block.owners & everyone:
                break
            after = hashes[i + 1] if i + 1 < len(hashes) else block.follower
            branches = block.follower == MANY or block.follower not in (None, after)
            common = branches or block.owners & everyone == everyone
            owners = 0 if common else block.owners & everyone
        return owners

    def choose(self, hashes: list[int], candidates: list[Any], everyone: int, max_imbalance: int) -> Any:
        """The replica for a prompt: its owner unless that is too far ahead in completions, or the least loaded one."""
        owners = self.owners(hashes, everyone)
        holders = [replica for replica in candidates if replica.bit & owners]
        best = min(holders, key=lambda replica: replica.inflight, default=None)
        least = min(replica.inflight for replica in candidates)
        near = best is not None and best.inflight - least <= max_imbalance
        self.counts["affinity" if near else "spilled" if best else "unmatched"] += 1
        return best if near else self.least_loaded(candidates)

    def least_loaded(self, candidates: list[Any]) -> Any:
        """The replica with the fewest completions in flight, in turn if there are several."""
        least = min(replica.inflight for replica in candidates)
        idle = [replica for replica in candidates if replica.inflight == least]
        self.turn += 1
        return idle[self.turn % len(idle)]

    def note(self, policy: str, hashes: list[int], bit: int) -> None:
        """Remember that the replica with this bit serves these blocks."""
        for i, key in enumerate(hashes):
            block = self.blocks.get(key, Block(0, None, policy))
            after = hashes[i + 1] if i + 1 < len(hashes) else block.follower
            follower = after if block.follower in (None, after) else MANY
            self.blocks[key] = Block(block.owners | bit, follower, policy)
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.max_blocks:
            self.blocks.popitem(last=False)

    def forget_policy(self, policy: str) -> None:
        for key in [key for key, block in self.blocks.items() if block.policy == policy]:
            del self.blocks[key]

    def forget_replica(self, bit: int) -> None:
        for key, block in list(self.blocks.items()):
            if block.owners == bit:
                del self.blocks[key]
            elif block.owners & bit:
                self.blocks[key] = block._replace(owners=block.owners & ~bit)
