"""Prompts: the bundled set, the generator, splits, hub sources and error messages."""

from __future__ import annotations

import ast
import doctest
import io
import json
import random
from collections import Counter

import datasets
import pytest

from dblast.reproduction.prompts import sources as prompts_module
from dblast.reproduction.prompts.templates import SHAPES, fill, number_function, text_function
from dblast.reproduction.prompts.sources import (
    TASKS,
    TRAINING_LIMIT_PER_TASK,
    Prompt,
    PromptError,
    chat_messages,
    load_prompts,
    normalised,
    split_prompts,
    training_prompts,
)


@pytest.fixture(scope="module")
def evaluation() -> list[Prompt]:
    return load_prompts()


@pytest.fixture(scope="module")
def generated() -> list[Prompt]:
    return training_prompts(5_000, seed=0)


def write_lines(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# --- the bundled evaluation set


def test_bundled_set_has_enough_distinct_prompts(evaluation):
    counts = Counter(p.task for p in evaluation)
    assert set(counts) == set(TASKS)
    assert min(counts.values()) >= 48
    assert len({p.id for p in evaluation}) == len(evaluation)
    assert len({normalised(p.turns[0]) for p in evaluation}) == len(evaluation)


@pytest.mark.parametrize("task", TASKS)
def test_bundled_prompts_vary_in_opening_and_length(task):
    texts = [p.turns[0] for p in load_prompts(tasks=[task])]
    assert len({tuple(text.split()[:3]) for text in texts}) >= 35
    lengths = [len(text.split()) for text in texts]
    assert 10 <= min(lengths) and max(lengths) <= 120


def test_some_chat_prompts_have_two_turns(evaluation):
    assert sum(len(p.turns) == 2 for p in evaluation if p.task == "chat") >= 5


def test_function_stubs_of_the_code_task_are_valid_python(evaluation):
    stubs = [p.turns[0] for p in evaluation if p.task == "code" and p.turns[0].startswith(("def ", "class ", "from ", "import "))]
    assert len(stubs) >= 20
    for stub in stubs:
        ast.parse(stub)


def test_tasks_are_selected(evaluation):
    chosen = load_prompts(tasks=["code", "maths"])
    assert chosen == [p for p in evaluation if p.task in ("code", "maths")]


def test_chat_messages_hold_the_first_turn_only():
    prompt = Prompt("x", "chat", ("first", "second"))
    assert chat_messages(prompt) == [{"role": "user", "content": "first"}]


# --- training prompts


def test_training_prompts_are_distinct_and_interleaved(generated):
    assert len({normalised(p.turns[0]) for p in generated}) == len(generated) == 5_000
    assert len({p.id for p in generated}) == len(generated)
    assert [p.task for p in generated[:8]] == list(TASKS) * 2


def test_no_training_prompt_is_an_evaluation_prompt(generated, evaluation):
    held = {normalised(turn) for p in evaluation for turn in p.turns}
    assert not held & {normalised(p.turns[0]) for p in generated}


def test_training_prompts_are_reproducible_and_prefixes_agree(generated):
    random.seed(1)
    state = random.getstate()
    assert training_prompts(300, seed=0) == generated[:300]
    assert random.getstate() == state
    assert training_prompts(300, seed=1) != generated[:300]


def test_training_prompts_of_some_tasks():
    assert {p.task for p in training_prompts(9, seed=3, tasks=("code", "chat"))} == {"code", "chat"}


def test_the_generator_gives_what_it_promises():
    n = TRAINING_LIMIT_PER_TASK * len(TASKS)
    assert n >= 8_000
    assert len({normalised(p.turns[0]) for p in training_prompts(n, seed=5)}) == n


def test_asking_for_too_many_training_prompts():
    with pytest.raises(PromptError) as error:
        training_prompts(TRAINING_LIMIT_PER_TASK + 1, seed=0, tasks=("maths",))
    assert str(TRAINING_LIMIT_PER_TASK) in one_line(error)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"n": 0, "seed": 0}, "at least 1"),
        ({"n": 2, "seed": 0, "tasks": ("poetry",)}, "maths, chat, code, creative"),
        ({"n": 2, "seed": 0, "tasks": ()}, "no tasks"),
        ({"n": 2, "seed": 0, "source": "web"}, "'bundled' or 'hub'"),
    ],
)
def test_bad_training_requests(arguments, part):
    with pytest.raises(PromptError) as error:
        training_prompts(**arguments)
    assert part in one_line(error)


