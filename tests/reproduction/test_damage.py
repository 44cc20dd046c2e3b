"""Every kind of artefact cut off, with a flipped bit, taken from another configuration or replaced by a pickle.

Each must be refused in one line that names it and says what to do; nothing of it may be used, and no code in it may run.
"""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch

import dblast
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.reproduction import results
from dblast.reproduction.demo import load_drafter
from dblast.reproduction.diagnosis.continuations import load_continuations, store_continuations
from dblast.reproduction.experiments import open_drafter
from dblast.reproduction.profiles import get_profile
from dblast.reproduction.prompts import sources
from dblast.reproduction.stages import Stage
from dblast.sampling import SamplingSettings
from dblast.support.progress import quiet_loading
from dblast.targets import load_target
from dblast.training import TrainingConfig, train
from dblast.trajectories import EncodedPrompt, TrajectorySet, sample_trajectories
from tests.checks import one_line, refused

SETTINGS = SamplingSettings(temperature=1.0, top_k=20, top_p=0.95)
PROMPTS = [EncodedPrompt("a", "chat", (1, 9, 17)), EncodedPrompt("b", "chat", (1, 5)), EncodedPrompt("c", "chat", (1, 7, 8))]
SMALL = TrainingConfig(steps=6, sequences=2, anchors=2)
PROFILE = get_profile("smoke")


@dataclass
class Artefact:
    """A file of one configuration, the same file of another, and what opens the first."""

    path: Path
    other: Path
    open: Callable[[], object]
    #: What the message names, if it is not the file.
    named: str | None = None


def keep_table(patch: pytest.MonkeyPatch, folder: Path, value: float) -> None:
    patch.setattr(results, "RESULTS", folder)
    patch.setitem(results.TABLES, "scores", lambda plan: pd.DataFrame({"x": [value] * 50}))
    results.open_table(PROFILE, "tiny", "scores", recompute=True)


