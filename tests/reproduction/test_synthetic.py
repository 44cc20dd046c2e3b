"""The synthetic language is coherent, its probabilities are exact, and the tiny target learns it."""

import math
import random
import re
from collections import Counter

import pytest
import torch

from dblast.reproduction.language import synthetic
from dblast.reproduction.language import tiny
from dblast.reproduction.language.grammar import GRAMMAR, SCENES, Writer
from tests.helpers import assert_within_errors, frequency_error


class Scripted(Writer):
    """A writer that takes the choices of `path` first and the first option afterwards."""

    def __init__(self, path, memory):
        super().__init__(None, memory)
        self.path, self.taken, self.widths = path, [], []

    def _index(self, weights):
        index = self.path[len(self.taken)] if len(self.taken) < len(self.path) else 0
        self.taken.append(index)
        self.widths.append(len(weights))
        return index


def outcomes(steps, memory):
    """Every `(words, log_probability)` that the steps can produce, by enumerating all choices."""
    pending = [[]]
    while pending:
        path = pending.pop()
        writer = Scripted(path, memory)
        for step in steps:
            step(writer)
        yield tuple(writer.words), writer.log_probability
        for depth in range(len(path), len(writer.taken)):
            pending.extend(writer.taken[:depth] + [other] for other in range(1, writer.widths[depth]))


def contexts(kind, number, count=6):
    """Memories as they are before step `number` in random documents."""
    for seed in range(count):
        writer = Writer(random.Random(seed))
        for step in GRAMMAR[kind][:number]:
            step(writer)
        yield writer.memory


STEPS = [(kind, number) for kind in synthetic.KINDS for number in range(len(GRAMMAR[kind]))]


@pytest.fixture(scope="module")
def corpus():
    return synthetic.documents(8000, seed=11)


@pytest.mark.parametrize("kind, number", STEPS, ids=lambda value: str(value))
def test_each_step_is_a_prefix_free_code_of_its_choices(kind, number):
    # Hence a text has one sequence of choices, and log_probability is that of the text.
    for memory in contexts(kind, number):
        found = sorted(outcomes([GRAMMAR[kind][number]], memory))
        assert sum(math.exp(value) for _, value in found) == pytest.approx(1, abs=1e-9)
        if found == [((), 0.0)]:
            continue  # a step that does not apply here says nothing, whatever follows
        for (earlier, _), (later, _) in zip(found, found[1:]):
            # Sorted order puts a text right before its extensions.
            assert later[: len(earlier)] != earlier


def test_sampled_frequencies_match_log_probability():
    generator, memory = random.Random(0), next(contexts("story", 4))
    step, n = GRAMMAR["story"][-1], 20_000
    counts = Counter()
    for _ in range(n):
        writer = Writer(generator, memory)
        step(writer)
        counts[tuple(writer.words)] += 1
    for words, value in outcomes([step], memory):
        p = math.exp(value)
        assert_within_errors(counts[words] / n, p, frequency_error(p, n))


def test_equal_texts_have_equal_probability_and_masses_stay_below_one(corpus):
    for kind in synthetic.KINDS:
        masses = {}
        for document in (d for d in corpus if d.kind == kind):
            value = masses.setdefault(document.tokens, document.log_probability)
            assert value == pytest.approx(document.log_probability, abs=1e-9)
            assert value < 0
        assert sum(map(math.exp, masses.values())) <= 1


def test_documents_are_deterministic_and_leave_the_global_generator_alone():
    state = random.getstate()
    assert synthetic.documents(12, seed=3) == synthetic.documents(12, seed=3)
    assert synthetic.documents(12, seed=3) != synthetic.documents(12, seed=4)
    assert random.getstate() == state
    assert [d.kind for d in synthetic.documents(8, seed=0)] == [*synthetic.KINDS, *synthetic.KINDS]
    assert {d.kind for d in synthetic.documents(8, seed=0, kinds=("code",))} == {"code"}


