"""What stands in for vLLM where there is no GPU: a small real server with vLLM's routes, status codes and messages.

It loads a model with transformers, applies the LoRA adapter that a request names, samples, and returns true logprobs.
All running completions share one batch and its KV cache, whatever adapter they use; they join and leave it at every
step. One thread owns model, adapters and batch, the HTTP threads hand it work. Where it departs from vLLM:

- CPU, full attention and completions only (no chat); no prefix cache, so a name used twice gives no stale answers
- sampling is never truncated: top_p, top_k, min_p and penalties that are not neutral are a 400
- it goes wrong on request: see Faults, each a flag, and `POST /stub/faults {"slow_s": 2}` (GET shows them)

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 \\
        python stub_vllm.py --model DIR --port 8000 --enable-lora --max-lora-rank 8 --max-loras 6
"""

import argparse
import dataclasses
import json
import math
import os
import queue
import re
import select
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from config import SERVED_LORA_RANKS

DEAD_ENGINE = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEATH_S = 1.0  # from the engine's death, which /health shows, to the end of the process
HANGUP_POLL_S = 0.05  # pause between two looks at which clients are gone
MAX_RUNNING = 256  # completions in the batch
PREFILL_TOKENS = 4096  # prompt tokens, padding included, of one forward


@dataclass
class Faults:
    """What goes wrong, on request. Zero and false mean that it does not."""

    load_delay_s: float = 0.0  # a load takes this much longer, and the engine does nothing else
    load_failures: int = 0  # this many loads fail (each counts one down) ...
    load_status: int = 500  # ... with this status
    load_message: str = "the stub was told to fail this load"  # ... and this message
    hidden_s: float = 0.0  # an adapter's directory is "not found" until this long after it was first asked for
    half_seen: bool = False  # an adapter's config is visible, its weights are not
    ignore_loads: bool = False  # a load is answered 200, and its name serves the base model
    slow_s: float = 0.0  # a completion starts this much later
    stall: bool = False  # /health is green, and no completion goes on
    crash: bool = False  # the engine dies
    fail_pause: bool = False  # /pause is answered 500


class ApiError(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": without_paths(message), "type": kind, "param": param, "code": status}}


@dataclass
class Request:
    """What a client sent."""

    body: dict
    query: dict
    connection: socket.socket


@dataclass(eq=False)
class Adapter:
    """A LoRA adapter that was loaded; its weights may have been evicted since."""

    name: str
    path: str
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]  # module name: A (r, in), B (out, r) with the scale in it


@dataclass(eq=False)
class Group:
    """One prompt of a completion request, with its completions."""

    prompt: list[int]
    body: dict  # the request's
    max_tokens: int
    temperature: float
    num_top_logprobs: int  # per sampled token, besides its own
    eos: int | None  # None: it does not end a completion
    stop: list[str]
    connection: socket.socket
    not_before: float  # monotonic time before which it does not start
    news: queue.SimpleQueue  # gets an item when there is something new to send; shared by the request's groups
    adapter: Adapter | None = None  # None: the base model
    completions: list["Completion"] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, int]] = field(default_factory=list)  # logprob and rank of prompt[1:]
    dead: bool = False  # the engine died on it

    def is_done(self) -> bool:
        return self.dead or all(completion.finish_reason for completion in self.completions)


@dataclass(eq=False)
class Completion:
    """What has been sampled for a group."""

    group: Group
    generator: torch.Generator | None  # None: the engine's own
    tokens: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # appended to last: as long as what can be sent
    finish_reason: str | None = None
    stop_reason: int | str | None = None


# Adapters


def without_paths(message: str) -> str:
    """A message as vLLM shows it: paths under the usual roots are masked."""
    return re.sub(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.-]+)+", "<path>", message)


def illegal(config: dict, max_lora_rank: int) -> str:
    """What in an adapter's config vLLM does not serve, in its words; empty if it serves it."""
    found = []
    if config.get("modules_to_save"):
        found.append("vLLM only supports modules_to_save being None.")
    if config.get("use_dora"):
        found.append("vLLM does not yet support DoRA.")
    if config["r"] > max_lora_rank:
        found.append(f"LoRA rank {config['r']} is greater than max_lora_rank {max_lora_rank}.")
    if config.get("bias", "none") != "none":
        found.append("Adapter bias is not supported.")
    return " ".join(found)


def parse_key(key: str) -> tuple[str, str]:
    """Module name and `lora_A` or `lora_B` of a tensor's name in an adapter file."""
    match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.(lora_[AB])\.weight", key)
    if match is None:
        raise ValueError(f"{key} is unsupported LoRA weight")
    return match[1], match[2]


