"""Whatever configurations, prompt files and command lines hold: they work, or are refused in one line."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dblast.errors import DBlastError
from dblast.reproduction.fields import check_fields
from dblast.reproduction.reproduce import parse_parameters
from dblast.reproduction.plans import DataConfig, DiagnosisConfig, DrafterConfig, Plan, TinyTargetConfig, Variant
from dblast.reproduction.profiles import PROFILES
from dblast.reproduction.prompts.sources import Prompt, normalised, read_prompts, split_prompts
from dblast.reproduction.stages import digest
from dblast.sampling import SamplingSettings
from dblast.training import TrainingConfig, learning_rate_factor
from tests.checks import refused

def examples(count: int):
    """The same examples on every machine, and no folder of them."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 1, 2**63, 10**400, math.nan, math.inf, -math.inf, -0.0, 1e-320, True])
)
ANYTHING = st.one_of(
    NUMBERS,
    st.none(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(NUMBERS, max_size=3),
    st.lists(NUMBERS, max_size=3).map(tuple),
    st.lists(st.text(max_size=5), max_size=2).map(tuple),
    st.dictionaries(st.text(max_size=2), NUMBERS, max_size=2),
    st.sampled_from(["NLL", "AL", "float32", "high", "low", "tiny", "synthetic", "bundled", "a\nb", "../x", object(), complex(1, 2)]),
)


def refusal(make, *words: str):
    """What ``make`` gives; None if it refuses, which it must do as DBlastError in one line."""
    try:
        return make()
    except DBlastError as error:
        assert "\n" not in str(error) and str(error), repr(str(error))
        assert all(word in str(error) for word in words)
        return None


# -- configurations ------------------------------------------------------------------------------


@examples(600)
@given(st.sampled_from(dataclasses.fields(TrainingConfig)), ANYTHING)
def test_a_training_configuration_works_or_is_refused(field, value):
    config = refusal(lambda: TrainingConfig(**{field.name: value}))
    if config is not None:
        check_fields(config)
        json.loads(json.dumps(dataclasses.asdict(config), allow_nan=False))
        digest(config)
        assert all(0 <= learning_rate_factor(step, config) <= 1 for step in (0, 1, config.steps - 1, config.steps))


@examples(300)
@given(st.sampled_from(dataclasses.fields(SamplingSettings)), ANYTHING)
def test_sampling_settings_work_or_are_refused(field, value):
    made = refusal(lambda: SamplingSettings(**{field.name: value}))
    if made is not None:
        assert 0 < made.temperature < math.inf and 0 < made.top_p <= 1 and (made.top_k is None or made.top_k >= 0)


PLANS = [PROFILES["smoke"].plan("tiny"), PROFILES["smoke"].plan("smollm2")]
#: Every field of a plan, and of what it is made of.
FIELDS = [(None, field.name) for field in dataclasses.fields(Plan)] + [
    (part, field.name)
    for part, kind in (("data", DataConfig), ("drafter", DrafterConfig), ("diagnosis", DiagnosisConfig), ("tiny", TinyTargetConfig))
    for field in dataclasses.fields(kind)
]


def with_value(plan: Plan, part: str | None, name: str, value) -> Plan:
    if part is None:
        return replace(plan, **{name: value})
    inner = getattr(plan, part)
    return replace(plan, **{part: replace(inner, **{name: value})}) if inner is not None else plan


@examples(1500)
@given(st.sampled_from(PLANS), st.sampled_from(FIELDS), ANYTHING)
def test_a_plan_works_or_is_refused(plan, field, value):
    def make() -> Plan:
        made = with_value(plan, *field, value)
        made.check()
        return made

    made = refusal(make)
    if made is not None:
        check_fields(made)
        digest(made)


@pytest.mark.parametrize(
    "part, name",
    [field for field in FIELDS if field[1] in ("learning_rate", "calibration_fraction", "category_temperature", "category_temperatures")],
)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(part, name, number):
    """A comparison alone lets NaN through."""
    value = (1.0, number) if name == "category_temperatures" else number
    with refused("must be finite"):
        with_value(PLANS[0], part, name, value).check()


@pytest.mark.parametrize("variant", [Variant(0, "NLL"), Variant(2.5, "NLL"), Variant("4", "NLL"), Variant(4, ["AL"]), Variant(4, "x"), "AL"])
def test_variants_that_cannot_be_trained_are_refused(variant):
    with refused():
        replace(PLANS[0], variants=(variant,)).check()


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_plans_of_the_project_pass(profile):
    for plan in profile.plans:
        plan.check()


# -- prompts -------------------------------------------------------------------------------------

TEXTS = st.text(max_size=30)
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "turns": st.one_of(st.lists(TEXTS, max_size=3), ANYTHING),
        "prompt": st.one_of(TEXTS, ANYTHING),
        "task": st.one_of(st.sampled_from(["chat", "code"]), TEXTS, ANYTHING),
        "id": st.one_of(st.sampled_from(["a", "b"]), TEXTS, ANYTHING),
    },
)


def encoded(record: dict, ascii_only: bool) -> bytes:
    return json.dumps(record, ensure_ascii=ascii_only, default=str).encode("utf-8", "surrogatepass")


LINES = st.one_of(
    st.builds(encoded, RECORDS, st.booleans()),
    st.builds(lambda turns: encoded({"turns": turns}, False), st.lists(TEXTS, min_size=1, max_size=2)),
    st.binary(max_size=20),
)


