"""The proxy's pure functions: routing by prefix and what vLLM's answers mean, with numbers worked out by hand."""

import email.utils
import json
from types import SimpleNamespace

import pytest

from serving import routing, vllm


def test_attempt_is_read_from_our_names_only():
    assert vllm.attempt_of("sanity-a1796066416123-v37") == ("sanity", 1796066416123)
    assert vllm.attempt_of("a-b-a12-v3-a7-v0") == ("a-b-a12-v3", 7)
    assert vllm.attempt_of("trl-policy-v3") is vllm.attempt_of("run-a12-v3-lora") is None


@pytest.mark.parametrize(("num_ids", "num_blocks"), [(0, 0), (15, 0), (16, 1), (135, 8)])
def test_only_full_blocks_are_hashed(num_ids, num_blocks):
    """E19: 15, 16 and 135 tokens are 0, 1 and 8 blocks of 16."""
    assert len(routing.block_hashes("v3", list(range(num_ids)))) == num_blocks


def test_block_hashes_are_chained_and_seeded_with_the_policy():
    """E18: another policy shares no block; a changed first block changes the equal second one too."""
    ids, changed, hashes = list(range(32)), [99, *range(1, 32)], routing.block_hashes
    assert not set(hashes("v3", ids)) & set(hashes("v4", ids))
    assert not set(hashes("v3", ids)) & set(hashes("v3", changed))
    assert hashes("v3", ids)[0] == hashes("v3", ids[:16] + changed[16:])[0]


def test_completions_are_counted_and_only_one_prompt_of_ids_is_routed_by_its_prefix():
    """E19: text, a batch, ids that are no ids: no affinity and no crash."""

    def read(**body):
        return vllm.read_completion(json.dumps({"model": "m"} | body).encode())

    assert read(prompt=[1, 2], n=8)["num"] == 8
    assert read(prompt=[1, 2])["num"] == read(prompt="text", n=None)["num"] == read(prompt=[1], n=0)["num"] == 1
    assert read(prompt=[[1], [2], [3]], n=2)["num"] == read(prompt=["a", "b", "c"], n=2)["num"] == 6
    for prompt in ("text", ["a", "b"], [[1] * 32, [2] * 32], [], None):
        assert read(prompt=prompt)["ids"] is None
    assert routing.block_hashes("m", [-1] * 32) == routing.block_hashes("m", [1, "x"] * 16) == []


def replicas(*inflight: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(id=str(i), bit=1 << i, inflight=num) for i, num in enumerate(inflight)]


def choose(router: routing.Router, hashes: list[int], fleet: list[SimpleNamespace], max_imbalance: int = 8) -> str:
    everyone = sum(replica.bit for replica in fleet)
    replica = router.choose(hashes, fleet, everyone, max_imbalance)
    router.note("v1", hashes, replica.bit)
    return replica.id


def test_owner_is_kept_at_the_limit_and_left_above_it():
    """E17: limit 8; an owner 8 ahead keeps the prompt, 9 ahead it spills to the least loaded."""
    for ahead, wanted in ((8, "0"), (9, "1")):
        router = routing.Router(1000)
        router.note("v1", [11, 12], 1)
        assert choose(router, [11, 12], replicas(ahead + 3, 3, 5)) == wanted
    assert router.counts == {"affinity": 0, "spilled": 1, "unmatched": 0}


def test_prompts_that_match_nothing_take_turns():
    router, fleet = routing.Router(1000), replicas(0, 0, 0)
    assert sorted(choose(router, [key], fleet) for key in (1001, 1002, 1003)) == ["0", "1", "2"]
    assert router.counts["unmatched"] == 3


