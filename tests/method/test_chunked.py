"""log q of given tokens in tiles, against the plain computation over the table of all logits."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dblast.support import chunked
from dblast.support.chunked import chunked_log_q
from tests.checks import refused
from tests.helpers import assert_close, assert_same_computation, generator

ROWS, HIDDEN, VOCABULARY, CANDIDATES = 11, 6, 23, 4
CHUNKS = [None, 1, 2, 5, 7, 22, 23, 100]
#: Limits of the logits that are kept for the backward pass: none ever, and those of all tests.
KEPT = {"twice": 0, "kept": 2**20}


@pytest.fixture(autouse=True, params=KEPT)
def limit(request, monkeypatch):
    """Every test with logits that are multiplied again, and with logits that are kept."""
    monkeypatch.setattr(chunked, "KEPT_LOGITS", KEPT[request.param])


twice = pytest.mark.parametrize("limit", ["twice"], indirect=True)
kept = pytest.mark.parametrize("limit", ["kept"], indirect=True)


def inputs(rows: int = ROWS, width: int | None = None, dtype=torch.float32, vocabulary: int = VOCABULARY):
    """Hidden states with gradient, a head, an index (duplicates, -1 and both ends of the vocabulary) and a gradient."""
    rng = generator(0)
    hidden = torch.randn(rows, HIDDEN, generator=rng, dtype=dtype).requires_grad_()
    head = torch.randn(vocabulary, HIDDEN, generator=rng, dtype=dtype)
    shape = (rows,) if width is None else (rows, width)
    index = torch.randint(-1, vocabulary, shape, generator=rng)
    index.flatten()[: min(3, index.numel())] = torch.tensor([-1, 0, vocabulary - 1])[: index.numel()]
    if width is not None and width > 1 and rows > 2:
        index[1] = -1
        index[2, 1] = index[2, 0]
    statistics = torch.promote_types(dtype, torch.float32)
    return hidden, head, index, torch.randn(shape, generator=rng, dtype=statistics)


def plain(hidden, head, index):
    """The computation that stores all logits, (R, V)."""
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    table = index if index.ndim == 2 else index.unsqueeze(1)
    log_q = logits.gather(1, table.clamp(min=0)) - logits.logsumexp(1, keepdim=True)
    return log_q.masked_fill(table < 0, float("-inf")).view(index.shape)


def value_and_gradient(function, hidden, head, index, grad, **chunks):
    log_q = function(hidden, head, index, **chunks)
    (gradient,) = torch.autograd.grad(log_q, hidden, grad)
    return log_q.detach(), gradient


def agree(function, hidden, head, index, grad, tolerance=1e-5, **chunks):
    log_q, gradient = value_and_gradient(function, hidden, head, index, grad, **chunks)
    expected, expected_gradient = value_and_gradient(plain, hidden, head, index, grad)
    assert log_q.shape == index.shape and log_q.dtype == expected.dtype
    assert gradient.shape == hidden.shape and gradient.dtype == hidden.dtype
    assert_close(log_q, expected, tolerance)
    assert_close(gradient, expected_gradient, tolerance)


# -- values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [None, 1, CANDIDATES])
@pytest.mark.parametrize("tokens_per_chunk", CHUNKS)
@pytest.mark.parametrize("rows_per_chunk", [None, 1, 3, ROWS, 50])
def test_values_and_gradients_are_those_of_the_plain_computation(rows_per_chunk, tokens_per_chunk, width):
    chunks = dict(rows_per_chunk=rows_per_chunk, tokens_per_chunk=tokens_per_chunk)
    agree(chunked_log_q, *inputs(width=width), **chunks)
    agree(chunked_log_q, *inputs(width=width, dtype=torch.float64), tolerance=1e-12, **chunks)


@pytest.mark.parametrize("width", [None, CANDIDATES])
@pytest.mark.parametrize("tokens_per_chunk", [None, 5])
def test_gradient_is_the_derivative(tokens_per_chunk, width):
    hidden, head, index, _ = inputs(rows=5, width=width, dtype=torch.float64)
    index = index.clamp(min=0)  # finite differences of -inf are not a number

    def function(hidden):
        return chunked_log_q(hidden, head, index, rows_per_chunk=2, tokens_per_chunk=tokens_per_chunk)

    assert torch.autograd.gradcheck(function, hidden, nondet_tol=1e-12)


@pytest.mark.parametrize("width", [None, CANDIDATES])
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows, width):
    agree(chunked_log_q, *inputs(rows=rows, width=width))


def test_no_candidates():
    hidden, head, _, _ = inputs()
    agree(chunked_log_q, hidden, head, torch.empty(ROWS, 0, dtype=torch.long), torch.empty(ROWS, 0))


def test_one_token_vocabulary_has_log_q_zero():
    hidden, head, _, grad = inputs(vocabulary=1)
    index = torch.zeros(ROWS, dtype=torch.long)
    log_q, gradient = value_and_gradient(chunked_log_q, hidden, head, index, grad)
    assert_close(log_q, 0.0, 1e-5)
    assert_close(gradient, 0.0, 1e-5)


def test_int32_index():
    hidden, head, index, grad = inputs(width=CANDIDATES)
    log_q, gradient = value_and_gradient(chunked_log_q, hidden, head, index.int(), grad)
    expected, expected_gradient = value_and_gradient(chunked_log_q, hidden, head, index, grad)
    assert_same_computation(log_q, expected)
    assert_same_computation(gradient, expected_gradient)


def test_inputs_of_any_strides():
    hidden, head, index, grad = inputs(width=CANDIDATES)
    transposed = hidden.detach().T.contiguous().T.requires_grad_()
    every_other = torch.stack([hidden.detach(), hidden.detach() + 1], 1)[:, 0].requires_grad_()
    wide_head = head.T.contiguous().T
    expected = value_and_gradient(chunked_log_q, hidden, head, index, grad)
    for ours, table, columns in [
        (transposed, head, index),
        (every_other, head, index),
        (hidden, wide_head, index),
        (hidden, head, index.T.contiguous().T),
    ]:
        assert not all(tensor.is_contiguous() for tensor in (ours, table, columns))
        for actual, wanted in zip(value_and_gradient(chunked_log_q, ours, table, columns, grad), expected, strict=True):
            assert_same_computation(actual, wanted)


def test_gradient_reaches_past_a_reshaped_hidden_state():
    """The drafter's states: a transposed 4-d view of a leaf."""
    rng = generator(3)
    leaf = torch.randn(2, 3, 2, HIDDEN, generator=rng).requires_grad_()
    head, index = torch.randn(VOCABULARY, HIDDEN, generator=rng), torch.randint(VOCABULARY, (12,), generator=rng)
    for function in (plain, chunked_log_q):
        states = leaf.transpose(1, 2).reshape(-1, HIDDEN)
        function(states, head, index).sum().backward()
    ours, leaf.grad = leaf.grad, None
    plain(leaf.transpose(1, 2).reshape(-1, HIDDEN), head, index).sum().backward()
    assert_close(ours, 2 * leaf.grad, 1e-5)


