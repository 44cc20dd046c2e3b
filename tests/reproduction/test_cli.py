"""The command line's refusals: clear, in one line, and before the heavy modules are imported."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dblast import losses, proposals, replay, sampling, verifier
from dblast.errors import ArtefactError, DBlastError
from dblast.reproduction import demo, names, objectives, profiles
from dblast.reproduction.cli import app
from dblast.reproduction.language import synthetic
from dblast.reproduction.paths import ROOT
from dblast.reproduction.prompts import sources
from tests.method.test_drafter_files import published  # noqa: F401  (a fixture)

#: Runs the command line like ``python -m dblast`` and says on stdout which of the modules named first it imported.
_PROBE = """
import sys
modules = sys.argv[1].split(",")
sys.argv = ["dblast", *sys.argv[2:]]
from dblast.reproduction.cli import main
try:
    main()
except SystemExit as stop:
    print("imported:", *(name for name in modules if name in sys.modules))
    sys.exit(stop.code)
"""

HEAVY = "torch,transformers,datasets,papermill,pandas"
#: Profiles are made of training configurations, which need torch; the rest can wait.
AFTER_PROFILES = "datasets,papermill,dblast.reproduction.experiments,dblast.reproduction.results"


def run(modules, arguments):
    command = [sys.executable, "-c", _PROBE, modules, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", " \n\t"], "the prompt is empty"),
        (["generate", "--prompt", "Hi", "--drafter", "./missing"], "no such folder 'missing'"),
        (["generate", "--prompt", "Hi", "--target", "./missing", "--drafter", "x"], "no such folder './missing'"),
        (["generate", "--prompt", "Hi", "--target", ""], "no such folder ''"),
        (["generate", "--prompt", "Hi", "--target", "."], "give --drafter FOLDER"),
        (["generate", "--prompt", "Hi", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["generate", "--prompt", "Hi", "--category-temperature", "-1"], "--category-temperature must be a number and not be negative, got -1.0"),
        (["generate", "--prompt", "Hi", "--nodes", "4"], "--nodes means nothing in --mode greedy_branch"),
        (["generate", "--prompt", "Hi", "--mode", "tree", "--draft-top-k", "4"], "only in soft or independent"),
        (["train", "--target", "smollm2", "--model", "/missing/model"], "no such folder '/missing/model'"),
        (["drafter", "--target", "smollm2", "--out", "x", "--loss", "nope"], "unknown --loss 'nope'; known: NLL, AL"),
        (["drafter", "--target", "smollm2", "--out", "x", "--training-setting", "nope"], "known: high, medium, low"),
        (["train", "--output", "."], "exists already"),
        (["reproduce", "--profile", "nope"], "unknown profile 'nope'; known profiles: smoke, cpu"),
        (["train", "--loss", "nope"], "unknown loss 'nope'; known losses: NLL, AL"),
        (["train", "--construction", "nope"], "unknown AL construction 'nope'"),
        (["train", "--target", "nope"], "profile 'cpu' has no target 'nope'; its targets: tiny, smollm2"),
        (["train", "--prompts", "missing.jsonl"], "missing.jsonl: no such prompt file"),
        (["train", "--tasks", "chat, creative"], "unknown task 'creative'; the tasks are story, maths, code, chat"),
        (["train", "--target", "smollm2", "--tasks", "story"], "unknown task 'story'; the tasks are maths, chat, code"),
        (["train", "--start", "./missing"], "--start: no such folder './missing'"),
        (["pretrain", "--profile", "sweeps", "--target", "tiny-b7"], "profile 'sweeps' has no target 'tiny-b7'"),
        (["generate", "--prompt", "Hi", "--mode", "nope"], "unknown proposal mode 'nope'"),
        (["generate", "--prompt", "Hi", "--verification", "nope"], "unknown verification 'nope'"),
        (["evaluate", "--drafter", "x", "--proposal", "soft", "--proposal", "nope"], "unknown proposal 'nope'"),
        (["evaluate", "--drafter", "x", "--setting", "nope"], "unknown setting 'nope'; known settings: high, medium, low"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_input_that_needs_no_model_is_refused_before_torch_is_imported(arguments, words):
    done = run(HEAVY, arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and words in done.stderr
    assert done.stdout.strip() == "imported:"


@pytest.mark.parametrize("arguments", [["train", "--nope"], ["generate"], ["nope"]], ids=" ".join)
def test_usage_errors_keep_their_text_and_import_nothing(arguments):
    done = run(HEAVY, arguments)
    assert done.returncode == 2
    assert "Usage:" in done.stderr and "Error" in done.stderr
    assert done.stdout.strip() == "imported:"


def test_a_plan_is_refused_before_the_stages_are_imported():
    done = run(AFTER_PROFILES, ["train", "--mask-token-id", "5"])
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "--mask-token-id is for loaded targets" in done.stderr
    assert done.stdout.strip() == "imported:"


def test_the_command_line_shows_every_name_that_is_known():
    assert names.PROFILES == tuple(profiles.PROFILES)
    assert (*names.LOSSES, *names.OBJECTIVES) == tuple(losses.LOSSES) and names.OBJECTIVES == tuple(objectives.OBJECTIVES)
    assert names.AL_CONSTRUCTIONS == losses.AL_CONSTRUCTIONS
    assert names.TARGETS == {name: tuple(p.label for p in profile.plans) for name, profile in profiles.PROFILES.items()}
    assert (names.MODES, names.PROPOSALS) == (proposals.MODES, replay.PROPOSALS)
    assert (names.VERIFICATIONS, names.SETTINGS) == (verifier.VERIFICATIONS, tuple(sampling.SETTINGS))
    assert names.TASKS == {"synthetic": synthetic.KINDS, "bundled": sources.TASKS}
    wide = {"COLUMNS": "400", "NO_COLOR": "1"}
    train, generate = (CliRunner(env=wide).invoke(app, [command, "--help"]).stdout for command in ("train", "generate"))
    for known in (names.LOSSES, names.OBJECTIVES, names.AL_CONSTRUCTIONS, names.PROMPT_SOURCES, names.STARTS):
        assert ", ".join(known) in train
    assert ", ".join(names.MODES) in generate


@pytest.mark.parametrize("name", ["owner/name", "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", "smollm2"])
def test_hub_ids_are_left_to_the_hub(name):
    demo.check_target_name(name)


@pytest.mark.parametrize("name", ["x", "./x", "../x", "~/x", "/x", "a/b/c", "owner/", "owner/two words", " "])
def test_other_names_must_be_folders(name):
    with pytest.raises(DBlastError, match=r"no such folder .*owner/name"):
        demo.check_target_name(name)


def test_a_folder_may_have_any_name_and_a_file_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    demo.check_target_name("a b")
    (tmp_path / "file").touch()
    with pytest.raises(DBlastError, match="no such folder 'file'"):
        demo.check_target_name("file")


def test_an_unknown_mode_is_refused_before_a_model_is_loaded(monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("dblast.reproduction.own.pairs.load_target", load)
    done = CliRunner().invoke(app, ["generate", "--prompt", "Hi", "--mode", "nope"])
    assert isinstance(done.exception, DBlastError) and "unknown proposal mode 'nope'" in str(done.exception)


def test_a_missing_drafter_that_could_be_on_the_hub_is_called_missing(llama):
    with pytest.raises(DBlastError, match="holds no drafter .no such folder, and none from the hub"):
        demo.load_drafter(Path("owner/name"), llama)


def test_a_drafter_whose_weights_do_not_fit_its_configuration_gets_one_line(llama, make_drafter, tmp_path):
    make_drafter(llama, num_categories=2).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change in ({"intermediate_size": config["intermediate_size"] + 8}, {"num_categories": 3}, {"num_categories": 0}, *({"num_hidden_layers": n} for n in (1, 9))):
        path.write_text(json.dumps(config | change))
        with pytest.raises(DBlastError, match="does not fit its weights") as error:
            demo.load_drafter(tmp_path, llama)
        assert len(str(error.value).splitlines()) == 1
    path.write_text(json.dumps(config))
    assert demo.load_drafter(tmp_path, llama).config.num_categories == 2


def test_a_drafter_with_a_manifest_is_compared_with_it(llama, make_drafter, tmp_path):
    folder = make_drafter(llama, num_categories=0).save(tmp_path / "made")
    demo.load_drafter(folder, llama)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ArtefactError, match="model.safetensors is missing or damaged"):
        demo.load_drafter(folder, llama)


def test_a_published_dflash_folder_decodes_from_the_command_line(qwen3, published, tmp_path):  # noqa: F811
    qwen3.model.save_pretrained(tmp_path / "target")
    qwen3.tokenizer.save_pretrained(tmp_path / "target")
    arguments = ["--target", str(tmp_path / "target"), "--drafter", str(published), "--max-new-tokens", "6"]
    done = CliRunner().invoke(app, ["generate", "--prompt", "w5 w6", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "accepted length" in done.output


def test_the_target_answers_as_its_drafter_was_trained(llama, make_drafter, tmp_path):
    drafter = make_drafter(llama)
    drafter.config.chat_options = {"enable_thinking": True}
    target = replace(llama, chat_options=dict(llama.chat_options))
    demo.load_drafter(drafter.save(tmp_path / "made"), target)
    assert target.chat_options == {"enable_thinking": True}


@pytest.mark.parametrize(("given", "policy"), [(None, "passive"), ("active", "active")])
def test_idle_threads_sleep_unless_it_is_asked_otherwise(given, policy):
    """Set before torch is loaded, for this process and all that it starts."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = (
        "import os, runpy, sys; sys.argv = ['dblast', 'nope']\n"
        "try: runpy.run_module('dblast', run_name='__main__')\n"
        "except SystemExit: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    given = {"OMP_WAIT_POLICY": given} if given else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [policy, "False"]
