"""The replicas and what they have loaded: one table of what is wanted, and one loop for each replica.

The table says which policies are wanted, and whether all are paused. Each replica has one thread that compares it with
what that replica has and does the next thing: load and check, unload, pause. So a load, a late or restarted replica, a
rollback, a retired policy and the leftovers of another attempt are one loop under another table. A replica is ready,
and gets requests, while it is well and has every live policy, with the right weights as its canary has shown. After any
surprise (a control call breaks, an answer does not fit) it is down, and joins anew: it is asked what it has.

Every exchange has a thread that blocks until the replica answers, and a connection of its own: none is ever found
stale, so nothing is generated twice for that. What should end early is woken by shutting that connection: `Call.cut`.
"""

import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from config import Config
from serving import vllm
from serving.routing import Router
from serving.vllm import ApiError

HEALTH_EVERY_S = 0.5  # a round of a replica's loop, so also the pause between two tries of a load
HEALTH_TIMEOUT_S = 5
HEALTH_MISSES = 3  # probes in a row that fail until a replica is down
CONNECT_TIMEOUT_S = 10
CONTROL_TIMEOUT_S = 60
CANARY_ATOL = {"float32": 1e-3}  # 0.05 for other dtypes
TOKEN_REFUSED = "it refuses the token ({}): HF_TOKEN must be a valid token with read access to the Job"


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes | Iterator[bytes]  # an iterator if it is a stream


@dataclass(eq=False)
class Policy:
    """An entry of the table: an adapter that replicas shall have."""

    name: str
    path: str
    ids: list[int]  # (C,) the canary, a short token sequence
    logprobs: list[float] | None  # (C - 1,) of its tokens after the first; None: what the first replica says
    state: str = "loading"  # then live, then retiring, then it leaves the table
    error: ApiError | None = None  # why it could not be loaded
    inflight: int = 0  # requests that name it


class Replica:
    """One vLLM server as the proxy knows it."""

    def __init__(self, fleet: "Fleet", name: str, url: str, job: str, bit: int):
        self.id, self.url, self.job, self.bit, self.lock = name, url.rstrip("/"), job, bit, fleet.lock
        self.state, self.reason, self.lost_for = "joining", "not asked yet", ""
        self.loaded: dict[str, str] = {}  # name: path; "" while it is being loaded
        self.checked: set[str] = set()  # loaded, and with the right weights
        self.reused: set[str] = set()  # names it had before
        self.suspect = self.denied = False  # a call broke; it refuses the token
        self.misses = self.inflight = self.routed = 0  # probes; completions
        self.probe_at = self.progress_s = self.free_at = 0.0  # monotonic; busy until free_at
        self.calls: set[Call] = set()
        self.wake = threading.Event()
        self.headers = {"Accept-Encoding": "identity", "Connection": "close"}
        self.headers |= {"Authorization": f"Bearer {fleet.token}"} if fleet.token else {}
        parts, self.path, kind = urlsplit(self.url), urlsplit(self.url).path, http.client.HTTPConnection
        if parts.scheme == "https":
            kind = partial(http.client.HTTPSConnection, context=ssl.create_default_context())
        self.connection = partial(kind, parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S)

    def __str__(self) -> str:
        return f"replica {self.id} ({f'job {self.job}' if self.job else self.url})"

    def control(self, method: str, path: str, payload: dict | None = None, timeout_s: float | None = None) -> Answer:
        """A call of the proxy's own, made again if the server asks to wait a little; ApiError if there is no answer."""
        body = None if payload is None else json.dumps(payload).encode()
        patient_until = time.monotonic() + HEALTH_TIMEOUT_S
        while True:
            call = Call(self, timeout_s or CONTROL_TIMEOUT_S)
            try:
                answer = call.answer(method, path, {"Content-Type": "application/json"} if body else {}, body)
            finally:
                call.finish()
            pause_s = vllm.retry_after_s(answer.headers, time.time())
            if method == "GET" or answer.status not in (429, 503) or time.monotonic() + pause_s > patient_until:
                return answer
            time.sleep(pause_s)