def read_adapter(directory: Path, linears: dict[str, torch.nn.Linear], max_lora_rank: int) -> dict:
    """The pairs of an adapter directory; FileNotFoundError if it has no config, else errors with vLLM's message.

    As in vLLM, keys that match no module are ignored, and tensors that are too small fill a part of their slot.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    if missing := {"r", "lora_alpha", "target_modules"} - set(config):
        raise ValueError(f"Missing required configuration fields: {missing}")
    if problem := illegal(config, max_lora_rank):
        raise ValueError(problem)
    if not (directory / "adapter_model.safetensors").is_file():
        raise ValueError(f"{directory} doesn't contain tensors")
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        tensors = {parse_key(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    served = {name.rsplit(".", 1)[-1] for name in linears}
    if unknown := [name for name, _ in tensors if name.rsplit(".", 1)[-1] not in served]:
        raise ValueError(f"While loading {directory}, expected target modules in {served} but received {unknown}.")
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    pairs = {}
    for name in {name for name, _ in tensors} & set(linears):
        a, b = tensors[name, "lora_A"], tensors[name, "lora_B"] * scale
        slot_a = linears[name].weight.new_zeros(max_lora_rank, linears[name].in_features)
        slot_b = linears[name].weight.new_zeros(linears[name].out_features, max_lora_rank)
        slot_a[: a.shape[0], : a.shape[1]].copy_(a)
        slot_b[: b.shape[0], : b.shape[1]].copy_(b)
        rank = max(a.shape[0], b.shape[1])
        pairs[name] = slot_a[:rank].contiguous(), slot_b[:, :rank].contiguous()
    return pairs


def rows_of_adapters(adapters: list[Adapter | None]) -> list[tuple[dict, torch.Tensor | None]]:
    """The pairs of each adapter with its rows (n,) in the batch; None for rows if it has all of them."""
    rows = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            rows.setdefault(adapter, []).append(row)
    return [(a.pairs, None if len(r) == len(adapters) else torch.tensor(r)) for a, r in rows.items()]


# Keys and values


class PromptCache:
    """Takes the keys and values of one prefill. Prompts begin at position 0."""

    def __init__(self):
        self.layers = []  # (keys, values), each (prompts, heads, length, head size)

    def update(self, keys, values, layer, *args, **kwargs):
        """What transformers calls in each layer: the keys and values to attend to."""
        self.layers.append((keys, values))
        return keys, values


class SlotCache:
    """Keys and values of the running completions: completion i is row i, and its prompt begins at position 0."""

    def __init__(self):
        self.layers = []  # (keys, values), each (rows, heads, length, head size), with room to grow
        self.num_rows = 0
        self.length = 0  # of the longest row
        self.positions = None  # (num_rows,) where the token of each row goes that is computed now

    def update(self, keys, values, layer, *args, **kwargs):
        """What transformers calls in each layer: the keys and values to attend to."""
        rows = torch.arange(self.num_rows)
        for slots, new in zip(self.layers[layer], (keys, values), strict=True):
            slots[rows, :, self.positions] = new[:, :, 0]
        return tuple(slots[: self.num_rows, :, : self.length] for slots in self.layers[layer])

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for that many rows of that length."""
        room, _, reach, _ = self.layers[0][0].shape
        more_rows = max(num_rows, 2 * room) - room if num_rows > room else 0
        more_length = max(length, 2 * reach) - reach if length > reach else 0
        if more_rows or more_length:
            padding = (0, 0, 0, more_length, 0, 0, 0, more_rows)  # after head size, length, heads and rows
            self.layers = [tuple(F.pad(slots, padding) for slots in pair) for pair in self.layers]

    def append(self, prompts: PromptCache, sources: list[int]) -> None:
        """Add a row for each of `sources`: a copy of that prompt's keys and values."""
        if not self.layers:
            self.layers = [tuple(part[:0] for part in pair) for pair in prompts.layers]
        end, length = self.num_rows + len(sources), prompts.layers[0][0].shape[2]
        self.reserve(end, length)
        for pair, prompt_pair in zip(self.layers, prompts.layers, strict=True):
            for slots, prompt in zip(pair, prompt_pair, strict=True):
                slots[self.num_rows : end, :, :length] = prompt[sources]
        self.num_rows, self.length = end, max(self.length, length)

    def keep(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was; the other rows are free."""
        moved = [i for i, row in enumerate(rows) if i != row]
        for slots in (slots for pair in self.layers for slots in pair if moved):
            slots[moved, :, : self.length] = slots[[rows[i] for i in moved], :, : self.length]
        self.num_rows = len(rows)


# The engine


def engine_is_dead() -> ApiError:
    return ApiError(500, DEAD_ENGINE, "InternalServerError")


def hung_up(connections: set[socket.socket]) -> set[socket.socket]:
    """Those whose client closed its end, or that are closed here."""
    gone = {connection for connection in connections if connection.fileno() < 0}
    by_fd = {connection.fileno(): connection for connection in connections - gone}
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(0):
        try:
            at_end = by_fd[fd].recv(1, socket.MSG_PEEK) == b""
        except OSError:
            at_end = True
        if at_end:
            gone.add(by_fd[fd])
    return gone


def score_prompt(prompt: list[int], logits: torch.Tensor) -> list[tuple[float, int]]:
    """Logprob and rank of each prompt token but the first, from the prompt's logits (length, vocabulary)."""
    logprobs = logits[:-1].log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])
    ranks = (logprobs > chosen).sum(1) + 1
    return list(zip(chosen[:, 0].tolist(), ranks.tolist(), strict=True))


