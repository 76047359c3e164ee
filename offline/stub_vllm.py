"""What stands in for vLLM where there is no GPU: a small real server with vLLM's routes, status codes and messages.

It loads a model with transformers, applies the LoRA adapter that a request names, samples, and returns true logprobs.
All running completions share one batch and its KV cache, whatever adapter they use; they join and leave it at every
step. One thread owns model, adapters and batch, the HTTP threads hand it work. Where it departs from vLLM:

- CPU, full attention, one prompt of token ids per request; no prefix cache, so a name used twice gives no stale answers
- what a request may say is in NEUTRAL and `group_of`; anything else that would change the answer is a 400
- it goes wrong on request: see Faults, each a flag, and `POST /stub/faults {"slow_s": 2}`

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 \\
        python offline/stub_vllm.py --model DIR --port 8000 --enable-lora --max-lora-rank 8 --max-loras 6
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
from collections import OrderedDict
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

SERVED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank accepts

DEAD_ENGINE = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEATH_S = 1.0  # from the engine's death, which /health shows, to the end of the process
HANGUP_POLL_S = 0.1  # pause between two looks at whether a client is gone
MAX_RUNNING = 256  # completions in the batch, more only if they are of one group

# What a request may say of these: anything else would change the distribution, or is not implemented.
NEUTRAL = {
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logprobs": (0,), "prompt_logprobs": (0,), "echo": (False,), "stream": (False,),
    "stop": ([], ""), "stop_token_ids": ([],), "min_tokens": (0,),
}  # fmt: skip


@dataclass
class Faults:
    """What goes wrong, on request. Zero and false mean that it does not."""

    hidden_s: float = 0.0  # an adapter's directory is "not found" until this long after it was first asked for
    half_seen: bool = False  # an adapter's config is visible, its weights are not
    load_failures: int = 0  # this many loads fail; each counts one down
    slow_s: float = 0.0  # a completion starts this much later
    crash: bool = False  # the engine dies


class ApiError(Exception):
    """An answer that is not 200. As in vLLM, paths in the message are masked."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        message = re.sub(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.-]+)+", "<path>", message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass
class Request:
    """What a client sent."""

    body: dict
    query: dict
    connection: socket.socket

    def text(self, name: str) -> str:
        """A field of the body that must be there and be text."""
        if not isinstance(self.body.get(name), str):
            problem = "Input should be a valid string" if name in self.body else "Field required"
            raise ApiError(400, f"1 validation error:\n  ('body', '{name}'): {problem}", "Bad Request", f"body.{name}")
        return self.body[name]

    def number(self, name: str, default: float) -> float:
        """A number of the body, of the default's kind."""
        value = self.body.get(name)
        if value is None:
            return default
        if type(value) not in (int, type(default)):
            raise ApiError(400, f"{name} must be a number ({type(default).__name__}), got {value!r}.", param=name)
        return value


@dataclass(eq=False)
class Adapter:
    """A LoRA adapter that was loaded. Its weights are in Engine.resident, or evicted."""

    name: str
    path: str