@pytest.mark.parametrize("task", TASKS)
def test_every_shape_fills_all_its_slots(task):
    assert len(SHAPES[task]) >= 15
    for shape in SHAPES[task]:
        text = fill(shape, random.Random(0))
        assert "#" not in text and "!>" not in text
        assert not any(opening in text.replace("->", "") for opening in ("<n", "<k", "<person", "<place", "<values"))


@pytest.mark.parametrize("make", [number_function, text_function])
def test_generated_stubs_are_valid_and_hold_one_example(make):
    for seed in range(50):
        stub = make(random.Random(seed))
        docstring = ast.get_docstring(ast.parse(stub).body[0])
        (example,) = doctest.DocTestParser().get_examples(docstring)
        assert example.want.strip()


# --- splits


def test_split_is_disjoint_complete_stratified_and_repeatable(evaluation):
    calibration, held_out = split_prompts(evaluation)
    assert not set(calibration) & set(held_out)
    assert set(calibration) | set(held_out) == set(evaluation)
    assert Counter(p.task for p in calibration) == {task: 5 for task in TASKS}
    assert (calibration, held_out) == split_prompts(evaluation)
    assert calibration != split_prompts(evaluation, seed=1)[0]


def test_split_membership_does_not_depend_on_the_order(evaluation):
    calibration, _ = split_prompts(list(reversed(evaluation)), seed=4)
    assert set(calibration) == set(split_prompts(evaluation, seed=4)[0])


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_either_part_of_a_split_has_every_task(evaluation, fraction):
    for part in split_prompts(evaluation, fraction):
        assert {p.task for p in part} == set(TASKS)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_split_fraction_out_of_range(evaluation, fraction):
    with pytest.raises(PromptError) as error:
        split_prompts(evaluation, fraction)
    assert "between 0 and 1" in one_line(error)


def test_split_needs_two_prompts_a_task_and_distinct_ids(evaluation):
    with pytest.raises(PromptError, match="'maths' has a single prompt"):
        split_prompts(evaluation[:1])
    with pytest.raises(PromptError, match="ids are repeated"):
        split_prompts([*evaluation, evaluation[0]])
    with pytest.raises(PromptError, match="no prompts"):
        split_prompts([])


# --- files


def test_a_file_of_prompts(tmp_path):
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"task": "chat", "turns": ["Hello?", "And now?"]},
        "",
        {"id": "b", "task": "code", "turns": ["Write été()."]},
    )
    first, second = load_prompts(path)
    assert first == Prompt("chat-line1", "chat", ("Hello?", "And now?"))
    assert second == Prompt("b", "code", ("Write été().",))
    assert load_prompts(str(path), tasks=["code"]) == [second]


GOOD = {"id": "a", "task": "chat", "turns": ["Hello?"]}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "not an object"),
        ({"task": ["chat"], "turns": ["x"]}, "'task' must be a string"),
        ({"task": " ", "turns": ["x"]}, "'task' must be a string that is not empty"),
        ({"task": "chat"}, "give either 'turns'"),
        ({"prompt": "x", "turns": ["x"]}, "give either 'turns'"),
        ({"prompt": ["x"]}, "'prompt' must be a string"),
        ({"prompt": " "}, "'prompt' is empty"),
        ({"task": "chat", "turns": "x"}, "'turns' must be a list of strings"),
        ({"task": "chat", "turns": [1]}, "'turns' must be a list of strings"),
        ({"task": "chat", "turns": []}, "'turns' is empty"),
        ({"task": "chat", "turns": ["  "]}, "'turns' is empty"),
        ({"id": 7, "task": "chat", "turns": ["x"]}, "'id' must be a string"),
        (GOOD, "id 'a' was used before on line 1"),
    ],
)
def test_an_unreadable_line_is_named(tmp_path, bad, reason):
    path = write_lines(tmp_path / "mine.jsonl", GOOD, "", bad)
    with pytest.raises(PromptError) as error:
        load_prompts(path)
    text = one_line(error)
    assert text.startswith(f"{path}:3: ")
    assert reason in text


def test_a_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(PromptError, match=":2: not UTF-8"):
        load_prompts(path)