def test_vocabulary_is_small_and_used(corpus):
    assert 170 <= len(synthetic.VOCABULARY) <= 230
    assert len(set(synthetic.VOCABULARY)) == len(synthetic.VOCABULARY)
    assert synthetic.VOCABULARY[:4] == ("<pad>", "<bos>", "<eos>", "<mask>")
    used = {token for document in corpus for token in document.tokens}
    assert set(synthetic.VOCABULARY) - used == {"<pad>", "<mask>"}


def test_lengths_and_prompts(corpus):
    prompts = {kind: set() for kind in synthetic.KINDS}
    for document in corpus:
        assert 45 <= len(document.tokens) <= 110
        assert document.tokens[:2] == ("<bos>", f"<{document.kind}>")
        assert document.tokens[-1] == "<eos>"
        assert 6 <= document.prompt_length <= 16
        prompts[document.kind].add(document.tokens[: document.prompt_length])
    assert min(map(len, prompts.values())) >= 400


def test_entropy_is_moderate_and_reproducible():
    mean, error = synthetic.entropy_per_token(2000, seed=0)
    other, other_error = synthetic.entropy_per_token(2000, seed=1)
    assert 0.2 < mean < 0.45 and 0 < error < 0.01
    assert_within_errors(mean, other, math.hypot(error, other_error))
    assert synthetic.entropy_per_token(2000, seed=0) == (mean, error)


def test_arithmetic_is_right(corpus):
    equation = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
    operators = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": lambda a, b: a / b}
    seen = Counter()
    for document in (d for d in corpus if d.kind == "maths"):
        text = " ".join(document.tokens)
        equations = equation.findall(text)
        assert len(equations) == 2
        for a, sign, b, c in equations:
            assert operators[sign](int(a), int(b)) == int(c)
            seen[sign] += 1
        # The second change starts from the first answer, and the last number said is the result.
        assert equations[1][0] == equations[0][3]
        assert re.findall(r"\d+", text)[-1] == equations[1][3]
    assert set(seen) == set("+-*/")


def test_stories_keep_to_their_scene(corpus):
    for document in (d for d in corpus if d.kind == "story"):
        text = " ".join(document.tokens)
        place = re.search(r"(?:walked|ran|went) to (?:the|a)(?: \w+)? (harbour|forest|market|castle) and", text)[1]
        scene = SCENES[place]
        size, thing = re.search(r"(?:lost a|looked for a|without the) (\w+) (\w+) \.", text).groups()
        assert thing in scene["things"]
        mood = re.search(rf"a (sad|mad|kind) {scene['person']} (?:who|looked|without the)", text)[1]
        assert {"sad": "cried", "mad": "shouted", "kind": "gave"}[mood] in text
        spots = "|".join(scene["spots"]).replace("{size}", r"\w+")
        assert re.search(rf"(?:found the|bought back the) {size} {thing} (?:{spots}) \.", text)


def test_code_uses_consistent_names(corpus):
    for document in (d for d in corpus if d.kind == "code"):
        text = " ".join(document.tokens)
        function, many, bound = re.search(r"def (\w+) \( (\w+) , (\w+) = \d+ \) :", text).groups()
        one = re.search(rf"for (\w+) in (?:(?:list|set) \( )?{many}\b", text)[1]
        assert one == many[:-1]
        assert re.search(rf"{function} \( {many}", text.split("return")[-1])
        result = re.search(r"; (\w+) = (?:0|none|\[ \]) ;", text)[1]
        assert re.search(rf"return (?:\[ |list \( |set \( )?{result}\b", text)
        assert text.count("(") == text.count(")") and text.count("[") == text.count("]")
        for other in {"n", "limit", "start"} - {bound}:
            assert f"> {other}" not in text


