"""Text that grows shard by shard: the sampler, its prompts, the store, and what a killed run leaves."""

import math
import random
from importlib.metadata import metadata, packages_distributions

import pytest
import torch
from typer.testing import CliRunner

from dblast.errors import ArtefactError, DBlastError
from dblast.reproduction.cli import app
from dblast.reproduction.prompts.sources import load_prompts
from dblast.reproduction.strong import prompts as strong_prompts
from dblast.reproduction.strong.attention import attend
from dblast.reproduction.strong.openings import LIBRARIES
from dblast.reproduction.strong.pool import ROWS, Responses, WindowSampler, tapped_states, trajectories
from dblast.reproduction.strong.text import TextRecipe, TextStore, grow, make_shard, sample_responses, text_folder
from dblast.sampling import get_setting
from dblast.targets import tap_features
from dblast.trajectories import EncodedPrompt
from tests.helpers import assert_close, assert_same_computation, assert_within_errors, frequency_error

TAPS = [0, 2]
RECIPE = TextRecipe(settings=("low", "high"), budgets=(6, 9, 12), quarters=1, responses=5)


def prompts(block: int, count: int) -> list[EncodedPrompt]:
    rng = random.Random(block)
    rows = [tuple(rng.randrange(4, 40) for _ in range(rng.randint(1, 7))) for _ in range(count)]
    return [EncodedPrompt(f"raw-{block}-{i}", "raw", ids) for i, ids in enumerate(sorted(rows, key=len))]


@pytest.fixture(scope="module")
def sampled(llama):
    """Twenty responses, some ended early, with their states."""
    return sample_responses(llama, prompts(0, 20), "low", 30, torch.Generator().manual_seed(3), TAPS)


def rows_of(text, states):
    return trajectories(text, states, [f"raw-{i}" for i in range(len(text.prompt_lengths))])