class Call:
    """One exchange with a replica: counted there until `finish`, ended early by `cut`."""

    def __init__(self, replica: Replica, timeout_s: float, num: int = 0, gone: Callable = lambda: False):
        self.replica, self.num, self.gone = replica, num, gone
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s
        self.connection, self.sock, self.ended_by = replica.connection(), None, None
        with replica.lock:
            if not replica.inflight:
                replica.progress_s = time.monotonic()
            replica.inflight += num
            replica.routed += num
            replica.calls.add(self)

    def answer(self, method: str, target: str, headers: dict, body: bytes | None, stream: bool = False) -> Answer:
        """Send a request and read its answer, only the head of it if it is a stream; ApiError if there is none."""
        try:
            self.connection.connect()
            self.connection.sock.settimeout(None)  # `watch` ends what takes too long
            self.sock = self.connection.sock
            if self.ended_by:
                raise self.ended_by
            self.connection.request(method, self.replica.path + target, body, headers | self.replica.headers)
            response = self.connection.getresponse()
            got = self.chunks(response) if stream and response.status == 200 else response.read()
            if self.num:
                self.replica.progress_s = time.monotonic()
            return Answer(response.status, response.getheaders(), got)
        except (OSError, http.client.HTTPException) as err:
            raise self.ended_by or ApiError(502, getattr(err, "strerror", None) or str(err) or repr(err)) from None

    def chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """A stream's chunks as they arrive; one that breaks off ends with an error, not as if it were whole."""
        try:
            while chunk := response.read1(65536):
                self.replica.progress_s = time.monotonic()
                yield chunk
        except (OSError, http.client.HTTPException):
            problem = self.ended_by or ApiError(502, f"{self.replica} broke off")
            yield b"data: " + json.dumps(problem.body()).encode() + b"\n\n"
            raise ConnectionError from None  # the server hangs up without the last chunk

    def cut(self, why: ApiError) -> None:
        """End it, whatever it waits for."""
        self.ended_by = self.ended_by or why
        if self.sock:
            with suppress(OSError):
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def finish(self) -> None:
        """Count it off, once."""
        self.connection.close()
        with self.replica.lock:
            if self in self.replica.calls:
                self.replica.calls.discard(self)
                self.replica.inflight -= self.num


# --- the table: what is wanted ---------------------------------------------------------------------------------------


class Fleet:
    """The replicas, the table of policies, and the router."""

    def __init__(self, cfg: Config, token: str):
        self.cfg, self.token, self.bucket = cfg, token, os.path.abspath(cfg.bucket)
        self.replicas: dict[str, Replica] = {}
        self.policies: dict[str, Policy] = {}
        self.base_models: set[str] = set()  # known once a replica has joined
        self.pause = ""  # or "/pause?mode=keep": how all replicas are paused
        self.num_requests = 0
        self.router = Router()
        self.counts: Counter[str] = Counter()
        self.events: deque[tuple[float, str]] = deque(maxlen=100)
        self.lock = threading.Condition()  # held to look at or change any of this
        self.control = threading.Lock()  # one load, pause, resume or reset at a time

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state == "ready"]

    def wanted(self) -> dict[str, Policy]:
        """What replicas shall have: a retiring policy while requests name it, but in a pause these never finish."""
        return {name: policy for name, policy in self.policies.items()
                if policy.state != "retiring" or (policy.inflight and not self.pause)}  # fmt: skip

    def say(self, text: str) -> None:
        text = text.replace(self.token or "\0", "***")
        self.events.append((time.time(), text))
        with suppress(OSError):  # whoever reads the output may be gone
            print(f"proxy: {text}", flush=True)

    def denied(self) -> bool:
        """Whether every replica refuses the token, so that waiting is no use."""
        return bool(self.replicas) and all(replica.denied for replica in self.replicas.values())

    def unavailable(self, why: str) -> ApiError:
        """Why nothing can be done: each replica and what keeps it."""
        states = "; ".join(f"{r} is {r.state}: {r.reason}" for r in self.replicas.values()) or "there are none"
        return ApiError(401, f"{why}: {states}") if self.denied() else ApiError(503, f"{why}: {states}", 1)

    def wait(self, true: Callable, timeout_s: float | None = None, gone: Callable = lambda: False) -> object:
        """What `true()` returns as soon as that is true; what it returned last after `timeout_s`, or if `gone()`."""
        deadline = time.monotonic() + (CONTROL_TIMEOUT_S if timeout_s is None else timeout_s)
        with self.lock:
            while not (found := true()) and not gone() and (left_s := deadline - time.monotonic()) > 0:
                self.lock.wait(min(left_s, 0.2))
            return found

    def retire(self, policy: Policy, error: ApiError | None = None) -> None:
        """Take a policy out of service: the loops unload it, then it leaves the table."""
        with self.lock:
            policy.state, policy.error = "retiring", policy.error or error
            self.router.forget_policy(policy.name)
            if error:
                self.counts["failed loads"] += 1
                self.say(f"{policy.name} is not loaded: {error}")
            self.stir()

    def count(self, policy: Policy | None, num: int) -> None:
        """Count requests in flight, those that name a policy or all of them."""
        with self.lock:
            if policy is None:
                self.num_requests += num
                return
            policy.inflight += num
            if policy.state == "retiring" and not policy.inflight:
                self.stir()

    def suspect(self, replica: Replica) -> bool:
        """Have a replica probed now, because a call to it broke; whether it is still ready afterwards."""
        with self.lock:
            replica.suspect = replica.state == "ready"
            replica.wake.set()
        self.wait(lambda: not replica.suspect, 2 * HEALTH_TIMEOUT_S)
        return replica.state == "ready"

    def stir(self) -> None:
        """Draw the conclusions of a change, and wake everyone who waits for one."""
        with self.lock:
            ready, wanted = self.ready(), self.wanted()
            for name, policy in list(self.policies.items()):
                if policy.state == "loading" and ready and all(name in replica.checked for replica in ready):
                    policy.state = "live"
                    self.counts["loads"] += 1
                    self.say(f"{name} is live on {len(ready)} replicas")
                if name not in wanted and not any(name in replica.loaded for replica in ready):
                    del self.policies[name]
                    self.say(f"{name} is retired")
            self.lock.notify_all()
            for replica in self.replicas.values():
                replica.wake.set()