class Engine:
    """The model, its adapters and the running batch. Its own thread alone touches them; `call` takes work there."""

    def __init__(self, args: argparse.Namespace, faults: Faults):
        self.args, self.faults = args, faults
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
        self.adapters: dict[str, Adapter] = {}  # by name
        self.resident: OrderedDict[Adapter, None] = OrderedDict()  # not evicted, the least recently used first
        self.first_asked: dict[str, float] = {}  # adapter path: monotonic time of its first load
        self.waiting: list[Group] = []
        self.running: list[Completion] = []
        self.cache = SlotCache()
        self.adapter_rows = []  # adapters of the forward that is running, with their rows
        self.paused = ""  # "new": nothing starts; "all": nothing goes on either
        self.drained: list[Future] = []  # to be told when nothing runs any more
        self.hung_up_at = 0.0  # monotonic time of the last look at who hung up
        self.dead = False
        self.inbox = queue.SimpleQueue()  # (future, function, arguments)
        head = self.model.get_output_embeddings()
        modules = self.model.named_modules()
        self.linears = {n: m for n, m in modules if isinstance(m, torch.nn.Linear) and m is not head}
        for name, linear in self.linears.items():
            linear.register_forward_hook(partial(self.add_lora, name))

    def call(self, function, *args):
        """Run a function in the engine's thread and return its result; ApiError if the engine is dead."""
        future = Future()
        self.inbox.put((future, function, args))
        if self.dead:
            raise engine_is_dead()
        return future.result()

    def run(self) -> None:
        """Work until the engine dies, then end the process."""
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                while not self.faults.crash:
                    self.turn()
        except Exception:
            traceback.print_exc()
        self.dead = True
        for group in self.groups():
            group.dead = True
            group.news.put(None)
        while not self.inbox.empty():
            self.inbox.get()[0].set_exception(engine_is_dead())
        time.sleep(DEATH_S)
        os._exit(0)  # as vLLM does

    def turn(self) -> None:
        """Do what was called for, drop who hung up, start what fits, and give each running completion a token."""
        self.take_calls()
        self.drop_hung_up()
        if self.faults.stall or self.faults.crash:
            return
        if starting := self.next_groups():
            self.prefill(starting)
        if self.goes_on():
            self.decode()
        if not self.running:
            for future in self.drained:
                future.set_result(None)
            self.drained = []

    def goes_on(self) -> bool:
        return bool(self.running) and self.paused != "all" and not self.faults.stall

    def take_calls(self) -> None:
        """Run the calls that were made; wait for one while there is nothing else to do."""
        if self.goes_on():
            wait_s = 0
        elif self.waiting and not self.paused and not self.faults.stall:
            wait_s = 0.002
        else:
            wait_s = HANGUP_POLL_S if self.groups() else None
        while True:
            try:
                future, function, args = self.inbox.get(block=wait_s != 0, timeout=wait_s)
            except queue.Empty:
                return
            wait_s = 0
            try:
                future.set_result(function(*args))
            except ApiError as error:
                future.set_exception(error)

    # Groups

    def groups(self) -> list[Group]:
        """All that are not done."""
        return self.waiting + list(dict.fromkeys(completion.group for completion in self.running))

    def submit(self, name: str | None, groups: list[Group]) -> None:
        """Let `groups` wait for their turn with the adapter of that name; without a name, or with the model's: none."""
        adapter = self.adapters.get(name)
        if adapter is None and name and name != self.args.served_model_name:
            raise ApiError(404, f"The model `{name}` does not exist.", "NotFoundError", "model")
        for group in groups:
            group.adapter = adapter
        self.waiting += groups

    def drop_hung_up(self) -> None:
        """Abort the groups whose client is gone."""
        if time.monotonic() - self.hung_up_at < HANGUP_POLL_S:
            return
        gone = hung_up({group.connection for group in self.groups()})
        self.abort([group for group in self.groups() if group.connection in gone])
        self.hung_up_at = time.monotonic()

    def abort(self, groups: list[Group]) -> None:
        """End the completions of `groups` where they are."""
        for completion in (c for group in groups for c in group.completions if c.finish_reason is None):
            completion.finish_reason = "abort"
        self.waiting = [group for group in self.waiting if group not in groups]
        self.leave()
        for group in groups:
            group.news.put(None)

    def next_groups(self) -> list[Group]:
        """The waiting groups that start now: as many as batch, adapter slots and one prefill hold."""
        starting, num_rows, longest = [], len(self.running), 0
        adapters = {completion.group.adapter for completion in self.running} - {None}
        for group in () if self.paused else self.waiting:
            longest = max(longest, len(group.prompt))
            is_full = num_rows > 0 and num_rows + len(group.completions) > MAX_RUNNING
            if is_full or (starting and longest * (len(starting) + 1) > PREFILL_TOKENS):
                break
            has_slot = len(adapters | {group.adapter} - {None}) <= self.args.max_loras
            if has_slot and time.monotonic() >= group.not_before:
                starting.append(group)
                num_rows += len(group.completions)
                adapters |= {group.adapter} - {None}
        return starting

    # Sampling

    def forward(self, ids, positions, mask, adapters, cache, kept):
        """Logits (rows, kept, vocabulary) of ids and positions (rows, length); each row has its adapter."""
        for adapter in set(adapters) - {None}:
            self.touch(adapter)
        self.adapter_rows = rows_of_adapters(adapters)
        lowest = torch.finfo(self.model.dtype).min
        mask = torch.zeros(mask.shape, dtype=self.model.dtype).masked_fill_(~mask, lowest)
        return self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True, logits_to_keep=kept
        ).logits

    def add_lora(self, name, linear, inputs, output):
        """Forward hook of every linear layer: adds what the adapters of the running forward add."""
        for pairs, rows in self.adapter_rows:
            if name not in pairs:
                continue
            a, b = pairs[name]
            if rows is None:
                output += F.linear(F.linear(inputs[0], a), b)
            else:
                output.index_add_(0, rows, F.linear(F.linear(inputs[0][rows], a), b))
        return output

    def prefill(self, groups: list[Group]) -> None:
        """Compute each prompt once; all its completions join the batch and get their first token."""
        ends = [len(group.prompt) - 1 for group in groups]
        length = max(ends) + 1
        ids = torch.tensor([group.prompt + [0] * (length - len(group.prompt)) for group in groups])
        positions = torch.arange(length).expand(len(groups), length)
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        needs_all = any(wants_prompt_logprobs(group) for group in groups)
        kept = list(range(length)) if needs_all else sorted(set(ends))  # positions with logits
        prompts = PromptCache()
        logits = self.forward(ids, positions, mask, [group.adapter for group in groups], prompts, torch.tensor(kept))
        for group, row in zip(groups, logits, strict=True):
            if wants_prompt_logprobs(group):
                group.prompt_logprobs = score_prompt(group.prompt, row[: len(group.prompt)].float())
        sources = [i for i, group in enumerate(groups) for _ in group.completions]
        self.cache.append(prompts, sources)
        joining = [completion for group in groups for completion in group.completions]
        self.waiting = [group for group in self.waiting if group not in groups]
        self.running += joining
        self.sample(joining, torch.stack([logits[i, kept.index(ends[i])] for i in sources]))

    def decode(self) -> None:
        """One token for every running completion."""
        ids = torch.tensor([[completion.tokens[-1]] for completion in self.running])
        positions = torch.tensor([len(c.group.prompt) + len(c.tokens) - 1 for c in self.running])
        self.cache.positions, self.cache.length = positions, int(positions.max()) + 1
        self.cache.reserve(len(self.running), self.cache.length)
        mask = (torch.arange(self.cache.length) <= positions[:, None])[:, None, None]
        adapters = [completion.group.adapter for completion in self.running]
        logits = self.forward(ids, positions[:, None], mask, adapters, self.cache, 1)
        self.sample(list(self.running), logits[:, -1])

    def sample(self, completions: list[Completion], logits: torch.Tensor) -> None:
        """Draw a token for each completion from its logits (rows, vocabulary); those that are done leave."""
        temperatures = torch.tensor([completion.group.temperature or 1.0 for completion in completions])
        logprobs = (logits.float() / temperatures[:, None]).log_softmax(-1)
        noise = torch.empty_like(logprobs).exponential_()  # argmax(p / noise) is a draw from p
        for row, completion in enumerate(completions):
            if completion.group.temperature == 0:
                noise[row] = 1.0
            elif completion.generator:
                noise[row].exponential_(generator=completion.generator)
        tokens = (logprobs - noise.log()).argmax(-1)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        for row, (completion, token) in enumerate(zip(completions, tokens.tolist(), strict=True)):
            completion.tokens.append(token)
            if completion.group.num_top_logprobs:
                top = logprobs[row].topk(min(completion.group.num_top_logprobs, logprobs.shape[1]))
                completion.top_logprobs.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
            completion.logprobs.append(chosen[row])
            self.finish_if_done(completion)
        self.leave()
        for group in dict.fromkeys(completion.group for completion in completions):
            if group.body.get("stream") or group.is_done():
                group.news.put(None)

    def finish_if_done(self, completion: Completion) -> None:
        """Set the finish reason of a completion that its last token ends."""
        group, token = completion.group, completion.tokens[-1]
        if token == group.eos:
            completion.finish_reason = "stop"
        elif token in (group.body.get("stop_token_ids") or ()):
            completion.finish_reason, completion.stop_reason = "stop", token
        elif len(completion.tokens) >= group.max_tokens:
            completion.finish_reason = "length"
        text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True) if group.stop else ""
        if found := [stop for stop in group.stop if stop in text]:
            completion.finish_reason = "stop"
            completion.stop_reason = min(found, key=lambda stop: text.index(stop) + len(stop))

    def leave(self) -> None:
        """Take the completions that are done out of the batch; the last rows move into their places."""
        rows = [row for row, completion in enumerate(self.running) if completion.finish_reason is None]
        if len(rows) < len(self.running):
            stay, movers = set(rows), [row for row in rows if row >= len(rows)]
            rows = [row if row in stay else movers.pop() for row in range(len(rows))]
            self.cache.keep(rows)
            self.running = [self.running[row] for row in rows]

    # Adapters and control

    def touch(self, adapter: Adapter) -> None:
        """Make an adapter the most recently used one, read again if it was evicted; the oldest may be evicted."""
        if adapter not in self.resident and not self.faults.ignore_loads:
            adapter.pairs = read_adapter(Path(adapter.path), self.linears, self.args.max_lora_rank)
        self.resident[adapter] = None
        self.resident.move_to_end(adapter)
        while len(self.resident) > max(self.args.max_loras, self.args.max_cpu_loras):
            self.resident.popitem(last=False)[0].pairs = {}

    def load(self, name: str, path: str, in_place: bool) -> str:
        """Load an adapter under a name; ApiError with vLLM's message if that fails."""
        if name in self.adapters and not in_place:
            message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            raise ApiError(400, message + "set 'load_inplace' to True.", "InvalidUserInput")
        faults, now = self.faults, time.monotonic()
        time.sleep(faults.load_delay_s)
        if faults.load_failures > 0:
            faults.load_failures -= 1
            raise ApiError(faults.load_status, faults.load_message, "InternalServerError")
        adapter = Adapter(name, path, {})
        try:
            if now - self.first_asked.setdefault(path, now) < faults.hidden_s:
                raise FileNotFoundError(path)
            if faults.half_seen:
                raise ValueError(f"{path} doesn't contain tensors")
            self.touch(adapter)
        except FileNotFoundError as error:
            message = f"Loading lora {name} failed: No adapter found for {path}"
            raise ApiError(404, message, "NotFoundError") from error
        except Exception as error:
            message = f"Call to add_lora method failed: Worker failed with error '{error}', "
            message += "please check the stack trace above for the root cause"
            raise ApiError(500, message, "InternalServerError") from error
        self.adapters[name] = adapter
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        """Forget a name; what runs with it runs on."""
        if name not in self.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    def pause(self, mode: str) -> Future:
        """Stop sampling. "abort" ends what runs, "keep" freezes it, "wait" lets it end: then the future is done."""
        done = Future()
        if mode == "abort":
            self.abort(self.groups())
        self.paused = "all" if mode == "keep" else "new"
        if mode == "wait":
            self.drained.append(done)
        else:
            done.set_result(None)
        return done

    def resume(self) -> None:
        """Go on sampling."""
        self.paused = ""

    def set_faults(self, changes: dict) -> None:
        """Change some faults."""
        for name, value in changes.items():
            setattr(self.faults, name, value)


