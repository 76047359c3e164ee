"""How completions are sampled, scored and queued while the trainer trains.

Threads ask the proxy for groups (one request with n = group_size, token ids in and out), score them, and put them into
a bounded queue. Departures from the textbook: sampling never waits for the trainer's step, each rollout remembers the
policy version that sampled it, and the number of completions in flight follows the number of ready replicas. When the
queue is full the threads wait, so a slow trainer holds generation back and nothing grows without bound.

A prompt is issued once per epoch, in an order that depends on the seed only. What was issued but not yet trained on is
part of the trainer's checkpoint, so a resumed run goes on with it, and trains on no group twice.
"""

import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

import requests

from bucket import Policy, direct_session
from config import Config, fresh_samples, queue_size
from prompts import Prompt
from rewards import RewardPool, total

MAX_FAILED_GROUPS = 20  # in a row without two usable completions, before the run stops
FOLLOW_EVERY_S = 0.5  # between two looks at how many replicas are ready


@dataclass(frozen=True)
class Rollout:
    """One completion, ready to be trained on."""

    group: int  # number of the group: rollouts of one group share their prompt
    prompt: list[int]  # token ids (P,)
    completion: list[int]  # token ids (T,), never empty; the eos is one of them
    old_logprobs: list[float]  # (T,) of the completion under the policy that sampled it; nan: not trained on
    reward: float | None  # None: unscorable (no usable gold), never trained on
    advantage: float  # reward relative to the group
    version: int  # policy version that sampled it
    truncated: bool = False  # cut by max_completion_tokens
    text: str = ""
    gold: Any = None
    scores: dict[str, float | None] = field(default_factory=dict)  # of each reward function


@dataclass(frozen=True)
class Choice:
    """One usable completion of a response."""

    ids: list[int]
    logprobs: list[float]
    text: str
    truncated: bool


class RolloutError(Exception):
    """Generation cannot go on, or one group could not be generated; the message says what to do."""


# --- which prompt comes next ----------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def prompt_order(num_prompts: int, epoch: int, seed: int) -> tuple[int, ...]:
    """The order of the prompts in one epoch: a shuffle that depends on nothing else."""
    order = list(range(num_prompts))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return tuple(order)


class PromptCursor:
    """Which group comes next, and which were issued but not trained on yet. Group g is position g of all epochs."""

    def __init__(self, num_prompts: int, seed: int, state: dict | None = None):
        state = state or {"next": 0, "pending": []}
        self.num_prompts, self.seed = num_prompts, seed
        self.next, self.again = state["next"], deque(sorted(state["pending"]))
        self.pending = set(state["pending"])
        self.lock = threading.Lock()

    def issue(self) -> tuple[int, int]:
        """The next group number and the index of its prompt; what an ended attempt left comes first."""
        with self.lock:
            if self.again:
                group = self.again.popleft()
            else:
                group, self.next = self.next, self.next + 1
            self.pending.add(group)
        epoch, position = divmod(group, self.num_prompts)
        return group, prompt_order(self.num_prompts, epoch, self.seed)[position]

    def done(self, groups: list[int]) -> None:
        """These were trained on or given up."""
        with self.lock:
            self.pending.difference_update(groups)

    def state(self) -> dict:
        """What a checkpoint stores: JSON-ready."""
        with self.lock:
            return {"next": self.next, "pending": sorted(self.pending)}


# --- the queue -------------------------------------------------------------------------------------------------------


def is_stale(version: int, current: int, max_staleness: int) -> bool:
    """Whether a rollout of `version` is too old to train policy version `current`."""
    return current - version > max_staleness


