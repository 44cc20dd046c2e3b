"""Prompts of one's own: forms, splits, and how a plan finds them again."""

import json
from dataclasses import replace

import datasets
import pytest

from dblast.errors import ArtefactError, DBlastError
from dblast.reproduction.profiles import SMOLLM2
from dblast.reproduction.prompts.own import (
    FEWEST,
    check_enough,
    divide,
    encode_own,
    keep,
    own_file,
    read_own,
    read_source,
    without_repeats,
)
from dblast.reproduction.prompts.plan import (
    calibration_ids,
    check_evaluation_prompts,
    evaluation_prompts,
    prompt_spec,
    training_prompt_ids,
)
from dblast.reproduction.prompts.sources import Prompt, PromptError, load_prompts


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def prompts(count, task="chat"):
    return [
        Prompt(f"{task}-{i}", task, (f"w{4 + i % 20} w{5 + i // 20}",), where=f"my.jsonl:{i + 1}") for i in range(count)
    ]


def test_both_forms_of_a_line_and_any_task(tmp_path):
    path = write_lines(
        tmp_path / "mine: a.jsonl",
        {"turns": ["Hello?"]},
        {"prompt": "Once upon"},
        {"task": "haiku", "prompt": "frog", "id": "f"},
    )
    chat, text, haiku = read_own(str(path))
    assert chat == Prompt("chat-line1", "chat", ("Hello?",)) and chat.where == f"{path}:1"
    assert text == Prompt("text-line2", "text", ("Once upon",), raw=True)
    assert haiku == Prompt("f", "haiku", ("frog",), raw=True)
    assert load_prompts(path, ["haiku"]) == [haiku]


def test_columns_of_single_files(tmp_path):
    messages = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]]
    table = datasets.Dataset.from_dict({"question": ["One?", None, " ", "Two?"], "chat": messages * 4, "n": [1, 2, 3, 4]})
    table.to_parquet(tmp_path / "my: set.parquet")
    table.remove_columns("chat").to_csv(tmp_path / "set.csv")
    table.to_json(tmp_path / "set.jsonl")
    for name in ("my: set.parquet", "set.csv", "set.jsonl"):
        rows = read_source(f"{tmp_path / name}:question")
        assert [row.turns for row in rows] == [("One?",), ("Two?",)]
        assert rows[1].where == f"{tmp_path / name}, row 4"
    for name in ("my: set.parquet", "set.jsonl"):
        assert {row.turns for row in read_source(f"{tmp_path / name}:chat")} == {("Hi",)}
    for column, words in (("absent", "no column 'absent'; its columns are question"), ("n", "row 1: column 'n' holds")):
        with pytest.raises(PromptError, match=words):
            read_source(f"{tmp_path / 'set.csv'}:{column}")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(PromptError, match="cannot be read as a table"):
        read_source(f"{tmp_path / 'bad.parquet'}:question")
    # Anything else is read as before.
    write_lines(tmp_path / "own.jsonl", {"prompt": "Once"})
    assert read_source(str(tmp_path / "own.jsonl"))[0].raw


def test_columns_of_data_sets_in_a_folder(tmp_path):
    messages = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]]
    table = datasets.Dataset.from_dict(
        {"question": ["One?", " ", "Two?"], "messages": messages * 3, "number": [1, 2, 3]}
    )
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "lines").mkdir()
    table.to_json(tmp_path / "lines" / "train.jsonl")
    for folder in ("saved", "lines"):
        found = read_own(f"{tmp_path / folder}:question")
        assert [(p.id, p.task, p.turns) for p in found] == [
            ("chat-row1", "chat", ("One?",)),
            ("chat-row3", "chat", ("Two?",)),
        ]
        assert {p.turns for p in read_own(f"{tmp_path / folder}:messages")} == {("Hi",)}
    with pytest.raises(PromptError, match="has no column 'answer'; its columns are question, messages, number"):
        read_own(f"{tmp_path / 'saved'}:answer")
    with pytest.raises(PromptError, match="row 1: column 'number' holds neither"):
        read_own(f"{tmp_path / 'saved'}:number")
    with pytest.raises(PromptError, match="could not be loaded"):
        read_own("nobody/nothing:question")


def test_a_single_file_is_split_by_text():
    rows = [*prompts(30), Prompt("again", "chat", ("W4  w5",)), *prompts(6, "code")]
    evaluation, training = divide(rows, "my.jsonl")
    # The code prompts repeat chat's texts, whatever their task.
    assert {p.task for p in evaluation + training} == {"chat"}
    assert len(evaluation) == 6 and len(training) == 24
    assert not without_repeats(training, evaluation)[24:] and len(without_repeats(evaluation + training)) == 30
    # The order of the file plays no part.
    assert [divide(order, "my.jsonl")[0] for order in (prompts(30), prompts(30)[::-1])] == [evaluation] * 2


def test_too_few_prompts_are_refused_by_task():
    with pytest.raises(PromptError, match=f"4 distinct prompts of task 'chat'.*more than {FEWEST}.*--train-prompts"):
        divide(prompts(4), "my.jsonl")
    with pytest.raises(PromptError, match="1 distinct prompt of task 'chat'"):
        check_enough(prompts(1), "my.jsonl")


def test_what_does_not_fit_the_target_is_named_by_file_and_line(llama):
    rows = [Prompt("a", "text", ("w4 w5",), True, "my.jsonl:1"), Prompt("b", "text", ("w4 " * 80,), True, "my.jsonl:7")]
    assert encode_own(rows, llama, 16, "--response-tokens")[0].ids == (4, 5)
    with pytest.raises(
        PromptError, match=r"my.jsonl:7: a prompt of 80 tokens and an answer of 17 .* 96; .*--response-tokens"
    ):
        encode_own(rows, llama, 17, "--response-tokens")


def test_a_plan_finds_kept_prompts_by_content(llama):
    evaluation, training = divide(prompts(30), "my.jsonl")
    encoded = [encode_own(rows, llama, 8, "--response-tokens") for rows in (evaluation, training)]
    name = keep(*encoded)
    assert name == keep(*encoded)
    plan = replace(SMOLLM2, data=replace(SMOLLM2.data, prompts=name, training_prompts=50, evaluation_per_task=5))
    plan.check()
    assert evaluation_prompts(plan, llama) == encoded[0][:5]
    sampled = training_prompt_ids(plan, llama)
    assert len({p.prompt_id for p in sampled}) == 50 and {p.ids for p in sampled} == {p.ids for p in encoded[1]}
    assert len(calibration_ids(plan)) == 1
    # The training split's address does not change with the evaluation prompts.
    other = keep(encoded[0][1:], encoded[1])
    assert prompt_spec(plan.data, True) == prompt_spec(replace(plan.data, prompts=other), True)
    assert prompt_spec(plan.data, False) != prompt_spec(replace(plan.data, prompts=other), False)
    own_file(name, "training").write_text("{")
    with pytest.raises(ArtefactError, match="missing or damaged"):
        training_prompt_ids(plan, llama)


def test_a_file_for_evaluation_alone_is_checked_against_the_target(tmp_path, llama):
    path = write_lines(tmp_path / "mine.jsonl", {"prompt": "w4 w5"}, {"prompt": "w6 " * 60})
    plan = replace(SMOLLM2, data=replace(SMOLLM2.data, prompts=str(path), evaluation_tokens=40))
    with pytest.raises(DBlastError, match="prompt 'text-line2' has 60 tokens"):
        check_evaluation_prompts(plan, llama)
    check_evaluation_prompts(replace(plan, data=replace(plan.data, evaluation_tokens=36)), llama)
