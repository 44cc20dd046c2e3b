"""Sampling trajectories from a target, and storing them shard by shard."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dblast import trajectories as module
from dblast.errors import ArtefactError, DBlastError
from dblast.sampling import SamplingSettings
from dblast.support.files import Shards
from dblast.targets import tap_features
from dblast.trajectories import EncodedPrompt, TrajectorySet, sample_batch, sample_trajectories, shard_generator
from tests.checks import one_line
from tests.helpers import assert_within_errors, frequency_error

TAPS = [0, 2]
WIDE = SamplingSettings(temperature=1.0, top_k=20, top_p=0.95)
EVERYTHING = SamplingSettings(temperature=1.3)
PROMPTS = [
    EncodedPrompt("a", "maths", (1, 9, 17, 30, 8)),
    EncodedPrompt("b", "chat", (1,)),
    EncodedPrompt("c", "maths", (1, 5, 5, 6, 7, 38, 21, 11, 12)),
    EncodedPrompt("d", "code", (1, 33, 20)),
]


def sample(target, prompts=PROMPTS, settings=WIDE, *, budget=14, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return sample_batch(target, prompts, settings, max_new_tokens=budget, taps=TAPS, generator=generator)


def assert_equal(first, second) -> None:
    for name, value in vars(first).items():
        other = getattr(second, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), name
        else:
            assert value == other


def endless(target):
    return replace(target, eos_token_ids=())


# -- one batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [WIDE, EVERYTHING, SamplingSettings(0.7, 20, 0.8)], ids=["wide", "all", "narrow"])
@pytest.mark.parametrize("target_name", ["llama", "qwen3"])
@torch.no_grad()
def test_what_is_recorded_equals_a_plain_forward_of_each_row(request, target_name, settings):
    target = request.getfixturevalue(target_name)
    for row in sample(target, settings=settings):
        p, n = len(row.prompt_ids), len(row.response_ids)
        out = target.model(row.tokens[None, :-1], output_hidden_states=True, use_cache=False)
        law = settings.log_probabilities(out.logits[0, p - 1 :])
        torch.testing.assert_close(row.log_p, law[range(n), row.response_ids], atol=1e-4, rtol=1e-4)
        # Of a longer support, the likeliest tokens.
        kept = torch.full_like(law, float("-inf"))
        likeliest = law.topk(min(module.SUPPORT_LIMIT, law.shape[-1]), dim=-1)
        kept.scatter_(-1, likeliest.indices, likeliest.values)
        recorded = torch.full_like(law, float("-inf")).scatter_reduce(-1, row.support, row.support_log_p, "amax")
        torch.testing.assert_close(recorded.exp(), kept.exp(), atol=1e-4, rtol=1e-3)
        assert row.support.shape == row.support_log_p.shape and row.support.shape[-1] <= module.SUPPORT_LIMIT
        torch.testing.assert_close(row.p_max, law.max(-1).values.exp(), atol=1e-4, rtol=1e-4)
        entropy = -(law.exp() * law.clamp(min=-1e4)).sum(-1)
        torch.testing.assert_close(row.entropy, entropy, atol=1e-3, rtol=1e-3)
        features = tap_features(out.hidden_states, TAPS)[0]
        # bfloat16 keeps 8 bits: a rounding step is 2 ** -8 of the value.
        torch.testing.assert_close(row.features.float(), features, atol=1e-4, rtol=2**-7)


def test_rows_carry_their_prompt_in_the_given_order(llama):
    for prompt, row in zip(PROMPTS, sample(llama), strict=True):
        assert (row.prompt_id, row.task) == (prompt.prompt_id, prompt.task)
        assert tuple(row.prompt_ids.tolist()) == prompt.ids


def test_shapes_and_types_are_the_documented_ones(llama):
    for row in sample(llama):
        p, n = len(row.prompt_ids), len(row.response_ids)
        assert row.prompt_ids.dtype == row.response_ids.dtype == torch.int64
        for statistic in (row.log_p, row.entropy, row.p_max):
            assert statistic.shape == (n,) and statistic.dtype == torch.float32
        assert row.features.shape == (p + n - 1, 2 * 32) and row.features.dtype == torch.bfloat16
        assert torch.equal(row.tokens, torch.cat([row.prompt_ids, row.response_ids]))


def test_token_statistics_are_consistent(llama):
    for row in sample(llama, settings=EVERYTHING):
        assert (row.log_p <= row.p_max.log() + 1e-5).all()
        assert (row.entropy >= -row.p_max.log() - 1e-5).all()


def test_a_response_ends_at_its_first_end_of_sequence(llama):
    ends = (2, 7, 12)
    rows = sample(replace(llama, eos_token_ids=ends), PROMPTS * 8, EVERYTHING, budget=20)
    for row in rows:
        assert not set(row.response_ids[:-1].tolist()) & set(ends)
        assert int(row.response_ids[-1]) in ends or len(row.response_ids) == 20
    assert {int(row.response_ids[-1]) for row in rows} >= set(ends)


@pytest.mark.parametrize("budget", [1, 2, 9])
def test_without_end_of_sequence_the_budget_is_used_up(llama, budget):
    for row in sample(endless(llama), budget=budget):
        assert len(row.response_ids) == budget
        assert len(row.features) == len(row.prompt_ids) + budget - 1


def test_a_batch_stops_when_every_row_has_ended(llama):
    everything = replace(llama, eos_token_ids=tuple(range(40)))
    assert all(len(row.response_ids) == 1 for row in sample(everything, budget=50))


def test_same_generator_state_gives_the_same_rows(llama):
    for first, second in zip(sample(llama), sample(llama), strict=True):
        assert_equal(first, second)


def test_another_seed_gives_other_rows(llama):
    first, second = sample(endless(llama)), sample(endless(llama), seed=1)
    assert any(not torch.equal(a.response_ids, b.response_ids) for a, b in zip(first, second, strict=True))


def test_sampling_leaves_the_global_random_state_alone(llama):
    before = torch.get_rng_state()
    sample(llama)
    assert torch.equal(before, torch.get_rng_state())


def test_first_tokens_follow_the_target(llama):
    settings = SamplingSettings(temperature=1.0, top_k=4)
    rows = sample(endless(llama), [PROMPTS[0]] * 4000, settings, budget=1)
    with torch.no_grad():
        logits = llama.model(torch.tensor([PROMPTS[0].ids])).logits[0, -1]
    p = settings.probabilities(logits)
    counts = torch.bincount(torch.cat([row.response_ids for row in rows]), minlength=40)
    assert not counts[p == 0].any()
    assert_within_errors(counts / 4000, p, frequency_error(p, 4000))


def test_empty_prompt_is_refused(llama):
    with pytest.raises(DBlastError) as error:
        sample(llama, [PROMPTS[0], EncodedPrompt("e", "chat", ())])
    one_line(error, "no tokens")


def test_budget_below_one_is_refused(llama):
    with pytest.raises(DBlastError) as error:
        sample(llama, budget=0)
    one_line(error, "max_new_tokens", "0")


def test_prompt_beyond_the_context_limit_is_refused(llama):
    long = EncodedPrompt("long", "chat", (5,) * 90)
    with pytest.raises(DBlastError) as error:
        sample(llama, [long], budget=7)
    one_line(error, "90", "7", "96")


def test_the_context_limit_itself_may_be_reached(llama):
    (row,) = sample(endless(llama), [EncodedPrompt("long", "chat", (5,) * 90)], budget=6)
    assert len(row.tokens) == 96


# -- shards --------------------------------------------------------------------------------------


def store(target, folder, *, seed=0, batch_size=2, prompts=PROMPTS):
    return sample_trajectories(
        target, prompts, WIDE, folder, max_new_tokens=8, taps=TAPS, seed=seed, batch_size=batch_size
    )


def save(rows, folder) -> None:
    Shards(folder, "test", shards=1, rows=len(rows)).add(folder / "shard-00000", lambda path: module._save_shard(rows, path))


def assert_same_set(first: TrajectorySet, second: TrajectorySet) -> None:
    assert len(first) == len(second)
    for one, two in zip(first, second, strict=True):
        assert_equal(one, two)


def test_stored_trajectories_equal_the_sampled_ones(llama, tmp_path):
    rows = sample(llama)
    save(rows, tmp_path)
    stored = TrajectorySet(tmp_path)
    for index, row in enumerate(rows):
        assert_equal(row, stored[index])
    assert stored.response_lengths() == [len(row.response_ids) for row in rows]


def test_features_keep_every_bit_pattern(make_trajectory, tmp_path):
    special = torch.tensor([[0.0, -0.0, 3e38, -3e38, 1e-38, float("inf")]] * 6).to(torch.bfloat16)
    row = replace(make_trajectory(prompt=3, response=4), features=special)
    save([row], tmp_path)
    assert torch.equal(TrajectorySet(tmp_path)[0].features.view(torch.int16), special.view(torch.int16))


def test_every_prompt_is_stored_once_shortest_first(llama, tmp_path):
    stored = store(llama, tmp_path)
    assert [row.prompt_id for row in stored] == ["b", "d", "a", "c"]
    assert sorted(path.name for path in tmp_path.glob("shard-*")) == ["shard-00000", "shard-00001"]


def test_shards_are_independent_of_each_other(llama, tmp_path):
    stored = store(llama, tmp_path)
    alone = sample_batch(
        llama,
        [PROMPTS[0], PROMPTS[2]],
        WIDE,
        max_new_tokens=8,
        taps=TAPS,
        generator=shard_generator(0, 1),
    )
    for one, two in zip(alone, [stored[2], stored[3]], strict=True):
        assert_equal(one, two)


def test_shard_generators_differ():
    draws = {shard_generator(seed, shard).initial_seed() for seed in range(10) for shard in range(10)}
    assert len(draws) == 100


def test_a_seed_decides_the_set(llama, tmp_path):
    first = store(llama, tmp_path / "a")
    assert_same_set(first, store(llama, tmp_path / "b"))
    third = store(llama, tmp_path / "c", seed=1)
    assert any(not torch.equal(a.response_ids, b.response_ids) for a, b in zip(first, third, strict=True))


def test_a_killed_run_goes_on_at_the_next_shard(llama, tmp_path, monkeypatch):
    whole = store(llama, tmp_path / "whole", batch_size=1)
    calls = []

    def killed(*args, **settings):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample_batch(*args, **settings)

    monkeypatch.setattr(module, "sample_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        store(llama, tmp_path / "parts", batch_size=1)
    monkeypatch.setattr(module, "sample_batch", lambda *a, **s: (calls.append(a), sample_batch(*a, **s))[1])
    parts = store(llama, tmp_path / "parts", batch_size=1)
    assert len(calls) == 3 + 2  # the third again, and the fourth
    assert_same_set(whole, parts)


@pytest.mark.parametrize("moment", ["shard", "record"])
def test_a_kill_while_a_shard_is_written_loses_only_that_shard(llama, tmp_path, monkeypatch, moment):
    whole = store(llama, tmp_path / "whole")
    replace_ = Path.replace

    def killed(source, destination):
        # Before the shard is in its place, or between that and its mention in the record.
        if str(destination).endswith("shard-00001" if moment == "shard" else "shards.json") and (
            tmp_path / "parts" / "shard-00000"
        ).exists():
            if moment == "shard" or (tmp_path / "parts" / "shard-00001").exists():
                raise KeyboardInterrupt
        return replace_(source, destination)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store(llama, tmp_path / "parts")
    monkeypatch.undo()
    assert (tmp_path / "parts" / "shard-00001").exists() == (moment == "record")
    with pytest.raises(ArtefactError):
        TrajectorySet(tmp_path / "parts")
    assert_same_set(whole, store(llama, tmp_path / "parts"))
    assert not list((tmp_path / "parts").glob("*.part"))


def test_a_deleted_shard_is_made_again(llama, tmp_path):
    whole = store(llama, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "shard-00001")
    (tmp_path / "parts" / "shards.json").unlink()
    assert_same_set(whole, store(llama, tmp_path / "parts"))


def test_an_unfinished_folder_is_refused(llama, tmp_path):
    store(llama, tmp_path)
    (tmp_path / "shards.json").unlink()
    with pytest.raises(ArtefactError) as error:
        TrajectorySet(tmp_path)
    one_line(error, str(tmp_path))


def test_a_missing_shard_is_refused(llama, tmp_path):
    store(llama, tmp_path)
    shutil.rmtree(tmp_path / "shard-00001")
    with pytest.raises(ArtefactError) as error:
        TrajectorySet(tmp_path)
    one_line(error, str(tmp_path))


@pytest.mark.parametrize("size", [0, 200])
def test_a_cut_off_shard_is_refused(llama, tmp_path, size):
    store(llama, tmp_path)
    (data,) = (tmp_path / "shard-00001").glob("*.arrow")
    data.write_bytes(data.read_bytes()[:size])
    with pytest.raises(ArtefactError) as error:
        TrajectorySet(tmp_path)
    one_line(error, str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", '{"rows": 4}', '{"shards": "two", "rows": 4}', "[]"])
def test_a_damaged_record_is_refused(llama, tmp_path, text):
    store(llama, tmp_path)
    (tmp_path / "shards.json").write_text(text)
    with pytest.raises(ArtefactError) as error:
        TrajectorySet(tmp_path)
    one_line(error, str(tmp_path))


def test_a_record_with_another_row_count_is_refused(llama, tmp_path):
    store(llama, tmp_path)
    path = tmp_path / "shards.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": 5}))
    with pytest.raises(ArtefactError) as error:
        TrajectorySet(tmp_path)
    one_line(error, "4 rows", "5")


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("finished", [True, False])
def test_a_shard_with_a_flipped_bit_is_refused_by_name(llama, tmp_path, finished):
    whole = store(llama, tmp_path / "whole")
    store(llama, tmp_path / "parts")
    shard = tmp_path / "parts" / "shard-00000"
    flip(next(shard.glob("*.arrow")))
    if not finished:
        shutil.rmtree(tmp_path / "parts" / "shard-00001")
    with pytest.raises(ArtefactError) as error:
        TrajectorySet(tmp_path / "parts") if finished else store(llama, tmp_path / "parts")
    one_line(error, str(shard), "delete")
    shutil.rmtree(shard)
    assert_same_set(whole, store(llama, tmp_path / "parts"))


def test_a_shard_of_another_run_is_refused(llama, tmp_path):
    store(llama, tmp_path / "a")
    store(llama, tmp_path / "b", seed=1)
    shutil.rmtree(tmp_path / "b" / "shard-00001")
    shutil.copytree(tmp_path / "a" / "shard-00001", tmp_path / "b" / "shard-00001")
    with pytest.raises(ArtefactError, match="shard-00001 is damaged"):
        store(llama, tmp_path / "b", seed=1)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 1}, {"key": "other"}, {"max_new_tokens": 7}, {"taps": [1]}, {"prompts": PROMPTS[:3]}]
)
def test_a_folder_begun_with_other_arguments_is_refused(llama, tmp_path, change):
    settings = {"prompts": PROMPTS, "settings": WIDE, "folder": tmp_path, "max_new_tokens": 8, "taps": TAPS, "seed": 0}
    sample_trajectories(llama, **settings, batch_size=2)
    with pytest.raises(ArtefactError) as error:
        sample_trajectories(llama, **{"batch_size": 2, **settings, **change})
    one_line(error, str(tmp_path), "another run's")


def test_no_prompts_are_refused(llama, tmp_path):
    with pytest.raises(DBlastError) as error:
        store(llama, tmp_path / "new", prompts=[])
    one_line(error, "no prompts")
    assert not (tmp_path / "new").exists()