# Completion requests

# What a request may say of these; anything else would change the distribution, or is not implemented.
NEUTRAL = {
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "prompt_logprobs": (0,), "echo": (False,),
}  # fmt: skip


def wants_prompt_logprobs(group: Group) -> bool:
    return group.body.get("prompt_logprobs") is not None


def number(body: dict, name: str, default: float | None, kind: type = int):
    """A field of a request as a number of that kind; ApiError if it is none."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
        raise ApiError(400, f"{name} must be a number ({kind.__name__}), got {value!r}.", param=name)
    return kind(value)


def prompts_of(body: dict, engine: Engine) -> list[list[int]]:
    """The prompts of a request as token ids; ApiError for what the model cannot take."""
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    prompts = [engine.tokenizer(one).input_ids if isinstance(one, str) else one for one in prompt]
    if not prompts or not all(prompts):
        raise ApiError(400, "You must pass at least one prompt")
    vocabulary = engine.model.get_input_embeddings().num_embeddings
    for token in (token for one in prompts for token in one):
        if not 0 <= token < vocabulary:
            raise ApiError(400, f"Token id {token} is out of vocabulary")
    return prompts


def check_length(prompt: list[int], max_tokens: int, max_model_len: int) -> None:
    """ApiError if a prompt and its completion do not fit into the context."""
    if max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if max_tokens > max_model_len:
        message = f"max_tokens={max_tokens} cannot be greater than max_model_len=max_total_tokens={max_model_len}. "
        raise ApiError(400, message + "Please request fewer output tokens.", param="max_tokens")
    if len(prompt) + max_tokens > max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} "
            f"output tokens and your prompt contains {len(prompt)} input tokens, for a total of "
            f"{len(prompt) + max_tokens} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens."
        )
        raise ApiError(400, message, param="input_tokens")


def groups_of(request: Request, engine: Engine) -> list[Group]:
    """The groups that a completion request asks for, one per prompt; ApiError if it cannot be served."""
    body = request.body
    for name, neutral in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(400, f"stub_vllm takes {name}={neutral[0]} only, got {body[name]}.", param=name)
    prompts, n, seed = prompts_of(body, engine), number(body, "n", 1), number(body, "seed", None)
    max_tokens, num_top = number(body, "max_tokens", 16), number(body, "logprobs", 0)
    temperature = number(body, "temperature", 1.0, float)
    if n < 1:
        raise ApiError(400, f"n must be at least 1, got {n}.")
    if temperature < 0:
        raise ApiError(400, f"temperature must be non-negative, got {temperature}.", param="temperature")
    if temperature == 0 and n > 1:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {n}.")
    if num_top > 20:
        message = f"Requested sample logprobs of {num_top}, which is greater than max allowed: 20"
        raise ApiError(400, message, param="logprobs")
    stop, news, groups = body.get("stop") or [], queue.SimpleQueue(), []
    for prompt in prompts:
        check_length(prompt, max_tokens, engine.args.max_model_len)
        group = Group(
            prompt=prompt, body=body, max_tokens=max_tokens, temperature=temperature, num_top_logprobs=num_top,
            eos=None if body.get("ignore_eos") else engine.tokenizer.eos_token_id,
            stop=[stop] if isinstance(stop, str) else stop, connection=request.connection,
            not_before=time.monotonic() + engine.faults.slow_s, news=news,
        )  # fmt: skip
        seeds = [None if seed is None else torch.Generator().manual_seed(seed + index) for index in range(n)]
        group.completions = [Completion(group, generator) for generator in seeds]
        groups.append(group)
    return groups


def text_of(completion: Completion, tokenizer, num_tokens: int | None = None) -> str:
    """Text of a completion (of its first tokens), without what stopped it and without what may still change."""
    tokens, stop = completion.tokens[:num_tokens], completion.stop_reason
    is_end = completion.finish_reason is not None and len(tokens) == len(completion.tokens)
    text = tokenizer.decode(tokens[:-1] if is_end and isinstance(stop, int) else tokens, skip_special_tokens=True)
    if is_end:
        return text[: text.index(stop)] if isinstance(stop, str) else text
    text = text.rstrip("\ufffd")  # the first bytes of a character
    return text[: len(text) - max(map(len, completion.group.stop), default=1) + 1]


def logprobs_of(completion: Completion, tokenizer, begin: int, end: int | None) -> dict:
    """Logprobs of the completion's tokens from `begin` to `end`; JSON has no infinity, so -9999 is the lowest."""
    names = [tokenizer.decode([token]) for token in completion.tokens[begin:end]]
    values = [max(value, -9999.0) for value in completion.logprobs[begin:end]]
    tops = completion.top_logprobs[begin:end] or [{}] * len(names)
    offset = len(text_of(completion, tokenizer, begin)) if begin else 0
    return {
        "text_offset": [offset + sum(map(len, names[:i])) for i in range(len(names))],
        "token_logprobs": values,
        "tokens": names,
        "top_logprobs": [
            {name: value} | {tokenizer.decode([token]): max(other, -9999.0) for token, other in top.items()}
            for name, value, top in zip(names, values, tops, strict=True)
        ],
    }


