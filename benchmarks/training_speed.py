"""Training speed and memory by number of categories and vocabulary, log q from the whole table of logits or tile by tile.

    python benchmarks/training_speed.py                 # SmolLM2's shapes, K = 1, 2, 4, 8, draft and full vocabulary

Random trajectories with features of the right width: neither speed nor memory
depends on what the tokens are. Every cell runs in a process of its own, so that
its peak memory (resident, model and data included) is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch

from dblast import drafter as drafter_module
from dblast.backbone import DBlastConfig
from dblast.training import new_drafter
from dblast.targets import load_target
from dblast.training import Trainer, TrainingConfig
from dblast.trajectories import Trajectory

LAYERS, BLOCK, TAPS = 2, 7, [1, 14, 27]


def random_trajectories(width: int, tokens: int, count: int = 8, prompt: int = 48, response: int = 64) -> list[Trajectory]:
    """Trajectories of random tokens below ``tokens`` and random features of that width."""
    rng = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        ids = torch.randint(tokens, (prompt + response,), generator=rng)
        features = torch.randn(prompt + response - 1, width, generator=rng).to(torch.bfloat16)
        spare = torch.rand(response, generator=rng)
        rows.append(
            Trajectory(
                prompt_id=f"r{i}",
                task="random",
                prompt_ids=ids[:prompt],
                response_ids=ids[prompt:],
                log_p=-2 * spare,
                entropy=spare,
                p_max=spare,
                support=ids[prompt:].unsqueeze(-1),
                support_log_p=-2 * spare.unsqueeze(-1),
                features=features,
            )
        )
    return rows


def measure(categories: int, vocabulary: int, tiled: bool, loss: str, steps: int) -> dict:
    """Anchors per second and peak memory of training steps of 128 anchors."""
    drafter_module.PLAIN_LOGITS = 0 if tiled else 2**62
    target = load_target("smollm2")
    config = DBlastConfig.for_target(
        target.model.config,
        num_layers=LAYERS,
        block_length=BLOCK,
        mask_token_id=target.mask_token_id,
        target_layer_ids=TAPS,
        draft_vocab_size=vocabulary,
        num_categories=categories,
    )
    drafter = new_drafter(config, target, 0)
    if vocabulary:
        drafter.set_draft_vocabulary(torch.arange(vocabulary))
    rows = random_trajectories(len(TAPS) * config.hidden_size, vocabulary or config.vocab_size)
    training = TrainingConfig(loss=loss, steps=1000, sequences=4, anchors=32, precision="bfloat16")
    trainer = Trainer(drafter.attach(target.model), rows, training)
    trainer.advance()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.advance()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
    return {"anchors/s": round(steps * 128 / seconds), "peak GiB": round(peak, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--categories", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 0], help="0: the target's whole vocabulary")
    parser.add_argument("--loss", default="AL")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measure(*arguments.cell)))
        return
    rows = []
    for vocabulary in arguments.vocabularies:
        for categories in arguments.categories:
            for tiled in (False, True):
                cell = json.dumps([categories, vocabulary, tiled, arguments.loss, arguments.steps])
                with tempfile.TemporaryFile("w+") as errors:
                    command = [sys.executable, str(Path(__file__).resolve()), "--cell", cell]
                    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
                    errors.seek(0)
                    if done.returncode and (said := errors.read().strip()):
                        print(said.splitlines()[-1], file=sys.stderr)
                names = {"vocabulary": vocabulary or "full", "K": categories, "log q": "tiled" if tiled else "one piece"}
                failed = {"anchors/s": f"failed ({done.returncode})", "peak GiB": ""}
                rows.append(names | (failed if done.returncode else json.loads(done.stdout.splitlines()[-1])))
                print(rows[-1], flush=True)
    print(pd.DataFrame(rows).to_markdown(index=False))


if __name__ == "__main__":
    main()
