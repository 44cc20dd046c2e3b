"""Where a drafter starts from: random weights, the target's own layers, or a published DFlash checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from dblast.checkpoints import shipped_drafter
from dblast.config import DBlastConfig
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.targets import Target
from dblast.trajectories import Trajectory

if TYPE_CHECKING:
    from dblast.profiles import DrafterConfig


def new_drafter(config: DBlastConfig, target: Target, seed: int) -> DBlastDrafter:
    """A random float32 drafter on its target's device, not attached yet; the global seed is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = DBlastDrafter(config)
    return drafter.to(device=target.device, dtype=torch.float32)


def tap_scales(trajectories: Iterable[Trajectory], taps: int, positions: int = 4096) -> torch.Tensor:
    """Median root-mean-square of every tapped layer over positions, (m,).

    The median, because a sequence's first token is orders of magnitude larger; of the positions that have
    a size, because a padding token's embedding is zero, and so may be all of its states.

    Raises:
        DBlastError: a tap is zero everywhere, or infinite at most positions.
    """
    rows, seen = [], 0
    for trajectory in trajectories:
        rows.append(trajectory.features.float().view(len(trajectory.features), taps, -1).square().mean(-1).sqrt())
        seen += len(trajectory.features)
        if seen >= positions:
            break
    sizes = torch.cat(rows)
    scales = sizes.masked_fill(sizes == 0, float("nan")).nanmedian(dim=0).values
    if not torch.isfinite(scales).all():
        raise DBlastError(f"tapped states have no usable size (medians {scales.tolist()}); choose other taps or check the target")
    return scales


def start_from_target(
    drafter: DBlastDrafter, target: Target, scales: torch.Tensor, layers: Sequence[int] | None = None
) -> DBlastDrafter:
    """Copy target layers and final norm into the drafter and let ``fc`` average the scaled taps.

    Args:
        scales: (m,) typical size of every tap, from :func:`tap_scales`; taps
            enter the average at unit size.
        layers: target layers to copy, one per draft layer (default: the last ones).

    Raises:
        DBlastError: layer shapes differ, or a layer does not exist.
    """
    config = drafter.config
    base = target.model.model
    count = len(base.layers)
    layers = list(layers or range(count - config.num_hidden_layers, count))
    if len(layers) != config.num_hidden_layers or any(not 0 <= i < count for i in layers):
        raise DBlastError(f"need {config.num_hidden_layers} target layers in 0..{count - 1} to start from, got {layers}")
    with torch.no_grad():
        for ours, index in zip(drafter.layers, layers, strict=True):
            source = {name: value.float() for name, value in base.layers[index].state_dict().items()}
            try:
                missing = ours.load_state_dict(source, strict=False)
            except RuntimeError as error:
                reason = str(error).splitlines()[-1].strip()
                raise DBlastError(f"target layer {index} does not fit the drafter: {reason}") from error
            if missing.unexpected_keys:
                raise DBlastError(f"target layer {index} has parameters the drafter lacks: {missing.unexpected_keys}")
        drafter.norm.weight.copy_(base.norm.weight)
        h, taps = config.hidden_size, len(config.target_layer_ids)
        eye = torch.eye(h, device=drafter.fc.weight.device)
        drafter.fc.weight.copy_(torch.cat([eye / (taps * scale) for scale in scales.tolist()], dim=1))
    return drafter


def frequent_tokens(trajectories: Iterable[Trajectory], size: int, vocab_size: int) -> torch.Tensor:
    """The ``size`` most frequent response tokens, ascending ids: a draft vocabulary.

    Ties, and places left when fewer tokens occur, go to the smaller id.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for trajectory in trajectories:
        counts += torch.bincount(trajectory.response_ids, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def add_categories(backbone: DBlastDrafter, num_categories: int, seed: int) -> DBlastDrafter:
    """A copy of a (K = 0 or any K) drafter with fresh category heads for ``num_categories``.

    The heads are drawn from ``seed``; backbone weights and borrowed tables are those of ``backbone``.
    """
    if num_categories < 1:
        raise DBlastError(f"number of categories K must be at least 1, got {num_categories}")
    settings = backbone.config.to_dict() | {"num_categories": num_categories}
    config = DBlastConfig(**{key: value for key, value in settings.items() if key not in ("model_type",)})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = DBlastDrafter(config)
    state = {k: v for k, v in backbone.state_dict().items() if not k.startswith(("expander.", "prior."))}
    drafter.load_state_dict(state, strict=False)
    drafter.to(device=backbone.device, dtype=backbone.dtype)
    drafter._borrowed = dict(backbone._borrowed)
    return drafter


def load_dflash(path: str | Path, num_categories: int = 0, seed: int = 0) -> DBlastDrafter:
    """Load a public DFlash checkpoint (z-lab's format) as a drafter, K = 0, or with fresh category heads.

    Raises:
        DBlastError: the checkpoint is missing, or lacks or has extra parameters.
    """
    try:
        config = DBlastConfig.from_pretrained(path)
        config.num_categories = 0
        # Sizes that do not fit come back in the report, beside missing and unexpected names.
        drafter, info = DBlastDrafter.from_pretrained(
            path, config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise DBlastError(f"could not load a DFlash checkpoint from {path}: {str(error).splitlines()[0]}") from error
    names = {kind: sorted(info[f"{kind}_keys"])[:3] for kind in ("missing", "unexpected", "mismatched")}
    if any(names.values()):
        found = ", ".join(f"{kind} {some}" for kind, some in names.items() if some)
        raise DBlastError(f"{path} is not a DFlash checkpoint of this shape: {found}")
    return add_categories(drafter, num_categories, seed) if num_categories else drafter


def start_drafter(
    shape: DrafterConfig, target: Target, trajectories: Iterable[Trajectory], taps: list[int]
) -> DBlastDrafter:
    """The untrained drafter that a configuration describes, without category heads, attached to its target.

    Args:
        trajectories: give the draft vocabulary and the scale of every tap.
        taps: tapped target layers.

    Raises:
        DBlastError: a published checkpoint taps other layers, or nothing fits the target.
    """
    if not shape.pretrained_here:
        # Published checkpoints are bfloat16; training wants float32 master weights.
        drafter = load_dflash(shipped_drafter(target.name) if shape.start == "shipped" else shape.start).float()
        if drafter.config.block_length != shape.block_length:
            raise DBlastError(
                f"the {shape.start} drafter drafts blocks of {drafter.config.block_length} tokens, the plan wants "
                f"{shape.block_length}; start from 'target' to pre-train one for other blocks"
            )
        if drafter.config.target_layer_ids != taps:
            raise DBlastError(
                f"{shape.start} taps target layers {drafter.config.target_layer_ids}, the plan {taps}; "
                "set the plan's taps to the checkpoint's"
            )
        return drafter.to(target.device).attach(target.model)
    config = DBlastConfig.for_target(
        target.model.config,
        num_layers=shape.layers,
        block_length=shape.block_length,
        mask_token_id=target.mask_token_id,
        target_layer_ids=taps,
        draft_vocab_size=shape.draft_vocabulary,
    )
    # A plain DFlash drafter: heads trained here would be dropped when a variant gets its own.
    config.num_categories = 0
    drafter = new_drafter(config, target, shape.seed)
    if shape.draft_vocabulary:
        drafter.set_draft_vocabulary(frequent_tokens(trajectories, shape.draft_vocabulary, config.vocab_size))
    if shape.start == "target":
        start_from_target(drafter, target, tap_scales(trajectories, len(config.target_layer_ids)), shape.start_layers)
    return drafter.attach(target.model)