def test_blocks_that_branch_are_common_and_say_nothing():
    """Blocks 10, 11 are a system prompt: followed by 21 and by 31. Only what comes after 11 is a prompt's own."""
    router = routing.Router(1000)
    router.note("v1", [10, 11, 21, 22], 1)
    assert router.owners([10, 11, 21, 22], 0b11) == 1  # nothing branches yet
    assert router.owners([10, 11, 31], 0b11) == 0  # this prompt makes 11 branch
    router.note("v1", [10, 11, 31], 2)
    assert router.owners([10, 11, 21, 22], 0b111) == 1
    assert router.owners([10, 11, 31], 0b111) == 2
    assert router.owners([10, 11], 0b111) == 0


def test_blocks_that_every_replica_served_say_nothing():
    router = routing.Router(1000)
    router.note("v1", [1, 2], 1)
    router.note("v1", [1, 2], 2)
    assert router.owners([1, 2], 0b11) == 0
    assert router.owners([1, 2], 0b111) == 0b11  # a third replica that is ready has not served them


def test_a_longer_prompt_follows_its_prefix():
    """Multi-turn: the second turn extends the first, which is no branch."""
    router = routing.Router(1000)
    router.note("v1", [1, 2, 3], 2)
    assert router.owners([1, 2, 3, 4, 5], 0b11) == 2


def test_routing_table_is_bounded_and_keeps_what_was_used_last():
    router = routing.Router(4)
    router.note("v1", [1, 2], 1)
    router.note("v1", [3, 4], 1)
    router.note("v1", [1, 2], 1)
    router.note("v1", [5, 6], 1)
    assert list(router.blocks) == [1, 2, 5, 6]


def test_blocks_of_retired_policies_and_lost_replicas_are_dropped():
    router = routing.Router(1000)
    router.note("v1", [1, 2], 1)
    router.note("v2", [3], 1)
    router.note("v2", [3, 4], 2)
    router.forget_policy("v1")
    assert list(router.blocks) == [3, 4]
    router.forget_replica(2)
    assert {key: block.owners for key, block in router.blocks.items()} == {3: 1}


def test_shared_system_prompt_does_not_pull_everything_to_one_replica():
    """E16: 100 prompts of 64 shared and 80 own tokens, 8 calls each, 2 replicas, 16 completions in flight."""
    router, fleet, inflight, warm = routing.Router(100_000), replicas(0, 0), [], set()
    load, hits = [0, 0], 0
    for prompt in range(100):
        ids = [*range(64), *(1000 + 80 * prompt + i for i in range(80))]
        for _ in range(8):
            chosen = int(choose(router, routing.block_hashes("v1", ids), fleet))
            hits += (prompt, chosen) in warm
            warm.add((prompt, chosen))
            load[chosen] += 1
            fleet[chosen].inflight += 1
            inflight.append(chosen)
            if len(inflight) > 16:
                fleet[inflight.pop(0)].inflight -= 1
    assert max(load) / min(load) <= 1.2
    assert hits / 800 >= 0.85


WORKER = "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace above"


@pytest.mark.parametrize(
    ("status", "text", "verdict"),
    [
        (200, "Success: LoRA adapter 'x' added successfully.", "loaded"),
        (404, "Loading lora x failed: No adapter found for <path>", "late"),  # A01
        (404, "Not Found", "final"),  # A02
        (500, WORKER.format("/b/x doesn't contain tensors"), "late"),  # A03
        (500, WORKER.format("Error while deserializing header: header too small"), "late"),  # A04
        (500, WORKER.format("Unterminated string starting at: line 1 column 9 (char 8)"), "late"),  # A05
        (500, WORKER.format("LoRA rank 32 is greater than max_lora_rank 16."), "final"),  # A07
        (500, WORKER.format("vLLM does not yet support DoRA."), "final"),  # A09
        (400, "The lora adapter 'x' has already been loaded. If you want to load", "unclear"),
        (500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "unclear"),
        (503, "", "late"),
        (401, "Invalid username or password.", "final"),
    ],
)
def test_answers_to_a_load_are_told_apart_by_what_they_say(status, text, verdict):
    assert vllm.load_verdict(status, text) == verdict