# --- the loop of each replica: what it has ---------------------------------------------------------------------------


def look_after(fleet: Fleet, replica: Replica) -> None:
    """A round every HEALTH_EVERY_S, or at once after a change, until the replica has left."""
    while fleet.replicas.get(replica.id) is replica:
        try:
            if replica.state != "draining":
                tend(fleet, replica)
            elif not replica.calls:
                with fleet.lock:
                    del fleet.replicas[replica.id]
                    fleet.router.forget_replica(replica.bit)
                    fleet.say(f"{replica} is removed")
        except Exception as err:  # whatever it answered, it is asked again
            lose(fleet, replica, str(err) if isinstance(err, ApiError | ValueError) else repr(err))
        replica.wake.wait(HEALTH_EVERY_S)
        replica.wake.clear()


def lose(fleet: Fleet, replica: Replica, reason: str) -> None:
    """A replica is down: it gets no requests, and those it has are sent again elsewhere."""
    with fleet.lock:
        if replica.state != "draining":
            if reason != replica.lost_for:  # once, not at every try to join
                fleet.say(f"{replica} is down: {reason}")
            replica.state, replica.reason, replica.lost_for = "down", reason, reason
        replica.loaded, replica.checked, replica.suspect = {}, set(), False
        fleet.router.forget_replica(replica.bit)
        for call in list(replica.calls):
            call.cut(ApiError(502, f"it went down: {reason}"))
        fleet.stir()


def probe(replica: Replica) -> str:
    """What is wrong with a replica by its /health; "" if nothing is."""
    try:
        status = replica.control("GET", "/health", timeout_s=HEALTH_TIMEOUT_S).status
    except ApiError as err:
        return str(err)
    replica.denied = status in (401, 403)
    if replica.denied:
        return TOKEN_REFUSED.format(status)
    return "" if status in (200, 429) else f"/health says {status}"


def is_well(fleet: Fleet, replica: Replica, now: float) -> bool:
    """Whether a replica answers, and a busy one gets on; ApiError if one that was ready does not."""
    ready, suspect = replica.state == "ready", replica.suspect
    if not ready or suspect or now >= replica.probe_at:
        replica.probe_at = now + HEALTH_EVERY_S
        trouble = probe(replica)
        replica.misses = replica.misses + 1 if trouble else 0
        if trouble and ready and (suspect or replica.misses >= HEALTH_MISSES):
            raise ApiError(502, trouble)
        if trouble and not ready:
            replica.reason = trouble
            return False
    if suspect:
        replica.suspect = False
        fleet.stir()
    if ready and replica.inflight and not fleet.pause and now - replica.progress_s > fleet.cfg.stall_s:
        stalled_s = now - replica.progress_s
        raise ApiError(502, f"/health is well, but nothing finished for {stalled_s:.0f} s")
    return True


def tend(fleet: Fleet, replica: Replica) -> None:
    """One round: what has a replica too much, or too little? ApiError or ValueError if it must join anew."""
    if not is_well(fleet, replica, time.monotonic()):
        return
    if replica.state != "ready":
        join(fleet, replica)
    with fleet.lock:
        wanted = fleet.wanted()
    for name in [name for name, path in replica.loaded.items() if name not in wanted or wanted[name].path != path]:
        unload_on(fleet, replica, name)
    for name, policy in wanted.items():
        if name not in replica.loaded and policy.state != "retiring":
            load_on(fleet, replica, policy)
        if name in replica.loaded and name not in replica.checked and not (fleet.pause and replica.state == "ready"):
            check_on(fleet, replica, policy)
    if replica.state == "joining":
        make_ready(fleet, replica)


