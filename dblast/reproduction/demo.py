"""What ``python -m dblast generate`` does: find a trained drafter, decode, time it against plain decoding.

Heavy modules are imported where they are used, so that a request that cannot work is refused at once.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dblast.errors import DBlastError

if TYPE_CHECKING:
    from dblast.decoding import Generated
    from dblast.drafter import DBlastDrafter
    from dblast.sampling import SamplingSettings
    from dblast.show import BlockView
    from dblast.targets import Target

#: What a model on the Hugging Face hub is called: owner/name, as no path from "." or "~" is.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

_DRAFTER_ADVICE = "give a folder written by `python -m dblast train --output FOLDER`"


def check_model_name(name: str, advice: str, prefix: str = "") -> None:
    """Refuse a name that is neither a folder here nor of the form owner/name; the message ends with ``advice``."""
    # An empty path is the current folder to pathlib.
    if not (name and Path(name).is_dir()) and not _HUB_ID.fullmatch(name):
        raise DBlastError(f"{prefix}no such folder {name!r}; {advice}")


def check_target_name(name: str) -> None:
    """Refuse a target that cannot be: not smollm2, not a folder, not of the form owner/name."""
    if name == "tiny":
        raise DBlastError("'tiny' is the target that profiles train, not one to load; for a folder give ./tiny")
    if name != "smollm2":
        check_model_name(name, "give a folder with a saved model, a Hugging Face id (owner/name) or smollm2")


def check_request(
    prompt: str,
    drafter_folder: Path | None,
    target_name: str | None,
    *,
    category_temperature: float | None,
    max_new_tokens: int,
) -> None:
    """Refuse what can be seen to be wrong before a model is loaded; the words are those of the command line.

    Raises:
        DBlastError: a blank prompt, a missing folder, no drafter for this target, a number out of range.
    """
    if not prompt.strip():
        raise DBlastError("the prompt is empty; give --prompt the text to answer")
    if max_new_tokens < 1:
        raise DBlastError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if category_temperature is not None and not 0 <= category_temperature < float("inf"):
        raise DBlastError(f"--category-temperature must be a number and not be negative, got {category_temperature}")
    if target_name is not None:
        check_target_name(target_name)
    if drafter_folder is not None:
        check_model_name(str(drafter_folder), _DRAFTER_ADVICE, prefix=f"{drafter_folder} holds no drafter: ")
    elif target_name not in (None, "smollm2"):
        raise DBlastError(f"give --drafter FOLDER, a drafter trained for {target_name}")
    else:
        from dblast.reproduction.paths import check_data

        check_data("the drafter that is used without --drafter is", "give --drafter FOLDER, made with `python -m dblast drafter`")


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuse sampling options that cannot be, in the words of the command line."""
    if not 0 <= temperature < float("inf"):
        raise DBlastError(f"--temperature must be positive, or 0 for greedy decoding, got {temperature}")
    if top_k < 0:
        raise DBlastError(f"--top-k must be at least 1, or 0 for no limit, got {top_k}")
    if not 0 < top_p <= 1:
        raise DBlastError(f"--top-p must lie above 0 and be at most 1, got {top_p}")


def default_drafter() -> Path:
    """A drafter for SmolLM2: the cpu profile's with K = 4 and the AL loss (seed 0) if it has been trained, else the
    shipped DFlash drafter, which has no category heads.
    """
    from dblast.reproduction.checkpoints import shipped_drafter
    from dblast.reproduction.experiments import variant_stage
    from dblast.reproduction.profiles import Variant, get_profile

    stage = variant_stage(get_profile("cpu").plan("smollm2"), Variant(4, "AL"), 0)
    if not stage.done:
        return shipped_drafter("smollm2")
    stage.check()
    return stage.folder


def load_drafter(folder: Path, target: Target) -> DBlastDrafter:
    """A saved drafter in the target's dtype, attached, ready to decode; the target then answers as it was trained to.

    Raises:
        DBlastError: the folder holds no drafter, or one for another target.
        ArtefactError: its files are not those of its manifest, if it has one.
    """
    from dblast.drafter import DBlastDrafter

    drafter = DBlastDrafter.load(folder, dtype=target.model.dtype).to(target.device).attach(target)
    target.chat_options |= drafter.config.chat_options or {}
    return drafter


def plain_speed(target: Target, prompt: list[int], settings: SamplingSettings | None, tokens: int, seed: int) -> float:
    """Tokens per second of :func:`plain_run`."""
    made, seconds = plain_run(target, prompt, settings, tokens, seed)
    return made / seconds