@pytest.fixture(scope="module")
def all_made(llama, make_drafter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch, quiet_loading():
        patch.setenv("DBLAST_CACHE", str(folder / "cache"))
        yield make_all(llama, make_drafter, folder, patch)


@pytest.fixture
def made(all_made):
    """One artefact by its kind; its file is put back afterwards."""
    kept = {}

    def choose(kind: str) -> Artefact:
        artefact = all_made[kind]
        kept[artefact.path] = artefact.path.read_bytes()
        return artefact

    yield choose
    for path, data in kept.items():
        path.write_bytes(data)


def make_all(llama, make_drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Artefact]:
    """Artefacts of two configurations, 0 and 1, by their kind."""
    found: dict[str, Artefact] = {}
    stages: dict[str, list[tuple[Stage, Callable]]] = {"trajectories": [], "continuations": [], "pretrained": [], "variants": []}
    for seed in (0, 1):

        def sample(folder, seed=seed):
            sample_trajectories(llama, PROMPTS, SETTINGS, folder, max_new_tokens=8, taps=[0, 2], seed=seed, batch_size=2)

        def continue_(folder, seed=seed):
            stored = TrajectorySet(stages["trajectories"][seed][0].folder)
            row, emitted = torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0])
            sizes = {"continuations": 2, "block_length": 2, "seed": seed, "rows_per_pass": 4}
            store_continuations(llama, stored, row, emitted, SETTINGS, folder, description=None, **sizes)

        def pretrain(folder, seed=seed):
            make_drafter(llama, num_categories=0, seed=seed, block_length=3 + seed).save_pretrained(folder)
            (folder / "history.json").write_text(json.dumps([{"step": seed, "loss": 1.0}]))

        def finetune(folder, seed=seed):
            pretrain(folder)
            pd.DataFrame({"passes": [float(seed)] * 20}).to_parquet(folder / "scores.parquet")

        for kind, compute in zip(stages, (sample, continue_, pretrain, finetune), strict=True):
            stage = Stage(kind, {"seed": seed})
            stages[kind].append((stage, compute))
            stage.run(compute)

    def of_stage(kind: str, name: str, read: Callable[[Path], object]) -> Artefact:
        (stage, compute), (other, _) = stages[kind]
        return Artefact(stage.folder / name, other.folder / name, lambda: read(stage.run(compute)))

    shard = next(stages["trajectories"][0][0].folder.glob("shard-00000/*.arrow")).name
    found["stage.json"] = of_stage("trajectories", "stage.json", TrajectorySet)
    found["Arrow shard"] = of_stage("trajectories", f"shard-00000/{shard}", TrajectorySet)
    found["Arrow description"] = of_stage("trajectories", "shard-00001/state.json", TrajectorySet)
    found["shards.json"] = of_stage("trajectories", "shards.json", TrajectorySet)
    found["continuations"] = of_stage("continuations", "shard-00001.safetensors", load_continuations)
    found["weights"] = of_stage("pretrained", "model.safetensors", lambda folder: open_drafter(folder, llama))
    found["config.json"] = of_stage("pretrained", "config.json", lambda folder: open_drafter(folder, llama))
    found["history.json"] = of_stage("pretrained", "history.json", lambda folder: (folder / "history.json").read_text())
    found["scores.parquet"] = of_stage("variants", "scores.parquet", lambda folder: pd.read_parquet(folder / "scores.parquet"))

    # A state that a killed run has left, and one of a run on other data.
    def go_on(seed: int, stop: int | None = None):
        drafter = make_drafter(llama, num_layers=2, target_layer_ids=[0, 2])
        stored = list(TrajectorySet(stages["trajectories"][seed][0].folder))
        train(drafter, stored, SMALL, tmp_path / f"run {seed}", stop_after=stop, key=f"key {seed}", description=None)

    go_on(0, 3), go_on(1, 3)
    state = "state.safetensors"
    found["training state"] = Artefact(tmp_path / "run 0" / state, tmp_path / "run 1" / state, lambda: go_on(0))

    # Shards of unfinished sampling: the record does not say yet that all is well.
    for seed in (0, 1):
        folder = tmp_path / f"unfinished {seed}"
        shutil.copytree(stages["trajectories"][seed][0].folder, folder)
        shutil.rmtree(folder / "shard-00001")
    name = f"shard-00000/{shard}"
    found["unfinished shard"] = Artefact(
        tmp_path / "unfinished 0" / name,
        tmp_path / "unfinished 1" / name,
        lambda: stages["trajectories"][0][1](tmp_path / "unfinished 0"),
        named="shard-00000",
    )
    found["unfinished record"] = Artefact(
        tmp_path / "unfinished 0" / "shards.json",
        tmp_path / "unfinished 1" / "shards.json",
        lambda: stages["trajectories"][0][1](tmp_path / "unfinished 0"),
        named="unfinished 0",
    )

    for name, value in (("other", 1.0), ("ours", 0.0)):
        keep_table(monkeypatch, tmp_path / name, value)
    for kind, file in (("kept results", "tiny-scores.parquet"), ("provenance", "provenance.json")):
        ours, other = (tmp_path / name / "smoke" / file for name in ("ours", "other"))
        named = "tiny-scores.parquet" if kind == "kept results" else ""
        found[kind] = Artefact(ours, other, lambda: results.open_table(PROFILE, "tiny", "scores"), named)

    drafters = [make_drafter(llama, num_categories=0, seed=seed, block_length=3 + seed) for seed in (0, 1)]
    checkpoints = [d.save(tmp_path / f"shipped {seed}", {"seed": seed}) for seed, d in enumerate(drafters)]
    for file in ("model.safetensors", "config.json", "training.json", "manifest.json"):
        ours, other = (folder / file for folder in checkpoints)
        found[f"shipped {file}"] = Artefact(ours, other, lambda: DBlastDrafter.load(checkpoints[0]), "" if file == "manifest.json" else None)

    for name, word in (("ours", "Hello"), ("other", "Goodbye")):
        lines = [json.dumps({"task": "chat", "turns": [f"{word} {i}?"]}) for i in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    shutil.copy(sources.EVALUATION_FILE, tmp_path / "bundled.jsonl")
    monkeypatch.setattr(sources, "EVALUATION_FILE", tmp_path / "bundled.jsonl")
    found["bundled prompts"] = Artefact(tmp_path / "bundled.jsonl", tmp_path / "other.jsonl", lambda: sources.load_prompts("bundled"))
    return found


KINDS = (
    ["stage.json", "Arrow shard", "Arrow description", "shards.json", "continuations", "weights", "config.json"]
    + ["history.json", "scores.parquet", "training state", "unfinished shard", "unfinished record", "kept results"]
    + [f"shipped {file}" for file in ("model.safetensors", "config.json", "training.json", "manifest.json")]
    + ["provenance", "bundled prompts"]
)

WAYS_OUT = ("delete", "restore it with git", "take it again from where it came", "recompute=True", "another folder")


def damage(artefact: Artefact, how: str | float) -> None:
    data = bytearray(artefact.path.read_bytes())
    if how == "swapped":
        shutil.copy(artefact.other, artefact.path)
    elif how == "cut off":
        artefact.path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        artefact.path.write_bytes(b"")
    elif how == "missing":
        artefact.path.unlink()
    else:
        data[int(how * (len(data) - 1))] ^= 1
        artefact.path.write_bytes(data)


@pytest.mark.parametrize("how", ["swapped", "cut off", "empty", 0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_artefact_is_refused_by_name(made, kind, how):
    artefact = made(kind)
    artefact.open()
    damage(artefact, how)
    with pytest.raises(DBlastError) as error:
        artefact.open()
    one_line(error, artefact.path.name if artefact.named is None else artefact.named)
    assert any(way in str(error.value) for way in WAYS_OUT)


@pytest.mark.parametrize("kind", ["stage.json", "Arrow shard", "weights", "scores.parquet", "kept results"])
def test_an_artefact_is_made_again_once_the_damaged_one_is_gone(made, kind):
    artefact = made(kind)
    damage(artefact, 0.6)
    if kind == "kept results":
        results.open_table(PROFILE, "tiny", "scores", recompute=True)
    else:
        with pytest.raises(DBlastError) as error:
            artefact.open()
        # Just as the message says.
        shutil.rmtree(str(error.value).partition("delete ")[2].partition(" and rerun")[0])
    artefact.open()


# -- what comes from outside is data, never code ------------------------------------------------------


class Malicious:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_the_malicious_pickle_would_work(tmp_path):
    pickle.loads(pickle.dumps(Malicious(tmp_path / "marker"))).close()
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_in_the_place_of_an_artefact_is_never_opened(made, kind, form, tmp_path):
    artefact, marker = made(kind), tmp_path / "marker"
    if form == "torch":
        torch.save(Malicious(marker), artefact.path)
    else:
        artefact.path.write_bytes(pickle.dumps(Malicious(marker)))
    with refused():
        artefact.open()
    assert not marker.exists()


@pytest.fixture
def pickled(llama, tmp_path):
    """Turns a saved model into one with pickled weights, as older ones have."""

    def turn(folder: Path) -> tuple[Path, Path]:
        (folder / "model.safetensors").unlink()
        torch.save(Malicious(tmp_path / "marker"), folder / "pytorch_model.bin")
        return folder, tmp_path / "marker"

    return turn


def test_pickled_weights_of_a_target_are_not_opened(llama, tmp_path, pickled):
    llama.model.save_pretrained(tmp_path / "model")
    llama.tokenizer.save_pretrained(tmp_path / "model")
    folder, marker = pickled(tmp_path / "model")
    with refused(str(folder)):
        load_target(str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("load", [lambda folder, llama: DBlastDrafter.load(folder), load_drafter], ids=["start", "decode"])
def test_pickled_weights_of_a_drafter_are_not_opened(llama, make_drafter, tmp_path, pickled, load):
    make_drafter(llama, num_categories=0).save_pretrained(tmp_path / "drafter")
    folder, marker = pickled(tmp_path / "drafter")
    with refused(str(folder)):
        load(folder, llama)
    assert not marker.exists()


def test_code_in_the_folder_of_a_target_is_not_run(llama, tmp_path):
    folder, marker = tmp_path / "model", tmp_path / "marker"
    llama.model.save_pretrained(folder)
    llama.tokenizer.save_pretrained(folder)
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    load_target(str(folder))
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    with refused(str(folder)):
        load_target(str(folder))
    assert not marker.exists()


#: Calls and arguments that run what a file says.
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "read_pickle", "to_pickle"}


def test_the_package_opens_no_pickles_and_runs_no_foreign_code():
    for path in sorted(Path(dblast.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            if isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
                assert not (ast.unparse(node) in ("torch.load", "torch.save", "np.load", "numpy.load")), f"{path}:{node.lineno}"
            if isinstance(node, ast.Name):
                names.add(node.id)
                assert node.id not in ("eval", "exec"), f"{path}:{node.lineno}"
            assert not names & FORBIDDEN, f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
                assert isinstance(node.value, ast.Constant) and node.value.value is False, f"{path}:{node.value.lineno}"
