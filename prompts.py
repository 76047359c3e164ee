"""What is asked: the rows of a dataset, and the token ids of their prompts.

A prompt is text, or a list of chat messages that go through the model's template. What a row holds reaches the reward
unchanged. Whatever is wrong with a row is an error that names it, before anything costs money: launch.py reads the
prompts too.
"""

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import Config, fail, flag

DATA_FILES = (".csv", ".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset: token ids, and all columns for the reward, `prompt` and `answer` among them."""

    ids: list[int]
    columns: dict


class WrittenFloat(float):
    """A number of a JSON file that prints as it stands there: a gold of 0.10 stays 0.10."""

    def __new__(cls, text: str):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __reduce__(self):
        return WrittenFloat, (self.text,)

    def __str__(self) -> str:
        return self.text


def read_json_rows(text: str) -> list[dict]:
    """The rows of a JSON array, or of JSON lines; ValueError names the row that is none."""
    loads = json.JSONDecoder(parse_float=WrittenFloat).decode
    if text.lstrip().startswith("["):
        return loads(text)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows += [loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
    return rows


def load_rows(cfg: Config) -> list[dict]:
    """Rows of a local .csv, .json, .jsonl or .parquet file or of a Hub dataset, values as they stand there."""
    path = Path(cfg.dataset)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix == ".csv":
            rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines(keepends=True)))
        elif path.suffix in DATA_FILES:
            rows = read_json_rows(path.read_text(encoding="utf-8-sig"))
        else:
            import datasets  # takes seconds to import

            datasets.disable_progress_bars()
            rows = datasets.load_dataset(cfg.dataset, split=cfg.dataset_split).to_list()
    except Exception as error:  # the kinds are many: the library's own, the Hub's, pyarrow's
        reason = str(error).strip().partition("\n")[0]
        where = "as a file" if path.suffix in DATA_FILES else f"from the Hub; files end with {', '.join(DATA_FILES)}"
        raise ValueError(f"--dataset {cfg.dataset}: cannot be read {where}: {reason}") from error
    bad = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if bad:
        raise ValueError(f"--dataset {cfg.dataset}: row {bad} is no object with columns: {str(rows[bad - 1])[:100]}")
    if not rows:
        raise ValueError(f"--dataset {cfg.dataset}: has no rows")
    return rows


def load_prompts(cfg: Config, tokenizer) -> tuple[list[Prompt], list[int]]:
    """Tokenized prompts that leave room for a whole completion, and the numbers of the rows that do not.

    ValueError names the flag and the row: a missing column, an empty prompt, messages that the template refuses.
    """
    prompts, too_long, rows = [], [], load_rows(cfg)
    for number, row in enumerate(rows, 1):
        text, answer = (cell(row, number, name, cfg) for name in ("prompt_column", "answer_column"))
        try:
            prompt, ids = encode_prompt(tokenizer, text, cfg.system_prompt)
        except Exception as error:  # templates raise kinds of their own
            raise ValueError(f"--prompt-column {cfg.prompt_column}: row {number} of {cfg.dataset}: {error}") from error
        if len(ids) + cfg.max_completion_tokens <= cfg.max_model_len:
            prompts.append(Prompt(ids, {**row, "prompt": prompt, "answer": answer}))
        else:
            too_long.append(number)
    if not prompts:
        raise ValueError(
            f"none of the {len(rows)} prompts of {cfg.dataset} leaves room for {cfg.max_completion_tokens} new tokens: "
            f"raise --max-model-len {cfg.max_model_len}"
        )
    return prompts, too_long


def cell(row: dict, number: int, name: str, cfg: Config) -> Any:
    """What a row (the number-th) has in the column that a field of the configuration names; or ValueError.

    A dotted path such as `reward_model.ground_truth` reaches into nested columns.
    """
    path, value = getattr(cfg, name), row
    for part in [path] if path in row else path.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"{flag(name)} {path}: row {number} of dataset {cfg.dataset} has {', '.join(row)}")
        value = value[part]
    return value


def encode_prompt(tokenizer, prompt: str | list[dict], system_prompt: str = "") -> tuple[str | list[dict], list[int]]:
    """The prompt as rewards see it, and its token ids; ValueError if it is empty, or is neither text nor messages.

    Chat messages go through the tokenizer's template with the assistant's turn opened, or continued if the last message
    is the assistant's. With a system prompt a text is the user's message.
    """
    if system_prompt:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = [{"role": "system", "content": system_prompt}, *messages]
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif not isinstance(prompt, list):
        raise ValueError(f"{prompt!r} is neither text nor a list of chat messages")
    elif not prompt:
        raise ValueError("it has no messages")
    elif not tokenizer.chat_template:
        raise ValueError("chat messages need a model with a chat template: give text, or name an instruct model")
    else:
        prefilled = prompt[-1].get("role") == "assistant"
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=not prefilled, continue_final_message=prefilled, return_dict=False
        )
    if ids[:2] == [tokenizer.bos_token_id] * 2:  # written by the template or the text, and by the tokenizer again
        ids = ids[1:]
    if not ids or ids == [tokenizer.bos_token_id]:
        raise ValueError("the prompt is empty")
    return prompt, ids


def check_reward(cfg: Config, shipped: Path | None) -> None:
    """Exit unless every --reward function can be imported here and, from the folder that is shipped, in a Job."""
    from rewards import load_rewards

    try:
        functions = load_rewards(cfg.reward)
    except ValueError as error:
        fail(f"--{error}")  # it begins with "reward" and the name
    for function in functions if shipped else []:
        file = Path(sys.modules[function.__module__].__file__)
        if file.parent != shipped:
            fail(f"--reward {cfg.reward}: Jobs do not get {file}; copy it beside launch.py and name it by its module")


def check_prompts(cfg: Config) -> None:
    """Exit unless every prompt can be encoded, and the reward scores the first row, as the trainer will do it."""
    from transformers import AutoTokenizer

    from rewards import load_rewards, try_rewards

    print(f"reading the prompts of {cfg.dataset} for {cfg.model}", flush=True)
    try:
        prompts, too_long = load_prompts(cfg, AutoTokenizer.from_pretrained(cfg.model))
        columns = {name: value for name, value in prompts[0].columns.items() if name != "prompt"}
        problem = try_rewards(load_rewards(cfg.reward), prompts[0].columns["prompt"], columns)
    except ValueError as error:
        fail(str(error))
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        return print(
            f"the prompts are not checked here: the tokenizer of {cfg.model} cannot be read: {reason}", flush=True
        )
    if problem:
        fail(f"--{problem}")
    if too_long:
        rows = ", ".join(map(str, too_long[:5])) + (", ..." if len(too_long) > 5 else "")
        print(f"{len(too_long)} prompts leave no room for a completion and are left out: rows {rows}", flush=True)