def choice_of(completion: Completion, index: int, tokenizer, begin: int = 0, end: int | None = None) -> dict:
    """What an answer, or a chunk of one, says about the completion's tokens from `begin` to `end`."""
    body, is_end = completion.group.body, end is None
    before = len(text_of(completion, tokenizer, begin)) if begin else 0
    return {
        "index": index,
        "text": text_of(completion, tokenizer, end)[before:],
        "logprobs": None if body.get("logprobs") is None else logprobs_of(completion, tokenizer, begin, end),
        "finish_reason": completion.finish_reason if is_end else None,
        "stop_reason": completion.stop_reason if is_end else None,
        "token_ids": completion.tokens[begin:end] if body.get("return_token_ids") else None,
        "prompt_token_ids": completion.group.prompt if body.get("return_token_ids") and begin == 0 else None,
    }


def prompt_logprobs_of(group: Group, tokenizer) -> list | None:
    """One entry per prompt token, the first is None: `{"9": {"logprob": -1.2, "rank": 3, "decoded_token": "7"}}`."""
    if not wants_prompt_logprobs(group):
        return None
    entries = [None]
    for token, (logprob, rank) in zip(group.prompt[1:], group.prompt_logprobs, strict=False):  # none if it was aborted
        entries.append({str(token): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.decode([token])}})
    return entries