@pytest.mark.parametrize("form", [WORKER + " for the root cause", "Call to add_lora method failed: {}"])
def test_messages_name_the_cause_and_the_cure(form):
    message = form.format("LoRA rank 32 is greater than max_lora_rank 16.")
    said = vllm.said(json.dumps({"error": {"message": message}}).encode())
    assert said == "LoRA rank 32 is greater than max_lora_rank 16."
    assert vllm.with_cure(said).endswith("max_lora_rank 16; start the replicas with --lora-rank 32")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in vllm.with_cure(vllm.said(b'{"detail":"Not Found"}'))
    assert "VLLM_ALLOW" not in vllm.with_cure("Loading lora x failed: No adapter found for <path>")  # A24
    assert vllm.said(b"<html>Bad\n Gateway</html>") == "<html>Bad Gateway</html>"


def test_retry_after_is_read_as_seconds_or_date_and_bounded():
    """D17: 429 with Retry-After 3."""
    now = 1_000_000_000.0
    date = email.utils.formatdate(now + 7, usegmt=True)
    for value, seconds in (("3", 3), (date, 7), ("-5", 0), ("99999", 60), ("soon", 1), ("nan", 60)):
        assert vllm.retry_after_s([("retry-after", value)], now) == pytest.approx(seconds, abs=1)
    assert vllm.retry_after_s([], now) == 1


def test_hop_by_hop_headers_are_not_passed_on():
    """E08: neither the known ones nor those that Connection names."""
    headers = [("Connection", "keep-alive, X-Secret"), ("Transfer-Encoding", "chunked"), ("x-secret", "1"), ("A", "b")]
    assert vllm.end_to_end(headers) == [("A", "b")]
    assert vllm.end_to_end([("Host", "h"), ("A", "b")], drop=("host",)) == [("A", "b")]


def test_canary_logprobs_are_those_of_the_prompt_tokens_and_their_gap_is_the_widest():
    rows = [None, {"7": {"logprob": -0.5}}, {"3": {"logprob": -9}, "8": {"logprob": -1.5}}]
    body = json.dumps({"choices": [{"prompt_logprobs": rows}]}).encode()
    assert vllm.canary_logprobs(body, [5, 7, 8]) == [-0.5, -1.5]
    with pytest.raises(ValueError, match="no prompt_logprobs"):
        vllm.canary_logprobs(b'{"choices": [{}]}', [5, 7])
    assert vllm.widest_gap([-1.0, -2.0, -3.0], [-1.0, -2.5, -3.25]) == 0.5
    assert vllm.widest_gap([-1.0, -2.0], [float("nan"), -2.0]) == float("inf")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lora_name": ""}, "lora_name"),
        ({"lora_path": None}, "lora_path"),
        ({"lora_path": "org/missing"}, "absolute"),  # A25
        ({"lora_path": "/etc"}, "inside the bucket"),
        ({"lora_path": "/bucket/../v1"}, "inside the bucket"),
        ({"lora_path": "/bucketful/v1"}, "inside the bucket"),
        ({"load_inplace": True}, "load_inplace"),  # A16
        ({"canary": [1, 2]}, "canary"),
        ({"canary": {"token_ids": [1], "logprobs": []}}, "canary"),
        ({"canary": {"token_ids": [1, "2"], "logprobs": [-1]}}, "canary"),
        ({"canary": {"token_ids": [1, 2], "logprobs": [None]}}, "canary"),
    ],
)
def test_loads_that_make_no_sense_are_refused(change, why):
    body = {"lora_name": "x", "lora_path": "/bucket/v1"}
    assert vllm.read_load(json.dumps(body).encode(), "/bucket") == ("x", "/bucket/v1", vllm.PROBE_IDS, None)
    with pytest.raises(vllm.ApiError, match=why):
        vllm.read_load(json.dumps(body | change).encode(), "/bucket")
