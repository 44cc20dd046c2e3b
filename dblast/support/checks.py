"""Arguments and numbers that cannot work are refused here by DBlastError, in one line that says what to give instead.

NaN passes every comparison, so nothing is tested with ``<`` alone before it is known to be finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dblast.errors import DBlastError


def check_number(name: str, value: Any, least: float = -math.inf) -> None:
    """Refuse what is no finite number, or lies below ``least``."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise DBlastError(f"{name} must be a number, got {type(value).__name__}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        raise DBlastError(f"{name} is too large") from None
    if not finite:
        raise DBlastError(f"{name} must be finite, got {value}")
    if value < least:
        raise DBlastError(f"{name} must be at least {least:g}, got {value}")


def is_whole(value: Any) -> bool:
    """Whether this is an integer, Python's or NumPy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool | np.bool_)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no integer, or lies below ``least``."""
    if not is_whole(value):
        raise DBlastError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise DBlastError(f"{name} must be at least {least}, got {value}")


def check_finite(values: Tensor, what: str) -> None:
    """Refuse NaN and infinities in a tensor of any shape; ``what`` names it, as a plural."""
    if not bool(torch.isfinite(values).all()):
        raise DBlastError(f"{what} hold NaN or infinity; check the weights, and the dtype the model runs in")


def token_ids(ids: Any, vocab_size: int | None = None, name: str = "eos_token_ids") -> tuple[int, ...]:
    """Token ids as transformers takes them: None, one id, or several in a list, tuple, set, tensor or array.

    Raises:
        DBlastError: something that is no integer, or an id outside the vocabulary.
    """
    if ids is None:
        return ()
    if isinstance(ids, Tensor | np.ndarray):
        return token_ids(ids.tolist(), vocab_size, name)
    if isinstance(ids, list | tuple | set | frozenset):
        return tuple(token for some in ids for token in token_ids(some, vocab_size, name))
    if not is_whole(ids):
        raise DBlastError(f"{name} must be token ids, integers, got {ids!r}")
    if ids < 0 or vocab_size is not None and ids >= vocab_size:
        raise DBlastError(f"{name} holds {ids}, which lies outside the target's vocabulary of {vocab_size}")
    return (int(ids),)


def prompt_tensors(prompts: Any, vocab_size: int) -> list[Tensor]:
    """Prompts as 1-d int64 tensors on the CPU.

    Args:
        prompts: a sequence of token id sequences of any lengths, or a tensor or array of two dimensions.

    Raises:
        DBlastError: text, no prompts, an empty one, something that is no token id, or one outside the vocabulary.
    """
    if isinstance(prompts, str | bytes):
        raise DBlastError("prompts must be token ids, not text; encode it: [tokenizer(text)['input_ids']]")
    if isinstance(prompts, Mapping):
        raise DBlastError("prompts must be a list of token id sequences, not a mapping; give its 'input_ids', unpadded")
    if not isinstance(prompts, Sequence | Tensor | np.ndarray) or getattr(prompts, "ndim", 1) == 0:
        raise DBlastError(f"prompts must be a list of token id sequences, got {type(prompts).__name__}")
    if len(prompts) == 0:
        raise DBlastError("no prompts given; give a list of token id sequences")
    if getattr(prompts, "ndim", 2) == 1 or is_whole(prompts[0]) or getattr(prompts[0], "ndim", 1) == 0:
        raise DBlastError("prompts must be a list of token id sequences; for one prompt write [ids]")
    return [_prompt_tensor(number, prompt, vocab_size) for number, prompt in enumerate(prompts)]


def _prompt_tensor(number: int, prompt: Any, vocab_size: int) -> Tensor:
    if isinstance(prompt, str | bytes):
        raise DBlastError(f"prompt {number} is text, not token ids; encode it: tokenizer(text)['input_ids']")
    if not isinstance(prompt, Sequence | Tensor | np.ndarray) or getattr(prompt, "ndim", 1) == 0:
        raise DBlastError(f"prompt {number} must be a sequence of token ids, got {type(prompt).__name__}")
    prompt = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
    ids = [token.item() if isinstance(token, Tensor) and token.ndim == 0 else token for token in prompt]
    if not ids:
        raise DBlastError(f"prompt {number} has no tokens; give at least one token id")
    for token in ids:
        if not is_whole(token):
            raise DBlastError(f"prompt {number} must be a flat sequence of token ids, integers; it holds {token!r:.40}")
        if not 0 <= token < vocab_size:
            raise DBlastError(
                f"prompt {number} has token id {token}, which lies outside the target's vocabulary of {vocab_size}"
            )
    return torch.tensor([int(token) for token in ids])
