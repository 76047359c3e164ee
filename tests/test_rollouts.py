"""rollouts.py: the order of prompts, the queue, what is asked of a replica, and what becomes of its answers."""

import dataclasses
import itertools
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import wait_for

import rollouts
from bucket import Policy
from config import LOCAL, Config
from prompts import Prompt
from rollouts import GroupQueue, PromptCursor, Rollout, Sampler, is_stale, usable_choices, what_to_do

CFG = dataclasses.replace(Config(**LOCAL), inflight_per_replica=8, group_size=4, batch_size=8, no_replica_wait_s=5.0)


def rollout(group: int = 0, version: int = 0) -> Rollout:
    return Rollout(group, [1, 2], [3, 4], [-0.1, -0.2], 1.0, 0.0, version)


def choice(ids=(5, 6), finish="stop", logprobs=(-0.5, -0.25), text="x") -> dict:
    return {
        "token_ids": list(ids) if ids is not None else None,
        "logprobs": {"token_logprobs": list(logprobs)},
        "finish_reason": finish,
        "text": text,
    }


# --- the order of the prompts ---


def test_every_prompt_comes_once_per_epoch_in_an_order_that_depends_on_the_seed():
    cursor = PromptCursor(num_prompts=5, seed=1)
    issued = [cursor.issue()[1] for _ in range(10)]
    assert sorted(issued[:5]) == sorted(issued[5:]) == [0, 1, 2, 3, 4]
    assert issued[:5] != issued[5:]
    again = PromptCursor(num_prompts=5, seed=1)
    assert [again.issue()[1] for _ in range(10)] == issued
    other = PromptCursor(num_prompts=5, seed=2)
    assert [other.issue()[1] for _ in range(10)] != issued


def test_a_resumed_cursor_repeats_what_was_issued_but_not_trained_and_nothing_else():
    cursor = PromptCursor(num_prompts=100, seed=1)
    issued = [cursor.issue() for _ in range(6)]
    cursor.done([0, 2, 3])
    state = json.loads(json.dumps(cursor.state()))
    assert state == {"next": 6, "pending": [1, 4, 5]}
    resumed = PromptCursor(num_prompts=100, seed=1, state=state)
    assert [resumed.issue() for _ in range(3)] == [issued[1], issued[4], issued[5]]
    assert resumed.issue() == cursor.issue()


# --- the queue ---


def test_staleness_is_kept_up_to_its_limit():
    # B29: trainer at v7, limit 4
    assert not is_stale(3, 7, 4)
    assert is_stale(2, 7, 4)


def test_a_full_queue_holds_the_sampler_back_until_the_trainer_takes():
    queue, stopped = GroupQueue(max_samples=4), threading.Event()
    queue.put([rollout(0)] * 4, stopped)
    putter = threading.Thread(target=queue.put, args=([rollout(1)] * 4, stopped))
    putter.start()
    putter.join(0.1)
    assert putter.is_alive()
    assert queue.num_samples == 4
    assert queue.get(1)[0].group == 0
    putter.join(10)
    assert queue.get(1)[0].group == 1
    assert queue.take_backpressure_s() >= 0.1
    assert queue.take_backpressure_s() == 0


def test_an_empty_queue_gives_nothing_after_its_timeout():
    assert GroupQueue(8).get(0.01) is None


# --- answers ---


def test_a_request_states_every_sampling_setting():
    # B11
    body = rollouts.completion_request(Prompt([1, 2], {}), Policy(3, "r-a1-v3"), CFG)
    assert body["model"] == "r-a1-v3"
    assert body["prompt"] == [1, 2]
    assert (body["n"], body["temperature"], body["max_tokens"]) == (4, 1.0, CFG.max_completion_tokens)
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert body["return_token_ids"]
    assert body["logprobs"] == 0


def test_only_choices_with_as_many_logprobs_as_tokens_are_used():
    # B18, B22 and design section 2
    body = {
        "choices": [
            choice(),
            choice(finish="length"),
            choice(finish="abort"),
            choice(ids=(), logprobs=()),
            choice(logprobs=(-0.5,)),
            choice(logprobs=(None, None)),
        ]
    }
    assert [(c.ids, c.truncated) for c in usable_choices(body)] == [([5, 6], False), ([5, 6], True)]


def test_f17_a_token_without_a_logprob_is_masked_and_the_rest_trains():
    (only,) = usable_choices({"choices": [choice(ids=(5, 6, 7), logprobs=(-0.1, None, -0.2))]})
    assert (only.logprobs[0], only.logprobs[2]) == (-0.1, -0.2)
    assert math.isnan(only.logprobs[1])


def test_a_lone_eos_is_a_completion_of_one_token():
    # B17
    (only,) = usable_choices({"choices": [choice(ids=(256,), logprobs=(-3.0,), text="")]})
    assert (only.ids, only.text, only.truncated) == ([256], "", False)