def test_grouped_attention_is_attention():
    """Of grouped heads, with keys past the mask that count for nothing."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, heads, n, 8, generator=g) for heads, n in ((6, 4), (2, 9), (2, 9)))
    mask = torch.rand(3, 1, 4, 7, generator=g) < 0.6
    mask[..., 0] = True
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key[:, :, :7], value[:, :, :7], mask, enable_gqa=True
    )
    assert_close(attend(None, query, key, value, mask, 8**-0.5)[0].transpose(1, 2), want, 1e-5)


def test_what_is_recorded_is_what_the_target_says(llama, sampled):
    """log p, supports and states of every row against one plain pass over it alone."""
    text, states = sampled
    settings = get_setting("low")
    assert len({int(n) for n in text.response_lengths}) > 2
    for row in rows_of(text, states):
        with torch.no_grad():
            out = llama.model(row.tokens[None], output_hidden_states=True)
        log_p = settings.log_probabilities(out.logits[0, len(row.prompt_ids) - 1 : -1])
        assert_close(row.log_p, log_p.gather(-1, row.response_ids[:, None])[:, 0], 1e-4)
        there = row.support_log_p > -torch.inf
        assert_close(row.support_log_p[there], log_p.gather(-1, row.support)[there], 1e-4)
        assert_close(row.support_log_p.exp().sum(-1), 1.0, 1e-5)
        assert_close(row.entropy, torch.special.entr(log_p.exp()).sum(-1), 1e-4)
        assert_close(row.p_max, log_p.exp().amax(-1), 1e-4)
        want = tap_features(out.hidden_states, TAPS)[0, :-1].bfloat16()
        assert_close(row.features.float(), want.float(), 2**-6)


def test_tokens_are_drawn_with_the_recorded_probabilities(llama):
    prompt = prompts(0, 20)[3]
    text, _ = sample_responses(llama, [prompt] * 4000, "low", 1, torch.Generator().manual_seed(1))
    sizes = text.support_sizes.tolist()
    tokens, p = text.support.split(sizes)[0], text.support_log_p.split(sizes)[0].exp()
    counts = (text.responses[:, None] == tokens).sum(0)
    assert counts.sum() == 4000
    assert_within_errors(counts / 4000, p, frequency_error(p, 4000))


def test_responses_end_at_the_end_token_alone(llama, sampled):
    text, states = sampled
    for row in rows_of(text, states):
        ended = torch.isin(row.response_ids, torch.tensor(llama.eos_token_ids))
        assert not ended[:-1].any()
        assert ended[-1] or len(row.response_ids) == 30


def test_states_are_recomputed(llama, sampled):
    text, states = sampled
    again = tapped_states(llama, text, TAPS)
    assert again.shape == states.shape
    assert_same_computation(again, states)


def test_a_row_does_not_depend_on_those_beside_it(llama):
    """Padding and batch: recorded distributions at the first token."""
    rows = prompts(0, 20)
    one, many = (
        sample_responses(llama, some, "low", 1, torch.Generator().manual_seed(0))[0] for some in (rows[3:4], rows)
    )
    assert len(rows[3].ids) < len(rows[-1].ids)
    assert_close(one.support_log_p, many.support_log_p.split(many.support_sizes.tolist())[3], 1e-4)


def without_times(store):
    return {
        i: (store.read(i)[1], {k: v for k, v in store.read(i)[0].items() if k != "seconds"}) for i in store.indices()
    }


def same(one, other):
    assert one.keys() == other.keys()
    for i, (text, header) in one.items():
        assert header == other[i][1]
        assert all(torch.equal(value, vars(other[i][0])[name]) for name, value in vars(text).items())


class Killed(Exception):
    pass


def test_a_killed_run_goes_on(llama, tmp_path, monkeypatch):
    whole, killed = TextStore(tmp_path / "a"), TextStore(tmp_path / "b")

    def run(store, tokens=120, **options):
        return grow(store, RECIPE, lambda: llama, lambda target: prompts, tokens, TAPS, **options)

    assert run(whole) == whole.tokens() >= 120
    monkeypatch.setattr(TextStore, "states_path", lambda self, index: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        run(killed)
    assert killed.indices() == [0]
    monkeypatch.undo()
    # A shard whose states were not written yet is whole.
    assert killed.read(0)[1].responses.numel() and killed.states(0, TAPS) is None
    run(killed)
    same(without_times(whole), without_times(killed))
    # Nothing is left to do, so nothing is loaded.
    assert grow(whole, RECIPE, None, None, 100) == whole.tokens()


def test_a_shard_depends_on_its_number_alone(llama, tmp_path):
    one, other = TextStore(tmp_path / "a"), TextStore(tmp_path / "b")
    for index in (0, 1, 2):
        make_shard(one, RECIPE, llama, index, prompts)
    grow(other, RECIPE, lambda: llama, lambda target: prompts, 1, first=2)
    same({2: without_times(one)[2]}, without_times(other))
    assert [one.header(i)["setting"] for i in range(3)] == ["low", "high", "low"]
    assert [one.header(i)["budget"] for i in range(3)] == [6, 9, 12]
    first, last = one.header(0), one.header(2)
    assert first["tokens"] <= 5 * 6 < one.tokens() and last["responses"] == 5


def test_cleaning_the_cache_leaves_it_alone(llama, cache_folder):
    store = TextStore(text_folder(RECIPE, "some target", "llama"))
    make_shard(store, RECIPE, llama, 0, prompts)
    assert store.folder.is_relative_to(cache_folder)
    done = CliRunner().invoke(app, ["cache", "--clean", "--yes"])
    assert f"{store.folder.name}  " in done.output and "never cleaned" in done.output
    assert store.read(0)[1].responses.numel()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["text", "--tokens", "0"], "--tokens"),
        (["text", "--minutes", "nan"], "--minutes"),
        (["text", "--first", "-1"], "--first"),
        (["sitting", "--name", "a", "--blocks", "3,x"], "--blocks"),
        (["sitting", "--name", "a/b"], "--name"),
        (["sitting", "--name", "a", "--rate", "nan"], "learning_rate"),
        (["sitting", "--name", "a"], "python -m dblast text"),
    ],
)
def test_commands_refuse_before_they_load_anything(command, said):
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, DBlastError) and said in str(result.exception)


def test_a_text_is_named_by_what_it_is():
    names = {
        text_folder(recipe, target, "t")
        for recipe in (RECIPE, TextRecipe(), TextRecipe(seed=1))
        for target in ("one", {"file": "two"})
    }
    assert len(names) == 6


def test_settings_lengths_and_budgets_meet_equally_often():
    recipe = TextRecipe()
    counts = (len(recipe.settings), len(recipe.budgets), recipe.quarters)
    assert math.lcm(*counts) == math.prod(counts)


def test_damage_and_other_formats_are_refused(llama, tmp_path):
    store = TextStore(tmp_path)
    make_shard(store, RECIPE, llama, 0, prompts, TAPS)
    before = store.states(0, TAPS)
    assert before is not None and store.states(0, [1, 2]) is None
    data = bytearray(store.path(0).read_bytes())
    data[-3] ^= 1
    store.path(0).write_bytes(data)
    # States of another text are none.
    assert store.states(0, TAPS) is None
    with pytest.raises(ArtefactError, match="damaged"):
        store.read(0)
    store.path(0).write_bytes(b"")
    with pytest.raises(ArtefactError, match="damaged"):
        store.header(0)


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_of_all_kinds_and_none_of_the_evaluation(llama, monkeypatch):
    texts = []
    kinds = {}
    rng = random.Random(5)
    for _ in range(150):
        kind, content = strong_prompts.draw_prompt(rng)
        kinds[kind] = kinds.get(kind, 0) + 1
        assert (kind == "raw") == isinstance(content, str)
        texts += [content] if isinstance(content, str) else [message["content"] for message in content]
    assert kinds.keys() == strong_prompts.KINDS.keys()
    for text in texts:
        assert "{topic}" not in text and "{passage}" not in text and "\0" not in text
    assert not any(map(strong_prompts.resembles_evaluation, texts))


@pytest.mark.parametrize("change", ["same", "case", "inside", "end"])
def test_an_evaluation_prompt_is_recognised(change):
    words = max((prompt.turns[0] for prompt in load_prompts()), key=len).split()
    text = {
        "same": " ".join(words),
        "case": "  ".join(words).upper(),
        "inside": "Please answer: " + " ".join(words) + " Thanks.",
        "end": " ".join(words[-9:]),
    }[change]
    assert strong_prompts.resembles_evaluation(text)
    assert not strong_prompts.resembles_evaluation(" ".join(words[-7:]))


def test_shards_share_no_prompts_and_leave_out_evaluation(llama, monkeypatch):
    one, two = (strong_prompts.shard_prompts(llama, 0, block, 12) for block in (0, 1))
    assert [p.ids for p in one] == [p.ids for p in strong_prompts.shard_prompts(llama, 0, 0, 12)]
    assert [len(p.ids) for p in one] == sorted(len(p.ids) for p in one)
    assert len({p.prompt_id for p in (*one, *two)}) == 24
    evaluation, draws = load_prompts()[0].turns[0], iter(range(10))

    def draw(rng):
        return "raw", evaluation if next(draws) < 3 else "w5 w6 w7"

    monkeypatch.setattr(strong_prompts, "draw_prompt", draw)
    assert len(strong_prompts.shard_prompts(llama, 0, 0, 2)) == 2 and next(draws) == 5


@pytest.mark.parametrize("library", LIBRARIES)
def test_openings_are_under_the_licence_that_is_stated(library):
    names = packages_distributions().get(library)
    if not names:
        pytest.skip(f"{library} is not installed")
    stated = metadata(names[0])
    words = (
        " ".join(stated.get_all("Classifier") or [])
        + str(stated.get("License-Expression"))
        + str(stated.get("License"))
    )
    assert LIBRARIES[library].split("-")[0] in words


# -- rows for training -----------------------------------------------------------------------------


@pytest.fixture
def store(llama, tmp_path):
    store = TextStore(tmp_path / "text")
    for index in range(5):
        make_shard(store, RECIPE, llama, index, prompts, TAPS if index % 2 else None)
    return store


def sampler(store, llama, seed=0):
    responses = Responses(store, store.indices(), llama, TAPS, window=2)
    generator = torch.Generator().manual_seed(seed)
    return WindowSampler(
        responses, visits=2, block_length=3, sequences=5, anchors=4, generator=generator, with_support=True
    )


def test_every_row_is_drawn_as_often_as_it_is_visited(store, llama, monkeypatch):
    ours, drawn = sampler(store, llama), []
    monkeypatch.setattr(Responses, "__getitem__", lambda self, n: drawn.append(n) or self.shard(n // ROWS)[n % ROWS])
    for _ in range(10):
        ours.next()
        assert len(ours.trajectories._held) <= 2
    assert sorted(drawn) == sorted(2 * [shard * ROWS + row for shard in range(5) for row in range(5)])
    # A window's shards are read once in a pass.
    assert [n // ROWS for n in drawn] != sorted(n // ROWS for n in drawn)


def test_batches_go_on_from_a_state(store, llama):
    one, other = sampler(store, llama), sampler(store, llama, seed=1)
    for _ in range(3):
        one.next()
    other.load_state(one.state())
    for _ in range(12):
        ours, theirs = vars(one.next()), vars(other.next())
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_too_small_shards_and_no_text_are_refused(store, llama, tmp_path):
    responses = Responses(store, store.indices(), llama, TAPS)
    options = dict(block_length=3, anchors=4, generator=torch.Generator(), with_support=True)
    with pytest.raises(DBlastError, match="too small"):
        WindowSampler(responses, visits=2, sequences=11, **options)
    with pytest.raises(DBlastError, match="python -m dblast text"):
        Responses(TextStore(tmp_path / "none"), [], llama, TAPS)
