"""rewards.py: what is a right answer, and scoring that nothing can hang, kill or fool. Ids like C06 are of cases.md."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rewards import RewardError, RewardPool, format_reward, grade, last_box, load_rewards, math_reward

ROOT = Path(__file__).resolve().parent.parent
SANITY_SET = ROOT.parent / "shared" / "data" / "sanity_math_1460.jsonl"
HANGS = r"\boxed{9^{9^{9^9}}}"
EATS_MEMORY = r"\boxed{\lfloor 2^{2^{40}} \rfloor}"

MY_REWARDS = """
import os, time

def half(completions, answer, **columns):
    return [0.5 for _ in completions]

def unscorable(completions, **columns):
    return [None]

def obeys(completions, **columns):
    text = completions[0]
    if text == "hang":
        while True:
            pass
    if text == "sleep":
        time.sleep(600)
    if text == "eat":
        hoard = [bytearray(2**24) for _ in range(1000)]
    if text == "die":
        os._exit(7)
    print("scored", text)
    return [float(text)]

def column_sizes(completions, prompt, **columns):
    return [1000 * len(completions) + 100 * len(prompt) + len(columns)]

def raises(completions, **columns):
    return [columns["no such column"]]

def exits(completions, **columns):
    raise SystemExit(3)

def takes_no_columns(completions):
    return [1.0]

def two(completions, **columns):
    return [1.0, 2.0]

def nan(completions, **columns):
    return [float("nan")]

def text(completions, **columns):
    return ["1.0"]

def bare_text(completions, **columns):
    return "1"

def nothing(completions, **columns):
    pass

not_a_function = 5
"""


SLOW_REWARDS = """
import time

def warm_up():
    global warm
    time.sleep(1)
    warm = True

def is_warm(completions, **columns):
    return [float(warm)]
"""


@pytest.fixture(scope="module")
def my_rewards(tmp_path_factory) -> Path:
    """A working directory with reward files of a user; it is the current one."""
    before, directory = Path.cwd(), tmp_path_factory.mktemp("user")
    (directory / "my_rewards.py").write_text(MY_REWARDS)
    (directory / "slow_rewards.py").write_text(SLOW_REWARDS)
    (directory / "broken_rewards.py").write_text("import a_package_that_is_not_installed\n")
    (directory / "typo_rewards.py").write_text("def f(:\n")
    os.chdir(directory)
    yield directory
    os.chdir(before)


@pytest.fixture(scope="module")
def math_pool():
    """A pool for math_reward that several tests share."""
    with contextlib.closing(RewardPool(load_rewards("rewards:math_reward"), workers=2, timeout_s=2)) as pool:
        yield pool


@pytest.fixture
def pool_of(my_rewards):
    """A function that starts a pool for functions of my_rewards; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(names: str, **settings) -> RewardPool:
            spec = ",".join(f"my_rewards:{name}" for name in names.split(","))
            return stack.enter_context(contextlib.closing(RewardPool(load_rewards(spec), **settings)))

        yield start


def boxed(answer: str) -> str:
    return rf"So the answer is $\boxed{{{answer}}}$."


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