class GroupQueue:
    """Scored groups that wait for the trainer; bounded in completions, oldest first."""

    def __init__(self, max_samples: int):
        self.max_samples = max_samples
        self.groups: deque[list[Rollout]] = deque()
        self.num_samples = 0
        self.backpressure_s = 0.0
        self.changed = threading.Condition()

    def put(self, group: list[Rollout], stopped: threading.Event) -> None:
        """Add a group, waiting for room until `stopped`."""
        start = time.monotonic()
        with self.changed:
            while self.num_samples + len(group) > self.max_samples and not stopped.is_set():
                self.changed.wait(0.5)
            self.backpressure_s += time.monotonic() - start
            self.groups.append(group)
            self.num_samples += len(group)
            self.changed.notify_all()

    def take_backpressure_s(self) -> float:
        """Time that threads have waited for room since the last call, summed over them."""
        with self.changed:
            taken, self.backpressure_s = self.backpressure_s, 0.0
            return taken

    def get(self, timeout_s: float) -> list[Rollout] | None:
        """The oldest group, or None after timeout_s."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.groups, timeout_s):
                return None
            group = self.groups.popleft()
            self.num_samples -= len(group)
            self.changed.notify_all()
            return group


# --- one request -----------------------------------------------------------------------------------------------------


def completion_request(prompt: Prompt, policy: Policy, cfg: Config) -> dict:
    """The body of one group's request: every sampling setting is stated, so no generation config leaks in."""
    return {
        "model": policy.name,
        "prompt": prompt.ids,
        "n": cfg.group_size,
        "max_tokens": cfg.max_completion_tokens,
        "temperature": cfg.temperature,
        "top_p": 1,
        "top_k": 0,
        "min_p": 0,
        "repetition_penalty": 1.0,
        "logprobs": 0,  # the sampled token's logprob only
        "return_token_ids": True,
    }


def usable_choices(body: dict) -> list[Choice]:
    """The choices that can be trained on: finished or cut; a token without a logprob gets nan, and is masked."""
    choices = []
    for choice in body["choices"]:
        ids = choice.get("token_ids")
        if ids is None:
            raise RolloutError("the replica returned no token_ids: it needs vLLM >= 0.10 (return_token_ids)")
        logprobs = [math.nan if p is None else p for p in (choice.get("logprobs") or {}).get("token_logprobs") or []]
        some = any(map(math.isfinite, logprobs))
        if choice["finish_reason"] in ("stop", "length") and ids and len(ids) == len(logprobs) and some:
            choices.append(Choice(ids, logprobs, choice["text"], choice["finish_reason"] == "length"))
    return choices


def what_to_do(status: int, text: str) -> str:
    """Sort an answer: ok, newest (ask again under the newest policy), wait (ask again later), give up or fatal."""
    if status == 200:
        return "ok"
    if status == 404 and "does not exist" in text:
        return "newest"
    if status in (401, 403):
        return "fatal"
    return "wait" if status in (429, 500, 502, 503) else "give up"


