"""The proxy: CPU and latency it adds, what it can do at most, and what clients notice of replicas that are killed."""

import argparse
import asyncio
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import requests

from benches.figures import figure
from tests import fake_replica

ROOT = Path(__file__).resolve().parent.parent
KB_PER_COMPLETION = 40  # what vLLM answers for 3,000 tokens with ids and logprobs
GROUP = 8


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


# Replicas that cost nothing: they answer after a delay, from memory


async def answer_canned(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: tuple) -> None:
    """Serve one connection: completions after a random delay, which a header tells, and what the proxy asks for."""
    models = b'{"data": [{"id": "base", "root": "base", "parent": null}]}'
    rows = [None, *({str(token): {"logprob": -1.0}} for token in (2, 3, 4))]
    canary = json.dumps({"choices": [{"prompt_logprobs": rows}]}).encode()
    while head := await reader.readuntil(b"\r\n\r\n"):
        lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body, delay = await reader.readexactly(sum(lengths)), 0.0
        if b"prompt_logprobs" in body:
            data = canary
        elif b"/v1/completions" in head:
            delay = random.uniform(*delay_s)
            await asyncio.sleep(delay)
            data = b"x" * (KB_PER_COMPLETION * 1000 * json.loads(body).get("n", 1))
        else:
            data = models
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Delay-S: %f\r\nContent-Length: %d\r\n\r\n"
                     % (delay, len(data)))  # fmt: skip
        writer.write(data)
        await writer.drain()


def serve_canned(urls: multiprocessing.Queue, num: int, delay_s: tuple) -> None:
    """A process with `num` such replicas; their URLs go into the queue."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer_canned(reader, writer, delay_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        servers = [await asyncio.start_server(connected, "127.0.0.1", 0, backlog=2048) for _ in range(num)]
        urls.put([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(main())


def start_canned(num: int, delay_s: tuple) -> tuple[multiprocessing.Process, list[str]]:
    urls = multiprocessing.Queue()
    process = multiprocessing.Process(target=serve_canned, args=(urls, num, delay_s), daemon=True)
    process.start()
    return process, urls.get(timeout=30)


def start_proxy(replicas: list[str], bucket: str, *flags: str) -> tuple[subprocess.Popen, str]:
    """A proxy as a process of its own, with all replicas ready, and its URL."""
    urls = ",".join(replicas)
    command = [sys.executable, str(ROOT / "proxy.py"), f"--replicas={urls}", "--port=0", f"--bucket={bucket}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = next(line for line in process.stdout if "listening on" in line).split()[-1]
    threading.Thread(target=process.stdout.read, daemon=True).start()  # or its events would fill the pipe
    deadline = time.monotonic() + 60
    while requests.get(f"{url}/proxy/stats", timeout=30).json()["ready"] < len(replicas):
        if time.monotonic() > deadline:
            raise TimeoutError("the replicas did not become ready in 60 s")
        time.sleep(0.1)
    return process, url


# Load


async def drive(urls: list[str], num_inflight: int, num_requests: int, n: int) -> tuple[list[float], int]:
    """Send completion requests, `num_inflight` at a time: seconds beyond the replica's delay of each, and errors.

    The first request of each connection is not timed: all of them start at once.
    """
    todo, over_s, errors = iter(range(num_requests)), [], 0

    async def worker(url: str) -> None:
        nonlocal errors
        host, port = url.removeprefix("http://").split(":")
        writer = None
        for turn, i in enumerate(todo):
            prompt = [random.randrange(500) for _ in range(128)]
            body = json.dumps({"model": "base", "prompt": prompt, "n": n, "user": str(i)}).encode()
            start = time.perf_counter()
            if writer is None:
                reader, writer = await asyncio.open_connection(host, int(port), limit=2**22)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
            await reader.readexactly(int(headers["content-length"]))
            if turn:
                over_s.append(time.perf_counter() - start - float(headers.get("x-delay-s", 0)))
            errors += " 200 " not in head[0]
            if headers.get("connection") == "close":
                writer.close()
                writer = None

    ended = await asyncio.gather(*(worker(urls[i % len(urls)]) for i in range(num_inflight)), return_exceptions=True)
    return over_s, errors + sum(isinstance(end, BaseException) for end in ended)


def measure(urls: list[str], num_inflight: int, num_requests: int, n: int, pid: int | None = None) -> SimpleNamespace:
    """Latency beyond the replica's (ms), errors, requests/s, and the CPU seconds and MiB of the process `pid`."""
    process = psutil.Process(pid) if pid else None
    cpu, start = sum(process.cpu_times()[:2]) if process else 0.0, time.monotonic()
    over_s, errors = asyncio.run(drive(urls, num_inflight, num_requests, n))
    wall_s = time.monotonic() - start
    return SimpleNamespace(
        p50_ms=1000 * percentile(over_s, 0.5), p99_ms=1000 * percentile(over_s, 0.99), errors=errors,
        per_s=num_requests / wall_s, cpu_s=sum(process.cpu_times()[:2]) - cpu if process else 0.0,
        rss_mib=process.memory_info().rss / 2**20 if process else 0.0,
    )  # fmt: skip