@dataclass(eq=False)
class Completion:
    """What has been sampled for a group."""

    group: "Group"
    generator: torch.Generator | None  # None: the engine's own
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(eq=False)
class Group:
    """The prompt of a request, with its completions."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    eos: int | None  # None: it does not end a completion
    wants_prompt_logprobs: bool
    adapter: Adapter | None = None  # None: the base model
    pairs: dict = field(default_factory=dict)  # the adapter's weights, held while the group runs
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # of prompt[1:]
    done: threading.Event = field(default_factory=threading.Event)


# Adapters


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


def in_slot(tensor: torch.Tensor, like: torch.Tensor, *shape: int) -> torch.Tensor:
    """The tensor in a slot of that shape: as in vLLM, one that is too small fills a part of it."""
    slot = like.new_zeros(shape)
    slot[: tensor.shape[0], : tensor.shape[1]].copy_(tensor)
    return slot


def read_adapter(directory: Path, linears: dict[str, torch.nn.Linear], max_lora_rank: int) -> dict:
    """By module name, A (r, in) and B (out, r) with the scale in it; keys that match no module are ignored.

    FileNotFoundError if the directory has no config, else errors with vLLM's message.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    if problem := illegal(config, max_lora_rank):
        raise ValueError(problem)
    if not (directory / "adapter_model.safetensors").is_file():
        raise ValueError(f"{directory} doesn't contain tensors")
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        tensors = {parse_key(key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    pairs = {}
    for name in {name for name, _ in tensors} & set(linears):
        a, b, linear = tensors[name, "lora_A"], tensors[name, "lora_B"] * scale, linears[name]
        rank = max(a.shape[0], b.shape[1])
        pairs[name] = (
            in_slot(a, linear.weight, rank, linear.in_features),
            in_slot(b, linear.weight, linear.out_features, rank),
        )
    return pairs


def rows_by_adapter(groups: list[Group]) -> list[tuple[dict, torch.Tensor | None]]:
    """The weights of each adapter with its rows (n,) of the batch; None for rows if it has all of them."""
    rows: dict[int, tuple[dict, list[int]]] = {}
    for row, group in enumerate(groups):
        if group.pairs:
            rows.setdefault(id(group.pairs), (group.pairs, []))[1].append(row)
    return [(pairs, None if len(own) == len(groups) else torch.tensor(own)) for pairs, own in rows.values()]


# Keys and values


class BatchCache:
    """Keys and values of the running completions: completion i is row i, and its prompt begins at position 0."""

    def __init__(self):
        self.layers = []  # (keys, values), each (rows, heads, length, head size), with room to grow
        self.positions = None  # (rows,) where the token of each row goes that is computed now
        self.length = 0  # of the longest row

    def update(self, keys, values, layer, *args, **kwargs):
        """What transformers calls in each layer: the keys and values to attend to."""
        rows = torch.arange(len(self.positions))
        for slots, new in zip(self.layers[layer], (keys, values), strict=True):
            slots[rows, :, self.positions] = new[:, :, 0]
        return tuple(slots[: len(rows), :, : self.length] for slots in self.layers[layer])

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for that many rows of that length."""
        room, _, reach, _ = self.layers[0][0].shape
        more_rows = max(num_rows, 2 * room) - room if num_rows > room else 0
        more_length = max(length, 2 * reach) - reach if length > reach else 0
        if more_rows or more_length:
            padding = (0, 0, 0, more_length, 0, 0, 0, more_rows)  # after head size, length, heads and rows
            self.layers = [tuple(F.pad(slots, padding) for slots in pair) for pair in self.layers]

    def join(self, prompt, begin: int, end: int) -> None:
        """Rows `begin` to `end` become copies of a prompt's keys and values, which are transformers' own cache."""
        new = [(layer.keys, layer.values) for layer in prompt.layers]
        self.layers = self.layers or [tuple(part[:0] for part in pair) for pair in new]
        length = new[0][0].shape[2]
        self.reserve(end, length)
        for pair, new_pair in zip(self.layers, new, strict=True):
            for slots, part in zip(pair, new_pair, strict=True):
                slots[begin:end, :, :length] = part

    def keep(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was; the other rows are free."""
        moved = [i for i, row in enumerate(rows) if i != row]
        for slots in (slots for pair in self.layers for slots in pair if moved):
            slots[moved, :, : self.length] = slots[[rows[i] for i in moved], :, : self.length]


# The engine


class Engine:
    """The model, its adapters and the running batch. Its own thread alone touches them; `call` takes work there."""

    def __init__(self, args: argparse.Namespace, faults: Faults):
        self.args, self.faults = args, faults
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
        ).eval()
        self.adapters: dict[str, Adapter] = {}  # by name
        self.resident: OrderedDict[Adapter, dict] = OrderedDict()  # their weights, the least recently used first
        self.first_asked: dict[str, float] = {}  # adapter path: monotonic time of its first load
        self.waiting: list[Group] = []
        self.running: list[Completion] = []
        self.cache = BatchCache()
        self.lora_rows = []  # weights of the adapters of the forward that is running, with their rows
        self.paused = False
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
        self.check_alive()
        return future.result()

    def check_alive(self) -> None:
        if self.dead:
            raise ApiError(500, DEAD_ENGINE, "InternalServerError")

    def run(self) -> None:
        """Work until the engine dies, then end the process."""
        torch.set_num_threads(1)  # a second one would wait for the other processes of this machine
        try:
            with torch.inference_mode():
                while not self.faults.crash:
                    self.turn()
        except Exception:
            traceback.print_exc()
        self.dead = True
        for group in self.groups():
            group.done.set()
        while not self.inbox.empty():
            self.inbox.get()[0].set_exception(ApiError(500, DEAD_ENGINE, "InternalServerError"))
        time.sleep(DEATH_S)
        os._exit(0)  # as vLLM does

    def turn(self) -> None:
        """Do what was called for, start what fits, and give each running completion a token."""
        self.take_calls()
        while not self.paused and self.waiting and self.has_room(self.waiting[0]):
            self.prefill(self.waiting[0])
        if self.running and not self.paused:
            self.decode()

    def has_room(self, group: Group) -> bool:
        return not self.running or len(self.running) + len(group.completions) <= MAX_RUNNING

    def take_calls(self) -> None:
        """Run the calls that were made; wait for one while there is nothing else to do."""
        is_idle = self.paused or not (self.running or self.waiting)
        while is_idle or not self.inbox.empty():
            is_idle = False
            future, function, args = self.inbox.get()
            try:
                future.set_result(function(*args))
            except ApiError as error:
                future.set_exception(error)

    # Groups

    def groups(self) -> list[Group]:
        """All that are not done."""
        return self.waiting + list(dict.fromkeys(completion.group for completion in self.running))

    def submit(self, name: str | None, group: Group) -> None:
        """Let a group wait for its turn with the adapter of that name; without a name, or with the model's: none."""
        group.adapter = self.adapters.get(name)
        if group.adapter is None and name and name != self.args.served_model_name:
            raise ApiError(404, f"The model `{name}` does not exist.", "NotFoundError", "model")
        self.waiting.append(group)

    def abort(self, groups: list[Group]) -> None:
        """End the completions of `groups` where they are."""
        for completion in (c for group in groups for c in group.completions if c.finish_reason is None):
            completion.finish_reason = "abort"
        self.waiting = [group for group in self.waiting if group not in groups]
        self.leave()
        for group in groups:
            group.done.set()

    def leave(self) -> None:
        """Take the completions that are done out of the batch; the last rows move into their places."""
        rows = [row for row, completion in enumerate(self.running) if completion.finish_reason is None]
        if len(rows) < len(self.running):
            stay, movers = set(rows), [row for row in rows if row >= len(rows)]
            rows = [row if row in stay else movers.pop() for row in range(len(rows))]
            self.cache.keep(rows)
            self.running = [self.running[row] for row in rows]

    # Sampling

    def add_lora(self, name, linear, inputs, output):
        """Forward hook of every linear layer: adds what the adapters of the running forward add."""
        for pairs, rows in self.lora_rows:
            if name not in pairs:
                continue
            a, b = pairs[name]
            if rows is None:
                output += F.linear(F.linear(inputs[0], a), b)
            else:
                output.index_add_(0, rows, F.linear(F.linear(inputs[0][rows], a), b))
        return output

    def prefill(self, group: Group) -> None:
        """Compute a prompt once; all its completions join the batch and get their first token."""
        group.pairs = self.weights(group.adapter) if group.adapter else {}
        self.lora_rows = rows_by_adapter([group])
        kept = len(group.prompt) if group.wants_prompt_logprobs else 1
        output = self.model(input_ids=torch.tensor([group.prompt]), use_cache=True, logits_to_keep=kept)
        logits = output.logits[0].float()
        if group.wants_prompt_logprobs:
            following = torch.tensor(group.prompt[1:], dtype=torch.long)[:, None]
            group.prompt_logprobs = logits[:-1].log_softmax(-1).gather(1, following)[:, 0].tolist()
        self.cache.join(output.cache, len(self.running), len(self.running) + len(group.completions))
        self.waiting.remove(group)
        self.running += group.completions
        self.sample(group.completions, logits[-1].expand(len(group.completions), -1))

    def decode(self) -> None:
        """One token for every running completion."""
        ids = torch.tensor([[completion.tokens[-1]] for completion in self.running])
        positions = torch.tensor([len(c.group.prompt) + len(c.tokens) - 1 for c in self.running])
        self.cache.positions, self.cache.length = positions, int(positions.max()) + 1
        self.cache.reserve(len(self.running), self.cache.length)
        self.lora_rows = rows_by_adapter([completion.group for completion in self.running])
        mask = (torch.arange(self.cache.length) <= positions[:, None])[:, None, None]  # (rows, 1, 1, length)
        logits = self.model(
            input_ids=ids, position_ids=positions[:, None], attention_mask=mask, cache=self.cache, use_cache=True
        ).logits
        self.sample(list(self.running), logits[:, -1].float())

    def sample(self, completions: list[Completion], logits: torch.Tensor) -> None:
        """Draw a token for each completion from its logits (rows, vocabulary); those that are done leave."""
        temperatures = torch.tensor([completion.group.temperature or 1.0 for completion in completions])
        logprobs = (logits / temperatures[:, None]).log_softmax(-1)
        noise = torch.empty_like(logprobs).exponential_()  # argmax(p / noise) is a draw from p
        for row, completion in enumerate(completions):
            if completion.group.temperature == 0:
                noise[row] = 1.0
            elif completion.generator:
                noise[row].exponential_(generator=completion.generator)
        tokens = (logprobs - noise.log()).argmax(-1)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        for completion, token, logprob in zip(completions, tokens.tolist(), chosen.tolist(), strict=True):
            completion.tokens.append(token)
            completion.logprobs.append(logprob)
            if token == completion.group.eos:
                completion.finish_reason = "stop"
            elif len(completion.tokens) == completion.group.max_tokens:
                completion.finish_reason = "length"
        self.leave()
        for group in {completion.group for completion in completions if completion.finish_reason}:
            if all(completion.finish_reason for completion in group.completions):
                group.done.set()

    # Adapters and control

    def weights(self, adapter: Adapter) -> dict:
        """An adapter's weights, read again if they were evicted; it is the last one now to be evicted."""
        if adapter not in self.resident:
            self.resident[adapter] = read_adapter(Path(adapter.path), self.linears, self.args.max_lora_rank)
        self.resident.move_to_end(adapter)
        while len(self.resident) > max(self.args.max_loras, self.args.max_cpu_loras):
            self.resident.popitem(last=False)
        return self.resident[adapter]

    def load(self, name: str, path: str) -> str:
        """Load an adapter under a name; ApiError with vLLM's message if that fails."""
        if name in self.adapters:
            message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            raise ApiError(400, message + "set 'load_inplace' to True.", "InvalidUserInput")
        adapter, now = Adapter(name, path), time.monotonic()
        try:
            if now - self.first_asked.setdefault(path, now) < self.faults.hidden_s:
                raise FileNotFoundError(path)
            if self.faults.half_seen:
                raise ValueError(f"{path} doesn't contain tensors")
            if self.faults.load_failures > 0:
                self.faults.load_failures -= 1
                raise ValueError("the stub was told to fail this load")
            self.weights(adapter)
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
        if self.adapters.pop(name, None) is None:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return f"Success: LoRA adapter '{name}' removed successfully."

    def pause(self, mode: str) -> None:
        """Stop sampling: "abort" ends what runs or waits, "keep" freezes it."""
        if mode == "abort":
            self.abort(self.groups())
        self.paused = True

    def resume(self) -> None:
        """Go on sampling."""
        self.paused = False

    def set_faults(self, changes: dict) -> dict:
        """Change some faults; all of them, or ApiError for a name that is none."""
        try:
            self.faults = dataclasses.replace(self.faults, **changes)
        except TypeError as error:
            raise ApiError(400, f"{error}; the stub's faults: {', '.join(vars(self.faults))}") from error
        return vars(self.faults)


# Routes


def check_prompt(prompt: object, max_tokens: int, engine: Engine) -> None:
    """ApiError for a prompt that the model cannot take, or that does not fit into the context with its completion."""
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise ApiError(400, "stub_vllm takes one prompt of token ids", param="prompt")
    vocabulary, context = engine.model.get_input_embeddings().num_embeddings, engine.args.max_model_len
    if outside := [token for token in prompt if not 0 <= token < vocabulary]:
        raise ApiError(400, f"Token id {outside[0]} is out of vocabulary")
    if len(prompt) + max_tokens > context:
        message = (
            f"This model's maximum context length is {context} tokens. However, you requested {max_tokens} output "
            f"tokens and your prompt contains {len(prompt)} input tokens, for a total of {len(prompt) + max_tokens} "
            "tokens. Please reduce the length of the input prompt or the number of requested output tokens."
        )
        raise ApiError(400, message, param="input_tokens")


def group_of(request: Request, engine: Engine) -> Group:
    """The group that a completion request asks for; ApiError if it cannot be served."""
    body = request.body
    for name, neutral in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(400, f"stub_vllm takes {name}={neutral[0]} only, got {body[name]}.", param=name)
    n, max_tokens, seed = request.number("n", 1), request.number("max_tokens", 16), request.number("seed", 0)
    temperature = float(request.number("temperature", 1.0))
    check_prompt(body.get("prompt"), max_tokens, engine)
    if n < 1:
        raise ApiError(400, f"n must be at least 1, got {n}.")
    if max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if temperature < 0:
        raise ApiError(400, f"temperature must be non-negative, got {temperature}.", param="temperature")
    if temperature == 0 and n > 1:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {n}.")
    eos = None if body.get("ignore_eos") else engine.tokenizer.eos_token_id
    group = Group(body["prompt"], max_tokens, temperature, eos, body.get("prompt_logprobs") is not None)
    for index in range(n):
        generator = None if body.get("seed") is None else torch.Generator().manual_seed(seed + index)
        group.completions.append(Completion(group, generator))
    return group


def complete(engine: Engine, request: Request) -> dict:
    """The answer to a completion request; a client that leaves takes its completions with it."""
    group, model = group_of(request, engine), request.body.get("model")
    time.sleep(engine.faults.slow_s)
    engine.call(engine.submit, model, group)
    while not group.done.wait(HANGUP_POLL_S):
        if is_gone(request.connection):
            engine.call(engine.abort, [group])
    engine.check_alive()
    choices = [choice_of(group, index, request.body, engine.tokenizer) for index in range(len(group.completions))]
    num_prompt, num_sampled = len(group.prompt), sum(len(completion.tokens) for completion in group.completions)
    usage = {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_sampled, "completion_tokens": num_sampled}
    head = {"object": "text_completion", "model": model or engine.args.served_model_name, "created": int(time.time())}
    return {**head, "choices": choices, "usage": usage}


def choice_of(group: Group, index: int, body: dict, tokenizer) -> dict:
    """What an answer says about one completion."""
    completion, wants_ids = group.completions[index], body.get("return_token_ids")
    prompt_logprobs = [
        {str(token): {"logprob": logprob}}
        for token, logprob in zip(group.prompt[1:], group.prompt_logprobs, strict=False)  # none if it was aborted
    ]
    return {
        "index": index,
        "text": tokenizer.decode(completion.tokens, skip_special_tokens=True),
        "logprobs": None if body.get("logprobs") is None else {"token_logprobs": completion.logprobs},
        "finish_reason": completion.finish_reason,
        "stop_reason": None,
        "token_ids": completion.tokens if wants_ids else None,
        "prompt_token_ids": group.prompt if wants_ids else None,
        "prompt_logprobs": [None, *prompt_logprobs] if group.wants_prompt_logprobs else None,
    }


def is_gone(connection: socket.socket) -> bool:
    """Whether the client closed its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        return bool(poll.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


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
    return {"object": "list", "data": [{"object": "model", "owned_by": "vllm", **card} for card in cards]}


def metrics(engine: Engine, request: Request) -> str:
    """Prometheus text with the two numbers that a router asks for."""
    counts = {"running": len(engine.running), "waiting": sum(len(group.completions) for group in list(engine.waiting))}
    label = f'{{engine="0",model_name="{engine.args.served_model_name}"}}'
    return "".join(f"vllm:num_requests_{name}{label} {float(count)}\n" for name, count in counts.items())


def server_info(engine: Engine, request: Request) -> dict:
    """The settings that a client asks for."""
    args = engine.args
    config = {
        "model_config": {"model": args.model, "dtype": f"torch.{args.dtype}", "max_model_len": args.max_model_len},
        "lora_config": {name: getattr(args, name) for name in ("max_lora_rank", "max_loras", "max_cpu_loras")},
        "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": 1, "world_size": 1},
    }
    return {"vllm_config": config}


def world_size(engine: Engine, request: Request) -> dict:
    return {"world_size": 1}


def load(engine: Engine, request: Request) -> str:
    name, path = request.text("lora_name"), request.text("lora_path")
    if not name or not path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    return engine.call(engine.load, name, path)


def unload(engine: Engine, request: Request) -> str:
    return engine.call(engine.unload, request.text("lora_name"))


def pause(engine: Engine, request: Request) -> dict:
    mode = request.query.get("mode", "abort")
    if mode not in ("abort", "keep"):
        raise ApiError(400, f"stub_vllm pauses with mode 'abort' or 'keep', not {mode!r}", param="query.mode")
    engine.call(engine.pause, mode)
    return {"status": "paused"}


def resume(engine: Engine, request: Request) -> dict:
    engine.call(engine.resume)
    return {"status": "resumed"}


def is_paused(engine: Engine, request: Request) -> dict:
    return {"is_paused": engine.paused}


def reset_prefix_cache(engine: Engine, request: Request) -> dict:
    return {"success": True}


def faults(engine: Engine, request: Request) -> dict:
    return engine.call(engine.set_faults, request.body)


def make_routes() -> dict:
    """Method and path: the function that answers. As in vLLM, two kinds of them need an environment variable."""
    routes = {
        "GET /health": health, "GET /metrics": metrics, "GET /v1/models": models, "POST /v1/completions": complete,
        "POST /stub/faults": faults,
    }  # fmt: skip
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        routes |= {
            "POST /pause": pause, "POST /resume": resume, "GET /is_paused": is_paused, "GET /server_info": server_info,
            "POST /reset_prefix_cache": reset_prefix_cache, "GET /get_world_size": world_size,
        }  # fmt: skip
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
        routes |= {"POST /v1/load_lora_adapter": load, "POST /v1/unload_lora_adapter": unload}
    return routes


# The server


class Handler(BaseHTTPRequestHandler):
    """One client connection. It stays open between requests, and is closed when it was idle for `timeout` seconds."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = float(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5"))

    def do_GET(self) -> None:
        """Call the function of this route and send what it returns."""
        url = urlsplit(self.path)
        route = self.server.routes.get(f"{self.command} {url.path}")
        try:
            request = Request(self.read_body(), dict(parse_qsl(url.query)), self.connection)
            if route is not None:
                self.send(200, route(self.server.engine, request))
            elif any(name.endswith(f" {url.path}") for name in self.server.routes):
                self.send(405, {"detail": "Method Not Allowed"})
            else:
                self.send(404, {"detail": "Not Found"})
        except ApiError as error:
            self.send(error.status, error.body)

    def do_POST(self) -> None:
        self.do_GET()

    def read_body(self) -> dict:
        """The request's JSON object, empty if it has no body."""
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
            raise ApiError(400, str(error)) from error
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if isinstance(content, dict) else "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

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
    parser.add_argument("--max-loras", type=int, default=1, help="adapters in the batch at a time (here: in memory)")
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
