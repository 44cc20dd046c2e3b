"""From one's own target to a folder with a drafter and its report: refusals, sizes, a whole run, and going on."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.reproduction import profiles
from dblast.reproduction.own import run as own_run
from dblast.reproduction.own.budget import Speeds, choose_sizes, with_sizes
from dblast.reproduction.own.costs import with_total
from dblast.reproduction.own.evaluate import evaluate_drafter
from dblast.reproduction.language.small import make_small_target, small_prompts
from dblast.reproduction.own.run import make_drafter
from dblast.reproduction.own.target import Request, check_request, parse_chat_options, prepare
from dblast.reproduction.profiles import SMOLLM2
from dblast.reproduction.own.requirements import check_memory, check_numbers, memory_need, size, sole_writer
from tests.checks import one_line

#: A machine so slow that an hour gives few steps.
SLOW = Speeds(token=0.01, pretraining=40.0, finetuning=10.0, scoring=0.01, start=0.0)
SLOW_HOURS = 0.5


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with a target under a misleading name, and prompts."""
    folder = tmp_path_factory.mktemp("my own")
    make_small_target(folder / "qwen3 tests", vocabulary=320, steps=1, hidden=32, layers=3, batch=4)
    lines = [json.dumps(row) for row in small_prompts(40, "tests")]
    (folder / "my prompts.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture
def request_(own):
    target, prompts = str(own / "qwen3 tests"), str(own / "my prompts.jsonl")
    return Request(target, prompts, hours=SLOW_HOURS, response_tokens=12, block_length=3)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hours": float("nan")}, "--hours must be a number"),
        ({"hours": 0.0}, "--hours must be positive"),
        ({"seed": -1}, "--seed must lie between 0"),
        ({"categories": 0}, "--categories must be at least 1"),
        ({"draft_vocabulary": -5}, "--draft-vocabulary must be"),
        ({"mask_token_id": -1}, "--mask-token-id must not be negative"),
        ({"target": "./absent"}, "no such folder './absent'"),
        ({"start": "./absent"}, "--start: no such folder"),
        ({"prompts": "absent.jsonl"}, "--prompts: no such file 'absent.jsonl'"),
        ({"train_prompts": "absent.jsonl"}, "--train-prompts: no such file"),
        ({"prompts": "absent.csv:text"}, "--prompts: no such file 'absent.csv'"),
        ({"prompts": "."}, "--prompts: '.' holds a table; name a column of it, as in '.:text'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_needs_no_model_is_refused_first(request_, tmp_path, changes, words):
    with pytest.raises(DBlastError) as error:
        check_request(replace(request_, **changes), tmp_path / "out")
    one_line(error, words)


def test_a_line_that_is_no_prompt_is_refused_before_the_target_is_loaded(request_, tmp_path):
    (tmp_path / "my.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    for option in ("prompts", "train_prompts"):
        with pytest.raises(DBlastError) as error:
            check_request(replace(request_, **{option: str(tmp_path / "my.jsonl")}), tmp_path / "out")
        one_line(error, "my.jsonl:2: give either 'turns'")


def test_an_output_that_exists_or_cannot_be_made_is_refused(request_, tmp_path):
    with pytest.raises(DBlastError, match="exists already; give --out"):
        check_request(request_, tmp_path)
    with pytest.raises(DBlastError, match="is no folder"):
        check_request(request_, tmp_path / "absent" / "out")
    with pytest.raises(DBlastError, match="cannot be made"):
        check_request(request_, Path("/proc/out"))


def test_one_process_makes_an_output_at_a_time(tmp_path):
    with sole_writer(tmp_path / "out"), pytest.raises(DBlastError, match="another process is making"):
        with sole_writer(tmp_path / "out"):
            pass
    with sole_writer(tmp_path / "out"):
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"categories": 10**7}, ("of memory", "lower -K")),
        ({"block_length": 12}, ("--block-length 12", "answers of 12 tokens")),
        ({"layers": 9}, ("--layers 9", "3 layers")),
        ({"loss": "nope"}, ("unknown loss 'nope'",)),
        ({"training_setting": "nope"}, ("unknown setting 'nope'",)),
        ({"response_tokens": 511}, ("my prompts.jsonl:", "context limit of 512", "--response-tokens")),
        ({"mask_token_id": 320}, ("mask token id 320", "320 tokens")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_before_anything_is_sampled(request_, cache_folder, changes, words):
    with pytest.raises(DBlastError) as error:
        prepare(replace(request_, **changes))
    one_line(error, *words)
    assert not (cache_folder / "trajectories").exists()


def test_targets_of_other_families_are_refused_by_name(tmp_path, request_):
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt")
    with pytest.raises(DBlastError) as error:
        prepare(replace(request_, target=str(tmp_path / "gpt")))
    one_line(error, "gpt", "model_type = 'gpt2'", "not supported")


def test_numbers_by_option():
    check_numbers(seed=0, hours=0.1, steps=1, layers=None)
    with pytest.raises(DBlastError, match="--pretrain-steps must be at least 1, got 0"):
        check_numbers(pretrain_steps=0)


def test_chat_options():
    assert parse_chat_options(None, None) is None
    assert parse_chat_options(["date=today", "n=3"], True) == {"enable_thinking": True, "date": "today", "n": 3}
    with pytest.raises(DBlastError, match="NAME=VALUE"):
        parse_chat_options(["date"], None)


# -- what is chosen --------------------------------------------------------------------------------


def test_what_a_target_decides(request_):
    prepared = prepare(request_)
    plan = prepared.plan
    # A Llama, whatever its folder is called; the reserved token is proposed and shown.
    assert prepared.target.model.config.model_type == "llama"
    assert plan.drafter.mask_token_id == 4 and any("mask token: 4 (<|reserved_0|>)" in note for note in prepared.notes)
    assert (plan.drafter.layers, plan.drafter.taps, plan.drafter.draft_vocabulary) == (3, (0, 1), 0)
    assert prepare(replace(request_, draft_vocabulary=100)).plan.drafter.draft_vocabulary == 100
    # Where target and prompts lie does not count, other options do.
    assert prepare(request_).key == prepared.key != prepare(replace(request_, seed=1)).key


def test_sizes_fill_the_time_and_too_little_time_is_refused(request_):
    prepared = prepare(request_)
    speeds = Speeds(token=1e-3, pretraining=0.5, finetuning=0.4, scoring=1e-4, start=10.0)
    sizes = choose_sizes(prepared.plan, prepared.target, speeds, 3600, 1e12, 500)
    twice = choose_sizes(prepared.plan, prepared.target, speeds, 7200, 1e12, 500)
    assert 1.9 < twice.pretraining_steps / sizes.pretraining_steps < 2.1
    tokens = prepared.plan.data.training_tokens
    spent = tokens * speeds.token * (sizes.pretraining_answers + sizes.finetuning_answers)
    spent += sizes.pretraining_steps * 0.5 + sizes.finetuning_steps * 0.4
    assert 0.7 * 3600 < spent < 0.8 * 3600
    plan = with_sizes(prepared.plan, sizes)
    plan.check()
    assert plan.pretrain_data.training_setting == "high" and plan.data.training_setting == "low"
    assert plan.pretrain.checkpoint_every == 40
    with pytest.raises(DBlastError) as error:
        choose_sizes(prepared.plan, prepared.target, speeds, 20, 1e12, 500)
    hours = float(re.search(r"--hours ([\d.]+)", str(error.value))[1])
    choose_sizes(prepared.plan, prepared.target, speeds, 3600 * hours, 1e12, 500)
    with pytest.raises(DBlastError, match="room for"):
        choose_sizes(prepared.plan, prepared.target, speeds, 3600, 1e5, 500)


def test_a_short_time_pays_for_the_least_evaluation_with_at_most_half_of_its_training(request_):
    prepared = prepare(request_)
    speeds = Speeds(token=1e-3, pretraining=0.5, finetuning=0.4, scoring=1e-4, start=10.0)

    def steps(**changes):
        sizes = choose_sizes(prepared.plan, prepared.target, replace(speeds, **changes), 600, 1e12, 500)
        assert sizes.evaluation_per_task >= 4
        return sizes.pretraining_steps, sizes.timed_tokens

    free, tokens = steps()
    assert tokens == prepared.plan.data.evaluation_tokens
    paid, tokens = steps(timing=10.0)
    # A twentieth of the time, but no answer below eight tokens.
    assert tokens == 8 and paid == pytest.approx(free * 510 / 590, rel=0.03)
    assert steps(scoring=0.5)[0] == pytest.approx(free * 300 / 590, rel=0.03)


def test_costs_add_up_with_what_is_not_of_a_stage():
    stages = pd.DataFrame([{"what": "pre-training", "tokens": 0, "anchors": 5, "disk": 7, "minutes": 2.0}])
    rest, total = with_total(stages, 300.0).iloc[1:].to_dict("records")
    assert rest["minutes"] == 3.0 and (total["minutes"], total["anchors"], total["disk"]) == (5.0, 5, 7)


def test_memory_grows_with_categories_and_blocks(request_, monkeypatch):
    prepared = prepare(request_)
    plan, config = prepared.plan, prepared.target.model.config
    many = replace(plan, variants=(replace(plan.variants[0], K=1000),))
    long = replace(plan, drafter=replace(plan.drafter, block_length=1000))
    need = memory_need(plan, config, 64)
    assert memory_need(many, config, 64).drafter > 10 * need.drafter
    assert memory_need(long, config, 64).training > 100 * need.training
    monkeypatch.setattr("dblast.reproduction.own.requirements.free_memory", lambda: 2e9)
    check_memory(plan, config, 64)
    with pytest.raises(DBlastError, match="lower -K or --block-length"):
        check_memory(long, config, 64)
    assert (size(999), size(12_345_678)) == ("999 B", "12.3 MB")


# -- a whole run -----------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """Sizes as on a slow machine, and small steps."""
    monkeypatch.setattr(own_run, "measure", lambda plan, target: SLOW)
    small = {name: replace(getattr(SMOLLM2, name), sequences=2, anchors=4) for name in ("pretrain", "finetune")}
    monkeypatch.setattr(profiles, "SMOLLM2", replace(SMOLLM2, **small))


def test_a_killed_run_goes_on_and_what_comes_out_is_whole(own, request_, slow, tmp_path, monkeypatch):
    out, said = tmp_path / "out folder", []
    real = own_run.prepare_variant

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(own_run, "prepare_variant", killed)
    with pytest.raises(KeyboardInterrupt):
        make_drafter(request_, out, said.append)
    assert list(tmp_path.iterdir()) == []
    assert any(line.startswith("measuring") for line in said) and "pre-training ..." in said
    assert not any("more than" in line for line in said)

    monkeypatch.setattr(own_run, "prepare_variant", real)
    monkeypatch.setattr(own_run, "measure", None)
    said.clear()
    make_drafter(request_, out, said.append)
    assert any("sizes that were chosen when this run first started" in line for line in said)
    assert "pre-training: done before" in said and "fine-tuning ..." in said
    assert [path.name for path in tmp_path.iterdir()] == ["out folder"]

    for path in out.glob("*.json"):
        json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{path.name} holds {word}"))
    drafter = DBlastDrafter.load(out)
    assert drafter.config.num_categories == 4 and drafter.dtype == torch.bfloat16
    assert drafter.config.target_name == request_.target
    assert set(drafter.config.category_temperatures) == {"high", "medium", "low"}
    html, markdown = (out / "report.html").read_text(), (out / "report.md").read_text()
    for text in (html, markdown):
        for words in ("in the loop", "per anchor", "start drafter", "soft", "started 2 times", "different blocks"):
            assert words in text
    assert "of these prompts, which do not count" in markdown
    assert html.count("data:image/png;base64,") == 2 and "http" not in html.replace("http-equiv", "")
    assert "![Training](training.png)" in markdown and (out / "training.png").exists()
    with pytest.raises(DBlastError, match="exists already"):
        make_drafter(request_, out)

    # Prompts that trained or calibrated it are left out; the rest was held out in the report, too.
    said.clear()
    table = evaluate_drafter(str(out), request_.prompts, response_tokens=12, say=said.append, csv=tmp_path / "t.csv")
    assert any("trained or calibrated this drafter and are left out" in line for line in said)
    assert set(table.proposal) == {"greedy_branch", "soft", "tree"} and (tmp_path / "t.csv").exists()
    greedy = table[(table.proposal == "greedy_branch") & (table.task == "all")].set_index("setting")
    assert dict(greedy.category_temperature) == drafter.config.category_temperatures

    # Its target is a folder, which may lie elsewhere today.
    config = json.loads((out / "config.json").read_text())
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    (moved / "manifest.json").unlink()
    (moved / "config.json").write_text(json.dumps(config).replace(request_.target, "gone elsewhere"))
    with pytest.raises(DBlastError, match="remembers its target as 'gone elsewhere', which is not here; give --target"):
        evaluate_drafter(str(moved), request_.prompts)

    # It belongs to this target alone.
    make_small_target(tmp_path / "other", vocabulary=330, steps=1, hidden=32, layers=3, batch=4)
    with pytest.raises(DBlastError, match="vocabulary 320, this target has 330"):
        evaluate_drafter(str(out), request_.prompts, str(tmp_path / "other"))


def test_a_run_from_a_given_drafter_only_fine_tunes(own, request_, slow, tmp_path, make_drafter_folder, monkeypatch):
    monkeypatch.setattr(own_run, "measure", lambda plan, target: replace(SLOW, timing=120.0))
    start = make_drafter_folder(request_.target)
    said = []
    request = replace(request_, start=str(start), categories=1, loss="NLL", block_length=None, hours=0.2)
    out = make_drafter(request, tmp_path / "out", said.append)
    assert not any(line.startswith("pre-training") for line in said)
    # Eight tokens to time it are as long as what was asked for.
    assert any("more than the 12.0 minutes of --hours" in line and "4 prompts of every task" in line for line in said)
    assert DBlastDrafter.load(out).config.num_categories == 1
    report = (out / "report.md").read_text()
    assert "different blocks" not in report
    # How the given drafter was trained is not known, and this plan's pre-training is not how.
    assert "none in this run: it starts from" in report and "pre-training responses" not in report
    assert "pretraining" not in DBlastDrafter.load(out).config.recipe
    with pytest.raises(DBlastError, match="--per-task must be at least 4"):
        evaluate_drafter(str(start), request_.prompts, per_task=3)
    table = evaluate_drafter(str(start), request_.prompts, response_tokens=12, per_task=4, say=said.append)
    assert set(table.K) == {0} and table.category_temperature.isna().all()
    with pytest.raises(DBlastError, match="has --block-length 2, not 3"):
        prepare(replace(request_, start=str(start)))
    with pytest.raises(DBlastError, match="has category heads already"):
        prepare(replace(request_, start=str(out), block_length=None))


@pytest.fixture
def make_drafter_folder(tmp_path):
    """Saves a random DFlash drafter (K = 0, b = 2) of a target's folder."""
    from dblast.backbone import DBlastConfig
    from dblast.targets import load_target
    from dblast.training import new_drafter

    def build(name):
        target = load_target(name, mask_token_id=4)
        config = DBlastConfig.for_target(
            target, num_layers=1, block_length=2, num_categories=0, target_layer_ids=[0, 1]
        )
        return new_drafter(config, target, 0).save(tmp_path / "start")

    return build