def test_chat_answers_the_question(corpus):
    for document in (d for d in corpus if d.kind == "chat"):
        text = " ".join(document.tokens)
        assert [turn.split()[0] for turn in re.findall(r"(?:user|bot) :", text)] == ["user", "bot"] * 2 + ["user"]
        trouble = re.search(r"user : (?:and what if|good , but|what do i do if) (.*?) [?.] bot", text)[1]
        echo = re.search(r"bot : if (.*?) you can", text)
        assert echo is None or echo[1] == trouble


def test_encode_decode_and_tokenizer_agree(corpus):
    tokenizer = synthetic.tokenizer()
    assert len(tokenizer) == len(synthetic.VOCABULARY)
    assert tokenizer.mask_token_id == synthetic.MASK_TOKEN_ID == synthetic.VOCABULARY.index("<mask>")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    for document in corpus[:200]:
        text, ids = " ".join(document.tokens), synthetic.encode(document.tokens)
        assert tuple(synthetic.decode(ids)) == document.tokens
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([1, 4, *synthetic.encode(["once", "there"])], skip_special_tokens=True) == "once there"


def test_tokenizer_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    synthetic.tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    document = synthetic.documents(1, seed=0)[0]
    assert loaded(" ".join(document.tokens))["input_ids"] == synthetic.encode(document.tokens)
    assert loaded.mask_token_id == synthetic.MASK_TOKEN_ID


@pytest.mark.parametrize("call, message", [
    (lambda: synthetic.encode(["once", "zebra"]), "zebra"),
    (lambda: synthetic.encode("once there"), "split"),
    (lambda: synthetic.decode([10_000]), "10000"),
    (lambda: synthetic.sample_document("poem", random.Random(0)), "poem"),
    (lambda: synthetic.documents(2, seed=0, kinds=("poem",)), "poem"),
    (lambda: synthetic.documents(2, seed=0, kinds=()), "kinds"),
    (lambda: synthetic.documents(-1, seed=0), "-1"),
    (lambda: synthetic.entropy_per_token(1), "at least 2"),
    (lambda: tiny.train_tiny_target(steps=0), "steps"),
    (lambda: tiny.held_out_loss(None, []), "document"),
])
def test_bad_input_is_refused_with_a_clear_message(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def small_config():
    return tiny.tiny_config(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3)


def test_padding_does_not_change_the_loss():
    model = tiny.train_tiny_target(steps=1, batch_size=2, config=small_config())[0]
    short, long = sorted(synthetic.documents(8, seed=5), key=lambda d: len(d.tokens))[::7]
    with torch.no_grad():
        alone = [tiny.document_loss(model, tiny.pad_documents([d])) for d in (short, long)]
        total, count = tiny.document_loss(model, tiny.pad_documents([short, long]))
    assert count == sum(n for _, n in alone) == len(short.tokens) + len(long.tokens) - 4
    assert total.item() == pytest.approx(sum(t.item() for t, _ in alone), rel=1e-4)


def test_same_seed_gives_the_same_weights_and_global_state_is_untouched():
    state = torch.get_rng_state()
    runs = [tiny.train_tiny_target(seed=seed, steps=5, batch_size=4, config=small_config())[0] for seed in (7, 7, 8)]
    assert torch.equal(torch.get_rng_state(), state)
    first, second, other = ([p for _, p in sorted(run.named_parameters())] for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


def test_short_training_learns():
    rows = []
    model, history = tiny.train_tiny_target(
        seed=0, steps=100, batch_size=16, record_every=50, config=small_config(), progress=rows.append)
    start = math.log(len(synthetic.VOCABULARY))
    assert [row["step"] for row in history] == [50, 100] and rows == history
    assert history[-1]["held_out_loss"] < history[0]["held_out_loss"] < start
    assert history[-1]["held_out_loss"] < 0.6 * start
    # Never below what any model can reach.
    assert history[-1]["held_out_loss"] > synthetic.entropy_per_token(500)[0]
    assert not model.training
    documents = synthetic.documents(128, tiny.HELD_OUT_SEED)
    assert tiny.held_out_loss(model, documents) == pytest.approx(history[-1]["held_out_loss"], rel=1e-5)
