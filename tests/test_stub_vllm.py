"""The contract of a replica: what design section 8 says of vLLM holds for stub_vllm.py, and for a real vLLM.

Each test runs against the stub, and with `-m vllm` against a real vLLM: the server at VLLM_URL (the toy model, started
with replica.sh's flags and --max-lora-rank 8 --max-loras 6, sees the directory VLLM_BUCKET), or one that is started
here with VLLM_PYTHON. Both are started by replica.sh (replicas.py). What only the stub has comes last.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import wait_for
from replicas import (
    BEYOND_EOS,
    CONFIG,
    KINDS,
    LONG,
    MAX_LORA_RANK,
    MAX_LORAS,
    MAX_MODEL_LEN,
    PROMPT,
    SAMPLED,
    WEIGHTS,
    Server,
    is_healthy,
    make_adapters,
    outcome,
    reference,
    started,
    tokens_and_logprobs,
    vllm_python,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from offline import stub_vllm

EOS, BOX = 1, 15  # <eos>, \boxed{


def configured(**changes):
    """An edit of a config file."""
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def tensors(edit):
    """An edit of a weights file: what becomes of each key and tensor."""
    return lambda data: safetensors.torch.save(dict(edit(*item) for item in safetensors.torch.load(data).items()))


# A file of a good adapter, its edit (None: it is not there), and the cause in the message of the load.
UNREADABLE = {
    "no config": (CONFIG, None, "No adapter found for "),  # A01, A03
    "no weights": (WEIGHTS, None, "doesn't contain tensors"),  # A03
    "empty weights": (WEIGHTS, lambda _: b"", "Error while deserializing header: header too small"),  # A04
    "half weights": (WEIGHTS, lambda data: data[: len(data) // 2], "incomplete metadata, file not fully covered"),
    "short weights": (WEIGHTS, lambda data: data[:100], "Error while deserializing header: invalid header length"),
    "empty config": (CONFIG, lambda _: b"", "Expecting value: line 1 column 1 (char 0)"),  # A05
    "half config": (CONFIG, lambda data: data[: data.index(b"target_mod")], "Unterminated string starting at: "),
    "rank": (CONFIG, configured(r=16), "LoRA rank 16 is greater than max_lora_rank 8."),  # A07
    "dora": (CONFIG, configured(use_dora=True), "vLLM does not yet support DoRA."),  # A09
    "saved": (CONFIG, configured(modules_to_save=["lm_head"]), "vLLM only supports modules_to_save being "),
    "bias": (CONFIG, configured(bias="all"), "Adapter bias is not supported."),
}
ACCEPTED = {  # although it is wrong
    "prefix": (WEIGHTS, tensors(lambda k, v: (k.replace("base_model.model.", "policy."), v))),
    "cut": (WEIGHTS, tensors(lambda k, v: (k, v[:64].clone() if "q_proj.lora_B" in k else v))),  # A12
    "nan": (WEIGHTS, tensors(lambda k, v: (k, v * float("nan")))),  # A11
}


# Servers and adapters


@pytest.fixture(scope="session")
def adapters(toy_dir, tmp_path_factory) -> Path:
    return make_adapters(toy_dir, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session", params=KINDS)
def shared(request, toy_dir, adapters, tmp_path_factory):
    """A server of each kind for all tests that do no lasting harm."""
    if request.param == "vllm" and "VLLM_URL" in os.environ:
        yield Server(os.environ["VLLM_URL"], Path(os.environ["VLLM_BUCKET"]), adapters, None, "vllm")
    else:
        with started(request.param, toy_dir, adapters, tmp_path_factory.mktemp(request.param)) as server:
            yield server


@pytest.fixture
def server(shared):
    """The shared server; the next test finds nothing loaded, no pause and no faults."""
    yield shared
    shared.post("/resume")
    if shared.kind == "stub":
        shared.post("/stub/faults", vars(stub_vllm.Faults()))
    for name in [name for name, card in shared.models().items() if card["parent"]]:
        shared.unload(name)


only_stub = pytest.mark.parametrize("shared", ["stub"], indirect=True)


@pytest.fixture(scope="session")
def peft(toy_dir, adapters):
    return reference(toy_dir, adapters)


# Loading and unloading


@pytest.mark.parametrize("variant", UNREADABLE)
def test_adapter_that_cannot_be_read_is_an_error_with_its_cause_and_leaves_nothing_behind(server, variant):
    name, (file, _, cause) = server.publish("good", *UNREADABLE[variant][:2]), UNREADABLE[variant]
    status, message = outcome(server.load(name))
    wrapped = "Call to add_lora method failed: " if status == 500 else f"Loading lora {name} failed: "
    assert (status, message[: len(wrapped)]) == (404 if variant == "no config" else 500, wrapped)
    assert cause in message
    assert name not in server.models()
    assert server.get("/health").status_code == 200
    shutil.copy(server.adapters / "good" / file, server.bucket / name / file)
    assert server.load(name).status_code == 200


def test_loads_and_unloads_answer_in_plain_text_and_refuse_to_be_repeated(server):
    name, adapter, in_place = server.publish(), "The lora adapter", "in place, set 'load_inplace' to True."
    answer = server.load(name, canary={"tokens": [3, 3]})  # fields it does not know are ignored
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    card = server.models()[name]
    assert (card["root"], card["parent"]) == (str(server.bucket / name), server.base())
    with ThreadPoolExecutor(6) as pool:  # A26
        codes = [answer.status_code for answer in pool.map(server.load, [server.publish()] * 6)]
    assert sorted(codes) == [200, 400, 400, 400, 400, 400]
    again = outcome(server.load(name))
    assert again == (400, f"{adapter} '{name}' has already been loaded. If you want to load the adapter {in_place}")
    answer = server.unload(name)
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' removed successfully.")
    assert outcome(server.unload(name)) == (404, f"{adapter} '{name}' cannot be found.")
    status, message = outcome(server.load("nobody"))  # A01: the directory is not there
    assert (status, message.split(" for ")[0]) == (404, "Loading lora nobody failed: No adapter found")


def test_unknown_or_unloaded_model_is_a_404_and_no_model_is_the_base(server, peft):  # A14, A22
    server.unload(unloaded := server.loaded())
    for model in (unloaded, "nobody"):
        status, message = outcome(server.complete(model))
        assert status == 404
        assert message.startswith(f"The model `{model}` does not exist.")
    assert server.prompt_logprobs(None) == peft(None)


def test_adapter_under_the_base_models_name_answers_for_it(server, peft):  # A13; vLLM 0.32 refuses it
    base, path = server.base(), server.bucket / server.publish()
    answer = server.post("/v1/load_lora_adapter", {"lora_name": base, "lora_path": str(path)})
    is_refused = server.kind == "vllm" and "conflicts with a served base model" in answer.text
    assert server.prompt_logprobs(base) == peft(None if is_refused else "good")
    assert server.unload(base).status_code == (404 if is_refused else 200)
    assert server.prompt_logprobs(base) == peft(None)


def test_adapter_beyond_the_limit_is_evicted_silently_and_read_again(server, peft):  # A20, A21
    kept, evicted = server.loaded(), server.loaded()
    shutil.rmtree(server.bucket / kept)
    shutil.copytree(server.adapters / "other", server.bucket / evicted, dirs_exist_ok=True)
    assert server.prompt_logprobs(evicted) == peft("good")  # from memory
    for _ in range(MAX_LORAS - 1):
        assert server.prompt_logprobs(kept) == peft("good")  # so it is never the least recently used
        server.loaded()
    assert evicted in server.models()
    assert server.prompt_logprobs(evicted) == peft("other")


def test_unloaded_adapter_serves_what_already_runs(server, peft):
    name = server.loaded()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.choices, name, n=64, **LONG)
        wait_for(lambda: server.num_running() > 0)
        assert server.unload(name).status_code == 200
        tokens, logprobs = tokens_and_logprobs(running.result()[0])
    assert len(tokens) == LONG["max_tokens"]
    assert logprobs == peft("good", PROMPT, tokens, atol=BEYOND_EOS)


def test_wrong_keys_and_shapes_are_loaded(server, peft):  # A12
    assert server.prompt_logprobs(server.loaded("good", *ACCEPTED["prefix"])) == peft(None)
    answer = server.complete(name := server.loaded("good", *ACCEPTED["cut"]), max_tokens=1, prompt_logprobs=0)
    assert answer.status_code in (200, 400)  # 400 if vLLM's slot held NaN before
    assert answer.status_code == 400 or server.prompt_logprobs(name) != peft("good")


# Completions


def test_completion_has_ids_logprobs_prompt_ids_and_the_reason_for_its_end(server):
    answer = server.complete(server.base(), n=2, max_tokens=40).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == PROMPT
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert tokens_and_logprobs(choice)[0][-1] == EOS
        assert choice["text"].endswith("}")  # without eos
    num_tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["usage"]["total_tokens"] == len(PROMPT) + num_tokens
    (alone,) = server.choices(server.base(), [*PROMPT, BOX, 3, 5, 4, 16], temperature=0)
    assert (alone["text"], alone["finish_reason"], tokens_and_logprobs(alone)[0]) == ("", "stop", [EOS])  # B17
    (cut,) = server.choices(server.base(), max_tokens=3)
    assert (cut["finish_reason"], len(cut["token_ids"])) == ("length", 3)


def test_adapters_in_one_batch_are_sampled_with_their_own_logprobs_at_the_temperature(server, peft):
    models = {server.loaded(): "good", server.loaded("other"): "other"}
    if server.kind == "stub":  # vLLM's CPU build gives the base model the last slot's adapter in a mixed batch
        models[server.base()] = None
    asked = list(itertools.product(models, [PROMPT, [3, 3, 12, 4, 4, 13, 15], [9]], [1.0, 0.7]))
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda one: server.choices(*one[:2], n=3, max_tokens=25, temperature=one[2]), asked)
    for (model, prompt, temperature), choices in zip(asked, answers, strict=True):
        for tokens, logprobs in map(tokens_and_logprobs, choices):
            assert logprobs == peft(models[model], prompt, tokens, temperature, SAMPLED)


def test_prompt_logprobs_are_pefts_whatever_the_temperature(server, peft):
    name, tokens = server.loaded(), [*PROMPT, BOX, 3, 5, 4, 16, EOS]
    for temperature in (0, 0.5, 2.0):
        assert server.prompt_logprobs(name, tokens, temperature=temperature) == peft("good", tokens)


def test_sampled_tokens_follow_the_models_distribution(server, peft):
    share = math.exp(peft(None, PROMPT, [BOX]).expected[0])
    choices = server.choices(server.base(), n=512, max_tokens=1, seed=1)
    count = sum(choice["token_ids"] == [BOX] for choice in choices)
    assert abs(count - 512 * share) < 4 * (512 * share * (1 - share)) ** 0.5


def test_seed_repeats_a_completion_and_temperature_zero_takes_the_likeliest_token(server, peft):
    one, again = (server.choices(server.base(), n=2, seed=5, max_tokens=20) for _ in range(2))
    assert [choice["token_ids"] for choice in one] == [choice["token_ids"] for choice in again]
    assert one[0]["token_ids"] != one[1]["token_ids"]
    tokens, logprobs = tokens_and_logprobs(server.choices(server.base(), temperature=0)[0])
    for position, logprob in enumerate(logprobs):
        every = [peft(None, PROMPT + tokens[:position], [token]).expected[0] for token in range(17)]
        assert logprob == pytest.approx(max(every), abs=SAMPLED)


BAD_REQUESTS = [
    ({"prompt": [99]}, "Token id 99 is out of vocabulary"),
    ({"prompt": [3] * 70}, "This model's maximum context length is 64 tokens."),  # E13
    ({"prompt": []}, ""),
    ({}, ""),
    ({"prompt": PROMPT, "n": "two"}, ""),
    ({"prompt": PROMPT, "n": 0}, "n must be at least 1, got 0."),
    ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"prompt": PROMPT, "temperature": -1}, "temperature must be non-negative, got -1.0."),
    ({"prompt": PROMPT, "temperature": 0, "n": 2}, "n must be 1 when using greedy sampling, got 2."),
]


def test_request_that_cannot_be_served_is_a_400_and_an_unknown_route_a_404_or_405(server):
    for body, message in BAD_REQUESTS:
        status, found = outcome(server.post("/v1/completions", body))
        assert (status, found[: len(message)]) == (400, message)
    for body in ({"lora_name": "x"}, {"lora_path": "/x"}, {"lora_name": "", "lora_path": ""}, {}):
        assert outcome(server.post("/v1/load_lora_adapter", body))[0] == 400
    assert server.post("/pause?mode=maybe").status_code == 400
    assert (server.get("/nope").status_code, server.get("/nope").json()) == (404, {"detail": "Not Found"})
    assert (server.get("/v1/completions").status_code, server.post("/health").status_code) == (405, 405)
    assert server.get("/health").status_code == 200


def test_server_tells_its_lora_and_parallel_settings(server):
    config = server.get("/server_info?config_format=json").json()["vllm_config"]
    lora, model = config["lora_config"], config["model_config"]
    assert (lora["max_lora_rank"], lora["max_loras"]) == (MAX_LORA_RANK, MAX_LORAS)
    assert (model["dtype"], model["max_model_len"]) == ("torch.float32", MAX_MODEL_LEN)
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert server.get("/get_world_size").json() == {"world_size": 1}


# Pause, health, connections


@contextlib.contextmanager
def long_completions(server):
    """Two requests whose 64 completions all run now; their futures."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(server.choices, server.base(), n=32, **LONG) for _ in range(2)]
        wait_for(lambda: server.num_running() == 64)
        yield futures