def usage_of(groups: list[Group]) -> dict:
    """How many tokens went in and came out."""
    num_prompt = sum(len(group.prompt) for group in groups)
    num_sampled = sum(len(completion.tokens) for group in groups for completion in group.completions)
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_sampled, "completion_tokens": num_sampled}


def complete(engine: Engine, request: Request) -> dict | Iterator[str]:
    """The answer to a completion request, or its chunks if it is to be streamed."""
    groups = groups_of(request, engine)
    engine.call(engine.submit, request.body.get("model"), groups)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex[:16]}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.body.get("model") or engine.args.served_model_name,
    }
    if request.body.get("stream"):
        return stream(groups, head, engine.tokenizer)
    while not all(group.is_done() for group in groups):
        groups[0].news.get()
    if any(group.dead for group in groups):
        raise engine_is_dead()
    choices = []
    for completion in (completion for group in groups for completion in group.completions):
        choice = choice_of(completion, len(choices), engine.tokenizer)
        choices.append(choice | {"prompt_logprobs": prompt_logprobs_of(completion.group, engine.tokenizer)})
    return {**head, "choices": choices, "usage": usage_of(groups)}


def stream(groups: list[Group], head: dict, tokenizer) -> Iterator[str]:
    """The chunks of a streamed answer, as server-sent events."""
    completions = [completion for group in groups for completion in group.completions]
    num_sent = [0] * len(completions)
    unfinished = list(enumerate(completions))
    while unfinished:
        groups[0].news.get()
        if any(group.dead for group in groups):
            yield f"data: {json.dumps(engine_is_dead().body)}\n\n"
            break
        for index, completion in list(unfinished):
            is_end = completion.finish_reason is not None  # asked first: then all its tokens are there
            end = len(completion.logprobs)
            if end > num_sent[index] or is_end:
                choice = choice_of(completion, index, tokenizer, num_sent[index], None if is_end else end)
                yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
            num_sent[index] = end
            if is_end:
                unfinished.remove((index, completion))
    if (groups[0].body.get("stream_options") or {}).get("include_usage"):
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage_of(groups)})}\n\n"
    yield "data: [DONE]\n\n"