def test_missing_and_empty_files_and_unknown_tasks(tmp_path):
    with pytest.raises(PromptError, match="no such prompt file"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(PromptError, match="holds no prompts"):
        load_prompts(write_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(PromptError, match="unknown task 'maths'; the tasks are chat"):
        load_prompts(write_lines(tmp_path / "chat.jsonl", GOOD), tasks=["maths"])
    with pytest.raises(PromptError, match="unknown task 'poetry'; the tasks are maths"):
        load_prompts(tasks=["poetry"])


# --- the hub


HUB = {
    "openai/gsm8k": [{"question": "How many?", "answer": "4"}],
    "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["One?", "Two?"], "prompt_id": 81, "category": "writing", "reference": []}],
    "openai/openai_humaneval": [{"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": "", "entry_point": "f"}],
}
CREATIVE = {"1": {"category": "c", "title": "t", "writing_prompt": "A tale. <SEED>", "seed_modifiers": ["In Rome.", "In Oslo."]}}
TULU = [
    {"id": f"row{i}", "source": source, "messages": [{"content": text, "role": "user"}, {"content": "…", "role": "assistant"}]}
    for i, (source, text) in enumerate(
        [("ai2-adapt-dev/personahub_math_v5", "Add."), ("ai2-adapt-dev/personahub_code_v2", "Code."),
         ("ai2-adapt-dev/no_robots", "Talk."), ("ai2-adapt-dev/no_robots", "talk. "), ("ai2-adapt-dev/no_robots", " ")]
    )
]


@pytest.fixture
def hub(monkeypatch):
    calls = []

    def load_dataset(name, *config, **options):
        calls.append((name, config, options))
        if name == "allenai/tulu-3-sft-mixture":
            return datasets.Dataset.from_list(TULU).to_iterable_dataset()
        return datasets.Dataset.from_list(HUB[name])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        prompts_module.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(json.dumps(CREATIVE).encode())
    )
    return calls


def test_the_papers_sets(hub):
    assert load_prompts("hub") == [
        Prompt("gsm8k-0000", "maths", ("How many?",)),
        Prompt("mt-bench-81", "chat", ("One?", "Two?")),
        Prompt("HumanEval/0", "code", ("def f():\n",)),
        Prompt("creative-writing-1", "creative", ("A tale. In Rome.",)),
    ]
    assert [(name, config, options["split"]) for name, config, options in hub] == [
        ("openai/gsm8k", ("main",), "test"),
        ("HuggingFaceH4/mt_bench_prompts", (), "train"),
        ("openai/openai_humaneval", (), "test"),
    ]
    assert all(options["revision"] for _, _, options in hub)


def test_only_the_needed_set_is_loaded(hub):
    load_prompts("hub", tasks=["code"])
    assert [name for name, _, _ in hub] == ["openai/openai_humaneval"]


def test_tulu_training_prompts(hub):
    found = training_prompts(3, seed=0, source="hub")
    assert {(p.task, normalised(p.turns[0])) for p in found} == {("maths", "add."), ("code", "code."), ("chat", "talk.")}
    assert found[:2] == training_prompts(2, seed=0, source="hub")
    assert hub[0][2]["streaming"] is True
    assert [p.task for p in training_prompts(1, seed=0, tasks=("code",), source="hub")] == ["code"]
    with pytest.raises(PromptError, match="has 3 that fit"):
        training_prompts(4, seed=0, source="hub")
    with pytest.raises(PromptError, match="does not mark creative"):
        training_prompts(1, seed=0, tasks=("creative",), source="hub")


@pytest.mark.parametrize("load", [lambda: load_prompts("hub", ["maths"]), lambda: training_prompts(1, 0, source="hub")])
def test_hub_out_of_reach(monkeypatch, load):
    def load_dataset(*_, **__):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(PromptError) as error:
        load()
    text = one_line(error)
    assert "no route" in text and "bundled" in text and "JSONL" in text


def test_creative_set_out_of_reach(monkeypatch):
    def urlopen(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(prompts_module.urllib.request, "urlopen", urlopen)
    with pytest.raises(PromptError, match="creative writing v3 could not be loaded"):
        load_prompts("hub", ["creative"])


@pytest.mark.parametrize("profile", ["smoke", "cpu"])
def test_synthetic_training_prompts_are_no_evaluation_prompts_of_any_plan(profile):
    """Figure 1's drafters train on one kind and are scored on that kind's prompts of the whole plan."""
    from dblast.reproduction.prompts.plan import evaluation_prompts, training_prompt_ids
    from dblast.reproduction.profiles import get_profile

    plan = get_profile(profile).plan("tiny")
    held_out = {prompt.ids for prompt in evaluation_prompts(plan, None)}
    for owner in (plan, plan.figure1()):
        assert not held_out & {prompt.ids for prompt in training_prompt_ids(owner, None)}
    figure1 = {(p.prompt_id, p.ids) for p in evaluation_prompts(plan.figure1(), None)}
    assert figure1 == {(p.prompt_id, p.ids) for p in evaluation_prompts(plan, None) if p.task == plan.diagnosis.task}