def latency_figures(bucket: str, against: str) -> list[dict]:
    """384 completions in flight, replicas that take 2 to 6 s: CPU and added latency of the proxy."""
    replicas, urls = start_canned(2, (2, 6))
    proxy, url = start_proxy(urls, bucket)
    figures = []
    try:
        for name, inflight, n, aim in (("single requests", 384, 1, 1.6), ("groups of 8", 48, GROUP, 0.4)):
            direct = measure(urls, inflight, 4 * inflight, n)
            measure([url], inflight, 2 * inflight, n)  # opens the proxy's connections
            ours = measure([url], inflight, 4 * inflight, n, proxy.pid)
            other = measure([against], inflight, 4 * inflight, n) if against else None
            beside = (
                {"other_p50": other.p50_ms - direct.p50_ms, "other_p99": other.p99_ms - direct.p99_ms} if other else {}
            )
            label = f"384 in flight, {name}"
            figures += [
                figure(f"{label}: proxy CPU per 1000 rollouts", 1000 * ours.cpu_s / (4 * inflight * n), aim, "s"),
                figure(f"{label}: added latency p50", ours.p50_ms - direct.p50_ms, 2, "ms", **beside),
                figure(f"{label}: added latency p99", ours.p99_ms - direct.p99_ms, 10, "ms"),
                figure(f"{label}: errors", ours.errors, 0),
            ]
        crowd = measure([url], 1024, 2048, 1, proxy.pid)
        figures += [figure("1024 in flight: errors", crowd.errors, 0),
                    figure("1024 in flight: memory", crowd.rss_mib, 150, "MiB")]  # fmt: skip
    finally:
        proxy.kill()
        replicas.kill()
    return figures


def saturation_figures(bucket: str, against: str) -> list[dict]:
    """256 requests in flight, replicas that take 20 ms: how much the proxy can do."""
    replicas, urls = start_canned(2, (0.02, 0.02))
    proxy, url = start_proxy(urls, bucket)
    try:
        single = measure([url], 256, 8000, 1, proxy.pid)
        group = measure([url], 256, 2000, GROUP, proxy.pid)
        other = measure([against], 256, 4000, 1) if against else None
    finally:
        proxy.kill()
        replicas.kill()
    beside = {"other_per_s": other.per_s} if other else {}
    return [
        figure("saturated, 20 ms replicas: single requests", single.per_s, 1200, "/s", True,
               cpu_ms=1000 * single.cpu_s / 8000, **beside),
        figure("saturated: rollouts/s in groups over single", GROUP * group.per_s / single.per_s, 2, "x", True,
               rollouts_per_s=GROUP * group.per_s, cpu_ms=1000 * group.cpu_s / 2000),
        figure("saturated: errors", single.errors + group.errors, 0),
    ]  # fmt: skip


# Replicas that die


def start_fake(port: int = 0) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, fake_replica.__file__, f"--port={port}", "--latency-s", "2", "6"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