CASES = [
    ("C01", r"\frac{1}{2}", r"\frac{1}{3}", 0),
    ("C01", r"\frac{1}{2}", r"\frac{1}{2}", 1),
    ("C06", "1234567", "1,234,567", 1),
    ("C06", "1234567", "1{,}234{,}567", 1),
    ("C06", "10000", r"10\,000", 1),
    ("C06", "10000", "10 000", 1),
    ("C06", r"\dfrac{1}{29,\!322,\!216}", r"\frac{1}{29322216}", 1),
    ("C06", "(100,101)", "(100101)", 0),
    ("C07", r"28\%", "28", 1),
    ("C07", r"28\%", "0.28", 1),
    ("C07", "28", r"28\%", 1),
    ("C07", "0.28", "28", 0),
    ("C07", r"28\%", r"29\%", 0),
    ("C08", r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", 0),
    ("C08", r"\frac{1}{2^{99}}", r"2^{-99}", 1),
    ("C08", r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0),
    ("C08", r"\left(\frac{1}{2^{99}}, 1\right)", r"\left(\frac{1}{2^{98}}, 1\right)", 0),
    ("C08", r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}", 0),
    ("C08", "0.000992", "0.0009924", 0),
    ("C08", r"\frac{1}{6}", r"2^\infty", 0),
    ("C09", r"1331 \text{ and } 1728", "1728", 0),
    ("C09", r"1331 \text{ and } 1728", r"1728, 1331", 1),
    ("C09", "-1,3,3", "-1,3", 0),
    ("C10", "5", r"5 \text{ or } 6", 0),
    ("C10", "5", "3,4,5,6", 0),
    ("C10", "5", "4=5", 0),
    ("C15", "(0,1)", "[0,1]", 0),
    ("C15", "[0,1)", "(0,1]", 0),
    ("C15", r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)", 1),
    ("C15", "[1,2]", r"1 \le x \le 2", 1),
    ("C15", r"(-\infty,3] \cup [4,\infty)", r"x \in (-\infty, 3]\cup[4, \infty)", 1),
    ("C16", "(1,2)", "(2,1)", 0),
    ("C16", r"\{1,2\}", r"\{2,1\}", 1),
    ("C16", "1,2", "2,1", 1),
    ("C16", "(1,2)", r"\{1,2\}", 0),
    ("C17", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", 1),
    ("C17", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", 0),
    ("C17", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", 0),
    ("C19", r"\text{(C)}", "C", 1),
    ("C19", r"\text{(C)}", r"\textbf{(D)}", 0),
    ("C19", r"\text{Monday}", r"\text{Monday}", 1),
    ("C19", r"\text{Monday}", "Monday", 1),
    ("C19", r"\text{east}", r"\text{west}", 0),
    ("C19", r"\text{no solution}", r"\text{No solutions}", 1),
    ("C20", "5", r"5\text{ cm}", 1),
    ("C20", "5", r"5\,\mathrm{m/s}", 1),
    ("C20", "5", "5 dollars", 1),
    ("C20", r"32\text{ square cm}", r"32\text{ cm}^2", 1),
    ("C20", "90", r"90^\circ", 1),
    ("C20", "5", r"\$5", 1),
    ("C20", "2s", "2", 0),
    ("C21", "1010_2", "1010", 1),
    ("C21", "1010_2", "1010_3", 0),
    ("C21", "12:00", "1:00", 0),
    ("C21", r"8\!:\!34 \text{ p.m.}", "8:34 PM", 1),
    ("C21", r"8\!:\!34 \text{ p.m.}", r"8:34 \text{ a.m.}", 0),
    ("C22", r"\frac13", "0.33", 0),
    ("C22", r"\frac13", "0.333333", 1),
    ("C22", r"0.\overline{3}", r"\frac13", 1),
    ("C22", r"\pi", "3.14159", 0),
    ("C23", "0.1", ".1", 1),
    ("C23", "3", "3.0", 1),
    ("C23", "3", "3.", 1),
    ("C23", "100", "1e2", 1),
    ("C23", "-3", "\u22123", 1),
    ("C24", r"\pm 2", "2", 0),
    ("C24", r"\pm 2", "2,-2", 1),
]


@pytest.mark.parametrize(("case", "gold", "answer", "reward"), CASES)
def test_answers_are_graded_as_a_teacher_would(case, gold, answer, reward):
    assert grade(boxed(answer), gold) == reward


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("x = 5", "5", 1),
        ("5", "x = 5", 1),
        ("x = 5", "y = 5", 0),
        ("2x + z - 5 = 0", "4x + 2z = 10", 1),
        ("2x + z - 5 = 0", "2x + z + 5 = 0", 0),
        (r"\frac{\sqrt{3}- 1}{2}", r"\frac{-1+\sqrt3}{2}", 1),
        (r"2007 + \frac\pi 2", r"2007+\frac{\pi}{2}", 1),
        ("11z^{17}(5+11z^{17})", "55z^{17}+121z^{34}", 1),
        ("3+4i", "(2+i)^2", 1),
        ("3+4i", r"3+4\mathrm{i}", 1),
        ("5 - 11i", "5 + 11i", 0),
        (r"\frac{3}{2}", r"1\frac{1}{2}", 1),
        ("4xyz", "4", 0),
    ],
)
def test_the_same_value_in_another_form_is_right(gold, answer, reward):
    assert grade(boxed(answer), gold) == reward


def test_only_the_last_box_counts():
    spam = "".join(rf"\boxed{{{digit}}} " for digit in range(10))
    assert grade(spam, "5") == 0  # C10
    assert grade(r"\boxed{5} \boxed{6}", "5") == 0  # C10
    assert grade(r"\boxed{840} so it is \boxed{840}", "840") == 1  # C03


def test_a_box_may_have_a_space_before_its_brace_and_must_be_closed():
    assert grade(r"\boxed {5}", "5") == 1  # C04
    assert grade(r"so we get \boxed{5", "5") == 0  # C05
    assert grade(r"\boxed{\frac{1}{2}", r"\frac12") == 0  # C05
    assert grade("the answer is 5", "5") == 0
    assert last_box(r"\boxed{\{1,2\}} \\") == r"\{1,2\}"


@pytest.mark.parametrize("gold", [None, "", r"\text{}", "$$", r"\frac{1}{", "1 +", "???", float("nan")])
def test_a_gold_that_is_missing_or_unreadable_is_unscorable_whatever_the_answer(gold):  # C14
    assert grade(boxed("5"), gold) is None
    assert grade(boxed(str(gold)), gold) is None
    assert grade("no box", gold) is None


def test_grading_works_off_the_main_thread():  # C11
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(grade, boxed(r"\frac{\sqrt{4}}{6}"), r"\frac13").result() == 1


def test_nonsense_in_the_box_is_wrong_and_never_an_error():
    nested = "(" * 400 + "1,2" + ")" * 400
    for answer in (nested, r"1 <+ i", r"\frac{}{}", "{}", r"\begin{pmatrix}", "1/0", "9" * 5000, r"\pm" * 50, "=", ","):
        assert grade(boxed(answer), r"\sqrt{22}") == 0


@pytest.mark.skipif(not SANITY_SET.exists(), reason="needs ../shared")
def test_every_gold_of_the_sanity_set_is_right_and_the_next_one_is_wrong(math_pool):
    golds = [json.loads(line)["answer"] for line in SANITY_SET.read_text().splitlines()]
    assert math_pool.score([boxed(gold) for gold in golds], {"answer": golds}) == [1.0] * 1460
    others = golds[1:] + golds[:1]
    scores = math_pool.score([boxed(other) for other in others], {"answer": golds})
    found_equal = {(gold, other) for gold, other, score in zip(golds, others, scores, strict=True) if score}
    assert {pair for pair in found_equal if pair[0] != pair[1]} == {("60", r"60^\circ")}  # 60 degrees


def test_a_bare_function_and_one_gold_for_the_whole_group_are_enough():
    with contextlib.closing(RewardPool(math_reward)) as pool:
        assert pool.score([boxed("5"), boxed("6"), "none"], {"answer": "5"}) == [1.0, 0.0, 0.0]
        assert pool.score([boxed("5")] * 3, {"answer": ["5", "6", None]}) == [1.0, 0.0, None]


def test_rewards_are_summed_and_one_unscorable_part_makes_the_sum_unscorable(pool_of, my_rewards):
    pool = pool_of("half,half")
    assert pool.score(["a", "b"], {"answer": "5"}) == [1.0, 1.0]
    assert pool_of("half,unscorable").score(["a"], {"answer": "5"}) == [None]


def test_a_reward_gets_every_column_by_name_one_completion_at_a_time(pool_of):
    columns = {"prompt": ["p", "q"], "answer": ["5", "6"], "difficulty": 3}
    assert pool_of("column_sizes").score(["a", "b"], columns) == [1102.0, 1102.0]


def test_a_column_of_the_wrong_length_is_named(math_pool):
    with pytest.raises(ValueError, match="column answer has 3 values for 2 completions"):
        math_pool.score(["a", "b"], {"answer": ["1", "2", "3"]})


def test_format_reward_wants_exactly_one_box():
    assert format_reward([boxed("5"), boxed("5") + boxed("5"), boxed(""), r"\boxed{5", "5"]) == [0.1, 0, 0, 0, 0]


def test_bad_completions_cost_neither_their_neighbours_nor_their_time(math_pool):
    bad = [HANGS, HANGS, EATS_MEMORY, HANGS, HANGS, EATS_MEMORY, HANGS]
    answers = [str(i) for i in range(20)]
    before, start = math_pool.timeouts, time.monotonic()
    completions = bad + [boxed(answer) for answer in answers]
    assert math_pool.score(completions, {"answer": ["5"] * 7 + answers}) == [0.0] * 7 + [1.0] * 20
    assert math_pool.timeouts - before == 7
    assert time.monotonic() - start < 2 * 7 / 2  # seven timeouts of 2 s one after another in two workers


@pytest.mark.parametrize("fate", ["hang", "sleep", "eat", "die"])
def test_a_worker_that_is_lost_costs_its_completion_only(pool_of, fate):
    pool = pool_of("obeys", workers=1, timeout_s=1, memory_mb=256)
    assert pool.score(["1", fate, "2"], {}) == [1.0, 0.0, 2.0]
    assert pool.timeouts == 1
    assert pool.score(["3"], {}) == [3.0]


def test_slow_completions_are_bounded_and_all_of_them_end(pool_of):
    pool = pool_of("obeys", workers=1, timeout_s=0.5)
    assert pool.score(["sleep"] * 12 + ["1"], {}) == [0.0] * 12 + [1.0]
    assert pool.timeouts == 12


def test_warming_up_does_not_count_as_a_completions_time(my_rewards):
    with contextlib.closing(RewardPool(load_rewards("slow_rewards:is_warm"), timeout_s=0.5)) as pool:
        assert pool.score(["a", "b"], {}) == [1.0, 1.0]
        assert pool.timeouts == 0


def test_many_threads_may_score_at_the_same_time(math_pool):
    def score(i: int) -> bool:
        group = [boxed(str(i)), boxed(str(i + 1)), boxed(rf"\frac{{{2 * i}}}{{2}}")]
        return math_pool.score(group, {"answer": str(i)}) == [1.0, 0.0, 1.0]

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(score, range(100)))


def test_a_pool_survives_that_all_its_processes_are_killed(pool_of):
    before = set(children())
    pool = pool_of("obeys", workers=2)
    assert pool.score(["1", "2"], {}) == [1.0, 2.0]
    killed = [process for process in children() if process not in before]
    for process in killed:
        process.kill()
    psutil.wait_procs(killed, timeout=10)
    assert pool.score(["3", "4"], {}) == [3.0, 4.0]
    assert pool.timeouts == 0


def test_close_leaves_no_process_behind_and_fails_what_was_being_scored(pool_of):
    before = set(children())
    pool = pool_of("obeys", workers=2, timeout_s=60)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.score, ["hang", "sleep", "1"], {})
        while len(set(children()) - before) < 4:  # the host, the two slow ones, and one that took over
            threading.Event().wait(0.02)
        started = set(children()) - before
        pool.close()
        with pytest.raises(RewardError, match="closed"):
            waiting.result(timeout=10)
    assert not any(process.is_running() for process in started)
    assert pool.timeouts == 0
    with pytest.raises(RewardError, match="closed"):
        pool.score(["1"], {})


