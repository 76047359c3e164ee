"""prompts.py: a row becomes token ids and columns unchanged, or an error that names it."""

import dataclasses
import json
import math

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from config import LOCAL, Config
from prompts import load_prompts

CFG = dataclasses.replace(Config(**LOCAL), max_completion_tokens=10, max_model_len=40)
TURNS = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}</>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def letters(template: str | None = TURNS, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per character; with adds_bos it puts ^ before every text."""
    vocabulary = {chr(i): i for i in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing("^ $A", special_tokens=[("^", ord("^"))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="^", chat_template=template)


def load(tmp_path, rows, tokenizer=None, name="data.jsonl", **changes):
    path = tmp_path / name
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    cfg = dataclasses.replace(CFG, dataset=str(path), **changes)
    return load_prompts(cfg, tokenizer or letters())


def text_of(prompt) -> str:
    return "".join(map(chr, prompt.ids))


# --- what is read ---


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", 'prompt,answer\n"a, b",07\nc,0.10\n'),
        ("rows.json", '[{"prompt": "a, b", "answer": "07"}, {"prompt": "c", "answer": 0.10}]'),
        ("rows.json", '{"prompt": "a, b", "answer": "07"}\n{"prompt": "c", "answer": 0.10}\n'),
        ("rows.jsonl", '{"prompt": "a, b", "answer": "07"}\n\n{"prompt": "c", "answer": 0.10}'),
    ],
)
def test_f19_ordinary_files_are_read_and_golds_stay_as_written(tmp_path, name, text):
    prompts, _ = load(tmp_path, text, name=name)
    assert [text_of(prompt) for prompt in prompts] == ["a, b", "c"]
    assert [str(prompt.columns["answer"]) for prompt in prompts] == ["07", "0.10"]


def test_parquet_files_are_read(tmp_path):
    parquet.write_table(pyarrow.table({"q": ["2+2"], "gold": [4]}), tmp_path / "data.parquet")
    cfg = dataclasses.replace(CFG, dataset=str(tmp_path / "data.parquet"), prompt_column="q", answer_column="gold")
    assert load_prompts(cfg, letters())[0][0].columns["answer"] == 4


@pytest.mark.parametrize(
    ("written", "gold"),
    [('["2400, 1350, 864"]', ["2400, 1350, 864"]), ("12345678901234567890", 12345678901234567890), ("null", None)],
)
def test_f06_a_gold_reaches_the_reward_as_the_dataset_holds_it(tmp_path, written, gold):
    ((prompt,), _) = load(tmp_path, f'{{"prompt": "a", "answer": {written}}}')
    assert prompt.columns["answer"] == gold


def test_a_gold_that_is_no_number_stays_so(tmp_path):
    ((prompt,), _) = load(tmp_path, '{"prompt": "a", "answer": NaN}')
    assert math.isnan(prompt.columns["answer"])


def test_rows_too_long_for_a_whole_completion_are_left_out_and_named(tmp_path):
    prompts, too_long = load(tmp_path, [{"prompt": "a" * n, "answer": "1"} for n in (29, 30, 31)])
    assert [len(prompt.ids) for prompt in prompts] == [29, 30]
    assert too_long == [3]


def test_answers_may_be_nested_and_other_columns_are_kept(tmp_path):
    rows = [{"prompt": "hi", "reward_model": {"ground_truth": 7}, "level": "easy"}]
    ((prompt,), _) = load(tmp_path, rows, answer_column="reward_model.ground_truth")
    assert (prompt.columns["answer"], prompt.columns["level"]) == (7, "easy")


# --- what a prompt becomes ---

USER, PREFILL = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}


@pytest.mark.parametrize(
    ("prompt", "changes", "expected"),
    [
        ([USER], {}, "<u>hi</><a>"),
        ([USER, PREFILL], {}, "<u>hi</><a>It is"),  # F11: the turn is continued
        ([USER], {"system_prompt": "Be brief."}, "<s>Be brief.</><u>hi</><a>"),
        ("hi", {"system_prompt": "Be brief."}, "<s>Be brief.</><u>hi</><a>"),
        ("hi", {}, "hi"),
    ],
)
def test_prompts_go_through_the_template(tmp_path, prompt, changes, expected):
    ((found,), _) = load(tmp_path, [{"prompt": prompt, "answer": "1"}], **changes)
    assert text_of(found) == expected


@pytest.mark.parametrize("prompt", ["hi", "^hi", [USER]])
def test_f10_there_is_one_bos(tmp_path, prompt):
    tokenizer = letters("^" + TURNS, adds_bos=True)
    ((found,), _) = load(tmp_path, [{"prompt": prompt, "answer": "1"}], tokenizer)
    assert text_of(found).count("^") == 1
    assert text_of(found).startswith("^")


# --- what is refused ---


@pytest.mark.parametrize(
    ("second", "template", "words"),
    [
        ("", TURNS, "the prompt is empty"),  # F12
        ([], TURNS, "it has no messages"),
        (None, TURNS, "None is neither text nor"),
        ([USER], None, "need a model with a chat template"),
        ([{"role": "system", "content": "x"}], "{{ raise_exception('no system role') }}", "no system role"),  # F20
    ],
)
def test_a_prompt_that_cannot_be_encoded_is_named_with_its_row(tmp_path, second, template, words):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": second, "answer": "2"}]
    with pytest.raises(ValueError, match=rf"--prompt-column prompt: row 2 of .*{words}"):
        load(tmp_path, rows, letters(template))


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("", {}, "has no rows"),
        ('{"prompt": ', {}, "cannot be read as a file: line 1 is not JSON"),
        ('{"prompt": "a", "answer": 1}\n' * 299 + "{oops", {}, "line 300 is not JSON"),
        ("[1]", {}, "row 1 is no object"),
        (
            '{"prompt": "a", "answer": "1"}',
            {"answer_column": "solution"},
            "--answer-column solution: .* has prompt, answer",
        ),
        (
            '{"prompt": "a", "meta": null}',
            {"answer_column": "meta.gold"},
            "--answer-column meta.gold: row 1 of dataset",
        ),
        ('{"prompt": "%s", "answer": "1"}' % ("a" * 31), {}, "none of the 1 prompts .*--max-model-len 40"),
    ],
)
def test_f19_bad_data_is_one_line_that_names_the_row_or_the_flag(tmp_path, text, changes, words):
    with pytest.raises(ValueError, match=words):
        load(tmp_path, text, **changes)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(ValueError, match=r"--dataset .*none.csv: cannot be read as a file: .*No such file"):
        load_prompts(dataclasses.replace(CFG, dataset=str(tmp_path / "none.csv")), letters())