def checked(path: Path, data: bytes) -> list[Prompt] | None:
    path.write_bytes(data)
    found = refusal(lambda: read_prompts(path), str(path))
    for prompt in found or ():
        assert prompt.id and prompt.task.strip() and all(turn.strip() for turn in prompt.turns)
        "".join((prompt.id, prompt.task, *prompt.turns)).encode("utf-8")
    assert found is None or len({prompt.id for prompt in found}) == len(found) > 0
    return found


@examples(500)
@given(
    lines=st.lists(LINES, max_size=4),
    ending=st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe"]),
)
@example(lines=[], ending=b"\n", mark=b"")
@example(lines=[], ending=b"\n", mark=b"\xef\xbb\xbf")
@example(lines=[b'{"turns": ["\\ud800"]}'], ending=b"\n", mark=b"")
@example(lines=[b"[" * 100_000], ending=b"\n", mark=b"")
@example(lines=[b'{"turns": ["x"], "id": ' + b"9" * 5000 + b"}"], ending=b"\n", mark=b"")
@example(lines=[b'{"turns": ["a\xe2\x80\xa8b"]}'], ending=b"\r\n", mark=b"")
def test_a_prompt_file_is_read_or_a_line_of_it_is_named(tmp_path, lines, ending, mark):
    checked(tmp_path / "mine.jsonl", mark + ending.join(lines))


@examples(200)
@given(
    texts=st.lists(st.text(min_size=1, max_size=40).filter(str.strip).filter(lambda t: t.isprintable()), min_size=1, max_size=5),
    ending=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
    ascii_only=st.booleans(),
)
def test_good_files_are_read_as_they_are_whatever_ends_their_lines(tmp_path, texts, ending, mark, ascii_only):
    lines = [json.dumps({"turns": [text]}, ensure_ascii=ascii_only) for text in texts]
    found = checked(tmp_path / "mine.jsonl", b"\xef\xbb\xbf" * mark + ending.join([*lines, ""]).encode())
    assert [prompt.turns for prompt in found] == [(text,) for text in texts]


def test_a_line_of_a_megabyte_is_read(tmp_path):
    (prompt,) = checked(tmp_path / "mine.jsonl", json.dumps({"turns": ["x " * 500_000]}).encode())
    assert len(prompt.turns[0]) == 1_000_000


WORDS = st.sampled_from(["Tell me", "tell  ME", "Why?", "why?", "How\tmany", "how many", "a", "b", "c"])


@examples(300)
@given(
    st.lists(st.tuples(WORDS, st.sampled_from(["chat", "code"])), min_size=1, max_size=14),
    st.floats(0.01, 0.99),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_equal_texts_stand_on_one_side_of_the_split(rows, fraction, seed, rng):
    prompts = [Prompt(f"id-{i:02d}", task, (text,)) for i, (text, task) in enumerate(rows)]
    parts = refusal(lambda: split_prompts(prompts, fraction, seed))
    if parts is None:
        return
    calibration, held_out = ({normalised(prompt.turns[0]) for prompt in part} for part in parts)
    assert not calibration & held_out
    assert sorted(prompt.id for part in parts for prompt in part) == [prompt.id for prompt in prompts]
    shuffled = rng.sample(prompts, len(prompts))
    assert {prompt.id for prompt in split_prompts(shuffled, fraction, seed)[0]} == {prompt.id for prompt in parts[0]}


def test_equal_texts_under_two_ids_and_tasks_stand_together():
    prompts = [Prompt(f"chat-{i}", "chat", (f"question {i}",)) for i in range(10)]
    prompts += [Prompt(f"copy-{i}", "chat", (f" Question\n{i} ",)) for i in range(10)]
    prompts += [Prompt(f"code-{i}", "code", (f"question {i + 5}",)) for i in range(10)]
    calibration, held_out = split_prompts(prompts, 0.3)
    assert not {normalised(p.turns[0]) for p in calibration} & {normalised(p.turns[0]) for p in held_out}
    # Copies change nothing about which of the others are chosen.
    alone, _ = split_prompts([p for p in prompts if not p.id.startswith("copy")], 0.3)
    assert [p for p in calibration if not p.id.startswith("copy")] == alone


# -- command lines -------------------------------------------------------------------------------


@examples(800)
@given(
    st.one_of(
        st.text(max_size=20),
        st.builds("{}={}".format, st.sampled_from(["recompute", "x", "profile", ""]), st.text(max_size=20)),
        st.builds("{}={}".format, st.just("x"), st.one_of(st.integers(), st.floats(), st.booleans())),
    )
)
@example("x=" + "[" * 10_000)
@example("x=" + "9" * 5000)
@example("x=" + "{" * 3000)
@example("x=2001-99-99")
@example("x==")
@example("x=!!python/object/apply:os.system ['true']")
@example("x=&a [*a]")
@example("x=1e999")
@example("x=\ud800")
def test_a_parameter_is_read_or_refused(pair):
    parsed = refusal(lambda: parse_parameters([pair]))
    if parsed is not None:
        ((name, value),) = parsed.items()
        assert name == pair.partition("=")[0] != "profile"
        assert isinstance(value, bool | int | float | str | None) and (not isinstance(value, float) or math.isfinite(value))


@examples(200)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_read_as_they_are_written(number):
    assert parse_parameters([f"x={number!r}"])["x"] == number