class Sampler:
    """Keeps `inflight_per_replica` completions in flight on every ready replica, and scored groups in the queue."""

    def __init__(
        self,
        cfg: Config,
        prompts: list[Prompt],
        cursor: PromptCursor,
        policy: Callable[[], Policy],  # the newest one
        pool: RewardPool,
        reload: Callable[[Policy], None],  # called if the proxy does not know the newest policy
    ):
        self.cfg, self.prompts, self.cursor, self.policy, self.pool = cfg, prompts, cursor, policy, pool
        self.reload = reload
        self.proxy = f"http://{cfg.host}:{cfg.port}"
        content = repr([(prompt.ids, prompt.columns["answer"]) for prompt in prompts])
        self.fingerprint = sha256(content.encode()).hexdigest()[:16]  # of the dataset, for a resumed run to compare
        self.queue = GroupQueue(queue_size(cfg))
        self.stopped = threading.Event()
        self.error: BaseException | None = None  # what ended the sampling; the trainer looks
        self.slots = threading.Condition()
        self.num_ready = 0  # replicas, as the proxy last said
        self.num_threads = 0
        self.inflight = 0  # completions
        self.failed_in_a_row = 0  # groups
        self.counts = dict.fromkeys(("generated_tokens", "rejected", "failed_groups", "dropped_stale"), 0)

    def totals(self) -> dict[str, float]:
        """Metrics that count from the start of this attempt."""
        return {
            "rollout/generated_tokens_total": self.counts["generated_tokens"],
            "rollout/rejected_total": self.counts["rejected"],  # aborted, or without tokens or logprobs
            "rollout/failed_groups_total": self.counts["failed_groups"],
            "sample/dropped_stale_total": self.counts["dropped_stale"],
            "rewards/timeouts": self.pool.timeouts,
            "rewards/failed": self.pool.failed,
        }

    def gauges(self) -> dict[str, float]:
        """Metrics of this moment."""
        return {
            "rollout/backpressure_s": self.queue.take_backpressure_s(),
            "rollout/inflight": self.inflight,
            "rollout/inflight_limit": self.num_ready * self.cfg.inflight_per_replica,
            "sample/queue_size": self.queue.num_samples,
        }

    def start(self) -> None:
        """Begin to sample from `policy()`; returns at once."""
        threading.Thread(target=self._follow_replicas, name="replicas", daemon=True).start()

    def stop(self) -> None:
        """End the threads; requests in flight are abandoned with the process."""
        self.stopped.set()
        with self.slots:
            self.slots.notify_all()

    def batch(self, num_groups: int, keep_waiting: Callable[[], bool], version: int) -> list[list[Rollout]]:
        """The next groups that are not stale for weights of this policy version, oldest first.

        Fewer only once `keep_waiting()` is false, which is asked several times a second.
        """
        groups, dropped_in_a_row = [], 0
        while len(groups) < num_groups and keep_waiting():
            group = self.queue.get(timeout_s=0.2)
            if group is None:
                continue
            with self.slots:
                self.slots.notify_all()
            if not is_stale(group[0].version, version, self.cfg.max_staleness):
                groups.append(group)
                dropped_in_a_row = 0
                continue
            self.counts["dropped_stale"] += len(group)
            dropped_in_a_row += 1
            self.cursor.done([group[0].group])
            if dropped_in_a_row == num_groups and self.cfg.max_staleness:  # with 0 that is how it goes
                print(
                    f"rollouts: {num_groups} groups in a row were too old to train on: lower --queue-size "
                    f"{queue_size(self.cfg)} or raise --max-staleness {self.cfg.max_staleness}",
                    flush=True,
                )
        return groups

    def _follow_replicas(self) -> None:
        """Let the number of threads and slots follow the number of ready replicas."""
        per_replica, session = (
            self.cfg.inflight_per_replica // self.cfg.group_size + self.cfg.reward_workers,
            direct_session(),
        )
        while not self.stopped.is_set():
            try:
                ready = session.get(self.proxy + "/proxy/stats", timeout=5).json()["ready"]
            except (requests.RequestException, ValueError, KeyError):
                ready = self.num_ready  # the proxy is being restarted: requests wait for it by themselves
            with self.slots:
                self.num_ready = ready
                self.slots.notify_all()
            while self.num_threads < ready * per_replica:
                threading.Thread(target=self._run, name=f"sampler-{self.num_threads}", daemon=True).start()
                self.num_threads += 1
            self.stopped.wait(FOLLOW_EVERY_S)

    def _run(self) -> None:
        try:
            with direct_session() as session:
                while not self.stopped.is_set():
                    self._sample_one(session)
        except BaseException as error:
            self.error = self.error or error

    def _sample_one(self, session: requests.Session) -> None:
        """Issue one prompt, generate and score its group, and queue it; count it if it failed."""
        if not self._take_slots():
            return
        group, index = self.cursor.issue()
        try:
            version, choices = self._generate(session, self.prompts[index])
        except RolloutError as error:
            self._count_failure(group, str(error))
            return
        finally:
            self._give_slots()
        rollouts = self._score(group, self.prompts[index], version, choices)
        if len(rollouts) < 2:  # one completion has nothing to be compared with
            self._count_failure(group, f"{len(rollouts)} of {self.cfg.group_size} completions were usable")
            return
        self.failed_in_a_row = 0
        self.queue.put(rollouts, self.stopped)

    def _take_slots(self) -> bool:
        def free() -> bool:
            limit = self.num_ready * self.cfg.inflight_per_replica
            fresh = fresh_samples(self.cfg) - self.queue.num_samples  # more would be too old when its turn comes
            return self.stopped.is_set() or self.inflight + self.cfg.group_size <= min(limit, fresh)

        with self.slots:
            self.slots.wait_for(free)
            if self.stopped.is_set():
                return False
            self.inflight += self.cfg.group_size
            return True

    def _give_slots(self) -> None:
        with self.slots:
            self.inflight -= self.cfg.group_size
            self.slots.notify_all()

    def _count_failure(self, group: int, reason: str) -> None:
        if self.stopped.is_set():
            return
        self.cursor.done([group])
        with self.slots:
            self.counts["failed_groups"] += 1
            self.failed_in_a_row += 1
            too_many = self.failed_in_a_row >= MAX_FAILED_GROUPS
        print(f"rollouts: group {group} failed: {reason}", flush=True)
        if too_many:
            raise RolloutError(f"{MAX_FAILED_GROUPS} groups in a row failed; the last one: {reason}")

    def _generate(self, session: requests.Session, prompt: Prompt) -> tuple[int, list[Choice]]:
        """The usable completions of one prompt and the version that sampled them; RolloutError when given up."""
        give_up_at = time.monotonic() + self.cfg.no_replica_wait_s
        for attempt in itertools.count():
            policy = self.policy()
            verdict, answer = self._ask(session, completion_request(prompt, policy, self.cfg))
            if verdict == "ok":
                choices = usable_choices(answer.json())
                with self.slots:
                    self.counts["generated_tokens"] += sum(len(choice.ids) for choice in choices)
                    self.counts["rejected"] += self.cfg.group_size - len(choices)
                return policy.version, choices
            if verdict == "fatal":
                self.error = RolloutError(f"the proxy refused a request: {answer}: check HF_TOKEN")
            if verdict in ("give up", "fatal") or time.monotonic() > give_up_at or self.stopped.is_set():
                raise RolloutError(f"{policy.name}: {answer}")
            if verdict == "newest" and policy == self.policy():  # the proxy and all replicas were restarted
                self.reload(policy)
            if verdict == "wait" or attempt:  # what was retired meanwhile is asked for again at once
                self.stopped.wait(min(10.0, 0.25 * 2 ** min(attempt, 6)) * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    def _ask(self, session: requests.Session, body: dict) -> tuple[str, object]:
        """One request: what to do next, and the response or a description of what went wrong."""
        timeout_s = self.cfg.request_timeout_s + self.cfg.no_replica_wait_s + 30  # the proxy gives up first
        try:
            response = session.post(self.proxy + "/v1/completions", json=body, timeout=timeout_s)
        except requests.ConnectionError as error:
            return "wait", f"no connection to the proxy: {error}"
        except requests.RequestException as error:
            return "give up", f"{type(error).__name__}: {error}"
        verdict = what_to_do(response.status_code, response.text if response.status_code != 200 else "")
        return verdict, response if verdict == "ok" else f"{response.status_code} {response.text[:500]}"

    def _score(self, group: int, prompt: Prompt, version: int, choices: list[Choice]) -> list[Rollout]:
        """Rollouts with rewards, by functions that get the whole group at once, as in TRL."""
        num, columns = len(choices), {name: value for name, value in prompt.columns.items() if name != "prompt"}
        columns = {name: [value] * num for name, value in columns.items()}
        columns |= {"prompts": [prompt.columns["prompt"]] * num, "completion_ids": [choice.ids for choice in choices],
                    "truncated": [choice.truncated for choice in choices]}  # fmt: skip
        scores = self.pool.scores([choice.text for choice in choices], columns) if choices else {}
        rewards = total(scores, self.pool.weights)
        if self.cfg.truncated != "score":
            instead = 0.0 if self.cfg.truncated == "zero" else None
            rewards = [instead if c.truncated else reward for c, reward in zip(choices, rewards, strict=True)]
        return [
            Rollout(
                group=group,
                prompt=prompt.ids,
                completion=choice.ids,
                old_logprobs=choice.logprobs,
                reward=rewards[i],
                advantage=0.0,
                version=version,
                truncated=choice.truncated,
                text=choice.text,
                gold=prompt.columns["answer"],
                scores={name: values[i] for name, values in scores.items()},
            )
            for i, choice in enumerate(choices)
        ]
