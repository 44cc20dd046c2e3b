"""What a run needs, compared with what the machine has, before the first token is sampled."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dblast.errors import DBlastError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from dblast.reproduction.plans import Plan

#: Share of the free memory, and of the free disk, that a run may plan with.
USABLE = 0.9
#: Bytes of a stored token beside its tapped states: what it was drawn from, its log p, entropy and so on.
TOKEN_BYTES = 200
#: Memory of Python and its libraries alone.
PROCESS_BYTES = 0.7e9


def check_numbers(**values: float | int | None) -> None:
    """Refuse options whose numbers cannot be: NaN or infinite, negative seeds, counts below one.

    Args:
        values: by option, "_" for "-"; ``seed`` may be zero, ``hours`` and ``learning_rate`` any positive number.
    """
    for name, value in values.items():
        if value is None:
            continue
        option = "--" + name.replace("_", "-")
        if not math.isfinite(value):
            raise DBlastError(f"{option} must be a number, got {value}")
        if name == "seed" and not 0 <= value < 2**31:
            raise DBlastError(f"{option} must lie between 0 and 2147483647, got {value}")
        if name in ("hours", "learning_rate") and value <= 0:
            raise DBlastError(f"{option} must be positive, got {value:g}")
        if name not in ("seed", "hours", "learning_rate") and value < 1:
            raise DBlastError(f"{option} must be at least 1, got {value}")


def check_output(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that exists, or that could not be made.

    Raises:
        DBlastError: see above.
    """
    if folder.exists() or folder.is_symlink():
        raise DBlastError(f"{folder} exists already; give {option} a new folder")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise DBlastError(f"{parent} is no folder; make it, or give {option} another place")
    probe = folder.with_name(f"{folder.name}.probe-{os.getpid()}")
    try:
        # Permissions do not tell of every place that takes no folder.
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise DBlastError(f"{folder} cannot be made ({error.strerror}); give {option} another place") from None


def check_cache() -> None:
    """Refuse a cache folder that cannot be written."""
    from dblast.support.files import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DBlastError(
            f"the cache {folder} is not writable ({error.strerror}); set DBLAST_CACHE to a folder that is"
        ) from None


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process, though it is not there yet; a killed process frees it.

    Raises:
        DBlastError: another process is making it.
    """
    from filelock import FileLock, Timeout

    from dblast.reproduction.stages import digest
    from dblast.support.files import cache_folder

    place = cache_folder() / "locks" / f"{digest(str(folder.absolute()))}.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DBlastError(f"another process is making {folder}; wait for it, or give --out another folder") from None
    try:
        yield
    finally:
        lock.release()


# -- memory and disk -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes that the parts of a run take at their peak, by our reckoning."""

    target: float
    sampling: float
    drafter: float
    training: float

    @property
    def peak(self) -> float:
        """Sampling and training do not happen at the same time."""
        return self.target + max(self.sampling, self.drafter + self.training)


def memory_need(plan: Plan, target: PreTrainedConfig, width: int) -> Memory:
    """Memory of a plan on a target.

    Args:
        target: configuration of the target.
        width: positions of the longest prompt with its answer.
    """
    h, layers, vocabulary = target.hidden_size, target.num_hidden_layers, target.vocab_size
    head = getattr(target, "head_dim", None) or h // target.num_attention_heads
    key_value = 2 * target.num_key_value_heads * head
    size = 2 if plan.precision == "bfloat16" else 4
    layer = 2 * h * h + h * key_value + 3 * h * target.intermediate_size
    shape = plan.drafter
    k, b = max(variant.K for variant in plan.variants), shape.block_length
    taps = len(shape.taps) if shape.taps else shape.layers
    weights = shape.layers * layer + taps * h * h + k * h * h + 2 * k * h + k
    blocks = max(config.blocks_per_step for config in (plan.pretrain, plan.finetune))
    sequences = max(config.sequences for config in (plan.pretrain, plan.finetune))
    queries = max(config.anchors for config in (plan.pretrain, plan.finetune)) * (b + 1)
    return Memory(
        target=PROCESS_BYTES + size * (layers * layer + 2 * vocabulary * h),
        # Keys and values, tapped states of the answers, logits of one step in float32.
        sampling=plan.data.batch_size * (width * (layers * key_value * size + 2 * taps * h) + 3 * 4 * vocabulary),
        # Weights, gradients and two moments in float32, and a copy while a checkpoint is written.
        drafter=4 * 5 * weights,
        # Tiles of logits, and those that are kept for the backward pass (dblast.support.chunked.KEPT_LOGITS).
        training=4 * min(2**26, blocks * k * b * (shape.draft_vocabulary or vocabulary))
        + 4 * blocks * (6 * k * b * h + (b + 1) * shape.layers * (12 * h + 3 * target.intermediate_size))
        + sequences * queries * (width + queries) * (1 + 4)
        + 6 * 4 * 2**23,
    )


def free_memory() -> float:
    """Bytes that a run can take: of the GPU if there is one, else of this machine; infinite if nobody knows."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (OSError, ValueError):
        return float("inf")


def check_memory(plan: Plan, target: PreTrainedConfig, width: int) -> Memory:
    """Refuse a plan that would be killed for memory, with what to lower.

    Raises:
        DBlastError: see above.
    """
    need, free = memory_need(plan, target, width), free_memory()
    if need.peak > USABLE * free:
        k, b = max(variant.K for variant in plan.variants), plan.drafter.block_length
        largest = max(("target", "sampling", "drafter", "training"), key=lambda name: getattr(need, name))
        advice = {
            "target": "choose a smaller target",
            "sampling": "use shorter prompts or lower --response-tokens",
            "drafter": "lower -K or --layers",
            "training": "lower -K or --block-length",
        }[largest]
        raise DBlastError(
            f"K = {k} and b = {b} need about {size(need.peak)} of memory ({largest} alone "
            f"{size(getattr(need, largest))}) and {size(free)} are free; {advice}"
        )
    return need


def free_disk(folder: Path) -> float:
    """Bytes free where ``folder`` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return float(shutil.disk_usage(folder).free)


def token_bytes(hidden_size: int, taps: int) -> int:
    """Bytes on disk of a stored token: its tapped states and what it was drawn from."""
    return 2 * hidden_size * taps + TOKEN_BYTES


def size(count: float) -> str:
    """Bytes in words: "3.2 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