def test_extreme_logits_stay_finite():
    hidden, head, index, grad = inputs(width=CANDIDATES)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    log_q, gradient = value_and_gradient(chunked_log_q, hidden, head, index, grad, tokens_per_chunk=3)
    assert log_q[index >= 0].isfinite().all() and gradient.isfinite().all()
    # One rounding of such a logit is worth a hundredth in float32: values are compared in float64.
    hidden, head, index, grad = inputs(width=CANDIDATES, dtype=torch.float64)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    agree(chunked_log_q, hidden, head, index, grad, tolerance=1e-8, tokens_per_chunk=3)


def test_state_that_is_not_a_number_shows_in_the_value_and_the_gradient():
    hidden, head, _, grad = inputs()
    hidden.data[4, 0] = float("nan")
    log_q, gradient = value_and_gradient(chunked_log_q, hidden, head, torch.arange(ROWS), grad, tokens_per_chunk=5)
    assert log_q.isnan().nonzero().flatten().tolist() == [4]
    assert gradient.isnan().all(1).nonzero().flatten().tolist() == [4]


# -- rows that cost nothing ----------------------------------------------------------------------


@pytest.mark.parametrize("width", [None, CANDIDATES])
def test_tokens_outside_the_vocabulary_have_no_gradient_whatever_comes_in(width):
    hidden, head, index, grad = inputs(width=width)
    expected = value_and_gradient(chunked_log_q, hidden, head, index, grad)
    for poison in (float("nan"), float("inf"), 7.0):
        poisoned = grad.masked_fill(index < 0, poison)
        log_q, gradient = value_and_gradient(chunked_log_q, hidden, head, index, poisoned)
        assert_same_computation(log_q, expected[0])
        assert_same_computation(gradient, expected[1])
    assert torch.equal(expected[0].isneginf(), index < 0)
    outside = (index < 0).view(ROWS, -1).all(1)
    assert outside.any() and not expected[1][outside].any()