def test_missing_token_ids_are_an_error_that_names_the_cure():
    # B20
    with pytest.raises(rollouts.RolloutError, match="return_token_ids"):
        usable_choices({"choices": [choice(ids=None)]})


def test_answers_are_sorted_by_what_to_do_next():
    assert what_to_do(200, "") == "ok"
    assert what_to_do(404, "The model `r-a1-v3` does not exist.") == "newest"
    assert what_to_do(404, "Not Found") == "give up"
    assert what_to_do(400, "maximum context length") == "give up"
    assert what_to_do(504, "") == "give up"  # E10: the generation may still run, so it is not asked for again
    assert [what_to_do(status, "") for status in (429, 500, 502, 503)] == ["wait"] * 4
    assert what_to_do(401, "") == what_to_do(403, "") == "fatal"


# --- the sampler against a little server ---


@pytest.fixture
def proxy():
    """A proxy whose answers a test scripts: answer(body) -> (status, document)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(200, {"ready": server.ready})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(body)
            self.reply(*server.answer(body))

        def reply(self, status, document):
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.ready, server.requests = 1, []
    server.answer = lambda body: (200, {"choices": [choice(text=str(i)) for i in range(body["n"])]})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Scores:
    """A reward pool that gives completion "0" a 1 and others a 0."""

    timeouts = failed = 0
    weights = (1.0,)

    def __init__(self):
        self.seen = []

    def scores(self, completions, columns):
        assert all(len(values) == len(completions) for values in columns.values())
        self.seen.append(columns)
        return {"zero": [1.0 if text == "0" else 0.0 for text in completions]}


@pytest.fixture
def start_sampler(proxy):
    started = []

    def start(policy=lambda: Policy(0, "r-a1-v0"), **changes) -> Sampler:
        cfg = dataclasses.replace(CFG, port=proxy.server_port, **changes)
        prompts = [Prompt([i], {"prompt": f"p{i}", "answer": "1"}) for i in range(50)]
        sampler = Sampler(cfg, prompts, PromptCursor(50, 0), policy, Scores(), lambda policy: None)
        started.append(sampler)
        sampler.start()
        return sampler

    yield start
    for sampler in started:
        sampler.stop()


def batch(sampler: Sampler, num_groups: int = 2) -> list[list[Rollout]]:
    until = time.monotonic() + 20
    return sampler.batch(num_groups, lambda: time.monotonic() < until and not sampler.error, sampler.policy().version)


def test_groups_come_scored_and_named_by_their_policy_version(start_sampler):
    sampler = start_sampler(policy=lambda: Policy(3, "r-a1-v3"))
    groups = batch(sampler)
    assert len(groups) == 2
    for group in groups:
        assert [r.reward for r in group] == [1.0, 0.0, 0.0, 0.0]
        assert {r.version for r in group} == {3}
        assert len({r.group for r in group}) == 1


@pytest.mark.parametrize(
    ("truncated", "rewards"), [("score", [1, 1, 1, 1]), ("zero", [0, 0, 1, 1]), ("mask", [None, None, 1, 1])]
)
def test_b19_f25_a_cut_completion_gets_what_was_asked_for(start_sampler, proxy, truncated, rewards):
    proxy.answer = lambda body: (200, {"choices": [choice(text="0", finish="length")] * 2 + [choice(text="0")] * 2})
    sampler = start_sampler(truncated=truncated)
    (group,) = batch(sampler, 1)
    assert [(r.reward, r.truncated) for r in group] == list(zip(rewards, [True, True, False, False], strict=True))
    assert sampler.pool.seen[0]["truncated"] == [True, True, False, False]


def test_f13_rewards_get_prompts_ids_and_columns_of_the_whole_group(start_sampler):
    sampler = start_sampler()
    (group,) = batch(sampler, 1)
    prompts = [f"p{group[0].prompt[0]}"] * 4
    seen = next(columns for columns in sampler.pool.seen if columns["prompts"] == prompts)
    assert (seen["completion_ids"], seen["answer"]) == ([[5, 6]] * 4, ["1"] * 4)
    assert (group[0].scores, group[0].text, group[0].gold) == ({"zero": 1.0}, "0", "1")


def test_one_failed_completion_costs_only_itself(start_sampler, proxy):
    # B30: 1 of 4 fails
    proxy.answer = lambda body: (200, {"choices": [choice(finish="abort"), *[choice()] * 3]})
    (group,) = batch(start_sampler(), 1)
    assert len(group) == 3


def test_a_group_with_one_usable_completion_is_dropped(start_sampler, proxy):
    # B30: all but one fail, then it works again
    bad = {"choices": [choice(), *[choice(finish="abort")] * 3]}
    answers = itertools.chain([bad, bad], itertools.repeat({"choices": [choice()] * 4}))
    proxy.answer = lambda body: (200, next(answers))
    sampler = start_sampler()
    assert len(batch(sampler)) == 2
    wait_for(lambda: sampler.counts["failed_groups"] == 2)
    assert sampler.error is None


def test_sampling_that_never_works_ends_with_the_reason(start_sampler, proxy, monkeypatch):
    # B30: 8 of 8 fail
    monkeypatch.setattr(rollouts, "MAX_FAILED_GROUPS", 3)
    proxy.answer = lambda body: (400, {"error": {"message": "maximum context length is 64"}})
    sampler = start_sampler()
    assert batch(sampler) == []
    assert "3 groups in a row failed" in str(sampler.error)
    assert "maximum context length" in str(sampler.error)


def test_a_reward_that_raises_ends_the_sampling(start_sampler):
    sampler = start_sampler()
    sampler.pool.scores = lambda *_: 1 / 0
    wait_for(lambda: sampler.error)
    assert isinstance(sampler.error, ZeroDivisionError)


def test_a_policy_retired_meanwhile_is_sampled_again_under_the_newest(start_sampler, proxy):
    # A22
    current = [Policy(3, "r-a1-v3")]

    def answer(body):
        if body["model"] == "r-a1-v3":
            current[0] = Policy(4, "r-a1-v4")
            return 404, {"error": {"message": "The model `r-a1-v3` does not exist."}}
        return 200, {"choices": [choice()] * 4}

    proxy.answer = answer
    (group,) = batch(start_sampler(policy=lambda: current[0]), 1)
    assert {r.version for r in group} == {4}


def test_a_proxy_without_replicas_is_waited_for(start_sampler, proxy):
    def answer(body):
        return (503, {}) if len(proxy.requests) < 3 else (200, {"choices": [choice()] * 4})

    proxy.answer = answer
    sampler = start_sampler()
    assert len(batch(sampler)) == 2
    assert sampler.counts["failed_groups"] == 0


def test_a_refused_token_ends_the_sampling_at_once(start_sampler, proxy):
    # D14
    proxy.answer = lambda body: (401, {"error": "no"})
    sampler = start_sampler()
    wait_for(lambda: sampler.error)
    assert "HF_TOKEN" in str(sampler.error)


def test_stale_groups_are_dropped_whole_and_counted(start_sampler):
    # B29
    current = [Policy(2, "r-a1-v2")]
    sampler = start_sampler(policy=lambda: current[0], max_staleness=4)
    wait_for(lambda: sampler.queue.num_samples >= 8)
    current[0] = Policy(7, "r-a1-v7")
    groups = batch(sampler)
    assert all(r.version == 7 for group in groups for r in group)
    assert sampler.counts["dropped_stale"] >= 8
    assert sampler.counts["dropped_stale"] % 4 == 0


def test_nothing_is_sampled_that_would_be_too_old_when_its_turn_comes(start_sampler, proxy):
    sampler = start_sampler(max_staleness=2, queue_size=100, inflight_per_replica=64)  # fresh: one batch of 8
    wait_for(lambda: sampler.queue.num_samples == 8)
    assert sampler.inflight == 0
    assert len(proxy.requests) == 2
    assert len(batch(sampler, 1)) == 1
    wait_for(lambda: len(proxy.requests) == 3)


def test_completions_in_flight_follow_the_ready_replicas(start_sampler, proxy):
    release, peak, inflight, lock = threading.Event(), [0], [0], threading.Lock()

    def answer(body):
        with lock:
            inflight[0] += body["n"]
            peak[0] = max(peak[0], inflight[0])
        release.wait(20)
        with lock:
            inflight[0] -= body["n"]
        return 200, {"choices": [choice()] * 4}

    proxy.answer = answer
    sampler = start_sampler()
    wait_for(lambda: inflight[0] == 8)  # inflight_per_replica of one replica
    proxy.ready = 2
    wait_for(lambda: inflight[0] == 16)
    assert sampler.inflight == 16
    release.set()
    batch(sampler)
    assert peak[0] == 16
    proxy.ready = 0
    sampler.stop()
    wait_for(lambda: sampler.inflight == 0)


def test_f09_a_dataset_is_known_again_by_its_prompts_and_golds():
    def fingerprint(*rows: tuple[list[int], str]) -> str:
        prompts = [Prompt(ids, {"prompt": "p", "answer": gold}) for ids, gold in rows]
        return Sampler(CFG, prompts, PromptCursor(len(rows), 0), None, Scores(), None).fingerprint

    assert fingerprint(([1], "2"), ([3], "4")) == fingerprint(([1], "2"), ([3], "4"))
    assert len({fingerprint(([1], "2")), fingerprint(([1], "5")), fingerprint(([3], "2"))}) == 3