def make_ready(fleet: Fleet, replica: Replica) -> None:
    """Let requests go to a replica that has every live policy and no other, and is paused if the fleet is."""
    pause = fleet.pause
    if pause and (answer := replica.control("POST", pause)).status != 200:
        raise ApiError(502, f"it refuses {pause}: {vllm.said(answer.body)}")
    with fleet.lock:
        live = {name for name, policy in fleet.policies.items() if policy.state == "live"}
        others = replica.loaded.keys() - fleet.wanted().keys()
        if replica.state == "joining" and live <= replica.checked and not others and pause == fleet.pause:
            replica.state, replica.reason, replica.lost_for = "ready", "", ""
            fleet.say(f"{replica} is ready with {len(live)} policies")
            fleet.stir()


def join(fleet: Fleet, replica: Replica) -> None:
    """Ask a well replica what it has, and whether it generates; ApiError or ValueError if it cannot serve."""
    with fleet.lock:
        replica.state, replica.checked = "joining", set()
    info = replica.control("GET", "/server_info?config_format=json").body
    if (size := re.search(rb'"data_parallel_size":\s*(\d+)', info)) and int(size[1]) > 1:
        raise ApiError(502, f"data_parallel_size {int(size[1])}: a load reaches one of them; use a replica for each")
    replica.control("POST", "/resume")  # it may have missed the end of a pause
    bases, replica.loaded = vllm.models_in(replica.control("GET", "/v1/models").body)
    score(replica, min(bases), vllm.PROBE_IDS)
    fleet.base_models |= bases


def score(replica: Replica, model: str, ids: list[int]) -> list[float]:
    """A replica's logprobs (C - 1,) of a token sequence (C,) after its first; ValueError if it has none."""
    payload = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1, "prompt_logprobs": 0}
    return vllm.canary_logprobs(replica.control("POST", "/v1/completions", payload).body, ids)


def unload_on(fleet: Fleet, replica: Replica, name: str) -> None:
    """Unload a policy; ApiError if the replica does not confirm it."""
    answer = replica.control("POST", "/v1/unload_lora_adapter", {"lora_name": name})
    text = vllm.said(answer.body)
    if answer.status != 200 and not (answer.status == 404 and "cannot be found" in text):
        raise ApiError(502, f"it did not unload {name}: {answer.status}, {vllm.with_cure(text)}")
    replica.loaded.pop(name, None)
    replica.checked.discard(name)
    replica.reused.add(name)
    fleet.stir()


def load_on(fleet: Fleet, replica: Replica, policy: Policy) -> None:
    """Try once to load a policy; a failure that is final fails the load everywhere."""
    name = policy.name
    if name in replica.reused and not vllm.attempt_of(name):  # vLLM would answer from the cache of the old one
        answer = replica.control("POST", "/reset_prefix_cache")
        if answer.status != 200:
            raise ApiError(502, f"{name} was used before, and its cache cannot be reset: {vllm.said(answer.body)}")
    replica.loaded[name] = ""
    answer = replica.control("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": policy.path})
    text = vllm.said(answer.body)
    verdict = vllm.load_verdict(answer.status, text)
    if verdict == "loaded":
        replica.loaded[name], replica.reason = policy.path, ""
        fleet.stir()
        return
    if verdict == "unclear":
        raise ApiError(502, text)
    replica.loaded.pop(name, None)
    if policy.state == "retiring":  # meanwhile; another replica could not load it
        fleet.stir()
    elif verdict == "late":
        if text != replica.reason:
            fleet.say(f"{replica} has not loaded {name} yet: {text}")
        replica.reason = text
    else:
        refuse(fleet, replica, policy, max(400, answer.status), f"cannot load {name}: {vllm.with_cure(text)}")


def check_on(fleet: Fleet, replica: Replica, policy: Policy) -> None:
    """Whether a replica serves a policy's weights: its logprobs of the canary are right, or those of the others."""
    try:
        found = score(replica, policy.name, policy.ids)
    except ValueError as err:
        refuse(fleet, replica, policy, 500, f"cannot score the canary of {policy.name}: {err}")
        return
    with fleet.lock:
        policy.logprobs = policy.logprobs or found
    gap, allowed = vllm.widest_gap(policy.logprobs, found), CANARY_ATOL.get(fleet.cfg.dtype, 0.05)
    if gap > allowed:
        if replica.state != "ready":
            unload_on(fleet, replica, policy.name)  # loaded afresh when it joins again
        refuse(fleet, replica, policy, 500, f"does not serve the weights of {policy.name}: a logprob of its canary is "
               f"off by {gap:.3g}, allowed is {allowed:g}")  # fmt: skip
        return
    replica.checked.add(policy.name)
    fleet.stir()


def refuse(fleet: Fleet, replica: Replica, policy: Policy, status: int, why: str) -> None:
    """What a ready replica cannot serve is loaded nowhere; a joining one that cannot serve what is live stays out."""
    if replica.state != "ready":
        raise ApiError(status, why)
    if policy.state == "loading":
        fleet.retire(policy, ApiError(status, f"{replica} {why}"))
