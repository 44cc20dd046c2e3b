"""The grammar of the synthetic language: four kinds of text with real branching.

A choice made early (a scene, a mood, an operation, a loop variable) fixes words that come much
later, and phrases of several words are picked as wholes, so that a block of a few tokens usually
has several continuations that are coherent inside but must not be mixed.

Every random choice goes through `Writer.choose`, which adds up its log-probability. Each step of
`GRAMMAR` is a *prefix-free code* of its choices: given what came before, no outcome's text is equal
to, or the beginning of, another's. So a text determines its choices, and the sum of their
log-probabilities is the exact log-probability of the text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

# Skewed on purpose: one draft block can be right often, and several are right more often.
_SKEW = {
    2: (0.56, 0.44),
    3: (0.43, 0.32, 0.25),
    4: (0.37, 0.27, 0.2, 0.16),
    5: (0.33, 0.24, 0.18, 0.14, 0.11),
    8: (0.28, 0.19, 0.14, 0.11, 0.09, 0.08, 0.06, 0.05),
}
_SIZES = ("small", "big", "new", "good")


class Writer:
    """Writes words, remembers named slots and adds up the log-probability of its choices.

    Args:
        generator: the source of every choice.
        memory: slots that are already fixed, used as `{slot}` in `say`.
    """

    def __init__(self, generator: random.Random | None, memory: dict[str, Any] | None = None):
        self.generator = generator
        self.memory = dict(memory or {})
        self.words: list[str] = []
        self.log_probability = 0.0

    def _index(self, weights: Sequence[float]) -> int:
        return self.generator.choices(range(len(weights)), weights)[0]

    def choose(self, options: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        """Pick one option; without `weights` (which sum to 1), earlier options are likelier."""
        weights = weights or _SKEW[len(options)]
        index = self._index(weights)
        self.log_probability += math.log(weights[index])
        return options[index]

    def fix(self, slot: str, options: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        """Pick an option and remember it as `slot`."""
        self.memory[slot] = self.choose(options, weights)
        return self.memory[slot]

    def say(self, text: str) -> None:
        """Write the words of `text`, slots filled from memory.

        `{size}`, `{n}` and `{friend}` (anyone but `name`) are drawn afresh by every phrase that says them.
        """
        if "{size}" in text:
            self.fix("size", _SIZES)
        if "{n}" in text:
            self.fix("n", (2, 3, 4))
        if "{friend}" in text:
            self.fix("friend", [name for name, _, _ in _PEOPLE if name != self.memory["name"]])
        self.words.extend(text.format_map(self.memory).split())

    def say_one(self, texts: Sequence[str], weights: Sequence[float] | None = None) -> None:
        """Pick one of several phrases as a whole and write it."""
        self.say(self.choose(texts, weights))


Step = Callable[[Writer], None]

# --- stories: the scene fixes people, things, animals and dangers -----------------------------

_PEOPLE = (("anna", "she", "her"), ("tom", "he", "him"), ("mia", "she", "her"), ("ben", "he", "him"))
_JOBS = ("farmer", "baker", "hunter", "sailor", "king")
SCENES = {
    "harbour": dict(
        person="sailor", things=("rope", "net"),
        spots=("under the {size} boat", "behind a {size} net", "near the sea"),
        acts=("bought fish from a sailor", "looked at the sea all night",
              "took a boat over the sea", "looked at a storm from the boat"),
        dangers=("a {size} storm was over the sea", "a {size} storm took the boat", "a rope fell in the water")),
    "forest": dict(
        person="hunter", things=("knife", "berries"),
        spots=("behind a tree", "inside a tree", "under the water"),
        acts=("took berries from a hunter", "ran after a wolf all day",
              "took apples from a tree", "was under a tree all day"),
        dangers=("a wolf ran from behind a {size} tree", "a {size} tree fell over", "a wolf took the dog")),
    "market": dict(
        person="baker", things=("basket", "bag"),
        spots=("under the {size} bread", "behind a {size} dog", "inside a {size} box"),
        acts=("bought bread for 2 coins", "bought cheese from the baker",
              "gave eggs to a big king", "lost all the coins"),
        dangers=("a {size} dog took the bread", "a {size} dog ran home with the cheese", "there was a fire")),
    "castle": dict(
        person="king", things=("crown", "coin"),
        spots=("inside a {size} tower", "under the {size} horse", "behind the gate"),
        acts=("was with the king all night", "took a horse to the tower",
              "was near the fire", "found a gate in the tower"),
        dangers=("a {size} horse ran over the king", "the gate fell over", "there was a fire in the tower")),
}
_MOODS = {
    "sad": dict(begs=("cried please help me find my {thing} .", "cried all night for the {thing} ."),
                ends=("they cried but were happy", "the sad {person} looked at the {thing} all night")),
    "mad": dict(begs=("shouted give me back my {thing} now .", "shouted at a dog all day ."),
                ends=("the {person} was not mad now", "they were friends")),
    "kind": dict(begs=("gave {name} bread and fish .", "was happy and gave {name} a box ."),
                 ends=("the {person} gave {her} {n} coins", "they had {size} bread and cheese")),
}


def _hero(w: Writer) -> None:
    w.memory["name"], w.memory["she"], w.memory["her"] = w.choose(_PEOPLE)


def _story_opening(w: Writer) -> None:
    opening = w.choose(("once there was a {adjective} {job} called {name} near the {home} .",
                        "one day {name} the {adjective} {job} was in the {home} .",
                        "one night {name} was a {adjective} {job} without friends .",
                        "once a {job} called {name} was {adjective} all day ."))
    _hero(w)
    # Only what the opening says may be drawn: a hidden choice would not show in the text.
    for slot, options in (("adjective", ("young", "happy", "big", "sad", "mad")), ("job", _JOBS),
                          ("home", ("sea", "forest", "school"))):
        if "{" + slot + "}" in opening:
            w.fix(slot, options)
    w.say(opening)


def _story_journey(w: Writer) -> None:
    w.fix("place", tuple(SCENES))
    w.memory["person"] = SCENES[w.memory["place"]]["person"]
    w.say_one(("{she} walked to the {size} {place} and", "{she} ran to the {place} and",
               "so {name} went to a {size} {place} and"))
    w.say_one(SCENES[w.memory["place"]]["acts"])
    w.say_one((".", "looked for bread .", "and was happy .", "with {friend} ."))


def _story_meeting(w: Writer) -> None:
    # Size and thing are chosen together here and come back, joined, in the plea and the search.
    w.memory["thing"] = w.choose(_SIZES) + " " + w.choose(SCENES[w.memory["place"]]["things"])
    w.fix("mood", tuple(_MOODS))
    w.say_one(("there {she} found a {mood} {person} who had lost a {thing} .",
               "near the {place} a {mood} {person} looked for a {thing} .",
               "there was a {mood} {person} without the {thing} ."))
    w.say("the {person}")
    w.say_one(_MOODS[w.memory["mood"]]["begs"])


def _story_search(w: Writer) -> None:
    if w.choose((True, False), (0.6, 0.4)):
        w.say_one(("then", "one night"))
        w.say_one(SCENES[w.memory["place"]]["dangers"])
        w.say_one(("but {name} was not afraid .", "and they ran home .", "so they went inside ."))
    w.say_one(("{name} looked for it and found the {thing}", "after a long day they found the {thing}",
               "{name} bought back the {thing}"))
    w.say_one(SCENES[w.memory["place"]]["spots"])
    w.say(".")


def _story_end(w: Writer) -> None:
    w.say_one(_MOODS[w.memory["mood"]]["ends"])
    w.say_one((".", "and {name} went home .", "and that was the end of a long day ."))


# --- word problems: small numbers, right arithmetic --------------------------------------------

_ITEMS = (("apples", "basket", "market"), ("books", "bag", "school"), ("eggs", "box", "market"),
          ("coins", "bag", "castle"), ("fish", "net", "harbour"))
_GAINS = ("{she} finds {b} more {items} {near} the {place} .", "{she} gets {b} more from {friend} .",
          "{friend} gives {her} {b} more {items} .")
_LOSSES = ("{she} gives {b} {items} to {friend} .", "{she} loses {b} {items} {near} the {place} .",
           "{friend} gets {b} of them at the {place} .")


def _maths_start(w: Writer) -> None:
    m = w.memory
    _hero(w)
    m["items"], m["box"], m["place"] = w.choose(_ITEMS)
    m["operation"] = w.choose(("add", "times", "share"), (0.6, 0.22, 0.18))
    if m["operation"] == "add":
        w.fix("a", (8, 5, 6, 9, 7, 10, 4, 3))
        w.say_one(("{name} has {a} {items} in a {size} {box} .", "in a {size} {box} {name} has {a} {items} .",
                   "there are {a} {items} in the {size} {box} of {name} ."))
        return
    m["a"], m["b"] = w.choose(((3, 4), (2, 5), (3, 5), (2, 6), (3, 3), (2, 4), (2, 7), (4, 4)))
    m["c"] = m["a"] * m["b"]
    if m["operation"] == "times":
        w.say("{name} has {a} times a {size} {box} with {b} {items} .")
    else:
        w.say_one(("{name} and {a} friends share {c} {size} {items} .",
                   "{name} gives {c} {size} {items} to {a} friends ."))


def _maths_change(w: Writer) -> None:
    m = w.memory
    if m["operation"] != "add":
        return
    w.fix("sign", ("+", "-"), (0.55, 0.45))
    w.fix("b", (2, 3) if m["a"] < 5 else (3, 2, 4, 5))
    text = w.choose(_GAINS if m["sign"] == "+" else _LOSSES)
    if "{near}" in text:
        w.fix("near", ("near", "at"))
    w.say(text)
    m["c"] = m["a"] + m["b"] if m["sign"] == "+" else m["a"] - m["b"]


def _maths_question(w: Writer) -> None:
    if w.memory["operation"] == "share":
        w.say_one(("how many {items} does a friend get ?", "what does a friend get ?"))
    elif w.memory["operation"] == "add" and w.memory["sign"] == "-":
        w.say_one(("how many {items} are left ?", "how many does {name} have now ?",
                   "what is left in the {box} ?"))
    else:
        w.say_one(("how many {items} does {name} have now ?", "how many {items} are there ?",
                   "what is the total now ?"))


def _maths_working(w: Writer) -> None:
    m = w.memory
    if m["operation"] == "add" and m["sign"] == "+":
        w.say_one(("we add {b} to {a} and get {a} + {b} = {c} .", "we count on from {a} : {a} + {b} = {c} .",
                   "the total is {a} + {b} = {c} ."))
    elif m["operation"] == "add":
        w.say_one(("we take {b} from {a} and get {a} - {b} = {c} .",
                   "we count back from {a} : {a} - {b} = {c} .", "what is left is {a} - {b} = {c} ."))
    elif m["operation"] == "times":
        w.say_one(("we count {a} times {b} and get {a} * {b} = {c} .", "the total is {a} * {b} = {c} ."))
    else:
        w.say_one(("we share {c} and get {c} / {a} = {b} .", "a friend gets {c} / {a} = {b} ."))
        m["c"] = m["b"]
    w.say_one(("so the answer is {c} {items} .", "so there are {c} {items} .", "the answer is {c} ."))


def _maths_later(w: Writer) -> None:
    m = w.memory
    m["a"] = m["c"]
    m["sign"] = w.choose(("+", "-"), (0.4, 0.6)) if 3 <= m["a"] <= 13 else "+" if m["a"] < 3 else "-"
    m["b"] = w.choose((2, 3))
    m["c"] = m["a"] + m["b"] if m["sign"] == "+" else m["a"] - m["b"]
    w.say_one(("then", "one day", "after school"))
    text = w.choose(("{name} gets {b} more from the {size} {other} .",
                     "{name} finds {b} {items} under the {size} {other} .") if m["sign"] == "+" else
                    ("{name} gives {b} {items} to the {size} {other} .",
                     "{name} loses {b} of them under a {size} {other} ."))
    w.fix("other", ("boat", "bread", "tree", "gate") if "under" in text else _JOBS)
    w.say(text)


def _maths_end(w: Writer) -> None:
    w.say("{a} {sign} {b} = {c} .")
    w.say_one(("now {name} has {c} {items} .", "now there are {c} .", "so at the end {name} has {c} ."))


# --- code: consistent names, a loop, a call ----------------------------------------------------

_ARGUMENTS = (("numbers", "number"), ("words", "word"), ("items", "item"), ("coins", "coin"))
_FUNCTIONS = {
    "total": dict(start="0", docs=("add all {many}", "return the total of the {many}"),
                  bodies=("{out} = {out} + {one} ;", "{out} += {one} ;", "if {one} > {bound} : {out} += {one} ;"),
                  ends=("return {out} ;", "print ( {out} ) ; return {out} ;")),
    "count": dict(start="0", docs=("count the {many}", "return how many {many} there are"),
                  bodies=("{out} += 1 ;", "{out} = {out} + 1 ;", "if {one} > {bound} : {out} += 1 ;"),
                  ends=("return {out} ;", "print ( {out} ) ; return {out} ;")),
    "best": dict(start="none", docs=("find the best {one}", "return the best of the {many}"),
                 bodies=("if {one} > {out} : {out} = {one} ;", "if not {out} : {out} = {one} ;"),
                 ends=("return {out} ;", "return [ {out} ] ;")),
    "back": dict(start="[ ]", docs=("give the {many} from back to start", "return the {many} back to start"),
                 bodies=("{out} = [ {one} ] + {out} ;", "{out} . add ( 0 , {one} ) ;"),
                 ends=("return {out} ;", "return list ( {out} ) ;", "return set ( {out} ) ;")),
}


def _code_header(w: Writer) -> None:
    m = w.memory
    m["function"] = w.choose(tuple(_FUNCTIONS))
    m["many"], m["one"] = w.choose(_ARGUMENTS)
    # The bound named here is compared with in the loop, far below.
    w.fix("bound", ("n", "limit", "start"))
    w.fix("default", (0, 1, 10, 2, 5, 3, 4, 7))
    w.say("def {function} ( {many} , {bound} = {default} ) :")


def _code_comment(w: Writer) -> None:
    w.say_one([f"# {doc} ;" for doc in _FUNCTIONS[w.memory["function"]]["docs"]])


def _code_start(w: Writer) -> None:
    w.fix("out", ("result", "out", "answer", "end"))
    w.say("{out} = " + _FUNCTIONS[w.memory["function"]]["start"] + " ;")


def _code_loop(w: Writer) -> None:
    w.say_one(("for {one} in {many} :", "for {one} in list ( {many} ) :",
               "if not {many} : return {out} ; for {one} in {many} :", "for {one} in set ( {many} ) :"))
    if w.choose((False, True), (0.5, 0.5)):
        w.say_one(("if {one} is none : next ;", "if {one} = {bound} : return {out} ;", "print ( {one} ) ;"))
    w.say_one(_FUNCTIONS[w.memory["function"]]["bodies"])
    w.say_one(_FUNCTIONS[w.memory["function"]]["ends"])


def _code_call(w: Writer) -> None:
    opening, closing = w.choose((("[", "]"), ("list (", ")"), ("set (", ")")))
    w.say("{many} = " + opening)
    digits = [str(w.choose((1, 2, 4, 3, 7))) for _ in range(w.choose((2, 3)))]
    w.say(" , ".join(digits) + f" {closing} ;")
    printed = w.choose((True, False))
    w.say("print ( {function} ( {many}" if printed else "{out} = {function} ( {many}")
    w.say_one(("", ", 10", ", 1"))
    w.say(") ) ;" if printed else ") ; print ( {out} ) ;")


# --- chat: the topic fixes the advice, the follow-up question fixes the reply -------------------

_TOPICS = {
    "cook": dict(
        objects=("fish", "eggs", "bread"),
        firsts=("put {n} {object} in cold water", "put the {object} near the {size} fire", "take bread and cheese"),
        thens=("cook it on a {size} fire", "add cheese and count to {n}", "find a small fire"),
        trouble=(("the fire is out", ("find a box of {size} books", "start a {size} fire")),
                 ("it is too cold", ("put it back on the fire", "add {n} more eggs")))),
    "grow": dict(
        objects=("apples", "berries"),
        firsts=("find water near a {size} tree", "put the {object} in a {size} box", "find a {size} gate"),
        thens=("water them all day", "add water at night", "put the dog in a box"),
        trouble=(("a dog finds them", ("build a {size} gate", "put the dog inside")),
                 ("the water is too cold", ("put it near the fire", "water them at night")))),
    "build": dict(
        objects=("boat", "tower", "gate"),
        firsts=("find a {size} tree near home", "take a {size} knife and a rope", "count all that you have"),
        thens=("put a {size} rope on the end", "take the tree home", "get help from {n} friends"),
        trouble=(("the rope is too small", ("get a {size} rope", "start again without a rope")),
                 ("it fell over", ("put it near a {size} tree", "start again with {n} friends")))),
    "find": dict(
        objects=("dog", "horse", "friend"),
        firsts=("go to {n} friends at school", "find out if it is at home", "get help from a hunter"),
        thens=("give it {size} bread and cheese", "go back to the forest", "take it home with a rope"),
        trouble=(("it is afraid", ("give it water and {size} bread", "put it inside all night")),
                 ("it went out at night", ("go to the forest", "get help from a hunter")))),
}


def _chat_question(w: Writer) -> None:
    w.fix("topic", tuple(_TOPICS))
    w.fix("object", _TOPICS[w.memory["topic"]]["objects"])
    w.memory["a"] = "" if w.memory["topic"] in ("cook", "grow") else "a"
    w.say("user :")
    w.say_one(("", "hello ,", "good day ,", "please help me ,"))
    w.say_one(("how do i {topic} {a} {size} {object}", "what is the best way to {topic} {a} {object}",
               "i have to {topic} {a} {size} {object} , how", "can you help me {topic} {a} {size} {object}"))
    w.say_one(("?", "for {n} friends ?", "at home ?", "without help ?", "in one day ?"))


def _chat_plan(w: Writer) -> None:
    w.say("bot :")
    w.say_one(("that is not so bad .", "then do what i do .", "good , i can help you .",
               "that is a long day ."))
    topic = _TOPICS[w.memory["topic"]]
    w.say_one(("first", "you can"))
    w.say_one(topic["firsts"])
    w.say_one((". then", "and after that"))
    w.say_one(topic["thens"])
    w.say(".")


def _chat_trouble(w: Writer) -> None:
    w.memory["trouble"], w.memory["cures"] = w.choose(_TOPICS[w.memory["topic"]]["trouble"])
    w.say("user :")
    w.say_one(("and what if {trouble} ?", "good , but {trouble} .", "what do i do if {trouble} ?"))


def _chat_cure(w: Writer) -> None:
    w.say("bot :")
    w.say_one(("if {trouble} you can", "then", "that is not bad :"))
    w.say_one(w.memory["cures"])
    w.say_one((".", "and start again .", "and that is all ."))


def _chat_end(w: Writer) -> None:
    w.say("user :")
    w.say_one(("thank you , that is a good answer .", "good , i can do that now .",
               "good , i can do that with {n} friends .", "thank you , bot ."))


GRAMMAR: dict[str, tuple[Step, ...]] = {
    "story": (_story_opening, _story_journey, _story_meeting, _story_search, _story_end),
    "maths": (_maths_start, _maths_change, _maths_question, _maths_working, _maths_later, _maths_end),
    "code": (_code_header, _code_comment, _code_start, _code_loop, _code_call),
    "chat": (_chat_question, _chat_plan, _chat_trouble, _chat_cure, _chat_end),
}
# A prompt is the text of this many steps, or its beginning if that is long.
PROMPT_STEPS = {"story": 1, "maths": 2, "code": 3, "chat": 1}