def test_gradient_that_is_not_a_number_is_not_taken_for_zero():
    hidden, head, _, grad = inputs()
    grad[5] = float("nan")
    _, gradient = value_and_gradient(chunked_log_q, hidden, head, torch.arange(ROWS), grad)
    assert gradient.isnan().all(1).nonzero().flatten().tolist() == [5]


class Watch(TorchDispatchMode):
    """Notes the rows of every matrix product and the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.product_rows, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.product_rows.append(len(out))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


def test_rows_without_gradient_and_rows_outside_the_vocabulary_cost_no_product(limit):
    hidden, head, index, grad = inputs(width=CANDIDATES)
    index = index.clamp(min=0)
    index[[2, 7]] = -1
    grad[[0, 4, 5]] = 0.0
    with Watch() as forward:
        log_q = chunked_log_q(hidden, head, index)
    with Watch() as backward:
        (gradient,) = torch.autograd.grad(log_q, hidden, grad)
    products = 1 if chunked.KEPT_LOGITS else 2
    assert forward.product_rows == [ROWS - 2] and backward.product_rows == [ROWS - 5] * products
    assert gradient.any(1).logical_not().nonzero().flatten().tolist() == [0, 2, 4, 5, 7]
    agree(chunked_log_q, hidden, head, index, grad)


def test_nothing_to_do_costs_nothing():
    hidden, head, index, grad = inputs()
    with Watch() as watch:
        log_q = chunked_log_q(hidden, head, torch.full_like(index, -1))
        (gradient,) = torch.autograd.grad(log_q, hidden, grad)
    assert watch.product_rows == [] and log_q.isneginf().all() and not gradient.any()


# -- precision -----------------------------------------------------------------------------------


def autocast(enabled: bool = True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def in_bfloat16(function, hidden, head, index, grad, **chunks):
    """Value and gradient with the forward pass under autocast, as in training."""
    with autocast():
        log_q = function(hidden, head, index, **chunks)
    (gradient,) = torch.autograd.grad(log_q, hidden, grad)
    return log_q.detach(), gradient


def distance(actual, expected) -> float:
    """Euclidean, relative to the expected norm."""
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("width", [None, CANDIDATES])
@pytest.mark.parametrize("tokens_per_chunk", [None, 1, 5])
def test_autocast_is_as_close_to_the_exact_result_as_plain_autocast(tokens_per_chunk, width):
    hidden, head, index, grad = inputs(width=width)
    inside = index >= 0
    log_q, gradient = in_bfloat16(chunked_log_q, hidden, head, index, grad, tokens_per_chunk=tokens_per_chunk)
    rough, rough_gradient = in_bfloat16(plain, hidden, head, index, grad)
    exact, exact_gradient = value_and_gradient(plain, hidden, head, index, grad)
    assert log_q.dtype == gradient.dtype == torch.float32
    # The same bfloat16 logits, statistics in float32: equal to plain autocast but for the last bits.
    assert_close(log_q, rough, 1e-5)
    assert 1e-4 < distance(rough[inside], exact[inside]) < 1e-2  # bfloat16 was indeed on
    assert distance(gradient, rough_gradient) < 1e-2
    assert distance(gradient, exact_gradient) < 1.2 * distance(rough_gradient, exact_gradient) + 1e-3


def test_gradient_does_not_lose_accuracy_with_the_number_of_tiles():
    hidden, head, index, grad = inputs(vocabulary=600, rows=40)
    _, exact = value_and_gradient(plain, hidden, head, index, grad)
    many, one = (
        in_bfloat16(chunked_log_q, hidden, head, index, grad, tokens_per_chunk=tokens)[1] for tokens in (1, 600)
    )
    assert distance(many, exact) < 1.2 * distance(one, exact)


def test_autocast_where_backward_is_called_changes_nothing():
    hidden, head, index, grad = inputs(width=CANDIDATES)
    expected = value_and_gradient(chunked_log_q, hidden, head, index, grad)[1]
    log_q = chunked_log_q(hidden, head, index)
    with autocast():
        assert_same_computation(torch.autograd.grad(log_q, hidden, grad)[0], expected)
    with autocast():
        inside = torch.autograd.grad(chunked_log_q(hidden, head, index), hidden, grad)[0]
    assert distance(inside, in_bfloat16(chunked_log_q, hidden, head, index, grad)[1]) < 1e-3


def test_autocast_leaves_float64_alone():
    arguments = inputs(dtype=torch.float64)
    with autocast():
        agree(chunked_log_q, *arguments, tolerance=1e-12)


def test_bfloat16_inputs_give_float32_values_and_bfloat16_gradients():
    hidden, head, index, grad = inputs(dtype=torch.bfloat16, width=CANDIDATES)
    log_q, gradient = value_and_gradient(chunked_log_q, hidden, head, index, grad, tokens_per_chunk=5)
    expected, expected_gradient = value_and_gradient(plain, hidden, head, index, grad)
    assert log_q.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert_close(log_q, expected, 1e-5)
    assert distance(gradient.float(), expected_gradient.float()) < 1e-2


def sure_inputs():
    """Rows whose index is their best token, by a margin that leaves log q at zero or next to it."""
    rng = generator(5)
    head = torch.randn(64, HIDDEN, generator=rng)
    hidden = 9 * head + 0.1 * torch.randn(64, HIDDEN, generator=rng)
    return hidden.requires_grad_(), head, (hidden @ head.T).argmax(1)


@pytest.mark.parametrize("tokens_per_chunk", [None, 1, 7])
@pytest.mark.parametrize("enabled", [False, True], ids=["float32", "bfloat16"])
def test_log_q_is_never_positive(enabled, tokens_per_chunk):
    hidden, head, index = sure_inputs()
    with autocast(enabled):
        log_q = chunked_log_q(hidden, head, index, tokens_per_chunk=tokens_per_chunk)
    assert (log_q <= 0).all() and (log_q > -1e-3).sum() > 10


def test_logit_by_a_dot_product_of_its_own_would_be_positive():
    """Why the chosen logit is read from the product: rounded on its own it exceeds the log-sum-exp."""
    hidden, head, index = sure_inputs()
    with autocast():
        log_sum = (hidden @ head.T).float().logsumexp(1)
    assert ((hidden * head[index]).sum(1) - log_sum > 1e-2).any()


# -- memory --------------------------------------------------------------------------------------


def saved(function, hidden, head, index) -> list[torch.Tensor]:
    """What a forward pass under autocast keeps for its backward pass."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensors.append(tensor) or tensor, lambda tensor: tensor):
        with autocast():
            function(hidden, head, index)
    return tensors


