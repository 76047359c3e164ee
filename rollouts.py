"""How completions are sampled, scored and queued while the trainer trains.

Threads ask the proxy for groups (one request with n = group_size, token ids in and out), score them, and put them into
a bounded queue. Departures from the textbook: sampling never waits for the trainer's step, each rollout remembers the
policy version that sampled it, and the number of completions in flight follows the number of ready replicas. When the
queue is full the threads wait, so a slow trainer holds generation back and nothing grows without bound.

A prompt is issued once per epoch, in an order that depends on the seed only. What was issued but not yet trained on is
part of the trainer's checkpoint, so a resumed run neither skips a prompt nor trains on a group twice.
"""

import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import requests

from bucket import Policy
from config import Config, flag, fresh_samples, queue_size
from rewards import RewardPool


@dataclass(frozen=True)
class Rollout:
    """One completion, ready to be trained on."""

    group: int  # number of the group: rollouts of one group share their prompt
    prompt: list[int]  # token ids (P,)
    completion: list[int]  # token ids (T,), never empty; the eos is one of them
    old_logprobs: list[float]  # (T,) of the completion under the policy that sampled it
    reward: float | None  # None: unscorable (no usable gold), never trained on
    advantage: float  # reward relative to the group
    version: int  # policy version that sampled it
    truncated: bool = False  # cut by max_completion_tokens


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset: token ids, and all columns for the reward, `answer` among them."""

    ids: list[int]
    columns: dict


@dataclass(frozen=True)
class Choice:
    """One usable completion of a response."""

    ids: list[int]
    logprobs: list[float]
    text: str
    truncated: bool


class RolloutError(Exception):
    """Generation cannot go on, or one group could not be generated; the message says what to do."""


# --- data ------------------------------------------------------------------------------------------------------------


def nested(row: dict, path: str):
    """The value under a dotted path such as `reward_model.ground_truth`; KeyError if it is not there."""
    if path in row:
        return row[path]
    for part in path.split("."):
        row = row[part] if isinstance(row, dict) else {}[part]
    return row


def load_rows(cfg: Config) -> list[dict]:
    """Rows of a local .jsonl or .parquet file or of a Hub dataset."""
    import datasets  # takes seconds to import; only the trainer needs it

    datasets.disable_progress_bars()
    suffix = Path(cfg.dataset).suffix
    try:
        if suffix in (".jsonl", ".json", ".parquet"):
            kind = "parquet" if suffix == ".parquet" else "json"
            return datasets.load_dataset(kind, data_files=cfg.dataset, split="train").to_list()
        return datasets.load_dataset(cfg.dataset, split=cfg.dataset_split).to_list()
    except Exception as error:  # the kinds are many: the library's own, the Hub's, pyarrow's
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"--dataset {cfg.dataset}: cannot be read, as a file or from the Hub: {reason}") from error


def load_prompts(cfg: Config, tokenizer) -> tuple[list[Prompt], int]:
    """Tokenized prompts that leave room for a whole completion, and how many did not; ValueError names the flag."""
    prompts, rows = [], load_rows(cfg)
    for number, row in enumerate(rows, 1):
        text, answer = (cell(row, number, name, cfg) for name in ("prompt_column", "answer_column"))
        try:
            ids = encode_prompt(tokenizer, text)
        except Exception as error:  # templates raise kinds of their own
            raise ValueError(f"--prompt-column {cfg.prompt_column}: row {number} of {cfg.dataset}: {error}") from error
        if len(ids) + cfg.max_completion_tokens <= cfg.max_model_len:
            prompts.append(Prompt(ids, {**row, "answer": None if answer is None else str(answer)}))
    if not prompts:
        raise ValueError(
            f"none of the {len(rows)} prompts of {cfg.dataset} leaves room for {cfg.max_completion_tokens} new tokens: "
            f"raise --max-model-len {cfg.max_model_len}"
        )
    return prompts, len(rows) - len(prompts)


def cell(row: dict, number: int, name: str, cfg: Config):
    """What a row (the number-th) has in the column that a field of the configuration names; or ValueError."""
    try:
        return nested(row, getattr(cfg, name))
    except KeyError:
        raise ValueError(
            f"{flag(name)} {getattr(cfg, name)}: row {number} of dataset {cfg.dataset} has {', '.join(row)}"
        ) from None


def encode_prompt(tokenizer, prompt: str | list[dict]) -> list[int]:
    """Token ids of a text, or of chat messages through the tokenizer's template with the assistant's turn opened.

    Raises ValueError for anything else, and for messages if the tokenizer has no template.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if not isinstance(prompt, list):
        raise ValueError(f"{prompt!r} is neither text nor a list of chat messages")
    if not tokenizer.chat_template:
        raise ValueError("chat messages need a model with a chat template: give text, or name an instruct model")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)


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
        "top_p": cfg.top_p,
        "top_k": cfg.top_k,
        "min_p": cfg.min_p,
        "repetition_penalty": 1.0,
        "logprobs": 0,  # the sampled token's logprob only
        "return_token_ids": True,
    }


