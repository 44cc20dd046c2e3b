"""Where a drafter starts from: random weights, the target's own layers, or a published DFlash checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dblast.backbone import DBlastConfig
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.reproduction.checkpoints import shipped_drafter
from dblast.targets import Target
from dblast.training import frequent_tokens, new_drafter, start_from_target, tap_scales
from dblast.trajectories import Trajectory

if TYPE_CHECKING:
    from dblast.reproduction.plans import DrafterConfig


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
        drafter = DBlastDrafter.load(shipped_drafter(target.name) if shape.start == "shipped" else shape.start).float()
        if drafter.config.num_categories:
            raise DBlastError(f"{shape.start} has category heads already; start from one without, as `pretrain` makes")
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
        drafter.to(target.device).attach(target)
        # It goes on learning from this target, whether or not it knew its name.
        drafter.config.remember(target)
        return drafter
    vocabulary = target.model.config.vocab_size
    config = DBlastConfig.for_target(
        target,
        num_layers=shape.layers,
        block_length=shape.block_length,
        # A plain DFlash drafter: heads trained here would be dropped when a variant gets its own.
        num_categories=0,
        target_layer_ids=taps,
        # A small target's whole vocabulary needs no choice.
        draft_vocab_size=shape.draft_vocabulary if shape.draft_vocabulary < vocabulary else 0,
    )
    drafter = new_drafter(config, target, shape.seed)
    if config.draft_vocab_size:
        drafter.set_draft_vocabulary(frequent_tokens(trajectories, config.draft_vocab_size, vocabulary))
    if shape.start == "target":
        start_from_target(drafter, target, tap_scales(trajectories, len(config.target_layer_ids)), shape.start_layers)
    return drafter.attach(target)