def test_pause_aborts_what_runs_and_what_comes_later_waits_while_loads_go_on(server):  # E24, B16
    with long_completions(server) as running:
        answer = server.post("/pause")
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        for choice in (choice for future in running for choice in future.result()):
            assert choice["finish_reason"] == "abort"
            assert len(tokens_and_logprobs(choice)[0]) < LONG["max_tokens"]
    server.loaded()
    assert server.get("/health").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.choices, server.base(), n=2)
        wait_for(lambda: server.post("/pause").status_code == 200 and waiting.done())
        for choice in waiting.result():
            assert (choice["finish_reason"], choice["token_ids"], choice["text"]) == ("abort", [], "")
        waiting = pool.submit(server.choices, server.base(), max_tokens=3)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        server.post("/resume")
        assert len(waiting.result()[0]["token_ids"]) == 3


def test_keep_freezes_and_resume_goes_on(server, peft):
    with long_completions(server) as running:
        assert [server.post("/pause?mode=keep").json() for _ in range(2)] == [{"status": "paused"}] * 2
        assert server.get("/is_paused").json() == {"is_paused": True}
        assert not any(future.done() for future in running)
        assert [server.post("/resume").json() for _ in range(2)] == [{"status": "resumed"}] * 2
        for choice in (choice for future in running for choice in future.result()):
            tokens, logprobs = tokens_and_logprobs(choice)
            assert choice["finish_reason"] == "length"
            assert logprobs == peft(None, PROMPT, tokens, atol=BEYOND_EOS)