@twice
@pytest.mark.parametrize("width", [None, CANDIDATES])
def test_only_states_head_index_and_log_sum_exp_are_kept(width):
    hidden, head, index, _ = inputs(width=width)
    found = saved(chunked_log_q, hidden, head, index)
    shapes = {(ROWS, HIDDEN), (VOCABULARY, HIDDEN), (ROWS, width or 1), (ROWS,)}
    assert len(found) == 4 and {tuple(tensor.shape) for tensor in found} == shapes
    assert found[0].dtype == torch.bfloat16  # the states as they entered the product
    assert found[1].data_ptr() == head.data_ptr()  # no second copy of the head
    # The plain computation does keep the table, so the absence above means something.
    assert (ROWS, VOCABULARY) in {tuple(tensor.shape) for tensor in saved(plain, hidden, head, index)}


@twice
@pytest.mark.parametrize("enabled", [False, True], ids=["float32", "bfloat16"])
def test_no_operation_of_either_pass_makes_a_tensor_larger_than_its_tile(enabled):
    hidden, head, index, grad = inputs(rows=60, vocabulary=500, width=CANDIDATES)
    bound = 60 * HIDDEN  # the gradient; larger than a tile and than a piece of the head

    def peak(function, **chunks):
        with Watch() as watch, autocast(enabled):
            log_q = function(hidden, head, index, **chunks)
            torch.autograd.grad(log_q, hidden, grad)
        return watch.largest

    assert peak(chunked_log_q, rows_per_chunk=9, tokens_per_chunk=40) == bound
    assert peak(plain) == 60 * 500


