"""Sampling settings: raw logits to the target distribution p.

Everything here works in float32 whatever the dtype of the logits, because
acceptance probabilities are ratios of these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.errors import DBlastError
from dblast.support.checks import check_finite, check_number, check_whole

NEG_INF = float("-inf")

#: A logit of -inf is a token that cannot come; any other that is not finite leaves the largest of its row not finite.
LARGEST = "the target's logits (over the temperature)"


@dataclass(frozen=True)
class SamplingSettings:
    """Temperature, then top-k, then top-p: the order Hugging Face applies them in.

    ``top_k=None`` (or 0) and ``top_p=1.0`` switch the filters off.

    Raises:
        DBlastError: temperature not positive and finite, top_k negative or no integer, top_p outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        check_number("top_p", self.top_p)
        if self.temperature <= 0:
            raise DBlastError(
                f"temperature must be positive, got {self.temperature}; for greedy decoding use do_sample=False"
            )
        if self.top_k is not None:
            check_whole("top_k (0 for no limit)", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise DBlastError(f"top_p must lie in (0, 1], got {self.top_p}")

    def support(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that survive the filters and their log-probabilities.

        Args:
            logits: (..., V), any float dtype.

        Returns:
            ``(tokens, log_p)``, both (..., W) with W the largest support in the
            batch. Rows with a smaller support are padded with log_p = -inf.
            Sorted by token id: of tokens tied at the edge of the nucleus, the higher
            ids stay (Hugging Face leaves that choice to an unstable sort).

        Raises:
            DBlastError: NaN or +inf among the logits, a row of -inf alone, or logits that the temperature takes there.
        """
        k = self.top_k or 0
        spare = 2 * k + 16
        if k and spare < logits.shape[-1]:
            # Several times faster than filtering the whole vocabulary, and the same: tokens
            # tied at the k-th place all survive, so they must be among these candidates.
            values, tokens = logits.topk(spare, dim=-1)
            scores = values.float() / self.temperature
            check_finite(scores[..., 0], LARGEST)  # NaN sorts first
            if bool((scores[..., -1] < scores[..., k - 1]).all()):
                tokens, order = tokens.sort(dim=-1)
                kept, log_p = self._filter(scores.gather(-1, order))
                return tokens.gather(-1, kept), log_p
        scores = logits.float() / self.temperature
        check_finite(scores.amax(-1), LARGEST)  # of a row with NaN that is NaN
        return self._filter(scores)

    def _filter(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k and top-p on (..., V) scaled scores: columns and log-probabilities, as :meth:`support` returns them."""
        if self.top_k and self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            # A tie at the k-th place keeps every tied token, as TopKLogitsWarper does.
            width = int((scores >= kth).sum(-1).max())
            values, tokens = scores.topk(width, dim=-1)
            values = values.masked_fill(values < kth, NEG_INF)
            tokens, order = tokens.sort(dim=-1)
            values = values.gather(-1, order)
        else:
            values = scores
            tokens = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
        if self.top_p < 1:
            ascending, order = values.sort(dim=-1, stable=True)
            removed = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            removed[..., -1] = False
            values = values.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), NEG_INF)
        return tokens, values.log_softmax(-1)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """log p over the whole vocabulary: (..., V) to (..., V) float32, -inf where filtered out."""
        tokens, log_p = self.support(logits)
        full = torch.full(logits.shape, NEG_INF, dtype=torch.float32, device=logits.device)
        return full.scatter(-1, tokens, log_p)

    def probabilities(self, logits: Tensor) -> Tensor:
        """p over the whole vocabulary: (..., V) to (..., V) float32, rows sum to one."""
        return self.log_probabilities(logits).exp()


#: The paper's three evaluation settings (its section 5.1), in falling order of determinism.
SETTINGS: dict[str, SamplingSettings] = {
    "high": SamplingSettings(temperature=0.7, top_k=20, top_p=0.8),
    "medium": SamplingSettings(temperature=1.0, top_k=20, top_p=0.95),
    "low": SamplingSettings(temperature=1.5, top_k=20, top_p=0.95),
}


def get_setting(name: str) -> SamplingSettings:
    """One of the paper's settings by name; DBlastError lists the known ones."""
    if name not in SETTINGS:
        raise DBlastError(f"unknown setting {name!r}; known settings: {', '.join(SETTINGS)}")
    return SETTINGS[name]
