"""Train a block drafter for a target, score it and decode with it: the whole method on one page.

    python examples/train_drafter.py ./my-llama prompts.txt my-drafter

``prompts.txt`` has one question a line; every tenth is held out. Sizes suit a small model on a laptop; more text and more
steps make a better drafter. Kill it and run it again: sampling and training go on where they stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from dblast import SETTINGS, DBlastConfig, TrainingConfig, generate, load_target, sample_trajectories, score, show_blocks, train
from dblast.backbone import default_taps
from dblast.targets import propose_mask_token
from dblast.training import new_drafter, start_from_target, tap_scales
from dblast.trajectories import EncodedPrompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder or Hugging Face id of a Llama- or Qwen3-family model, or smollm2")
    parser.add_argument("prompts", type=Path, help="text file, one question a line")
    parser.add_argument("output", type=Path, help="new folder for the drafter")
    parser.add_argument("--work", type=Path, help="folder for text and training states (default: beside the output)")
    parser.add_argument("--tokens", type=int, default=64, help="response tokens a prompt")
    parser.add_argument("--steps", type=int, default=300, help="steps of pre-training; fine-tuning takes a third of them")
    parser.add_argument("--layers", type=int, default=2, help="draft layers")
    parser.add_argument("-b", type=int, default=7, help="draft block length")
    parser.add_argument("-K", type=int, default=4, help="number of categories")
    parser.add_argument("--mask-token-id", type=int, help="a token that the target never writes (default: one is proposed)")
    arguments = parser.parse_args()
    work = arguments.work or arguments.output.with_name(arguments.output.name + "-work")

    # 1. The target, and a token that it never writes for the draft slots.
    target = load_target(arguments.target, mask_token_id=arguments.mask_token_id)
    if target.mask_token_id is None:
        target.mask_token_id = propose_mask_token(target.tokenizer, target.model.config.vocab_size)
    if target.mask_token_id is None:
        parser.error("no unused token was found; give --mask-token-id, a token that the target never writes")

    # 2. Text that the target samples, with the states that the drafter will read. Every tenth prompt is held out.
    lines = [line.strip() for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [
        EncodedPrompt(f"line-{number}", "chat", tuple(target.encode_chat([{"role": "user", "content": line}])))
        for number, line in enumerate(dict.fromkeys(lines))
    ]
    taps = default_taps(target.model.config.num_hidden_layers, arguments.layers)
    sampling = {"max_new_tokens": arguments.tokens, "taps": taps}
    training = [prompt for number, prompt in enumerate(prompts) if number % 10]
    texts = sample_trajectories(target, training, SETTINGS["high"], work / "training", seed=0, **sampling)
    held_out = sample_trajectories(target, prompts[::10], SETTINGS["high"], work / "held-out", seed=1, **sampling)

    # 3. A DFlash drafter, started from the target's own last layers and trained by decayed cross-entropy.
    config = DBlastConfig.for_target(target, num_layers=arguments.layers, block_length=arguments.b, num_categories=0)
    drafter = start_from_target(new_drafter(config, target, seed=0), target, tap_scales(texts, len(taps)))
    drafter.attach(target)
    train(drafter, texts, TrainingConfig(loss="CE", steps=arguments.steps), work / "pretraining", description="DFlash")

    # 4. K categories on top of it, trained for the expected accepted length (eq. 16).
    dependent = drafter.with_categories(arguments.K, seed=0)
    tuning = TrainingConfig(loss="AL", steps=max(1, arguments.steps // 3), learning_rate=3e-4)
    train(dependent, texts, tuning, work / "fine-tuning", description=f"DBlast, K = {arguments.K}")

    # 5. The online loop's exact expected accepted length on held-out text, for several category temperatures.
    for name, candidate in (("DFlash, K = 0", drafter), (f"DBlast, K = {arguments.K}", dependent)):
        table = score(candidate, held_out, (0.0, 0.5, 1.0), description=None)
        sums = table.fillna({"category_temperature": 0.0}).groupby("category_temperature")[["emitted", "passes"]].sum()
        lengths = (sums.emitted - sums.passes) / sums.passes
        best = lengths.idxmax()
        print(f"{name}: accepted length {lengths[best]:.2f} at Z_T = {best:g}, n = {len(held_out)} held-out prompts")
    dependent.save(arguments.output, {"prompts": len(training), "steps": arguments.steps, "loss": "CE, then AL"})

    # 6. Decode with it: the output has exactly the target's law.
    drafting = dependent.to(target.model.dtype).eval()
    result = generate(
        target,
        drafting,
        [prompts[0].ids],
        SETTINGS["high"],
        category_temperature=float(best),
        max_new_tokens=arguments.tokens,
        generator=torch.Generator().manual_seed(0),
    )
    view = show_blocks(result, target.tokenizer)
    print(f"{view.ansi()}\n{view.summary}\ndrafter in {arguments.output}")


if __name__ == "__main__":
    main()