def usable_choices(body: dict) -> list[Choice]:
    """The choices that can be trained on: finished or cut, with a finite logprob for every token."""
    choices = []
    for choice in body["choices"]:
        ids = choice.get("token_ids")
        if ids is None:
            raise RolloutError("the replica returned no token_ids: it needs vLLM >= 0.10 (return_token_ids)")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        finite = all(value is not None and math.isfinite(value) for value in logprobs)
        if choice["finish_reason"] in ("stop", "length") and ids and len(ids) == len(logprobs) and finite:
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
        reload: Callable[[Policy], None] = lambda policy: None,  # called if the proxy does not know the newest policy
    ):
        self.cfg, self.prompts, self.cursor, self.policy, self.pool = cfg, prompts, cursor, policy, pool
        self.reload = reload
        self.proxy = f"http://{cfg.host}:{cfg.port}"
        self.queue = GroupQueue(queue_size(cfg))
        self.stopped = threading.Event()
        self.error: BaseException | None = None  # what ended the sampling; the trainer looks
        self.slots = threading.Condition()
        self.num_ready = 0  # replicas, as the proxy last said
        self.num_threads = 0
        self.inflight = 0  # completions
        self.generated_tokens = 0
        self.rejected = 0  # completions that could not be used (aborted, without tokens or logprobs)
        self.failed_groups = 0
        self.failed_in_a_row = 0
        self.dropped_stale = 0  # completions

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
            self.dropped_stale += len(group)
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
        per_replica = self.cfg.inflight_per_replica // self.cfg.group_size + self.cfg.reward_workers
        while not self.stopped.is_set():
            try:
                ready = requests.get(self.proxy + "/proxy/stats", timeout=5).json()["ready"]
            except (requests.RequestException, ValueError, KeyError):
                ready = self.num_ready  # the proxy is being restarted: requests wait for it by themselves
            with self.slots:
                self.num_ready = ready
                self.slots.notify_all()
            while self.num_threads < ready * per_replica:
                threading.Thread(target=self._run, name=f"sampler-{self.num_threads}", daemon=True).start()
                self.num_threads += 1
            self.stopped.wait(self.cfg.health_every_s)

    def _run(self) -> None:
        try:
            with requests.Session() as session:
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
            self.failed_groups += 1
            self.failed_in_a_row += 1
            too_many = self.failed_in_a_row >= self.cfg.max_failed_groups
        print(f"rollouts: group {group} failed: {reason}", flush=True)
        if too_many:
            raise RolloutError(f"{self.cfg.max_failed_groups} groups in a row failed; the last one: {reason}")

    def _generate(self, session: requests.Session, prompt: Prompt) -> tuple[int, list[Choice]]:
        """The usable completions of one prompt and the version that sampled them; RolloutError when given up."""
        give_up_at = time.monotonic() + self.cfg.no_replica_wait_s
        for attempt in itertools.count():
            policy = self.policy()
            verdict, answer = self._ask(session, completion_request(prompt, policy, self.cfg))
            if verdict == "ok":
                choices = usable_choices(answer.json())
                with self.slots:
                    self.generated_tokens += sum(len(choice.ids) for choice in choices)
                    self.rejected += self.cfg.group_size - len(choices)
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
        """Rollouts with rewards; a truncated completion scores 0 without being looked at."""
        finished = [choice for choice in choices if not choice.truncated]
        columns = {name: [value] * len(finished) for name, value in prompt.columns.items()}
        scores = iter(self.pool.score([choice.text for choice in finished], columns) if finished else [])
        return [
            Rollout(
                group=group,
                prompt=prompt.ids,
                completion=choice.ids,
                old_logprobs=choice.logprobs,
                reward=0.0 if choice.truncated else next(scores),
                advantage=0.0,
                version=version,
                truncated=choice.truncated,
            )
            for choice in choices
        ]
