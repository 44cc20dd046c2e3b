"""The paper's drafters counted without their weights: real modules on the meta device."""

from __future__ import annotations

import pandas as pd
import torch

from dblast.backbone import DBlastConfig
from dblast.drafter import DBlastDrafter

#: Shapes of the paper's targets (their public configurations), whose layers the drafters repeat.
SHAPES: dict[str, dict[str, int]] = {
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288},
}
_COMMON = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "block_size": 16,
}


def paper_drafter(target: str, num_categories: int) -> DBlastDrafter:
    """A drafter of the paper's shape (its Table 8: five layers, block size 16), without storage."""
    taps = {"dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151_669}}
    with torch.device("meta"):
        return DBlastDrafter(DBlastConfig(**SHAPES[target], **_COMMON, **taps, num_categories=num_categories))


def parameter_row(target: str, drafter: DBlastDrafter) -> dict:
    """A row of Table 1: parameters that a drafter's category heads add, and those of the rest."""
    added = drafter.category_parameters()
    base = drafter.num_parameters() - added
    return {
        "target": target,
        "hidden_size": drafter.config.hidden_size,
        "K": drafter.config.num_categories,
        "added_parameters": added,
        "drafter_parameters": base,
        "percent_of_drafter": 100 * added / base,
    }


def parameters_at_paper_scale(num_categories: int = 4) -> pd.DataFrame:
    """Table 1's counts for the paper's targets: the columns of :func:`dblast.reproduction.results.collect_parameters`."""
    return pd.DataFrame([parameter_row(target, paper_drafter(target, num_categories)) for target in SHAPES])
