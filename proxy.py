"""N vLLM replicas behind one address: adapters are loaded on all of them or on none, prompts go where their prefix is.

    HF_TOKEN=... python proxy.py --replicas http://127.0.0.1:9001,http://127.0.0.1:9002 --port 8000 --bucket DIR

- Completions are routed to one ready replica, and sent again elsewhere if it dies under them.
- Loads, unloads, pause, resume and cache resets go to every ready replica, one control call at a time. A load that
  fails anywhere is undone everywhere. Requests may name a policy once every ready replica has loaded it and has shown,
  by its logprobs for a short canary, that it serves those weights.
- A new or lost replica becomes ready when it has every live policy and no other.
- Everything else is forwarded to one ready replica: clients see a single vLLM server.

What a plain reverse proxy would do and this one does not: send the client's Authorization header (it is always the
proxy's own $HF_TOKEN), follow redirects, or pass on requests that vLLM would answer from other weights than asked for
(no model, an unknown or retired policy).

The status page is /, the same as JSON /proxy/stats, for Prometheus /metrics. Replicas may come and go meanwhile:
POST /proxy/replicas {"url": ..., "id": ..., "job": ...}, DELETE /proxy/replicas/<id>.

What replicas' answers mean and what a request may be is in vllm_api.py, what the page looks like in proxy_page.py.
"""

if __name__ == "__main__":  # before anything that opens sockets is imported; importing this file patches nothing
    from gevent import monkey

    monkey.patch_all(select=False)  # select is only called to look at idle connections, and need not yield for that

import array
import contextlib
import gc
import http.client
import io
import math
import os
import random
import re
import resource
import signal
import socket
import ssl
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

import gevent
import gevent.event
import gevent.lock
import gevent.pywsgi
import gevent.queue
import orjson
import urllib3
from flask import Flask, Request, Response, render_template_string, request

from config import Config, config_from, fail, make_parser
from proxy_page import PAGE, metrics
from vllm_api import (
    ApiError,
    Canary,
    answer_verdict,
    canary_logprobs,
    data_parallel_size,
    end_to_end,
    error_body,
    lies_in,
    load_verdict,
    named_model,
    read_completion,
    read_json,
    read_load,
    retry_after_s,
    said,
    widest_gap,
    with_cure,
)

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
PROBE_IDS = [1, 2, 3, 4]  # tokens of every vocabulary: the canary of a load that brings none
MAX_CATCH_UP_ROUNDS = 10  # policies that came or went during a catch-up are caught up in another round
NOT_SENT_ON = {"host", "authorization", "content-length", "expect", "accept-encoding"}  # the proxy sets its own
NOT_COPIED = {"content-length", "date", "server"}  # of answers, for the same reason
PLAIN_HEADER = re.compile(rb"([\w!#$%&'*+.^`|~-]+):[ \t]*([^\r\n]*)\r?\n")
thorough_headers = http.client.parse_headers  # Python's own, whose place plain_headers takes in `serve`
TOKEN_REFUSED = "it refuses the token ({}): HF_TOKEN must be a valid token with read access to the Job"


class NotReadyError(Exception):
    """Why a replica cannot become ready."""


class CallTimeoutError(Exception):
    """A call took longer than it may."""


class Lost(gevent.GreenletExit):
    """Ends the calls to a replica that went down."""


class ClientGone(gevent.GreenletExit):
    """Ends the call made for a client that disconnected."""


CALL_ERRORS = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, CallTimeoutError)


class Answer(NamedTuple):
    """A replica's answer; the body is None while a stream is still to come."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes | None

    @property
    def text(self) -> str:
        return said(self.body or b"")


class Ask(NamedTuple):
    """A client's request: what is sent on, and what routing needs to know of it."""

    method: str
    target: str  # path and query
    headers: dict[str, str]
    body: bytes
    model: str | None = None  # the policy or base model it names
    ids: list[int] | None = None  # its prompt, if that is one list of token ids
    num: int = 0  # completions it asks for
    stream: bool = False
    repeatable: bool = True  # may be sent again when a call breaks


@dataclass
class Policy:
    """An adapter that is live on the replicas, or on its way out."""

    name: str
    path: str
    canary: Canary | None = None
    live: bool = True  # False: retired, unloaded as soon as nothing in flight names it
    inflight: int = 0  # requests that name it
    checked: gevent.event.Event = field(default_factory=gevent.event.Event)  # requests are held until then
    idle: gevent.event.Event = field(default_factory=gevent.event.Event)  # nothing in flight names it
    unloaded: gevent.event.Event = field(default_factory=gevent.event.Event)  # gone from every ready replica


# Pure functions


def attempt_of(policy: str) -> int | None:
    """The attempt in a name "<run>-a<attempt>-v<version>"; None for names of another form, such as TRL's."""
    match = re.fullmatch(r".+-a(\d+)-v\d+", policy)
    return int(match[1]) if match else None


def block_hashes(policy: str, ids: list[int] | None, block_size: int) -> list[int]:
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


def survivors(found: Iterable[dict[str, str]]) -> dict[str, str]:
    """Which of the policies found on replicas (name to path) live on: the newest attempt's, and those without one."""
    together = {name: path for adapters in found for name, path in adapters.items()}
    newest = newest_attempt(together)
    return {name: path for name, path in together.items() if attempt_of(name) in (None, newest)}


def newest_attempt(policies: Iterable[str]) -> int:
    """The largest attempt in these names; -1 if none has one."""
    return max((attempt for name in policies if (attempt := attempt_of(name)) is not None), default=-1)


def short(err: Exception) -> str:
    """The end of an error's text, which says what happened, or the name of its kind."""
    return re.sub(r"^.*(?:\] |\('|, ')", "", str(err), flags=re.DOTALL).strip("'\") ") or type(err).__name__


# One replica


