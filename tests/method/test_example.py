"""The page that shows the whole method runs as written, on a small target from a folder."""

import runpy
import sys
from pathlib import Path

import torch

import dblast
from dblast.drafter import DBlastDrafter

EXAMPLE = Path(dblast.__file__).parent.parent / "examples" / "train_drafter.py"


def test_the_method_on_one_page(llama, tmp_path, monkeypatch, capsys):
    target, prompts, output = tmp_path / "my target", tmp_path / "prompts.txt", tmp_path / "drafter"
    llama.model.save_pretrained(target)
    llama.tokenizer.save_pretrained(target)
    prompts.write_text("\n".join(f"w{5 + i} w{6 + i} w{7 + i}" for i in range(20)))
    sizes = ["--tokens", "12", "--steps", "6", "--layers", "1", "-b", "3", "-K", "2", "--mask-token-id", "3"]
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, str(target), str(prompts), str(output), *sizes])
    before = torch.random.get_rng_state()
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert torch.equal(torch.random.get_rng_state(), before)  # a script on one page, and no global seed
    text = capsys.readouterr().out
    assert text.count("accepted length") >= 3 and "n = 2 held-out prompts" in text
    drafter = DBlastDrafter.load(output)
    assert (drafter.config.num_categories, drafter.config.block_length) == (2, 3)


def test_it_fits_a_page_and_knows_no_plan():
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100 and "reproduction" not in text