@kept
@pytest.mark.parametrize("enabled", [False, True], ids=["float32", "bfloat16"])
def test_kept_logits_give_the_very_numbers_of_a_second_product(enabled, monkeypatch):
    """As they are in the dtype of the product, nothing is lost; tables above the limit are not kept."""
    found = []
    for limit in (0, 60 * 500 - 1, 60 * 500):
        monkeypatch.setattr(chunked, "KEPT_LOGITS", limit)
        hidden, head, index, grad = inputs(rows=60, vocabulary=500, width=CANDIDATES)
        grad[::3] = 0.0
        with autocast(enabled):
            log_q = chunked_log_q(hidden, head, index, rows_per_chunk=9, tokens_per_chunk=40)
        with Watch() as watch:
            (gradient,) = torch.autograd.grad(log_q, hidden, grad)
        found.append((log_q.detach(), gradient, len(watch.product_rows)))
    assert found[0][2] == found[1][2] == 2 * found[2][2]
    for log_q, gradient, _ in found[1:]:
        assert_same_computation(log_q, found[0][0])
        assert_same_computation(gradient, found[0][1])


def test_nothing_is_kept_without_gradient():
    hidden, head, index, _ = inputs()
    with torch.no_grad():
        assert saved(chunked_log_q, hidden, head, index) == []
    log_q = chunked_log_q(hidden.detach(), head, index)
    assert not log_q.requires_grad
    assert_same_computation(log_q, chunked_log_q(hidden, head, index).detach())


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda h, t, i: (h.unsqueeze(0), t, i), ["(R, H)", "(1, 11, 6)"]),
        (lambda h, t, i: (h, t[:, 1:], i), ["(11, 6)", "(23, 5)"]),
        (lambda h, t, i: (h, t[:0], i), ["(0, 6)"]),
        (lambda h, t, i: (h, t, i[1:]), ["(11,)", "(11, W)", "(10,)"]),
        (lambda h, t, i: (h, t, i.view(11, 1, 1)), ["(11, 1, 1)"]),
        (lambda h, t, i: (h, t, i.float()), ["int64", "float32"]),
        (lambda h, t, i: (h, t, i.bool()), ["int64", "bool"]),
        (lambda h, t, i: (h, t, i - 1), ["-1..22", "-2.."]),
        (lambda h, t, i: (h, t, i + 1), ["-1..22", "..23"]),
        (lambda h, t, i: (h, t.clone().requires_grad_(), i), ["head.detach()"]),
        (lambda h, t, i: (h.detach().long(), t.long(), i), ["int64"]),
        (lambda h, t, i: (h, t.long(), i), ["float32", "int64"]),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    hidden, head, index, _ = inputs()
    with refused(*words):
        chunked_log_q(*change(hidden, head, index))


@pytest.mark.parametrize("chunks", [{"rows_per_chunk": 0}, {"tokens_per_chunk": -2}])
def test_empty_tiles_are_refused(chunks):
    with refused("at least 1", str(*chunks.values())):
        chunked_log_q(*inputs()[:3], **chunks)