TRAINER = """
import sys
sys.path.insert(0, {root!r})
import psutil, threading
from rewards import RewardPool, load_rewards
try:
    pool = RewardPool(load_rewards("my_rewards:obeys"), workers=2, timeout_s=600)
    threading.Thread(target=pool.score, args=(["hang", "sleep"], {{}}), daemon=True).start()
    while len(psutil.Process().children(recursive=True)) < 3:
        threading.Event().wait(0.02)
    print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_busy_workers_die_with_the_trainer_and_without_a_word(my_rewards, tmp_path, how):
    script = tmp_path / "trainer.py"  # elsewhere than the reward file, which is in the working directory
    script.write_text(TRAINER.format(root=str(ROOT)))
    command = [sys.executable, str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    trainer = subprocess.Popen(command, cwd=my_rewards, start_new_session=True, **pipes)
    try:
        processes = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(processes) == 3  # the host and two busy workers
        os.killpg(trainer.pid, how)
        _, alive = psutil.wait_procs(processes, timeout=10)
        _, errors = trainer.communicate(timeout=10)
    finally:
        trainer.kill()
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert errors == ""


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("raises", "my_rewards:raises raised KeyError: 'no such column'"),
        ("exits", "my_rewards:exits raised SystemExit: 3"),
        ("takes_no_columns", "my_rewards:takes_no_columns raised TypeError.*answer"),
        ("two", "my_rewards:two returned 2 rewards for 1 completion"),
        ("nan", "my_rewards:nan returned nan"),
        ("text", "my_rewards:text returned \\['1.0'\\]"),
        ("bare_text", "my_rewards:bare_text returned a str"),
        ("nothing", "my_rewards:nothing returned a NoneType"),
    ],
)
def test_a_broken_reward_is_named_at_the_first_group(pool_of, function, complaint):
    with pytest.raises(RewardError, match=complaint):
        pool_of(function, workers=1).score(["a"] * 8, {"answer": "5"})


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("no_such_file:f", "no module no_such_file; put no_such_file.py into .*user"),
        ("my_rewards:no_such_function", "my_rewards has no function no_such_function; define it"),
        ("my_rewards:not_a_function", "my_rewards:not_a_function: is a int, not a function"),
        ("broken_rewards:f", "importing broken_rewards failed: .*; install a_package_that_is_not_installed"),
        ("typo_rewards:f", "importing typo_rewards failed: SyntaxError"),
        ("my_rewards", "must be module:function"),
        ("my_rewards:half,", "must be module:function"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_at_start(my_rewards, spec, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_rewards(spec)


def test_a_function_that_workers_cannot_import_is_refused():
    with pytest.raises(ValueError, match=r"lambda.* cannot import it"):
        RewardPool(lambda completions, **columns: [1.0])


def test_one_completion_can_be_graded_by_hand():
    command = [sys.executable, str(ROOT / "rewards.py"), r"so \boxed{0.5}", r"\frac{1}{2}"]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "1.0\n"
