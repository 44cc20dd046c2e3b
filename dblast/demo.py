"""What ``python -m dblast generate`` does: find a trained drafter, decode, time it against plain decoding."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors import SafetensorError

from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.generate import Generated, generate
from dblast.progress import quiet_loading
from dblast.sampling import SamplingSettings
from dblast.show import BlockView, show_blocks
from dblast.targets import Target, load_target


def default_drafter() -> Path:
    """Folder of the cpu profile's SmolLM2 drafter with K = 4 and the AL loss, seed 0.

    Raises:
        DBlastError: it has not been trained yet; the message has the command.
    """
    from dblast.experiments import variant_stage
    from dblast.profiles import Variant, get_profile

    stage = variant_stage(get_profile("cpu").plan("smollm2"), Variant(4, "AL"), 0)
    if not stage.done:
        raise DBlastError(
            "no trained drafter for smollm2 in the cache; train one with "
            "`python -m dblast train --target smollm2 -K 4 --loss AL` or give --drafter FOLDER"
        )
    stage.check()
    return stage.folder


def load_drafter(folder: Path, target: Target) -> DBlastDrafter:
    """A saved drafter in the target's dtype, attached, ready to decode.

    Raises:
        DBlastError: the folder holds no drafter, or one for another target.
    """
    try:
        with quiet_loading():
            drafter = DBlastDrafter.from_pretrained(folder, dtype=target.model.dtype)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, DBlastError):
            raise
        reason = str(error).splitlines()[0]
        raise DBlastError(f"{folder} holds no drafter ({reason}); give a folder written by `train`") from error
    return drafter.to(target.device).attach(target.model).eval()


def plain_speed(target: Target, prompt: list[int], settings: SamplingSettings | None, tokens: int, seed: int) -> float:
    """Tokens per second of the target's own ``generate`` under the same settings; the global random state is left."""
    sampling = {"do_sample": False}
    if settings is not None:
        sampling = {
            "do_sample": True,
            "temperature": settings.temperature,
            "top_k": settings.top_k or 0,
            "top_p": settings.top_p,
        }
    ids = torch.tensor([prompt], device=target.device)
    cuda = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            eos_token_id=list(target.eos_token_ids) or None,
            pad_token_id=0,
            **sampling,
        )
        return (out.shape[1] - len(prompt)) / (time.perf_counter() - start)


def decode_and_compare(
    prompt: str,
    drafter_folder: Path | None,
    target_name: str,
    settings: SamplingSettings | None,
    *,
    category_temperature: float,
    mode: str,
    max_new_tokens: int,
    seed: int,
) -> tuple[BlockView, str]:
    """Answer a prompt speculatively and time the same with plain decoding.

    Args:
        drafter_folder: None for :func:`default_drafter`, which belongs to smollm2.
        settings: None decodes greedily.

    Returns:
        The view and a sentence with both speeds, tokens per second after a short warm-up.

    Raises:
        DBlastError: no drafter, or arguments that cannot work.
    """
    if drafter_folder is None:
        if target_name != "smollm2":
            raise DBlastError(f"give --drafter FOLDER, a drafter trained for {target_name}")
        drafter_folder = default_drafter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(target_name, device=device)
    drafter = load_drafter(drafter_folder, target)
    ids = target.encode_chat([{"role": "user", "content": prompt}])

    def decode(tokens: int) -> Generated:
        return generate(
            target,
            drafter,
            [ids],
            settings,
            max_new_tokens=tokens,
            do_sample=settings is not None,
            mode=mode,
            category_temperature=category_temperature,
            generator=torch.Generator(device=device).manual_seed(seed),
        )

    warm_up = min(4, max_new_tokens)
    decode(warm_up)
    start = time.perf_counter()
    result = decode(max_new_tokens)
    speed = len(result.tokens[0]) / (time.perf_counter() - start)
    plain_speed(target, ids, settings, warm_up, seed)
    plain = plain_speed(target, ids, settings, max_new_tokens, seed)
    timing = f"{speed:.1f} tokens/s against {plain:.1f} with plain decoding ({speed / plain:.2f} times)"
    return show_blocks(result, target.tokenizer), timing