def test_second_derivative_is_refused():
    hidden, head, index, grad = inputs()
    log_q = chunked_log_q(hidden, head, index.clamp(min=0))
    (gradient,) = torch.autograd.grad(log_q, hidden, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# -- mutants -------------------------------------------------------------------------------------

SOURCE = Path(chunked.__file__).read_text(encoding="utf-8")

#: name -> (what stands in the source, what a slip would have written)
MUTANTS = {
    "softmax pushes the wrong way": ("mul_(-total[rows])", "mul_(total[rows])"),
    "softmax not weighted": (".mul_(-total[rows])", ".neg_()"),
    "softmax weighted by one candidate": ("total = grad.sum(1, keepdim=True)", "total = grad[:, :1]"),
    "softmax not normalised": ("logits.sub_(log_sum[rows])", "logits"),
    "duplicates overwrite": ("scatter_add_(1, column,", "scatter_(1, column,"),
    "tokens of other tiles": ("grad[rows].masked_fill(~inside, 0.0)", "grad[rows]"),
    "gradient of the last tile": ("grad_hidden[rows] += ", "grad_hidden[rows] = "),
    "log-sum-exp of the last tile": ("torch.logaddexp(log_sum[rows], part)", "part"),
    "peak forgotten": (" + peak.squeeze(1)", ""),
    "logit of the last tile": ("logits.gather(1, column), chosen[rows])", "logits.gather(1, column), -torch.inf)"),
    "column not shifted": ("index - tokens.start", "index"),
    "last part of a span lost": ("range(0, total, size)", "range(0, total - size + 1, size)"),
    "-1 taken for the first token": ("inside = (column >= 0)", "inside = ((column >= 0) | (index < 0))"),
    "gradient at -1": ("grad.masked_fill(index < 0, 0.0)", "grad"),
    "rows with any -1 skipped": ("_members((index >= 0).any(1))", "_members((index >= 0).all(1))"),
    "rows with any zero skipped": ("(grad != 0).any(1)", "(grad != 0).all(1)"),
    "negative gradients skipped": ("(grad != 0)", "(grad > 0)"),
    "statistics in the dtype of the product": ("torch.promote_types(dtype, torch.float32)", "dtype"),
    "autocast ignored": ("torch.is_autocast_enabled(device)", "False"),
    "autocast of the caller of backward": ("torch.autocast(flat.device.type, enabled=False)", "torch.enable_grad()"),
    "gradient accumulated in bfloat16": ("(hidden, dtype=_statistics_dtype(hidden.dtype))", "(hidden)"),
    "statistics overwrite what is kept": ("copy=kept is not None", "copy=False"),
    "softmax overwrites what is kept": (
        "table[rows].to(_statistics_dtype(table.dtype), copy=True)",
        "table[rows].to(_statistics_dtype(table.dtype))",
    ),
    "kept rows of the whole batch": ("((index >= 0).any(1).cumsum(0) - 1)[rows]", "rows"),
    "kept rows counted from one": (".cumsum(0) - 1)[rows]", ".cumsum(0))[rows] % (index >= 0).any(1).sum()"),
    "logit by a dot product": (
        "logits.gather(1, column)",
        "(hidden[rows].unsqueeze(1).float() * head[index[rows].clamp(min=0)].float()).sum(-1).to(dtype)",
    ),
}


def every_check(function) -> None:
    """The checks above that a wrong implementation is likeliest to fail, on one function."""
    for width in (None, CANDIDATES):
        hidden, head, index, grad = inputs(width=width)
        grad.flatten()[3::4] = 0.0
        for chunks in ({}, dict(rows_per_chunk=3, tokens_per_chunk=5)):
            agree(function, hidden, head, index, grad, **chunks)
            log_q, gradient = in_bfloat16(function, hidden, head, index, grad, **chunks)
            rough, rough_gradient = in_bfloat16(plain, hidden, head, index, grad)
            assert log_q.dtype == gradient.dtype == torch.float32
            assert_close(log_q, rough, 1e-5)
            assert distance(gradient, rough_gradient) < 1e-2
        # All rows count, and the backward pass runs twice.
        whole, drawn = index.clamp(min=0), grad + 0.01
        log_q = function(hidden, head, whole)
        both = [torch.autograd.grad(log_q, hidden, drawn, retain_graph=True)[0] for _ in range(2)]
        for gradient in both:
            assert_close(gradient, value_and_gradient(plain, hidden, head, whole, drawn)[1], 1e-5)
        poisoned = grad.masked_fill(index < 0, float("nan"))
        assert value_and_gradient(function, hidden, head, index, poisoned)[1].isfinite().all()
        log_q = function(hidden, head, index)
        with autocast():
            (gradient,) = torch.autograd.grad(log_q, hidden, grad)
        assert_close(gradient, value_and_gradient(plain, hidden, head, index, grad)[1], 1e-5)
    hidden, head, index = sure_inputs()
    with autocast():
        assert (function(hidden, head, index) <= 0).all()
    hidden, head, index, grad = inputs(vocabulary=600, rows=40)
    exact = value_and_gradient(plain, hidden, head, index, grad)[1]
    rough = in_bfloat16(plain, hidden, head, index, grad)[1]
    ours = in_bfloat16(function, hidden, head, index, grad, tokens_per_chunk=1)[1]
    assert distance(ours, exact) < 1.2 * distance(rough, exact)


def test_the_checks_accept_the_implementation():
    every_check(chunked_log_q)


def refuses(module: types.ModuleType) -> bool:
    """Whether one of the checks fails, with logits kept or without."""
    for module.KEPT_LOGITS in KEPT.values():
        try:
            every_check(module.chunked_log_q)
        except (AssertionError, IndexError):
            return True
    return False


@kept
@pytest.mark.parametrize("name", MUTANTS)
def test_the_checks_refuse_a_faulty_implementation(name):
    right, wrong = MUTANTS[name]
    assert SOURCE.count(right) == 1, "the mutant no longer fits the source"
    module = types.ModuleType("mutant")
    exec(compile(SOURCE.replace(right, wrong), name, "exec"), module.__dict__)
    assert refuses(module)