# The other routes


def health(engine: Engine, request: Request) -> None:
    """Empty: 200 while the engine lives, else 503."""
    if engine.dead:
        raise ApiError(503, DEAD_ENGINE, "InternalServerError")


def models(engine: Engine, request: Request) -> dict:
    """The base model, and the adapters that have a name."""
    args = engine.args
    cards = [{"id": args.served_model_name, "root": args.model, "parent": None, "max_model_len": args.max_model_len}]
    for adapter in list(engine.adapters.values()):
        card = {"id": adapter.name, "root": adapter.path, "parent": args.served_model_name, "max_model_len": None}
        cards.append(card)
    common = {"object": "model", "created": int(time.time()), "owned_by": "vllm"}
    return {"object": "list", "data": [card | common for card in cards]}


def metrics(engine: Engine, request: Request) -> str:
    """Prometheus text with the two numbers that a router asks for."""
    label = f'{{engine="0",model_name="{engine.args.served_model_name}"}}'
    waiting = sum(len(group.completions) for group in list(engine.waiting))
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {float(len(engine.running))}\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{label} {float(waiting)}\n"
    )


def server_info(engine: Engine, request: Request) -> dict:
    """The settings that a client asks for."""
    args = engine.args
    config = {
        "model_config": {"model": args.model, "dtype": f"torch.{args.dtype}", "max_model_len": args.max_model_len},
        "lora_config": {name: getattr(args, name) for name in ("max_lora_rank", "max_loras", "max_cpu_loras")},
        "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": 1, "world_size": 1},
    }
    is_json = request.query.get("config_format") == "json"
    return {"vllm_config": config if is_json else str(config), "vllm_env": {}, "system_env": {}}


def text_field(request: Request, name: str) -> str:
    """A field of the body that must be there and be text."""
    if not isinstance(request.body.get(name), str):
        problem = "Input should be a valid string" if name in request.body else "Field required"
        raise ApiError(400, f"1 validation error:\n  ('body', '{name}'): {problem}", "Bad Request", f"body.{name}")
    return request.body[name]


def load(engine: Engine, request: Request) -> str:
    name, path = text_field(request, "lora_name"), text_field(request, "lora_path")
    if not name or not path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    return engine.call(engine.load, name, path, bool(request.body.get("load_inplace")))


def unload(engine: Engine, request: Request) -> str:
    return engine.call(engine.unload, text_field(request, "lora_name"))


def pause(engine: Engine, request: Request) -> dict:
    mode = request.query.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        message = f"1 validation error:\n  ('query', 'mode'): Input should be 'abort', 'wait' or 'keep', not {mode!r}"
        raise ApiError(400, message, "Bad Request", "query.mode")
    if engine.faults.fail_pause:
        raise ApiError(500, "the stub was told to fail this pause", "InternalServerError")
    engine.call(engine.pause, mode).result()
    return {"status": "paused"}


def resume(engine: Engine, request: Request) -> dict:
    engine.call(engine.resume)
    return {"status": "resumed"}


def is_paused(engine: Engine, request: Request) -> dict:
    return {"is_paused": bool(engine.paused)}


def reset_prefix_cache(engine: Engine, request: Request) -> dict:
    return {"success": True}


def tokenize(engine: Engine, request: Request) -> dict:
    tokens = engine.tokenizer(text_field(request, "prompt")).input_ids
    return {"count": len(tokens), "max_model_len": engine.args.max_model_len, "tokens": tokens, "token_strs": None}


def faults(engine: Engine, request: Request) -> dict:
    """Show the faults, and change those that the body names; ApiError for a name or a type that does not exist."""
    kinds = {fault.name: fault.type for fault in dataclasses.fields(Faults)}
    for name, value in request.body.items():
        if name not in kinds or type(value) not in ((int, float) if kinds[name] is float else (kinds[name],)):
            raise ApiError(400, f"{name}={value!r} is not a fault of stub_vllm; they are: {kinds}", param=name)
    engine.call(engine.set_faults, request.body)
    return dataclasses.asdict(engine.faults)