def plain_run(
    target: Target, prompt: list[int], settings: SamplingSettings | None, tokens: int, seed: int
) -> tuple[int, float]:
    """Tokens and seconds of the target's own ``generate`` under the same settings; the global random state is left."""
    import torch

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
        return out.shape[1] - len(prompt), time.perf_counter() - start


def draw_tree(
    target: Target,
    drafter: DBlastDrafter,
    answer: Generated,
    nodes: int,
    category_temperature: float,
    number: int | None = None,
) -> str:
    """The tree that one pass of an answer verified, and the target's way through it, as text.

    The tree is drafted again from the text before that pass: nothing of it is random.

    Args:
        answer: from ``generate(mode="tree")`` with these models, one prompt.
        nodes, category_temperature: as there.
        number: which pass (default: the first of those that accepted most).
    """
    import torch

    from dblast.cache import BlockDecoder
    from dblast.show import show_tree
    from dblast.trees import TreeOutcome, draft_tree

    steps = answer.steps[0]
    if number is None:
        number = max(range(len(steps)), key=lambda i: steps[i].emitted)
    step, text = steps[number], answer.sequences[0]
    decoder = BlockDecoder(target.model, drafter)
    decoder.start([text[: step.position]], reserve=nodes)
    with torch.no_grad():
        tree = draft_tree(drafter, decoder.draft(), nodes, category_temperature=category_temperature)
    emitted = text[step.position : step.position + step.emitted].to(target.device)
    path = torch.full((1, drafter.config.block_length), -1, device=target.device)
    path[:, : step.accepted] = tree.follow(emitted[None, : step.accepted]) if step.accepted else path[:, :0]
    # Rounding may leave a node out that the first draft just had.
    path = path.masked_fill(path == tree.nodes, -1)
    accepted = (path >= 0).sum(1)
    drafted = tree.tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, 0)
    last = path[torch.arange(1), (accepted - 1).clamp(min=0)]
    token = emitted[int(accepted) :][:1]
    outcome = TreeOutcome(path, drafted, accepted, token, tree.is_leaf(last))
    before = target.tokenizer.decode(text[max(0, step.position - 12) : step.position].tolist())
    return f"pass {number + 1} of {len(steps)}, after {before!r}:\n{show_tree(tree, target.tokenizer, outcome=outcome)}"


def decode_and_compare(
    prompt: str,
    drafter_folder: Path | None,
    target_name: str | None,
    settings: SamplingSettings | None,
    *,
    category_temperature: float | None,
    mode: str,
    max_new_tokens: int,
    seed: int,
    chat_options: dict[str, Any] | None = None,
    **drafting: Any,
) -> tuple[BlockView, str, str]:
    """Answer a prompt speculatively and time the same with plain decoding.

    Args:
        drafter_folder: None for :func:`default_drafter`, which belongs to smollm2.
        target_name: None takes the one that the drafter remembers.
        settings: None decodes greedily.
        category_temperature: None takes the one calibrated at the nearest of the paper's settings.
        chat_options: put over those that the drafter remembers.
        drafting: ``nodes``, ``draft_temperature``, ``draft_top_k`` and ``verification`` of :func:`dblast.generate`.

    Returns:
        The view, a sentence with both speeds, tokens per second after a short warm-up, and for trees a picture of one
        (:func:`draw_tree`; otherwise empty).

    Raises:
        DBlastError: a folder without a drafter, or arguments that cannot work.
    """
    check_request(
        prompt,
        drafter_folder,
        target_name,
        category_temperature=category_temperature,
        max_new_tokens=max_new_tokens,
    )

    import torch

    from dblast.decoding import generate
    from dblast.proposals import check_mode
    from dblast.reproduction.own.pairs import nearest_setting, open_pair
    from dblast.show import show_blocks
    from dblast.trees import TREE_NODES

    check_mode(mode, num_categories=1)
    if drafter_folder is None:
        drafter_folder, target_name = default_drafter(), "smollm2"
    target, _ = open_pair(str(drafter_folder), target_name, chat_options)
    options, device = target.chat_options, target.device
    drafter = load_drafter(drafter_folder, target)
    target.chat_options = options
    if category_temperature is None:
        category_temperature = drafter.category_temperature(nearest_setting(settings))
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
            **drafting,
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
    picture = ""
    if mode == "tree" and max_new_tokens > 1:
        picture = draw_tree(target, drafter, result, drafting.get("nodes", TREE_NODES), category_temperature)
    return show_blocks(result, target.tokenizer), timing, picture
