"""Sampling settings against the logits processors of transformers."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dblast.errors import DBlastError
from dblast.sampling import SETTINGS, SamplingSettings, get_setting
from tests.helpers import assert_close, generator

CUSTOM = {
    "no filters": SamplingSettings(temperature=0.7),
    "top_k None": SamplingSettings(temperature=1.3, top_k=None, top_p=0.9),
    "top_k 0": SamplingSettings(temperature=1.3, top_k=0, top_p=0.9),
    "top_k 1": SamplingSettings(temperature=1.3, top_k=1, top_p=0.9),
    "top_k alone": SamplingSettings(temperature=1.3, top_k=5, top_p=1.0),
    "top_k = V": SamplingSettings(temperature=0.9, top_k=50, top_p=0.8),
    "top_k > V": SamplingSettings(temperature=0.9, top_k=1000, top_p=0.8),
    "small nucleus": SamplingSettings(temperature=1.0, top_k=20, top_p=1e-4),
    "nucleus below float32 resolution": SamplingSettings(temperature=1.0, top_k=20, top_p=1e-9),
}
ALL_SETTINGS = {**SETTINGS, **CUSTOM}


@pytest.fixture
def stable_sort(monkeypatch):
    """Top-p in transformers sorts without asking for stability, so which of several tied tokens it drops
    depends on the machine; with a stable sort it is defined, and comparable token by token."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


def transformers_probabilities(settings: SamplingSettings, logits: torch.Tensor) -> torch.Tensor:
    """p as sampling in transformers computes it: float32 logits, temperature, top-k, top-p, softmax."""
    warpers = [TemperatureLogitsWarper(settings.temperature)]
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    scores = logits.float()
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)


def random_logits(seed: int, rows: int = 64, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=generator(seed)) * 2.5


def assert_same_law(settings: SamplingSettings, logits: torch.Tensor) -> None:
    expected = transformers_probabilities(settings, logits)
    actual = settings.probabilities(logits)
    assert torch.equal(actual > 0, expected > 0)
    assert_close(actual, expected, tolerance=1e-6)


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_random_logits(name):
    assert_same_law(ALL_SETTINGS[name], random_logits(seed=1))


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_logits_rounded_to_many_ties(name, stable_sort):
    assert_same_law(ALL_SETTINGS[name], random_logits(seed=2).round())


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_ties_keep_as_many_tokens_as_an_unstable_sort_keeps(name):
    logits = random_logits(seed=2).round()
    expected = transformers_probabilities(ALL_SETTINGS[name], logits)
    assert_close(ALL_SETTINGS[name].probabilities(logits).sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_bfloat16_logits(name, stable_sort):
    logits = random_logits(seed=3).bfloat16()
    assert_same_law(ALL_SETTINGS[name], logits)
    assert ALL_SETTINGS[name].probabilities(logits).dtype == torch.float32


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_leading_dimensions(name):
    logits = random_logits(seed=4).reshape(4, 16, 50)
    expected = transformers_probabilities(ALL_SETTINGS[name], logits.flatten(0, 1))
    assert_close(ALL_SETTINGS[name].probabilities(logits).flatten(0, 1), expected)
    assert ALL_SETTINGS[name].probabilities(logits[0, 0]).shape == (50,)


def test_ties_at_the_kth_place_are_all_kept_and_widen_only_their_own_row():
    logits = torch.stack([torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0, 2.0]), torch.arange(6.0)])
    assert (SamplingSettings(top_k=3).probabilities(logits) > 0).sum(-1).tolist() == [5, 3]
    for settings in (SamplingSettings(top_k=3), SamplingSettings(top_k=3, top_p=0.9)):
        assert_same_law(settings, logits)


@pytest.mark.parametrize("top_k", [None, 20])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 0.8, 0.95])
def test_ties_at_the_nucleus_boundary_are_cut_at_the_same_token(top_p, top_k, stable_sort):
    """All logits equal: only the order among ties decides which survive. No sum of 41sts is near one of the top_p."""
    assert_same_law(SamplingSettings(top_k=top_k, top_p=top_p), torch.zeros(1, 41))
    mixed = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, -2.0, 1.0]])
    assert_same_law(SamplingSettings(top_k=top_k, top_p=top_p), mixed)


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_log_probabilities_are_the_log_of_probabilities(name):
    logits = random_logits(seed=6)
    assert_close(ALL_SETTINGS[name].log_probabilities(logits), ALL_SETTINGS[name].probabilities(logits).log())


def test_order_is_temperature_then_top_k_then_top_p():
    """The nucleus is taken of the renormalised, tempered top-k; other orders keep other tokens."""
    logits = random_logits(seed=7)
    settings = SamplingSettings(temperature=1.5, top_k=8, top_p=0.8)
    nucleus_before_top_k = TopKLogitsWarper(8)(None, TopPLogitsWarper(0.8)(None, logits / 1.5)).softmax(-1)
    nucleus_before_temperature = (TopPLogitsWarper(0.8)(None, TopKLogitsWarper(8)(None, logits)) / 1.5).softmax(-1)
    for other in (nucleus_before_top_k, nucleus_before_temperature):
        assert not torch.equal(settings.probabilities(logits) > 0, other > 0)


def test_support_lists_the_surviving_tokens_in_order():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    tokens, log_p = SamplingSettings(top_k=2).support(logits)
    assert tokens.tolist() == [1, 3]
    assert_close(log_p, torch.tensor([3.0, 2.0]).log_softmax(-1))


def test_support_pads_narrower_rows_with_minus_infinity():
    logits = torch.stack([torch.zeros(6), torch.tensor([0.0, 0.0, 9.0, 0.0, 8.0, 0.0])])
    tokens, log_p = SamplingSettings(top_k=2).support(logits)
    assert tokens.shape == log_p.shape == (2, 6)
    assert (log_p > -torch.inf).sum(-1).tolist() == [6, 2]
    assert tokens[1][log_p[1] > -torch.inf].tolist() == [2, 4]
    assert all(len(set(row)) == 6 for row in tokens.tolist())
    assert_close(log_p.exp().sum(-1), 1.0)


def test_paper_settings():
    assert {name: (s.temperature, s.top_k, s.top_p) for name, s in SETTINGS.items()} == {
        "high": (0.7, 20, 0.8),
        "medium": (1.0, 20, 0.95),
        "low": (1.5, 20, 0.95),
    }
    assert get_setting("low") is SETTINGS["low"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.2}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(DBlastError, match=message):
        SamplingSettings(**arguments)


def test_unknown_setting_name_lists_the_known_ones():
    with pytest.raises(DBlastError, match="'lukewarm'.*high, medium, low"):
        get_setting("lukewarm")