class Replica:
    """One vLLM server: its state, and connections to it, those of control calls apart from those of requests."""

    def __init__(self, name: str, url: str, job: str, bit: int, cfg: Config, token: str):
        self.id, self.url, self.job, self.bit = name, url.rstrip("/"), job, bit
        self.state, self.reason, self.lost_for = "joining", "not asked yet", ""
        self.policies: set[str] = set()  # loaded and checked
        self.inflight = self.routed = 0  # completions
        self.misses = self.strikes = 0  # probes and calls in a row that failed
        self.denied = False  # it refuses the token
        self.inspected = False
        self.progress_s = self.wait_until_s = 0.0  # monotonic: something finished last, a 429 lasts
        self.calls: set[gevent.Greenlet] = set()
        self.probing = gevent.lock.BoundedSemaphore(1)
        self.cfg = cfg
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.prefix = urlsplit(self.url).path
        self.pool, self.control_pool = self.connect(cfg.max_inflight), self.connect(8)

    def __str__(self) -> str:
        return f"replica {self.id} ({f'job {self.job}' if self.job else self.url})"

    def connect(self, size: int) -> urllib3.HTTPConnectionPool:
        secure = {"ssl_context": ssl.create_default_context()} if self.url.startswith("https:") else {}
        timeout = urllib3.Timeout(connect=self.cfg.connect_timeout_s, read=None)
        return urllib3.connection_from_url(self.url, maxsize=size, timeout=timeout, **secure)

    def open(
        self, pool: urllib3.HTTPConnectionPool, method: str, target: str, headers: dict, body: bytes | None
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and read the head of its answer."""
        return pool.urlopen(
            method, self.prefix + target, body=body, headers=headers | self.headers, redirect=False, retries=False,
            preload_content=False, decode_content=False,
        )  # fmt: skip

    def control(self, method: str, target: str, payload: dict | None, timeout_s: float) -> Answer:
        """One control call, made again if the server asks to wait and there is time; raises one of CALL_ERRORS."""
        deadline = time.monotonic() + timeout_s
        with gevent.Timeout(timeout_s, CallTimeoutError(f"no answer in {timeout_s:g} s")):
            while True:
                answer = self.control_once(method, target, payload)
                pause_s = retry_after_s(answer.headers, time.time()) * random.uniform(1, 1.25)
                if answer.status != 429 or time.monotonic() + pause_s > deadline:
                    return answer
                gevent.sleep(pause_s)

    def control_once(self, method: str, target: str, payload: dict | None) -> Answer:
        """The answer to a control call, which may be sent twice: an idle connection can close at this moment."""
        headers = {} if payload is None else {"Content-Type": "application/json"}
        body = None if payload is None else orjson.dumps(payload)
        for last in (False, True):
            try:
                response = self.open(self.control_pool, method, target, headers, body)
                return Answer(response.status, list(response.headers.items()), response.read(decode_content=True))
            except urllib3.exceptions.ProtocolError:
                if last:
                    raise
        raise AssertionError("unreachable")

    def begin(self, call: gevent.Greenlet, num: int) -> None:
        """Count a request that was just sent; its end, whatever that is, counts it off."""
        if not self.inflight:
            self.progress_s = time.monotonic()
        self.calls.add(call)
        self.inflight += num
        self.routed += num
        call.rawlink(lambda ended: self.end(ended, num))

    def end(self, call: gevent.Greenlet, num: int) -> None:
        self.calls.discard(call)
        self.inflight -= num
        if isinstance(call.value, Answer):
            self.progress_s = time.monotonic()


# Routing


class Block(NamedTuple):
    owners: int  # bits of the replicas that served it
    follower: int | None  # the block seen after it, or MANY
    policy: str


MANY = -1  # different blocks followed; hash() never returns -1


class Router:
    """Remembers which replicas served which blocks: a bounded table, the least recently used blocks go first."""

    def __init__(self, max_blocks: int):
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

    def choose(self, hashes: list[int], candidates: list[Replica], everyone: int, max_imbalance: int) -> Replica:
        """The replica for a prompt: its owner unless that is too far ahead in completions, or the least loaded one."""
        owners = self.owners(hashes, everyone)
        holders = [replica for replica in candidates if replica.bit & owners]
        best = min(holders, key=lambda replica: replica.inflight, default=None)
        least = min(replica.inflight for replica in candidates)
        near = best is not None and best.inflight - least <= max_imbalance
        self.counts["affinity" if near else "spilled" if best else "unmatched"] += 1
        return best if near else self.least_loaded(candidates)

    def least_loaded(self, candidates: list[Replica]) -> Replica:
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


# The fleet: what the proxy knows


class Fleet:
    """The replicas, the policies and the router; changes of them are said aloud and wake whoever waits."""

    def __init__(self, cfg: Config, bucket: str, token: str):
        self.cfg, self.bucket, self.token = cfg, bucket, token
        self.replicas: dict[str, Replica] = {}
        self.policies: dict[str, Policy] = {}
        self.base_models: set[str] = set()  # known once a replica was ready
        self.burned: OrderedDict[str, None] = OrderedDict()  # names that were used and are not live any more
        self.newest_attempt = -1
        self.pause_target: str | None = None  # "/pause?mode=keep" while paused
        self.num_requests = 0
        self.router = Router(cfg.max_tracked_blocks)
        self.counts: Counter[str] = Counter()
        self.events: deque[tuple[float, str]] = deque(maxlen=100)
        self.lock = gevent.lock.BoundedSemaphore(1)
        self.lock_holder = ""
        self.changed = gevent.event.Event()

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state == "ready"]

    def live(self) -> dict[str, Policy]:
        return {name: policy for name, policy in self.policies.items() if policy.live}

    def say(self, text: str) -> None:
        text = text.replace(self.token or "\0", "***")
        self.events.append((time.time(), text))
        with contextlib.suppress(OSError):  # whoever reads the output may be gone
            print(f"proxy: {text}", flush=True)

    def stir(self) -> None:
        """Wake everyone who waits for a change."""
        self.changed.set()
        self.changed = gevent.event.Event()

    def burn(self, name: str) -> None:
        self.burned[name] = None
        while len(self.burned) > 10_000:
            self.burned.popitem(last=False)


def gather(function: Callable, replicas: Iterable[Replica]) -> list:
    """What `function` returns for each replica, asked at the same time."""
    calls = [gevent.spawn(function, replica) for replica in replicas]
    return [call.get() for call in calls]


def wait_until(fleet: Fleet, true: Callable, timeout_s: float, gone: Callable = lambda: False) -> object:
    """Wait until `true()` is, and return it; what it returned last, if `timeout_s` ran out or `gone()`."""
    deadline = time.monotonic() + timeout_s
    while not (found := true()) and not gone() and (left := deadline - time.monotonic()) > 0:
        fleet.changed.wait(min(left, 0.5))
    return found


# Replicas: probed, lost, caught up


def lose(fleet: Fleet, replica: Replica, reason: str) -> None:
    """A replica is down: it gets no requests, and those it has are sent again elsewhere."""
    if replica.state != "draining":
        if reason != replica.lost_for:  # once, not at every catch-up that fails for it
            fleet.say(f"{replica} is down: {reason}")
        replica.state, replica.reason, replica.lost_for = "down", reason, reason
    replica.policies.clear()
    fleet.router.forget_replica(replica.bit)
    for call in list(replica.calls):
        call.kill(Lost(), block=False)
    fleet.stir()


def probe(replica: Replica) -> str | None:
    """Ask for /health: None if the replica is well, or what is wrong."""
    try:
        status = replica.control("GET", "/health", None, replica.cfg.health_timeout_s).status
    except CALL_ERRORS as err:
        replica.denied = False
        return short(err)
    replica.denied = status in (401, 403)
    if replica.denied:
        return TOKEN_REFUSED.format(status)
    return None if status in (200, 429) else f"/health says {status}"


def is_lost(fleet: Fleet, replica: Replica, why: str, strike: bool = True) -> bool:
    """After a call that failed: probe the replica; it goes down if it is not well, or at too many strikes in a row."""
    with replica.probing:  # the calls that break together ask once
        if replica.state == "down":
            return True
        replica.strikes += strike
        trouble = probe(replica)
        if trouble is None and replica.strikes >= fleet.cfg.health_misses:
            trouble = f"{replica.strikes} calls in a row failed"
        if trouble:
            lose(fleet, replica, why if trouble == why else f"{why}; {trouble}")
        return trouble is not None


def supervise(fleet: Fleet, replica: Replica) -> None:
    """Look after a replica until it is removed."""
    while fleet.replicas.get(replica.id) is replica:
        if replica.state != "draining":
            look_after(fleet, replica)
        elif not replica.calls:
            remove(fleet, replica)
        gevent.sleep(fleet.cfg.health_every_s)


def remove(fleet: Fleet, replica: Replica) -> None:
    """Forget a replica that has drained."""
    del fleet.replicas[replica.id]
    fleet.router.forget_replica(replica.bit)
    fleet.say(f"{replica} is removed")
    fleet.stir()


def look_after(fleet: Fleet, replica: Replica) -> None:
    """One probe and what follows from it: a well replica is caught up, a dead or wedged one is down."""
    cfg = fleet.cfg
    trouble = probe(replica)
    if replica.state == "ready":
        replica.misses = replica.misses + 1 if trouble else 0
        idle_s = time.monotonic() - replica.progress_s
        if replica.misses >= cfg.health_misses:
            lose(fleet, replica, f"{replica.misses} probes failed, the last one: {trouble}")
        elif replica.inflight and not fleet.pause_target and idle_s > cfg.stall_s:
            lose(fleet, replica, f"/health is well, but nothing finished for {idle_s:.0f} s")
    elif trouble:
        replica.reason = trouble
    else:
        try:
            catch_up(fleet, replica)
        except (NotReadyError, ApiError) as err:
            lose(fleet, replica, str(err))
        except Exception as err:  # whatever it answered, it must be asked again
            lose(fleet, replica, f"catching up: {short(err)}")


def served(replica: Replica) -> tuple[set[str], dict[str, str]]:
    """The base model's names and the adapters (name to path) in a replica's /v1/models."""
    answer = replica.control("GET", "/v1/models", None, replica.cfg.control_timeout_s)
    if answer.status != 200:
        raise NotReadyError(f"/v1/models says {answer.status}: {answer.text}")
    try:
        models = orjson.loads(answer.body)["data"]
        bases = {model["id"] for model in models if not model.get("parent")}
        return bases, {model["id"]: model["root"] for model in models if model.get("parent")}
    except (ValueError, LookupError, TypeError, AttributeError) as err:
        raise NotReadyError(f"/v1/models is not vLLM's: {answer.text}") from err


def catch_up(fleet: Fleet, replica: Replica) -> None:
    """Make a healthy replica ready: it generates, and has every live policy and no other. Raises what is in the way."""
    if replica.state != "draining":
        replica.state, replica.reason = "joining", "catching up"
    prove(fleet, replica)
    for _ in range(MAX_CATCH_UP_ROUNDS):
        give_policies(fleet, replica)
        with control_lock(fleet, f"the catch-up of {replica}"):
            if replica.state != "joining":
                return
            if replica.policies == set(fleet.live()):
                make_ready(fleet, replica)
                return
    raise NotReadyError("policies came and went faster than it could load them")


def make_ready(fleet: Fleet, replica: Replica) -> None:
    """Let requests go to a replica that has caught up; paused, if the others are."""
    if fleet.pause_target:
        answer = replica.control("POST", fleet.pause_target, None, fleet.cfg.control_timeout_s)
        if answer.status != 200:
            raise NotReadyError(f"the fleet is paused, but it does not pause: {answer.text}")
    replica.state, replica.reason, replica.lost_for = "ready", "", ""
    replica.misses = replica.strikes = 0
    fleet.say(f"{replica} is ready with {len(replica.policies)} policies")
    fleet.stir()


def prove(fleet: Fleet, replica: Replica) -> None:
    """Whether a replica can serve at all: one engine, not paused, and it generates; raises what is in the way."""
    timeout_s = fleet.cfg.control_timeout_s
    if not replica.inspected:
        answer = replica.control("GET", "/server_info?config_format=json", None, timeout_s)
        if (size := data_parallel_size(answer.body)) > 1:
            raise NotReadyError(f"data_parallel_size {size}: a load reaches one of them; use one replica for each")
        replica.inspected = True
    replica.control("POST", "/resume", None, timeout_s)  # it may have missed the end of a pause
    bases, _ = served(replica)
    if not bases:
        raise NotReadyError("/v1/models names no base model")
    fleet.base_models |= bases
    if failure := canary_on(fleet, replica, min(bases), PROBE_IDS)[1]:
        raise failure


def give_policies(fleet: Fleet, replica: Replica) -> None:
    """Unload from a joining replica what is not live, load and check what is; raises what is in the way."""
    live = fleet.live()
    _, adapters = served(replica)
    for name, path in adapters.items():
        if name not in live or live[name].path != path:
            forget_on(fleet, replica, name)
    deadline = time.monotonic() + fleet.cfg.load_deadline_s
    for name, policy in live.items():
        if adapters.get(name) != policy.path and (failure := load_on(fleet, replica, policy, deadline)):
            raise failure
        if not policy.live:
            continue
        if name not in replica.policies and (failure := check(fleet, policy, [replica])):
            forget_on(fleet, replica, name)  # loaded afresh at the next try
            raise failure
        if replica.state != "joining":
            raise NotReadyError(replica.reason)
        replica.policies.add(name)


def forget_on(fleet: Fleet, replica: Replica, name: str) -> None:
    """Unload a policy from a joining replica, and what it has cached under a name that will be loaded again."""
    unload_on(fleet, replica, name)
    replica.policies.discard(name)
    if name in fleet.live():
        tell(fleet, replica, "/reset_prefix_cache", None)


def discover(fleet: Fleet) -> None:
    """At the start: policies that replicas serve are live, if of the newest attempt and still in the bucket."""

    def adapters_on(replica: Replica) -> dict[str, str]:
        try:
            return served(replica)[1]
        except (NotReadyError, *CALL_ERRORS):
            return {}

    found = gather(adapters_on, fleet.replicas.values())
    fleet.newest_attempt = newest_attempt(name for adapters in found for name in adapters)
    for name, path in survivors(found).items():
        if lies_in(path, fleet.bucket) and os.path.isfile(os.path.join(path, "adapter_config.json")):
            fleet.policies[name] = Policy(name, path)
            fleet.policies[name].checked.set()
            fleet.say(f"{name} is live: replicas have it from before")


# Control calls


@contextlib.contextmanager
def control_lock(fleet: Fleet, what: str) -> Iterator[None]:
    """One control call at a time; ApiError if the one that runs takes too long."""
    wait_s = fleet.cfg.load_deadline_s + fleet.cfg.control_timeout_s
    if not fleet.lock.acquire(timeout=wait_s):
        raise ApiError(503, f"{what} waited {wait_s:g} s for {fleet.lock_holder}", 1)
    fleet.lock_holder = what
    try:
        yield
    finally:
        fleet.lock_holder = ""
        fleet.lock.release()


def load(fleet: Fleet, policy: Policy) -> None:
    """Load a policy on every ready replica, check it and make it live; or undo it everywhere and raise ApiError."""
    if not wait_until(fleet, fleet.ready, fleet.cfg.load_deadline_s):
        raise ApiError(503, f"no replica is ready to load {policy.name}: {states(fleet)}", 1)
    with control_lock(fleet, f"the load of {policy.name}"):
        if already_live(fleet, policy):
            return
        replicas = fleet.ready()
        failure = clear_caches(fleet, policy, replicas) or load_everywhere(fleet, policy, replicas)
        if not failure and not fleet.pause_target:
            failure = check(fleet, policy, fleet.ready())
        if not failure and not fleet.ready():
            failure = ApiError(503, f"every replica went down during the load of {policy.name}: {states(fleet)}", 1)
        if failure:
            gather(lambda replica: unload_on(fleet, replica, policy.name), fleet.ready())
            fleet.burn(policy.name)
            fleet.counts["failed loads"] += 1
            fleet.say(f"{policy.name} is not loaded: {failure}")
            raise failure
        for replica in fleet.ready():
            replica.policies.add(policy.name)
        if not fleet.pause_target:
            policy.checked.set()
        fleet.policies[policy.name] = policy
        fleet.counts["loads"] += 1
        fleet.say(f"{policy.name} is live on {len(fleet.ready())} replicas")
    for name in fleet.live():
        if attempt_of(name) not in (None, fleet.newest_attempt):
            retire(fleet, name)


def already_live(fleet: Fleet, policy: Policy) -> bool:
    """Whether a load repeats one that succeeded; ApiError if the policy may not be loaded."""
    name, attempt = policy.name, attempt_of(policy.name)
    if name in fleet.base_models:
        raise ApiError(400, f"{name} is the base model's name: requests for the base model would get the adapter")
    if attempt is not None and attempt < fleet.newest_attempt:
        raise ApiError(409, f"{name} is of attempt {attempt}, but attempt {fleet.newest_attempt} has taken over")
    if attempt is not None:
        fleet.newest_attempt = attempt
    known = fleet.policies.get(name)
    if known and known.live and known.path == policy.path and attempt is not None:
        return True
    if known and known.live:
        raise ApiError(400, f"The lora adapter '{name}' has already been loaded from {known.path}")
    if known or (name in fleet.burned and attempt is not None):
        raise ApiError(409, f"{name} was used before: vLLM would answer from its old cache; load under a new name")
    return False


def clear_caches(fleet: Fleet, policy: Policy, replicas: list[Replica]) -> ApiError | None:
    """Before a name without an attempt (TRL's) is used again: vLLM would answer from the old policy's cache."""
    if policy.name not in fleet.burned:
        return None
    answers = gather(lambda replica: tell(fleet, replica, "/reset_prefix_cache", None), replicas)
    if all(answer is None or answer.status == 200 for answer in answers):
        return None
    return ApiError(409, f"{policy.name} was used before, and its cache cannot be reset everywhere: use a new name")


def load_everywhere(fleet: Fleet, policy: Policy, replicas: list[Replica]) -> ApiError | None:
    """Load on all replicas at once; the first failure ends it, and is returned."""
    deadline = time.monotonic() + fleet.cfg.load_deadline_s
    calls = [gevent.spawn(load_on, fleet, replica, policy, deadline) for replica in replicas]
    try:
        return next((failure for call in gevent.iwait(calls) if (failure := call.get())), None)
    finally:
        gevent.killall(calls)


def load_on(fleet: Fleet, replica: Replica, policy: Policy, deadline: float) -> ApiError | None:
    """Load on one replica, trying again while its mount does not show the files; what failed, if not the replica."""
    cfg, last, silent = fleet.cfg, "no answer", False
    while (left_s := deadline - time.monotonic()) > 0:
        timeout_s = min(left_s, cfg.control_timeout_s)
        verdict, status, text = try_load(replica, policy, timeout_s)
        if verdict == "loaded":
            return None
        if verdict in ("final", "already"):
            text = TOKEN_REFUSED.format(status) if status in (401, 403) else with_cure(text)
            return ApiError(max(status, 400), f"{replica} cannot load {policy.name}: {text}")
        if verdict == "dead":
            lose(fleet, replica, text)
        elif verdict in ("silent", "broken"):
            is_lost(fleet, replica, text, strike=verdict == "broken")
        if replica.state not in ("ready", "joining") or not policy.live:  # not live: retired during a catch-up
            return None
        if verdict != "silent" or timeout_s == cfg.control_timeout_s:  # a try cut short by the deadline says nothing
            if text != last:
                fleet.say(f"{replica} has not loaded {policy.name} yet: {text}")
            last, silent = text, verdict == "silent"
        gevent.sleep(min(cfg.load_retry_s, left_s))
    if silent:
        lose(fleet, replica, f"it did not answer the load of {policy.name}")
    return ApiError(504, f"{replica} has not loaded {policy.name} within {cfg.load_deadline_s:g} s: {last} "
                    f"(is the bucket mounted there, and {policy.path} complete?)")  # fmt: skip


def try_load(replica: Replica, policy: Policy, timeout_s: float) -> tuple[str, int, str]:
    """One try: its verdict (also silent: no answer in time; broken: none at all), and the answer's status and text."""
    payload = {"lora_name": policy.name, "lora_path": policy.path}
    try:
        answer = replica.control("POST", "/v1/load_lora_adapter", payload, timeout_s)
        verdict = load_verdict(answer.status, answer.text)
        if verdict == "already" and served(replica)[1].get(policy.name) == policy.path:
            verdict = "loaded"  # the answer to an earlier try was lost
        return verdict, answer.status, answer.text
    except CallTimeoutError as err:
        return "silent", 504, str(err)
    except (NotReadyError, *CALL_ERRORS) as err:
        return "broken", 502, short(err)


def canary_on(fleet: Fleet, replica: Replica, model: str, ids: list[int]) -> tuple[list[float] | None, ApiError | None]:
    """A replica's logprobs (C - 1,) of a token sequence, or what is wrong with them; neither if the replica is lost."""
    payload = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1, "prompt_logprobs": 0}
    try:
        answer = replica.control("POST", "/v1/completions", payload, fleet.cfg.control_timeout_s)
        if answer.status == 200:
            return canary_logprobs(answer.body, ids), None
        problem = f"{answer.status}, {answer.text}"
    except ValueError as err:
        problem = str(err)
    except CALL_ERRORS as err:
        problem = short(err)
        if is_lost(fleet, replica, problem):
            return None, None
    return None, ApiError(500, f"{replica} cannot score a canary under {model}: {problem}")


def check(fleet: Fleet, policy: Policy, replicas: list[Replica]) -> ApiError | None:
    """Whether replicas serve a policy's weights: their canary logprobs are right, or the same where there is none."""
    ids = policy.canary.ids if policy.canary else PROBE_IDS
    answers = gather(lambda replica: canary_on(fleet, replica, policy.name, ids), replicas)
    for replica, (logprobs, failure) in zip(replicas, answers, strict=True):
        if failure:
            return failure
        if logprobs is None:
            continue
        policy.canary = policy.canary or Canary(ids, logprobs)
        gap, at = widest_gap(policy.canary.logprobs, logprobs)
        if gap > fleet.cfg.canary_atol:
            return ApiError(500, f"{replica} does not serve the weights of {policy.name}: its logprob of canary token "
                            f"{at} is off by {gap:.3g}, allowed is {fleet.cfg.canary_atol:g}")  # fmt: skip
    return None


def unload_on(fleet: Fleet, replica: Replica, name: str) -> None:
    """Unload on one replica; one that does not confirm it goes down, and will be caught up."""
    try:
        answer = replica.control("POST", "/v1/unload_lora_adapter", {"lora_name": name}, fleet.cfg.control_timeout_s)
        if answer.status == 200 or (answer.status == 404 and "cannot be found" in answer.text):
            replica.policies.discard(name)
            return
        problem = f"{answer.status}, {with_cure(answer.text)}"
    except CALL_ERRORS as err:
        problem = short(err)
    lose(fleet, replica, f"it did not unload {name}: {problem}")


def unload(fleet: Fleet, name: str) -> None:
    """Retire a policy and wait until every ready replica has unloaded it; ApiError if that takes too long."""
    policy = fleet.policies.get(name)
    if name in fleet.base_models:
        raise ApiError(400, f"{name} is the base model: it cannot be unloaded")
    if policy is None:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
    retire(fleet, name)
    if not policy.unloaded.wait(fleet.cfg.control_timeout_s):
        raise ApiError(503, f"{name} is retired, but {policy.inflight} requests that name it are still in flight; "
                       "ask again later", 1)  # fmt: skip


def retire(fleet: Fleet, name: str) -> None:
    """From now on requests for a policy get 404; it is unloaded when nothing in flight names it."""
    policy = fleet.policies[name]
    if not policy.live:
        return
    policy.live = False
    fleet.burn(name)
    fleet.router.forget_policy(name)
    if not policy.inflight:
        policy.idle.set()
    gevent.spawn(finish_retiring, fleet, policy)


def finish_retiring(fleet: Fleet, policy: Policy) -> None:
    """Unload a retired policy everywhere once it is idle, or at once during a pause: nothing finishes then."""
    while not policy.idle.wait(0.5) and not fleet.pause_target:
        pass  # ends: every request is bounded by its timeouts
    with fleet.lock:
        gather(lambda replica: unload_on(fleet, replica, policy.name), fleet.ready())
        del fleet.policies[policy.name]
        fleet.say(f"{policy.name} is retired")
    policy.unloaded.set()


def broadcast(fleet: Fleet, path: str, target: str, payload: dict | None) -> Answer:
    """Pause, resume or reset every ready replica: the first answer if all agree, ApiError if not."""
    with control_lock(fleet, path):
        replicas = fleet.ready()
        if not replicas:
            raise ApiError(503, f"no replica is ready for {path}: {states(fleet)}", 1)
        answers = gather(lambda replica: tell(fleet, replica, target, payload), replicas)
        good = [answer for answer in answers if answer and answer.status == 200]
        bad = [(r, answer) for r, answer in zip(replicas, answers, strict=True) if answer and answer.status != 200]
        if path == "/resume" and good:  # one that stays paused must not get requests
            for replica, answer in bad:
                lose(fleet, replica, f"it did not resume: {answer.text}")
        elif bad:
            if path == "/pause":
                gather(lambda replica: resume(fleet, replica), replicas)
            replica, answer = bad[0]
            raise ApiError(answer.status, f"{replica} refuses {path}: {answer.text}")
        if not good:
            raise ApiError(503, f"every replica went down during {path}: {states(fleet)}", 1)
        settle(fleet, path, target)
        return good[0]


def tell(fleet: Fleet, replica: Replica, target: str, payload: dict | None) -> Answer | None:
    """A replica's answer to a control call (504 if it gives none); None if the replica is lost."""
    try:
        return replica.control("POST", target, payload, fleet.cfg.control_timeout_s)
    except CALL_ERRORS as err:
        return None if is_lost(fleet, replica, short(err)) else Answer(504, [], short(err).encode())


def resume(fleet: Fleet, replica: Replica) -> None:
    """Take back a pause; a replica that may still be paused afterwards goes down."""
    answer = tell(fleet, replica, "/resume", None)
    if answer and answer.status != 200:
        lose(fleet, replica, f"it did not resume: {answer.text}")


def states(fleet: Fleet) -> str:
    """The replicas and what keeps them, for messages."""
    return "; ".join(f"{r} is {r.state}: {r.reason}" for r in fleet.replicas.values()) or "there are no replicas"


def settle(fleet: Fleet, path: str, target: str) -> None:
    """What a pause, resume or reset that succeeded everywhere means for the fleet."""
    if path == "/reset_prefix_cache":
        fleet.router.blocks.clear()
        return
    fleet.pause_target = target if path == "/pause" else None
    fleet.say("paused" if fleet.pause_target else "resumed")
    if path == "/pause":
        return
    for replica in fleet.ready():
        replica.progress_s = time.monotonic()
    for policy in [policy for policy in fleet.live().values() if not policy.checked.is_set()]:
        if failure := check(fleet, policy, fleet.ready()):  # loads during the pause could not be checked then
            retire(fleet, policy.name)
            raise failure
        policy.checked.set()
    fleet.stir()


# Requests


class Visit:
    """A client's request while it is answered: notices that the client leaves, and is counted until `end`."""

    def __init__(self, fleet: Fleet, sock: socket.socket):
        self.fleet, self.gone = fleet, False
        self.policy: Policy | None = None
        self.call: gevent.Greenlet | None = None
        self.arrivals: gevent.queue.SimpleQueue | None = None
        self.watcher = gevent.get_hub().loop.io(sock.fileno(), 1)  # 1: readable
        self.watcher.start(self.look, sock._sock)  # the plain socket: an event loop's callback may not wait
        fleet.num_requests += 1

    def look(self, sock: socket.socket) -> None:
        """The client's socket became readable: it sent its next request early, or it left."""
        try:
            data = sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.watcher.stop()
        if data:
            return
        self.gone = True
        if self.call:
            self.call.kill(ClientGone(), block=False)

    def name(self, policy: Policy) -> None:
        """Count the policy that this request names as in flight."""
        self.policy = policy
        policy.inflight += 1
        policy.idle.clear()

    def end(self) -> None:
        """The answer is given, or given up."""
        self.watcher.stop()
        self.watcher.close()
        self.fleet.num_requests -= 1
        if self.call:
            self.call.kill(ClientGone(), block=False)
        if self.policy:
            self.policy.inflight -= 1
            if not self.policy.inflight:
                self.policy.idle.set()


def answer(fleet: Fleet, ask: Ask, sock: socket.socket) -> Response:
    """Answer a request from one ready replica."""
    if fleet.num_requests >= fleet.cfg.max_inflight:
        raise ApiError(503, f"{fleet.num_requests} requests are in flight; raise --max-inflight", 1)
    visit, response = Visit(fleet, sock), None
    try:
        admit(fleet, ask, visit)
        response = route(fleet, ask, visit)
    finally:
        if response is None or not response.is_streamed:
            visit.end()
    if response.is_streamed:
        response.call_on_close(visit.end)
    return response


def admit(fleet: Fleet, ask: Ask, visit: Visit) -> None:
    """Let a request in that names a live policy, the base model or nothing; ApiError for other names."""
    if ask.model is None:
        return
    wait_s = fleet.cfg.no_replica_wait_s
    known = ask.model in fleet.policies  # if not, it may be the base model, whose name the first replica tells
    if not known and not wait_until(fleet, lambda: fleet.base_models, wait_s, lambda: visit.gone or denied(fleet)):
        raise unavailable(fleet)
    policy = fleet.policies.get(ask.model)
    if policy and policy.live:
        visit.name(policy)
        wait_until(fleet, policy.checked.is_set, wait_s, lambda: visit.gone or not policy.live)
    if not (policy and policy.live and policy.checked.is_set()) and ask.model not in fleet.base_models:
        raise unknown(ask.model)


def route(fleet: Fleet, ask: Ask, visit: Visit) -> Response:
    """Send a request to the best replica, and again if that one breaks; ApiError if it cannot be answered."""
    hashes = block_hashes(ask.model or "", ask.ids, fleet.cfg.block_size)
    max_sends = fleet.cfg.max_sends if ask.repeatable else 1
    tried, again = list[Replica](), True
    while again and len(tried) < max_sends:
        replica = pick(fleet, ask, hashes, visit, tried)
        tried.append(replica)
        got, again = weigh(fleet, replica, ask, send(replica, ask, visit))
        fleet.counts["sent again"] += again and len(tried) < max_sends
    if isinstance(got, ApiError):
        raise got
    headers = [*end_to_end(got.headers, NOT_COPIED), ("X-Replica", replica.id)]
    body = relay(fleet, replica, visit.arrivals) if got.body is None else got.body
    return Response(body, got.status, headers)


def pick(fleet: Fleet, ask: Ask, hashes: list[int], visit: Visit, tried: list[Replica]) -> Replica:
    """The replica to send a request to, if possible one that has not been tried; waits for one, or ApiError."""
    cfg, policy = fleet.cfg, visit.policy

    def candidates() -> list[Replica]:
        now, ready = time.monotonic(), fleet.ready()
        return [r for r in ready if r.wait_until_s <= now and (policy is None or policy.name in r.policies)]

    def hopeless() -> bool:
        return visit.gone or denied(fleet) or (policy is not None and not policy.live)

    found = wait_until(fleet, candidates, cfg.no_replica_wait_s, hopeless)
    if not found:
        raise unavailable(fleet) if policy is None or policy.live else unknown(policy.name)
    found = [replica for replica in found if replica not in tried] or found  # one that fails at once looks idle
    if not ask.num:
        return fleet.router.least_loaded(found)
    everyone = sum(replica.bit for replica in fleet.ready())
    replica = fleet.router.choose(hashes, found, everyone, cfg.max_imbalance)
    fleet.router.note(ask.model, hashes, replica.bit)
    return replica


def denied(fleet: Fleet) -> bool:
    """Whether every replica refuses the token, so that waiting is no use."""
    return bool(fleet.replicas) and all(replica.denied for replica in fleet.replicas.values())


def unavailable(fleet: Fleet) -> ApiError:
    """Why no replica can answer."""
    message = f"no replica can answer: {states(fleet)}"
    return ApiError(401, message) if denied(fleet) else ApiError(503, message, 1)


def unknown(model: str) -> ApiError:
    """vLLM's own words for a model that it does not have."""
    return ApiError(404, f"The model `{model}` does not exist.")


def send(replica: Replica, ask: Ask, visit: Visit) -> object:
    """Call a replica in a greenlet of its own: an Answer (a stream's body is still to come), or what ended the call."""
    visit.arrivals = gevent.queue.SimpleQueue()
    visit.call = gevent.spawn(exchange, replica, ask, visit.arrivals)
    replica.begin(visit.call, ask.num)
    visit.call.rawlink(visit.arrivals.put)
    if visit.gone:
        visit.call.kill(ClientGone(), block=False)
    first = visit.arrivals.get()
    return first.get() if first is visit.call else first


def exchange(replica: Replica, ask: Ask, arrivals: gevent.queue.SimpleQueue) -> object:
    """One call: returns its Answer or error; the beginning of a stream and its chunks are put into `arrivals`."""
    timeout_s = replica.cfg.request_timeout_s
    try:
        with gevent.Timeout(timeout_s, CallTimeoutError(f"no answer in {timeout_s:g} s")):
            response = replica.open(replica.pool, ask.method, ask.target, ask.headers, ask.body)
            headers = list(response.headers.items())
            if response.status >= 300:  # read here, so not compressed
                headers = end_to_end(headers, ("content-encoding",))
                return Answer(response.status, headers, response.read(decode_content=True))
            if not ask.stream:
                return Answer(response.status, headers, response.read())
            arrivals.put(Answer(response.status, headers, None))
            while chunk := response.read1(65536):
                replica.progress_s = time.monotonic()
                arrivals.put(chunk)
            return Answer(response.status, headers, b"")
    except CALL_ERRORS as err:
        return err


def relay(fleet: Fleet, replica: Replica, arrivals: gevent.queue.SimpleQueue) -> Iterator[bytes]:
    """The chunks of a stream as they arrive; a stream that breaks off ends with an error, not as if it were whole."""
    while isinstance(item := arrivals.get(), bytes):
        yield item
    ended = item.value
    if isinstance(ended, Answer):
        return
    if isinstance(ended, CALL_ERRORS) and not isinstance(ended, CallTimeoutError):
        gevent.spawn(is_lost, fleet, replica, short(ended))
    yield b"data: " + orjson.dumps(error_body(502, f"{replica} broke off")) + b"\n\n"
    raise gevent.GreenletExit  # the server closes the connection without the last chunk, and prints no traceback


def weigh(fleet: Fleet, replica: Replica, ask: Ask, got: object) -> tuple[Answer | ApiError, bool]:
    """What to answer after a call, and whether to try another one first."""
    if isinstance(got, ClientGone):
        return ApiError(499, "the client left"), False
    if isinstance(got, CallTimeoutError):
        return ApiError(504, f"{replica}: {got}"), False
    if isinstance(got, Lost):
        return ApiError(502, f"{replica} went down: {replica.reason}"), True
    if not isinstance(got, Answer):
        is_lost(fleet, replica, short(got))
        return ApiError(502, f"{replica}: {short(got)}"), True
    verdict = answer_verdict(got.status, "" if got.status < 300 else got.text)
    if verdict == "pass":
        replica.strikes = 0
    elif verdict == "dead" or (verdict == "forgot" and ask.model in fleet.policies):
        lose(fleet, replica, got.text)
        return got, True
    elif verdict == "doubtful":
        own = got.status == 500  # the server's own, which a request can cause; others are a gateway's
        return got, is_lost(fleet, replica, f"it said {got.status}: {got.text}", strike=not own) or not own
    elif verdict == "busy":
        pause_s = retry_after_s(got.headers, time.time()) * random.uniform(1, 1.25)
        replica.wait_until_s = time.monotonic() + pause_s
        return got, True
    elif verdict == "moved":
        return ApiError(502, f"{replica} redirects, which is not followed: check its URL and HF_TOKEN"), False
    elif verdict == "token":
        return ApiError(got.status, f"{replica}: {TOKEN_REFUSED.format(got.status)}"), False
    return got, False


# The pages


def stats(fleet: Fleet) -> dict:
    """What the status page shows."""
    return {
        "ready": len(fleet.ready()),
        "paused": fleet.pause_target is not None,
        "replicas": [
            {
                "id": replica.id, "url": replica.url, "job": replica.job, "state": replica.state,
                "reason": replica.reason, "inflight": replica.inflight, "policies": sorted(replica.policies),
                "routed": replica.routed,
            }
            for replica in fleet.replicas.values()
        ],
        "policies": list(fleet.live()),
        "retiring": [name for name, policy in fleet.policies.items() if not policy.live],
        "requests": fleet.num_requests,
        "busy_with": fleet.lock_holder,
        "router": {**fleet.router.counts, "tracked_blocks": len(fleet.router.blocks)},
        "counts": dict(fleet.counts),
        "events": [{"time": when, "text": text} for when, text in fleet.events],
    }  # fmt: skip


def create_app(fleet: Fleet) -> Flask:
    """The routes."""
    app = Flask(__name__, static_folder=None)
    add_pages(app, fleet)
    add_control_routes(app, fleet)
    add_replica_routes(app, fleet)
    app.register_error_handler(ApiError, refusal)
    app.after_request(partial(without_token, fleet))

    @app.route("/<path:_>", methods=METHODS)
    def everything_else(_: str) -> Response:
        return forward(fleet, request)

    flask_app = app.wsgi_app

    def wsgi_app(environ: dict, start_response: Callable) -> Iterable[bytes]:
        """Completions go past Flask, which is a sixth of the CPU that they cost."""
        if environ["REQUEST_METHOD"] != "POST" or environ["PATH_INFO"] not in COMPLETIONS:
            return flask_app(environ, start_response)
        try:
            response = complete(fleet, Request(environ))
        except ApiError as err:
            response = refusal(err)
        return without_token(fleet, response)(environ, start_response)

    app.wsgi_app = wsgi_app
    return app


def refusal(err: ApiError) -> Response:
    """How the proxy says what it cannot do."""
    response = as_json(error_body(err.status, str(err)), err.status)
    if err.retry_after_s is not None:
        response.headers["Retry-After"] = str(math.ceil(err.retry_after_s))
    return response


def without_token(fleet: Fleet, response: Response) -> Response:
    """A response in which the token is masked, should it be there."""
    sampled = response.status_code < 300 and "X-Replica" in response.headers  # too long to search, and no error
    if fleet.token and not sampled and not response.is_streamed:
        response.set_data(response.get_data().replace(fleet.token.encode(), b"***"))
    return response


def add_pages(app: Flask, fleet: Fleet) -> None:
    """What the proxy says of itself."""

    @app.get("/")
    def page() -> str:
        return render_template_string(PAGE, now=time.time(), **stats(fleet))

    @app.get("/proxy/stats")
    def stats_page() -> Response:
        return as_json(stats(fleet))

    @app.get("/metrics")
    def metrics_page() -> Response:
        return Response(metrics(stats(fleet)), mimetype="text/plain")

    @app.get("/health")
    @app.get("/ping")
    def health() -> Response:
        num_ready = len(fleet.ready())
        others = {str(r): f"{r.state}: {r.reason}" for r in fleet.replicas.values() if r.state != "ready"}
        return as_json({"ready": num_ready, "others": others}, 200 if num_ready >= fleet.cfg.min_ready else 503)


def add_control_routes(app: Flask, fleet: Fleet) -> None:
    """What concerns every replica."""

    @app.post("/v1/load_lora_adapter")
    def load_policy() -> Response:
        policy = Policy(*read_load(body_of(request), fleet.bucket))
        load(fleet, policy)
        return Response(f"Success: LoRA adapter '{policy.name}' added successfully.", mimetype="text/plain")

    @app.post("/v1/unload_lora_adapter")
    def unload_policy() -> Response:
        name = read_json(body_of(request)).get("lora_name")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "an unload needs lora_name")
        unload(fleet, name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", mimetype="text/plain")

    @app.post("/pause")
    @app.post("/resume")
    @app.post("/reset_prefix_cache")
    def tell_all() -> Response:
        body = body_of(request)
        got = broadcast(fleet, request.path, request.environ["proxy.target"], read_json(body) if body else None)
        return Response(got.body, got.status, end_to_end(got.headers, NOT_COPIED))


def add_replica_routes(app: Flask, fleet: Fleet) -> None:
    """Which replicas there are."""

    @app.post("/proxy/replicas")
    def new_replica() -> Response:
        if not request.is_json:  # so that no web page can add one: the token is sent to replicas
            raise ApiError(415, "send the replica as JSON, with Content-Type: application/json")
        wanted = read_json(body_of(request))
        replica = add_replica(fleet, wanted.get("url"), wanted.get("id"), wanted.get("job"))
        fleet.say(f"{replica} is joining")
        gevent.spawn(supervise, fleet, replica)
        return as_json({"id": replica.id})

    @app.delete("/proxy/replicas/<name>")
    def drain_replica(name: str) -> Response:
        replica = fleet.replicas.get(name)
        if replica is None:
            raise ApiError(404, f"there is no replica {name}")
        replica.state, replica.reason = "draining", "asked to leave"
        if not replica.calls:
            remove(fleet, replica)
        return as_json({"id": name, "inflight": replica.inflight})


def complete(fleet: Fleet, asked: Request) -> Response:
    """A completion, from the replica that holds its prefix."""
    body = body_of(asked)
    return answer(fleet, outgoing(asked, body, **read_completion(body)), asked.environ["proxy.socket"])


def forward(fleet: Fleet, asked: Request) -> Response:
    """Whatever else a vLLM server answers, from any replica."""
    body = body_of(asked)
    ask = outgoing(asked, body, model=named_model(body), repeatable=asked.method in ("GET", "HEAD", "OPTIONS"))
    return answer(fleet, ask, asked.environ["proxy.socket"])


def as_json(value: dict, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, mimetype="application/json")


def body_of(asked: Request) -> bytes:
    """A request's body; ApiError if its client leaves before the end of it."""
    try:
        return asked.get_data()
    except OSError as err:
        raise ApiError(400, f"the request's body ends early ({err}): send it again, whole") from None


def outgoing(asked: Request, body: bytes, **known: object) -> Ask:
    """A request as it is sent on."""
    target = asked.environ["proxy.target"]
    if not re.match(r"/(?!/)", target):  # a whole URL, or what urllib3 would take for one
        raise ApiError(400, f"the request's target {target[:100]!r} must be a path")
    headers = dict(end_to_end(asked.headers.items(), NOT_SENT_ON))
    headers["Accept-Encoding"] = "gzip" if "gzip" in asked.headers.get("Accept-Encoding", "") else "identity"
    return Ask(asked.method, target, headers, body, **known)


# The server


def add_replica(fleet: Fleet, url: object, name: object = None, job: object = None) -> Replica:
    """A new replica, still to be looked after; ApiError if the URL is not one or is taken."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[\w.-]+(:\d{1,5})?(/[\w./-]*)?", url):
        raise ApiError(400, f"replica URL {url!r}: must be like http://host:port or https://host")
    taken = fleet.replicas
    name = str(name) if name is not None else next(str(i) for i in range(len(taken) + 1) if str(i) not in taken)
    same = next((replica for replica in taken.values() if replica.url == url.rstrip("/")), None)
    if same or name in taken:
        raise ApiError(409, f"{same or taken[name]} is there already: remove it first")
    bits = sum(replica.bit for replica in taken.values())
    replica = Replica(name, url, str(job or ""), ~bits & (bits + 1), fleet.cfg, fleet.token)
    taken[name] = replica
    return replica


def plain_headers(source: BinaryIO, _class: type = http.client.HTTPMessage) -> http.client.HTTPMessage:
    """What http.client.parse_headers returns, without its parser of e-mails: that is a fifth of a request's CPU.

    A head with any line that is not a plain `name: value` (a folded one, a malformed one) still goes there.
    """
    lines, message = http.client._read_headers(source), _class()
    for line in lines[:-1]:
        plain = PLAIN_HEADER.fullmatch(line)
        if not plain:
            return thorough_headers(io.BytesIO(b"".join(lines)), _class)
        message[plain[1].decode()] = plain[2].decode("iso-8859-1")
    return message


class Handler(gevent.pywsgi.WSGIHandler):
    """Adds the client's socket and the request's target to the WSGI environment."""

    timeout_s = Config.request_timeout_s  # a client that neither reads nor writes for this long is hung up on

    def handle(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(self.timeout_s)
        super().handle()

    def get_environ(self) -> dict:
        environ = super().get_environ()
        environ["proxy.socket"], environ["proxy.target"] = self.socket, self.path
        return environ

    def log_request(self) -> None:
        """No access log."""


def start(fleet: Fleet) -> None:
    """Find the live policies again, then look after every replica."""
    discover(fleet)
    for replica in fleet.replicas.values():
        gevent.spawn(supervise, fleet, replica)


def serve(fleet: Fleet) -> None:
    """Answer requests until SIGTERM or SIGINT ends the process."""
    cfg = fleet.cfg
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * cfg.max_inflight + 1024  # two sockets for each request, with room
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    stopped = gevent.event.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, stopped.set)
    Handler.timeout_s = cfg.request_timeout_s
    server = gevent.pywsgi.WSGIServer(
        (cfg.host, cfg.port), create_app(fleet), handler_class=Handler, log=None, backlog=cfg.max_inflight
    )
    try:
        server.start()
    except OSError as err:
        fail(f"--host {cfg.host} --port {cfg.port}: {os.strerror(err.errno) if err.errno else err}")
    print(f"proxy: listening on http://{cfg.host}:{server.server_port}", flush=True)
    http.client.parse_headers = plain_headers  # for clients' requests and replicas' answers
    gevent.config.track_greenlet_tree = False  # or every call would note where it was spawned
    gevent.spawn(start, fleet)
    gc.freeze()  # what was imported stays: collections need not look at it, nor come after every few requests
    gc.set_threshold(50_000, 20, 50)
    stopped.wait()
    os._exit(0)


def main() -> None:
    parser = make_parser(__doc__, without=("replicas",))
    parser.add_argument("--replicas", default="", help="URLs of vLLM servers, joined by commas; more can join later")
    args = parser.parse_args()
    urls = [url.strip() for url in args.replicas.split(",") if url.strip()]
    del args.replicas
    cfg = config_from(args)
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):
        fail("HF_TOKEN holds characters that no token has: set it again")
    fleet = Fleet(cfg, os.path.abspath(cfg.bucket), token)
    try:
        for url in urls:
            add_replica(fleet, url)
    except ApiError as err:
        fail(str(err))
    serve(fleet)


if __name__ == "__main__":
    main()