def publish(url: str, bucket: str, version: int) -> str:
    """Write an adapter, load it through the proxy and retire the one four versions older; the policy's name."""
    path = Path(bucket) / f"v{version}"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"r": 1}')
    (path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"%d" % version)
    load = {"lora_name": f"run-a1-v{version}", "lora_path": str(path)}
    answer = requests.post(f"{url}/v1/load_lora_adapter", json=load, timeout=300)
    if not answer.ok:
        print(
            answer.text, *[e["text"] for e in requests.get(f"{url}/proxy/stats", timeout=30).json()["events"]], sep="\n"
        )
    answer.raise_for_status()
    if version >= 4:
        requests.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": f"run-a1-v{version - 4}"}, timeout=300)
    return load["lora_name"]


def ask_group(url: str, bucket: str, policy: str, seed: int) -> tuple[str, str]:
    """One group through the proxy: "right", "wrong policy", or what went wrong; and the id of its generation."""
    prompt = [seed % 500, seed // 500 % 500, 7]
    body = {"model": policy, "prompt": prompt, "n": GROUP, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=300)
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:200]}", ""
    weights = fake_replica.weights_in(f"{bucket}/{policy.removeprefix('run-a1-')}")
    wanted = [fake_replica.sampled(weights, prompt, index, 8) for index in range(GROUP)]
    right = [choice["token_ids"] for choice in answer.json()["choices"]] == wanted
    return "right" if right else "wrong policy", answer.json()["id"]


def kill_figures(bucket: str, kill_s: float) -> list[dict]:
    """3 replicas, one killed and restarted every 10 s, policies moving, 200 groups in flight: what clients notice."""
    fakes = [start_fake() for _ in range(3)]
    proxy, url = start_proxy([url for _, url in fakes], bucket)
    newest, version = publish(url, bucket, 0), 0
    end, results, generations = time.monotonic() + kill_s, Counter(), Counter()

    def client(first: int) -> None:
        for seed in range(first, 10**9, 200):
            if time.monotonic() > end:
                return
            verdict, generation = ask_group(url, bucket, newest, seed)
            results[verdict] += 1
            generations[generation] += 1

    try:
        with ThreadPoolExecutor(200) as pool:
            clients = [pool.submit(client, first) for first in range(200)]
            while time.monotonic() < end:
                time.sleep(min(10, max(0, end - time.monotonic())))
                victim = version % 3
                fakes[victim][0].kill()
                version += 1
                newest = publish(url, bucket, version)
                fakes[victim] = start_fake(int(fakes[victim][1].rsplit(":", 1)[1]))
            for done in clients:
                done.result()
        state = requests.get(f"{url}/proxy/stats", timeout=30).json()
        unused = sum(generations.values()) - len(generations)  # one generation, two answers
        for process, fake in fakes:  # and those whose answer nobody got
            answered = sum(id.startswith(f"cmpl-{process.pid}-") for id in generations)
            unused += requests.get(f"{fake}/fake/state", timeout=30).json()["finished"] - answered
    finally:
        proxy.kill()
        for process, _ in fakes:
            process.kill()
    lost = {text: num for text, num in results.items() if text not in ("right", "wrong policy")}
    print("".join(f"  lost {num}: {text}\n" for text, num in lost.items()), end="")
    inflight = sum(replica["inflight"] for replica in state["replicas"])
    return [
        figure(f"{version} kills in {kill_s:.0f} s: groups lost", sum(lost.values()), 0, answered=results["right"],
               sent_again=state["counts"].get("sent again", 0)),
        figure("answers under a wrong policy", results["wrong policy"], 0),
        figure("groups generated twice for one answer", unused, 0),
        figure("in flight afterwards", inflight, 0),
    ]  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py proxy`."""
    parser.add_argument("--against", default="", metavar="URL", help="another proxy before the same kind of replicas")
    parser.add_argument("--kill-s", type=float, default=120.0, help="seconds of the run with kills; 0: none")


def run(args: argparse.Namespace) -> list[dict]:
    """Cost, capacity and survival of the proxy."""
    with tempfile.TemporaryDirectory() as bucket:
        figures = [*latency_figures(bucket, args.against), *saturation_figures(bucket, args.against)]
        return figures + (kill_figures(bucket, args.kill_s) if args.kill_s else [])