def test_client_that_hangs_up_stops_its_completions(server):
    with server.asking(server.base(), n=64, **LONG):
        wait_for(lambda: server.num_running() > 0)
        server.post("/pause?mode=keep")  # so that they cannot end by themselves
    wait_for(lambda: server.num_running() == 0)


def test_nan_weights_are_loaded_and_their_logprobs_are_a_400(server):  # A11
    name = server.loaded("good", *ACCEPTED["nan"])
    assert outcome(server.complete(name)) == (400, "Out of range float values are not JSON compliant")
    assert server.complete(name, logprobs=None).status_code == 200
    if server.kind == "stub":  # in vLLM's CPU build NaN stay in the KV cache and spoil later requests: so this is last
        assert server.complete(server.base()).status_code == 200


# Servers of their own


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_adapter_whose_directory_is_gone_kills_the_engine(kind, toy_dir, adapters, tmp_path):  # A18
    with started(kind, toy_dir, adapters, tmp_path) as own, ThreadPoolExecutor(1) as pool:
        gone, *_ = (own.loaded() for _ in range(MAX_LORAS + 1))
        shutil.rmtree(own.bucket / gone)
        bystander = pool.submit(own.complete, own.base(), n=32, **LONG)
        wait_for(lambda: own.num_running() > 0)
        for answer in (own.complete(gone), bystander.result()):
            assert outcome(answer) == (500, stub_vllm.DEAD_ENGINE)
        wait_for(lambda: not is_healthy(own.url))
        assert own.process.wait(60) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_server_without_its_environment_lacks_routes_and_closes_idle_connections(kind, toy_dir, adapters, tmp_path):
    bare = tmp_path / "python"
    unset = "env -u VLLM_ALLOW_RUNTIME_LORA_UPDATING -u VLLM_SERVER_DEV_MODE VLLM_HTTP_TIMEOUT_KEEP_ALIVE=1"
    bare.write_text(f'#!/bin/sh\nexec {unset} {sys.executable if kind == "stub" else vllm_python()} "$@"\n')
    bare.chmod(0o755)
    with started(kind, toy_dir, adapters, tmp_path, str(bare)) as server:
        answers = [server.load(server.publish()), server.get("/server_info")]  # A02
        answers += [server.post(path) for path in ("/pause", "/resume", "/reset_prefix_cache")]
        assert [(answer.status_code, answer.json()) for answer in answers] == [(404, {"detail": "Not Found"})] * 5
        with server.connection() as client:
            client.connect()
            sock = client.sock
            for _ in range(2):
                client.request("GET", "/health")
                assert client.getresponse().read() == b""
            assert client.sock is sock  # it was kept
            assert sock.recv(1) == b""  # and is closed after an idle second
        if kind == "stub":
            assert server.post("/stub/faults", {"crash": True}).json()["crash"] is True
            assert server.process.wait(30) == 1