def make_routes() -> dict:
    """Method and path: the function that answers. As in vLLM, two kinds of them need an environment variable."""
    routes = {
        "GET /health": health, "GET /ping": health, "POST /ping": health, "GET /metrics": metrics,
        "GET /v1/models": models, "POST /v1/completions": complete, "POST /tokenize": tokenize,
        "GET /stub/faults": faults, "POST /stub/faults": faults,
    }  # fmt: skip
    if is_set("VLLM_SERVER_DEV_MODE"):
        routes |= {
            "POST /pause": pause, "POST /resume": resume, "GET /is_paused": is_paused,
            "POST /reset_prefix_cache": reset_prefix_cache, "GET /server_info": server_info,
        }  # fmt: skip
    if is_set("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        routes |= {"POST /v1/load_lora_adapter": load, "POST /v1/unload_lora_adapter": unload}
    return routes


def is_set(name: str) -> bool:
    """Whether an environment variable says yes, as vLLM reads it."""
    return os.environ.get(name, "").strip().lower() in ("1", "true")


# The server


class Handler(BaseHTTPRequestHandler):
    """One client connection. It stays open between requests, and is closed when it was idle for `timeout` seconds."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = float(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5"))

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def answer(self, method: str) -> None:
        """Call the function of this route and send what it returns."""
        try:
            url = urlsplit(self.path)
            request = Request(self.read_body(), dict(parse_qsl(url.query)), self.connection)
            route = self.server.routes.get(f"{method} {url.path}")
            if route is None:
                known = any(name.endswith(f" {url.path}") for name in self.server.routes)
                return self.send(405 if known else 404, {"detail": "Method Not Allowed" if known else "Not Found"})
            result = route(self.server.engine, request)
            if isinstance(result, Iterator):
                self.send_chunks(result)
            else:
                self.send(200, result)
        except ApiError as error:
            self.send(error.status, error.body)
        except (ConnectionError, TimeoutError):
            raise  # the client is gone
        except Exception as error:
            traceback.print_exc()
            self.send(500, ApiError(500, str(error), "InternalServerError").body)

    def read_body(self) -> dict:
        """The request's JSON object, empty if it has no body."""
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise ApiError(411, "stub_vllm needs a Content-Length")
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        except ValueError as error:
            raise ApiError(400, f"1 validation error:\n  JSON decode error: {error}", "Bad Request", "body") from error
        if not isinstance(body, dict):
            raise ApiError(400, "1 validation error:\n  the body must be an object", "Bad Request", "body")
        return body

    def send(self, status: int, content: dict | str | None) -> None:
        """Send an answer: JSON, text or nothing."""
        try:
            data = (json.dumps(content, allow_nan=False) if isinstance(content, dict) else content or "").encode()
        except ValueError as error:  # NaN among the logprobs
            return self.send(400, ApiError(400, str(error)).body)
        self.send_response(status)
        if data:
            self.send_header("Content-Type", "application/json" if isinstance(content, dict) else "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_chunks(self, chunks: Iterator[str]) -> None:
        """Send server-sent events as they come."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in (chunk.encode() for chunk in chunks):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args) -> None:
        """No line per request: it would bury the rest."""


class Server(ThreadingHTTPServer):
    """A thread per connection, and a queue that holds the hundreds that arrive at once."""

    request_queue_size = 2048

    def handle_error(self, request, client_address) -> None:
        """A client that is gone is no error here."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def parse_args() -> argparse.Namespace:
    """The flags that replica.sh gives to either engine, and one per fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="a model directory, or a Hub name")
    parser.add_argument("--served-model-name", help="the base model's name (default: --model)")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max-model-len", type=int, help="prompt and completion together (default: the model's)")
    parser.add_argument("--max-lora-rank", type=int, default=16, choices=SERVED_LORA_RANKS)
    parser.add_argument("--max-loras", type=int, default=1, help="adapters in the batch at a time")
    parser.add_argument("--max-cpu-loras", type=int, default=0, help="adapters in memory (default: --max-loras)")
    parser.add_argument("--enable-lora", action="store_true", help="it always is")
    parser.add_argument("--enable-prefix-caching", action="store_true", help="it never is")
    parser.add_argument("--logprobs-mode", choices=("processed_logprobs",), help="the only one there is")
    parser.add_argument("--generation-config", choices=("vllm",), help="the only one there is")
    for fault in dataclasses.fields(Faults):
        kind = {"action": "store_true"} if fault.type is bool else {"type": fault.type, "default": fault.default}
        parser.add_argument("--" + fault.name.replace("_", "-"), help="a fault", **kind)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.served_model_name = args.served_model_name or args.model
    args.max_cpu_loras = max(args.max_loras, args.max_cpu_loras)
    server = Server((args.host, args.port), Handler, bind_and_activate=False)
    try:
        server.server_bind()  # before the model is loaded, so that a port in use is said at once
    except OSError as error:
        sys.exit(f"stub_vllm: port {args.port} on {args.host}: {error.strerror}; choose another --port")
    disable_progress_bar()
    engine = Engine(args, Faults(**{fault.name: getattr(args, fault.name) for fault in dataclasses.fields(Faults)}))
    args.max_model_len = args.max_model_len or engine.model.config.max_position_embeddings
    if getattr(engine.model.config, "sliding_window", None) and args.max_model_len > engine.model.config.sliding_window:
        sys.exit(f"stub_vllm: {args.model} has a sliding window; use a smaller --max-model-len")
    server.engine, server.routes = engine, make_routes()
    threading.Thread(target=engine.run, daemon=True).start()
    server.server_activate()
    print(f"stub_vllm: {args.model} on http://{args.host}:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        os._exit(0)


if __name__ == "__main__":
    main()
