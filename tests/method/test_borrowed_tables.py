"""The target's embedding and head beside a drafter: shared, moved with it, never converted, trained or saved."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from dblast.backbone import DBlastConfig
from dblast.support.chunked import chunked_log_q
from dblast.drafter import TABLES, DBlastDrafter
from dblast.errors import DBlastError
from tests.checks import refused
from tests.conftest import MASK_TOKEN_ID, VOCABULARY_SIZE


@pytest.fixture(scope="module")
def half(llama) -> LlamaForCausalLM:
    """The Llama target in bfloat16."""
    return copy.deepcopy(llama.model).to(torch.bfloat16)


def hidden_states(dtype=torch.float32, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 2, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.tensor([[7, 8]]), torch.tensor([[3, 9]]), torch.randn(1, 9, 64, generator=generator)


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.dtype == second.dtype and first.shape == second.shape


def check_shared(drafter: DBlastDrafter, model) -> None:
    assert same_memory(drafter.target_embedding, model.get_input_embeddings().weight)
    assert same_memory(drafter.target_head, model.get_output_embeddings().weight)


def test_tables_are_the_targets_own_memory_in_its_own_dtype(half, llama, make_drafter):
    check_shared(make_drafter(llama), llama.model)
    check_shared(make_drafter(llama).attach(half), half)


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double", "cpu"])
def test_conversions_of_the_drafter_leave_the_tables_alone(half, llama, make_drafter, convert):
    for model in (half, llama.model):
        check_shared(getattr(make_drafter(llama).attach(model), convert)(), model)


@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 12}])
def test_tables_move_with_the_drafter(llama, half, make_drafter, settings):
    """To the meta device, the only other one that every machine has."""
    drafter = make_drafter(llama, **settings).attach(half)
    dtypes = {name: getattr(drafter, name).dtype for name in TABLES if getattr(drafter, name) is not None}
    drafter.to("meta")
    assert {tensor.device.type for tensor in (*drafter.parameters(), *drafter.buffers())} == {"meta"}
    assert {name: getattr(drafter, name).dtype for name in dtypes} == dtypes
    assert len(dtypes) == (3 if settings else 2)


def test_tables_are_neither_parameters_nor_saved(llama, make_drafter):
    drafter = make_drafter(llama, draft_vocab_size=12)
    names = {name for name, _ in drafter.named_parameters()} | set(drafter.state_dict())
    assert not names & set(TABLES)
    assert "draft_token_ids" in names
    assert not any(getattr(drafter, name).requires_grad for name in TABLES)


def test_a_deep_copy_shares_the_tables_and_owns_its_weights(llama, make_drafter):
    drafter = make_drafter(llama)
    twin = copy.deepcopy(drafter)
    check_shared(twin, llama.model)
    with torch.no_grad():
        twin.fc.weight.zero_()
    assert drafter.fc.weight.any() and twin.config is not drafter.config
    assert torch.equal(drafter.logits(hidden_states()), twin.logits(hidden_states()))


@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 12}])
def test_loading_leaves_the_tables_empty_until_attach(llama, make_drafter, tmp_path, settings):
    make_drafter(llama, **settings).save_pretrained(tmp_path)
    loaded = DBlastDrafter.from_pretrained(tmp_path)
    assert all(getattr(loaded, name) is None for name in TABLES)
    with pytest.raises(DBlastError, match="attach"):
        loaded.logits(hidden_states())
    with pytest.raises(DBlastError, match="attach"):
        loaded.log_q(hidden_states(), torch.zeros(6, 3, dtype=torch.long))
    loaded.attach(llama).logits(hidden_states())


# -- precision -----------------------------------------------------------------------------------


def converted(drafter: DBlastDrafter, dtype: torch.dtype) -> DBlastDrafter:
    """The same drafter with tables cast once, as a copy."""
    twin = copy.deepcopy(drafter)
    twin.target_embedding = drafter.target_embedding.to(dtype)
    twin.target_head = drafter.target_head.to(dtype)
    return twin


@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 12}])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("limit", [0, 2**23])
def test_a_float32_drafter_beside_bfloat16_tables_computes_what_cast_tables_give(
    llama, half, make_drafter, monkeypatch, settings, autocast, limit
):
    """To the last bit, forward and backward, in one piece or in tiles."""
    monkeypatch.setattr("dblast.drafter.PLAIN_LOGITS", limit)
    drafter = make_drafter(llama, **settings).attach(half)
    found = []
    for each in (drafter, converted(drafter, torch.float32)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = each(*inputs())
            hidden = out.branch_hidden
            log_q = each.log_q(hidden, torch.arange(6).view(2, 3))
            greedy = each.greedy_tokens(hidden)
            logits = each.logits(hidden)
        each.zero_grad()
        log_q.clamp(min=-60).sum().backward()
        gradient = each.fc.weight.grad.clone()
        found.append((hidden.dtype, log_q.dtype, hidden, out.prior_logits, log_q, greedy, logits, gradient))
    assert found[0][:2] == found[1][:2] == (torch.float32, torch.float32)
    for ours, theirs in zip(found[0][2:], found[1][2:], strict=True):
        assert torch.equal(ours, theirs)


def test_products_with_the_head_are_float32_where_the_drafter_is(llama, half, make_drafter):
    drafter, hidden = make_drafter(llama).attach(half), hidden_states()
    exact = hidden.double() @ half.get_output_embeddings().weight.double().T
    torch.testing.assert_close(drafter.logits(hidden), exact.float(), atol=1e-5, rtol=1e-5)
    rough = (hidden.to(torch.bfloat16) @ half.get_output_embeddings().weight.T).float()
    assert (rough - exact).abs().max() > 1e-3


def test_a_bfloat16_drafter_beside_float32_tables_runs_in_bfloat16(llama, make_drafter):
    drafter = make_drafter(llama).to(torch.bfloat16)
    cast = converted(drafter, torch.bfloat16)
    for each in (drafter, cast):
        assert each(*inputs()).branch_hidden.dtype == torch.bfloat16
    assert torch.equal(drafter(*inputs()).branch_hidden, cast(*inputs()).branch_hidden)
    hidden = hidden_states(torch.bfloat16)
    assert torch.equal(drafter.logits(hidden), cast.logits(hidden))


@pytest.mark.parametrize("limit", [32, 7 * 32, 40 * 32])
@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 12}])
def test_a_large_head_is_converted_piece_by_piece(llama, half, make_drafter, monkeypatch, limit, settings):
    drafter, hidden = make_drafter(llama, **settings).attach(half), hidden_states()
    logits, greedy = drafter.logits(hidden), drafter.greedy_tokens(hidden)
    monkeypatch.setattr("dblast.drafter.CONVERTED_HEAD", limit)
    assert len(list(drafter._head(hidden))) == -(-len(drafter.target_head) * 32 // limit)
    torch.testing.assert_close(drafter.logits(hidden), logits, atol=1e-6, rtol=1e-6)
    assert torch.equal(drafter.greedy_tokens(hidden), greedy)


def test_the_first_of_equal_tokens_wins_across_pieces(llama, half, make_drafter, monkeypatch):
    drafter = make_drafter(llama, num_categories=0)
    # Whole numbers, whose products no order of summation rounds.
    head = torch.randint(-3, 4, (VOCABULARY_SIZE, 32), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    head[20:] = head[:20]
    drafter.attach_tables(half.get_input_embeddings().weight, head)
    monkeypatch.setattr("dblast.drafter.CONVERTED_HEAD", 7 * 32)
    assert drafter.greedy_tokens(hidden_states().round()).max() < 20


def test_log_q_of_hidden_states_beside_a_head_of_another_dtype():
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(23, 6, generator=generator).to(torch.bfloat16)
    index = torch.randint(-1, 23, (11,), generator=generator)
    for dtype in (torch.float32, torch.float64):
        hidden = torch.randn(11, 6, generator=generator).to(dtype).requires_grad_()
        found = [chunked_log_q(hidden, table, index, tokens_per_chunk=5) for table in (head, head.to(dtype))]
        assert torch.equal(*found) and found[0].dtype == dtype
        grads = [torch.autograd.grad(value[index >= 0].sum(), hidden)[0] for value in found]
        assert torch.equal(*grads)


# -- the draft vocabulary ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 12])
def test_a_draft_vocabulary_that_nobody_set_is_refused(llama, size):
    config = DBlastConfig.for_target(llama, num_layers=1, block_length=3, draft_vocab_size=size)
    drafter = DBlastDrafter(config)
    assert not drafter.draft_vocabulary_is_set
    with refused("set_draft_vocabulary"):
        drafter.attach(llama)
    drafter.set_draft_vocabulary(torch.arange(size))
    assert drafter.draft_vocabulary_is_set
    drafter.attach(llama)


@pytest.mark.parametrize("ids", [[0, 0, 1], [0, 1, VOCABULARY_SIZE], [-1, 0, 1]])
def test_an_impossible_draft_vocabulary_in_a_file_is_refused(llama, make_drafter, ids):
    drafter = make_drafter(llama, draft_vocab_size=3)
    drafter.draft_token_ids.copy_(torch.tensor(ids))
    with pytest.raises(DBlastError, match="not set"):
        drafter.attach(llama)


def test_without_a_draft_vocabulary_there_is_nothing_to_set(llama, make_drafter):
    assert make_drafter(llama).draft_vocabulary_is_set and MASK_TOKEN_ID < VOCABULARY_SIZE
