"""Time of one speculative step against a bare target pass, and tokens per second against plain sampling.

    python benchmarks/step_latency.py                       # SmolLM2, bfloat16, two threads, 16 prompts of 128 tokens
    python benchmarks/step_latency.py --drafter FOLDER      # tokens/s of a trained drafter as well

What a step is, and how it is timed, is told in ``dblast.reproduction.latency``, whose table of the trained profiles' drafters notebook
04 shows. Here sizes can be chosen. Unless a folder is given, the drafter starts from the target's layers and is not
trained: its time does not depend on its weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from dblast.backbone import DBlastConfig
from dblast.reproduction.demo import load_drafter, plain_speed
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.reproduction.experiments import for_decoding
from dblast.decoding import generate
from dblast.training import new_drafter, start_from_target
from dblast.reproduction.latency import measure
from dblast.reproduction.latency_tables import BARE, PARTS
from dblast.reproduction.prompts.sources import chat_messages, load_prompts
from dblast.sampling import get_setting
from dblast.targets import Target, load_target


def untrained_drafter(target: Target, categories: int, block_length: int, vocabulary: int) -> DBlastDrafter:
    """Two layers copied from the target, category heads random, in the target's dtype."""
    config = DBlastConfig.for_target(
        target.model.config,
        num_layers=2,
        block_length=block_length,
        mask_token_id=target.mask_token_id,
        num_categories=categories,
        draft_vocab_size=vocabulary,
    )
    drafter = new_drafter(config, target, seed=0)
    if vocabulary:
        drafter.set_draft_vocabulary(torch.arange(vocabulary, device=drafter.device))
    start_from_target(drafter, target, torch.ones(len(config.target_layer_ids)))
    return for_decoding(drafter, target)


def prompt_ids(target: Target, count: int, length: int) -> list[torch.Tensor]:
    """Bundled prompts, repeated until they have ``length`` tokens."""
    prompts = load_prompts("bundled")
    if count > len(prompts):
        raise DBlastError(f"there are {len(prompts)} bundled prompts; give a smaller --prompts")
    rows = [target.encode_chat(chat_messages(prompt)) for prompt in prompts[:: len(prompts) // count][:count]]
    return [torch.tensor((row * (length // len(row) + 1))[:length]) for row in rows]


def speeds(target, drafter, prompts, settings, tokens) -> tuple[float, float, float]:
    """Tokens per second of the loop and of plain sampling, and the accepted length."""
    emitted = seconds = 0.0
    steps = []
    for seed, ids in enumerate(prompts):
        start = time.perf_counter()
        rng = torch.Generator(device=target.device).manual_seed(seed)
        result = generate(target, drafter, [ids], settings, max_new_tokens=tokens, generator=rng)
        seconds += time.perf_counter() - start
        emitted += len(result.tokens[0])
        steps += result.steps[0]
    plain = [plain_speed(target, ids.tolist(), settings, tokens, seed) for seed, ids in enumerate(prompts)]
    accepted = sum(step.accepted for step in steps) / len(steps)
    return emitted / seconds, len(plain) / sum(1 / speed for speed in plain), accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", type=Path, help="folder of a trained drafter, for tokens/s")
    parser.add_argument("--categories", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--block-length", type=int, default=7)
    parser.add_argument("--draft-vocabulary", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=8, help="steps per prompt")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt for tokens/s; 0 leaves it out")
    parser.add_argument("--speed-prompts", type=int, default=4, help="prompts for tokens/s")
    parser.add_argument("--setting", default="medium")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    target = load_target(options.target, dtype=getattr(torch, options.dtype), device=options.device)
    settings = get_setting(options.setting)
    drafters = {
        k: untrained_drafter(target, k, options.block_length, options.draft_vocabulary) for k in options.categories
    }
    prompts = prompt_ids(target, options.prompts, options.prompt_tokens)
    times = measure(target, drafters, prompts, settings, options.repeats, "steps")
    medians = times.groupby(["K", "part"]).milliseconds.median()

    bare, first = medians[-1, BARE], options.categories[0]
    print(f"{options.target}, {options.dtype}, {options.threads} threads, {len(prompts)} prompts of "
          f"{options.prompt_tokens} tokens, b = {options.block_length}; medians in ms")  # fmt: skip
    print(f"bare target pass of {options.block_length + 1} tokens: {bare:.1f}")
    print(f"{'K':>3} {'step':>7} {'/ bare':>7} {f'/ K={first}':>7}  " + " ".join(f"{part:>8}" for part in PARTS))
    for k in options.categories:
        step = medians[k, "step"]
        parts = " ".join(f"{medians[k, part]:8.2f}" for part in PARTS)
        print(f"{k:>3} {step:7.1f} {step / bare:7.3f} {step / medians[first, 'step']:7.3f}  {parts}")
    if options.tokens:
        drafter = load_drafter(options.drafter, target) if options.drafter else drafters[options.categories[-1]]
        name = str(options.drafter) if options.drafter else "untrained"
        chosen = prompts[: options.speed_prompts]
        loop, plain, accepted = speeds(target, drafter, chosen, settings, options.tokens)
        print(f"{name} drafter, K = {drafter.config.num_categories}: {loop:.1f} tokens/s (accepted length "
              f"{accepted:.2f}), plain sampling {plain:.1f} tokens/s, ratio {loop / plain:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