# What only the stub has


@only_stub
def test_stub_goes_wrong_as_asked_and_refuses_what_it_would_answer_otherwise(server):  # B10
    def fault(**changes):
        return server.post("/stub/faults", changes).status_code

    assert [fault(load_failures=1), fault(no_such_fault=1)] == [200, 400]
    name = server.publish()
    assert [server.load(name).status_code for _ in range(2)] == [500, 200]
    fault(hidden_s=0.3)
    name = server.publish()
    assert outcome(server.load(name))[0] == 404
    wait_for(lambda: server.load(name).status_code == 200)
    fault(hidden_s=0, half_seen=True, slow_s=0.3)
    assert "doesn't contain tensors" in outcome(server.load(server.publish()))[1]
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stream": False, "stop": []}
    other = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stream": True, "stop": ["}"]}
    began = time.monotonic()
    assert server.complete(server.base(), **neutral).status_code == 200
    assert time.monotonic() - began >= 0.3
    for name, value in other.items():
        status, message = outcome(server.complete(server.base(), **{name: value}))
        assert (status, name in message) == (400, True)


def test_another_model_family_is_sampled_with_its_own_logprobs(toy_dir, tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 17, "initializer_range": 0.3}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", tie_word_embeddings=True, **shape)).eval()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(toy_dir).save_pretrained(tmp_path)
    engine = stub_vllm.Engine(Namespace(model=str(tmp_path), dtype="float32", max_model_len=64), stub_vllm.Faults())
    groups = [
        stub_vllm.group_of(stub_vllm.Request({"prompt": prompt, "n": 3, **LONG}, {}, None), engine)
        for prompt in (PROMPT, [4, 3, 4, 4, 4, 4], [5, 7])
    ]
    with torch.inference_mode():
        for group in groups:
            engine.submit(None, group)
        while engine.groups():
            engine.turn()
        for completion in (completion for group in groups for completion in group.completions):
            ids = torch.tensor([completion.group.prompt + completion.tokens])
            expected = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            assert completion.logprobs == pytest.approx(expected[-LONG["max_tokens"] :].tolist(), abs=SAMPLED)
