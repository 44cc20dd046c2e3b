"""Shapes and word lists from which the bundled training prompts are made.

A shape is a text with slots. ``<person>`` draws a word from ``WORDS["person"]``;
``<person#2>`` draws another one, different from ``<person>``; a slot that occurs
twice is filled in the same way both times. ``<n:3-40>`` draws a whole number and
``<n:12-96/12>`` one in steps of 12; later ``<n>`` repeats it. If the entries of a
list are tuples, ``<record.0>`` and ``<record.1>`` are the parts of one drawn entry.
A ``!`` at the end, ``<hero!>``, writes the first letter as a capital. A shape may
also be a function that takes the random generator and returns the finished text.
"""

# ruff: noqa: E501  (a shape is easier to read on one line)

from __future__ import annotations

import random
import re
from collections.abc import Callable

WORDS: dict[str, tuple] = {
    "person": tuple(
        "Abena Adrian Alma Anselm Bea Bruno Carys Chidi Cosima Darragh Dora Edwin Elif Esteban Farah Finn Greta "
        "Hana Hugo Ines Ivo Jamila Jasper Kaya Keir Leila Lorenzo Mabel Milan Nina Odile Oscar Paloma Per Qiana "
        "Rafael Rosa Samir Signe Tamsin Teo Ursula Vikram Willa Xenia Yara Yusuf Zdenek".split()
    ),
    "food": ("plum tarts", "samosas", "pumpkin muffins", "cheese scones", "spring rolls", "honey cakes", "pretzels",
             "empanadas", "lemon bars", "rice balls", "oat biscuits", "veggie burgers"),
    "goods": ("notebooks", "wool scarves", "clay mugs", "seed packets", "puzzles", "postcards", "lanterns",
              "bird boxes", "keyrings", "jars of jam", "wooden spoons", "paper kites", "soap bars", "bookmarks"),
    "place": ("market", "school fair", "harbour kiosk", "community centre", "street festival", "train station",
              "museum shop", "village hall", "sports ground", "garden centre"),
    "vehicle": ("van", "coach", "tram", "tractor", "delivery bike", "ferry", "lorry", "hired car"),
    "job": ("plumber", "tailor", "gardener", "tutor", "carpenter", "photographer", "translator", "electrician"),
    "crop": ("strawberries", "potatoes", "onions", "olives", "walnuts", "blueberries", "beans", "apricots"),
    "animal": ("goats", "rabbits", "sheep", "parrots", "ponies", "llamas", "turtles", "pigeons"),
    "hobby": ("pottery", "archery", "fencing", "chess", "drumming", "calligraphy", "rowing", "juggling", "knitting",
              "birdwatching", "salsa dancing", "rock climbing", "astronomy", "bread baking"),
    "saving": ("a telescope", "a cello", "a mountain bike", "a tent", "a camera", "a sewing machine", "a surfboard",
               "a drawing tablet", "a record player", "an electric guitar"),
    "fraction": ("half", "a third", "a quarter", "a sixth", "two thirds", "three quarters", "five sixths"),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
    # conversation
    "audience": ("a ten-year-old", "a busy manager", "someone who left school early", "a first-year student",
                 "my grandmother", "a sceptical journalist", "a new colleague", "a group of tourists",
                 "a class of teenagers", "an engineer from another field", "a person learning English"),
    "science": ("how tides work", "why leaves change colour", "how a compass works", "what causes lightning",
                "how bees find their way home", "why bread rises", "how noise-cancelling headphones work",
                "why the sky is blue", "how antibiotics differ from antivirals", "what a black hole is",
                "how batteries store energy", "why metals feel colder than wood", "how earthquakes are located",
                "what makes glass transparent", "how yeast turns sugar into alcohol", "why ice floats",
                "how satellites stay in orbit", "what DNA is for", "how a refrigerator cools"),
    "history": ("the fall of Constantinople", "the spread of coffee houses", "the building of the Suez Canal",
                "the Irish potato famine", "the Silk Road", "the abolition of the slave trade", "the Meiji era",
                "the invention of the telegraph", "the Hanseatic League", "the Great Depression",
                "the partition of India", "the Olympic revival of 1896", "the rise of Venice", "the Inca road system"),
    "question": ("privacy on social media", "free public transport", "zoos", "a four-day working week",
                 "school uniforms", "nuclear power", "tipping in restaurants", "electric scooters in cities",
                 "compulsory voting", "space tourism", "remote work", "banning cars from city centres",
                 "teaching cursive handwriting", "universal basic income", "daylight saving time"),
    "document": ("an apology email", "a cover letter", "a notice for the staff kitchen", "an invitation",
                 "a thank-you note", "a complaint", "a short speech", "a reference letter", "a newsletter item",
                 "a reminder", "a resignation letter", "a blog introduction"),
    "recipient": ("a neighbour", "my former teacher", "the members of a choir", "a hotel manager",
                  "a customer who waited too long", "our volunteers", "the parents of my pupils", "a supplier",
                  "my team", "the local newspaper", "a distant cousin", "the head of another department"),
    "occasion": ("a cancelled concert", "a lost parcel", "a surprise retirement party", "a broken heating system",
                 "a change of opening hours", "a successful fundraiser", "a delayed project", "a new puppy in the office",
                 "a flooded cellar", "a charity bike ride", "a missed appointment", "the end of a long cooperation"),
    "manner": ("warm but brief", "formal", "light-hearted", "very direct", "apologetic without grovelling", "calm",
               "enthusiastic", "diplomatic", "plain and factual"),
    "role": ("a ship's navigator in 1750", "a strict but fair chess coach", "the last librarian on Mars",
             "a Roman baker", "a talkative taxi driver", "a wise old tortoise", "a nervous time traveller",
             "a court astronomer", "a mountain guide", "a detective who hates mysteries", "a jazz pianist",
             "a medieval stonemason", "an alien tourist", "a wardrobe in an opera house", "a polar explorer"),
    "visitor": ("an impatient apprentice", "a lost child", "a rival", "a radio reporter", "a tax inspector",
                "an admirer", "a sceptic", "a visitor who speaks in riddles", "someone asking for a job"),
    "dilemma": ("My flatmate never washes up", "My best friend is always late", "A colleague takes credit for my ideas",
                "My parents want me to study law", "My neighbour plays loud music", "I forgot an important birthday",
                "My manager cancels every meeting with me", "My brother sold a bike that I had lent him",
                "I promised to help at two events on the same day", "My partner dislikes my oldest friend",
                "I have been asked to lead people older than me", "My child refuses to go to swimming lessons"),
    "wish": ("stay on good terms", "avoid a scene", "settle it this week", "be honest", "not sound petty",
             "set a clear boundary", "understand their side first", "keep it private"),
    "plan": ("a weekend trip with two toddlers", "learning to cook from nothing", "a reading group", "a small balcony garden",
             "an allotment shared by four families", "a first half marathon", "a school science day", "a home office",
             "a picnic for thirty", "moving house in one week", "a language exchange evening", "a repair café"),
    "limit": ("very little money", "only two free evenings a week", "no car", "unreliable weather", "a short deadline",
              "a bad back", "a shared kitchen", "no previous experience", "a noisy neighbourhood"),
    "format": ("a numbered list", "a table", "a short dialogue", "three paragraphs", "a timeline", "five bullet points",
               "a checklist", "question and answer pairs", "a letter"),
    "art": ("jazz", "Gothic cathedrals", "film noir", "haiku", "opera", "street murals", "Persian carpets",
            "silent comedy", "chamber music", "origami", "science-fiction novels", "folk ballads", "board games"),
    # creative writing
    "genre": ("a ghost story", "a fable", "a love story", "a science-fiction scene", "a comic sketch", "a fairy tale",
              "a detective story", "a prose poem", "a horror story", "a historical vignette", "a western",
              "a magical-realist tale", "a thriller opening", "a bedtime story", "a tall tale"),
    "hero": ("a retired bell-ringer", "a shy locksmith", "a one-armed juggler", "an insomniac baker", "a widowed beekeeper",
             "a teenage ferryman", "a failed inventor", "a deaf violin maker", "a night nurse", "an honest smuggler",
             "a weary crossing guard", "a glass-blower's daughter", "an exiled queen", "a census taker",
             "a puppet restorer", "a storm chaser", "a lift attendant", "an apprentice clockmaker", "a snow-plough driver"),
    "setting": ("an abandoned funfair", "a monastery above the clouds", "a floating market", "a desert weather station",
                "the archive under a city hall", "a sleeper train", "a drowned village", "a rooftop in high summer",
                "a lighthouse without a lamp", "an ice-bound ship", "a provincial theatre", "a moon colony's laundry",
                "a walled garden", "a border checkpoint", "an all-night diner", "a closing department store"),
    "event": ("receives a letter meant for somebody else", "finds a door that was not there yesterday",
              "has until dawn to make up with an old friend", "discovers that the dog has been keeping a secret",
              "is asked to repair something that should stay broken", "hears a familiar song from an empty room",
              "must choose which of two promises to break", "meets a person who remembers the future",
              "wins a prize that nobody wants", "is mistaken for a hero", "begins to lose one word each day",
              "finds the town clock running backwards", "hides a stranger for one night"),
    "device": ("Tell it entirely through letters", "Use only dialogue", "Write in the second person",
               "Start with the last moment and work backwards", "Let every paragraph begin with a colour",
               "Use the present tense throughout", "Include a refrain that changes slightly", "Keep every sentence short",
               "Let an object tell the story", "Never name the main character", "Break it into five numbered scenes",
               "Write it as a series of diary entries", "Use no adjectives in the final paragraph"),
    "tone": ("melancholy", "wry", "tender", "ominous", "playful", "restrained", "dreamlike", "bitter-sweet", "breathless",
             "deadpan", "hopeful", "lyrical"),
    "object": ("a cracked teapot", "a train ticket", "a glass eye", "a red umbrella", "a chess queen", "an unsent telegram",
               "a jar of buttons", "a borrowed coat", "a music box", "a rusty key", "a wedding photograph", "a paper crown",
               "a compass that points south", "a bicycle bell"),
    "theme": ("forgiveness", "the cost of pride", "first grief", "unlikely friendship", "growing old", "homesickness",
              "inheritance", "small acts of courage", "the comfort of routine", "missed chances", "envy between sisters",
              "being believed", "silence"),
    "form": ("sonnet", "ballad", "villanelle", "free-verse poem", "limerick sequence", "haiku sequence", "lullaby", "ode"),
    "words": ("200", "300", "400", "500", "600", "700", "800", "1,000"),
    # code: plural noun, argument name, element type
    "record": (("orders", "order", "total"), ("employees", "employee", "salary"), ("books", "book", "pages"),
               ("songs", "song", "seconds"), ("planets", "planet", "mass"), ("tickets", "ticket", "price"),
               ("recipes", "recipe", "calories"), ("flights", "flight", "distance"), ("matches", "match", "score"),
               ("parcels", "parcel", "weight"), ("rivers", "river", "length"), ("plants", "plant", "height")),
    "group": ("city", "year", "category", "owner", "colour", "team", "status", "country", "supplier"),
    "structure": ("stack", "priority queue", "binary search tree", "trie", "linked list", "graph", "matrix", "set",
                  "ring buffer", "disjoint-set forest", "sparse vector", "interval map", "bag", "skip list", "heap"),
    "operation": ("an iterator over its items", "a method that merges another one into it", "a readable repr",
                  "equality and hashing", "a method that returns its size", "a copy that shares nothing",
                  "a method to remove an item", "conversion to and from JSON", "a membership test", "a clear method"),
    "problem": ("the shortest path between two cells", "all permutations without repeats", "the longest common subsequence",
                "the edit distance of two words", "the number of ways to climb n stairs", "the k-th smallest element",
                "every anagram group", "the first duplicate", "the majority element", "the largest square of ones",
                "a topological order of tasks", "the prime factors of a number", "the longest palindrome in a string",
                "the fewest coins for an amount", "the overlap of two calendars", "the convex hull of some points"),
    "input": ("a list of integers", "two strings", "a grid of characters", "a dictionary of lists", "a text file",
              "a list of (start, end) pairs", "a nested list", "an iterator that can be read once", "a list of tuples",
              "a comma-separated string"),
    "rule": ("without recursion", "in linear time", "using a generator", "with constant extra memory", "with type hints",
             "without importing anything", "in a functional style", "without changing the input", "with memoisation"),
    "edge": ("an empty input", "negative numbers", "repeated values", "very large inputs", "non-ASCII text",
             "missing keys", "a single element", "invalid types"),
    "fileformat": ("CSV", "JSON Lines", "INI", "plain text", "Markdown", "XML", "tab-separated", "YAML-like"),
    "tool": ("renames photographs by date", "finds duplicate files", "counts words", "converts units", "checks links",
             "prints a calendar", "summarises a log", "splits a bill", "draws a bar chart in text", "compares two folders",
             "generates passwords", "tracks habits"),
    "bug": (("total = 0\nfor i in range(1, len(<values>)):\n    total += <values>[i]", "the sum comes out too small"),
            ("for v in <values>:\n    if v < 0:\n        <values>.remove(v)", "some negative items survive"),
            ("copy = <values>\ncopy.sort()", "the original list changes as well"),
            ("if len(<values>) > 0 & <values>[0] == 1:\n    start()", "it fails on some inputs"),
            ("average = sum(<values>) / len(<values>)", "it crashes for the first user of the day"),
            ("result = [[]] * 3\nresult[0].extend(<values>)", "all three rows change together"),
            ("while <values>:\n    last = <values>[-1]", "the program never stops"),
            ("best = 0\nfor v in <values>:\n    best = max(best, v)", "it is wrong for negative numbers")),
    "values": ("scores", "prices", "readings", "weights", "ages", "heights", "marks", "distances", "levels", "votes"),
    "adjective": ("quiet", "amber", "rapid", "hollow", "bright", "early", "narrow", "gentle", "frozen", "lucky"),
    "noun": ("river", "garden", "engine", "window", "pepper", "signal", "market", "feather", "station", "harvest"),
}

# A condition on a number, and a digest of the numbers that pass it.
CONDITIONS = (
    ("even", lambda v: v % 2 == 0), ("odd", lambda v: v % 2 == 1), ("positive", lambda v: v > 0),
    ("negative", lambda v: v < 0), ("divisible by three", lambda v: v % 3 == 0), ("above ten", lambda v: v > 10),
    ("divisible by five", lambda v: v % 5 == 0), ("two-digit", lambda v: 10 <= abs(v) <= 99),
    ("perfect squares", lambda v: v >= 0 and round(v**0.5) ** 2 == v), ("below four", lambda v: v < 4),
)
DIGESTS = (
    ("sum", "sum", "int", sum), ("count", "number", "int", len),
    ("largest", "largest", "int", lambda kept: max(kept, default=0)),
    ("smallest", "smallest", "int", lambda kept: min(kept, default=0)),
    ("spread", "difference of largest and smallest", "int", lambda kept: max(kept) - min(kept) if kept else 0),
    ("squares", "squares", "list[int]", lambda kept: [v * v for v in kept]),
    ("sorted", "sorted list", "list[int]", sorted),
    ("totals", "running totals", "list[int]", lambda kept: [sum(kept[: i + 1]) for i in range(len(kept))]),
    ("unique", "list without repeats", "list[int]", lambda kept: list(dict.fromkeys(kept))),
)
TEXT_STEPS = (
    ("reverse each word", lambda s: " ".join(w[::-1] for w in s.split())),
    ("swap upper and lower case", str.swapcase),
    ("drop every vowel", lambda s: "".join(c for c in s if c.lower() not in "aeiou")),
    ("put the words in alphabetical order", lambda s: " ".join(sorted(s.split(), key=str.lower))),
    ("double every letter", lambda s: "".join(c * 2 if c.isalpha() else c for c in s)),
    ("replace spaces by underscores", lambda s: s.replace(" ", "_")),
    ("remove characters that occurred before", lambda s: "".join(dict.fromkeys(s))),
    ("put the words in reverse order", lambda s: " ".join(s.split()[::-1])),
    ("begin each word with a capital", lambda s: " ".join(w.capitalize() for w in s.split())),
    ("put a hyphen after every third character", lambda s: "".join(c + "-" * (i % 3 == 2) for i, c in enumerate(s))),
)


def number_function(rng: random.Random) -> str:
    """A Python stub that digests some of the numbers in a list, with a correct example."""
    condition, passes = rng.choice(CONDITIONS)
    name, digest, returns, compute = rng.choice(DIGESTS)
    argument = rng.choice(WORDS["values"])
    numbers = [rng.randint(-12, 40) for _ in range(rng.randint(3, 6))]
    function = f"{name}_of_{condition.replace(' ', '_').replace('-', '_')}_{argument}"
    return (
        f"def {function}({argument}: list[int]) -> {returns}:\n"
        f'    """Return the {digest} of those {argument} that are {condition}.\n\n'
        f"    >>> {function}({numbers})\n    {compute([v for v in numbers if passes(v)])}\n"
        f'    """\n'
    )


def text_function(rng: random.Random) -> str:
    """A Python stub that changes a text in two steps, with a correct example."""
    (first, one), (second, two) = rng.sample(TEXT_STEPS, 2)
    words = [rng.choice(WORDS["adjective"]).capitalize(), rng.choice(WORDS["noun"]), rng.choice(WORDS["noun"])]
    text = " ".join(words[: rng.randint(2, 3)])
    function = f"{rng.choice(('rework', 'encode', 'prepare', 'twist', 'restyle'))}_{rng.choice(WORDS['noun'])}"
    return (
        f"def {function}(text: str) -> str:\n"
        f'    """First {first}, then {second}.\n\n'
        f"    >>> {function}({text!r})\n    {two(one(text))!r}\n"
        f'    """\n'
    )


Shape = str | Callable[[random.Random], str]

SHAPES: dict[str, tuple[Shape, ...]] = {
    "maths": (
        "<person> baked <n:24-144/12> <food> for the <place>. By midday <fraction> of them had been sold at $<p:2-6> each, and the others went for $<q:1-3> each in the afternoon. How much money came in altogether?",
        "A <vehicle> travels <d:120-480/20> kilometres in <h:2-6> hours, rests for <m:15-45/5> minutes, and then covers another <e:30-180/10> kilometres at the same speed. How long does the whole journey take?",
        "<person> has <n:20-90> <goods>, and <person#2> has <k:5-30> fewer. They put them together and pack them in boxes of <b:4-12>. How many full boxes do they get, and how many <goods> are left over?",
        "At the <place>, <goods> cost $<p:3-15> each and <goods#2> cost $<q:2-9> each. <person> buys <a:2-8> of the former and <b:2-9> of the latter and pays with $<c:200-300/50>. How much change is due?",
        "A <job> charges a call-out fee of $<f:20-60/5> and $<r:18-55> an hour. The bill for <person> came to <h:2-9> hours of work with a discount of <s:5-25/5>% on the total. What did <person> pay?",
        "<person> is saving for <saving> that costs $<c:300-960/20>. There is $<s:20-120/10> in the jar already, and <person> adds $<w:12-36> a week but takes out $<o:5-10> every second week. After how many weeks is there enough?",
        "On <weekday> a farm picked <n:120-600/20> kilograms of <crop>. <p:10-40/5>% were too small to sell, and the rest was packed in crates of <k:4-9> kilograms. How many crates were filled completely?",
        "A shelter looks after <n:12-40/2> <animal> and <k:2-6> times as many <animal#2>. In one month <m:3-9> of the <animal> and half of the <animal#2> found new homes. How many animals are still waiting?",
        "<person> practises <hobby> for <m:20-60/5> minutes on weekdays and <k:60-120/10> minutes on each day of the weekend. How many hours is that in <w:3-12> weeks?",
        "In a <hobby> club of <n:24-120/12> members, <fraction> are adults. Of the others, <fraction#2> joined this year. How many of the younger members joined in earlier years?",
        "<person> is <a:6-14> years old and <person#2> is <k:2-5> times as old. In how many years will <person#2> be only twice as old as <person>, or has that moment passed?",
        "A rectangular plot for <crop> is <l:8-40> metres long and <w:4-20> metres wide. A fence costs $<p:6-19> a metre and the gate, which is <g:1-3> metres wide, costs $<q:45-95/5>. What does it cost to enclose the plot?",
        "If <a:3-8> people need <d:4-18> days to repaint <h:12-60/6> beach huts, how many days would <b:2-12> people need at the same pace? Afterwards work out what they earn together at $<p:60-140/10> a day each.",
        "<person> read <p:12-40> pages of a book on <weekday> and <k:3-9> pages more on every following day than on the day before. How many pages were read in the first <n:4-9> days?",
        "Tickets for a trip by <vehicle> cost $<a:9-28> for adults and $<c:4-8> for children. A party of <n:12-50> people, <k:3-11> of them adults, gets $<s:10-30/5> off. How much does each person pay if they share the cost evenly?",
        "A tank at the <place> holds <v:300-1200/60> litres. It is filled at <i:12-30> litres a minute while <o:2-8> litres a minute run out. How long does it take to fill from empty, and how much water has run out by then?",
        "Three friends, <person>, <person#2> and <person#3>, collected <goods>. <person> found <n:8-40>, <person#2> found twice as many, and <person#3> found <k:3-15> fewer than the other two together. How many more must they find to reach <t:200-400/25>?",
        "The price of <saving> rose by <r:5-30/5>% and was later cut by <s:5-30/5>%. It used to cost $<p:200-900/50>. By how many dollars does the final price differ from the first?",
        "For <n:4-9> portions of soup a cook uses <g:200-900/50> grams of <crop> and <l:1-3> litres of stock. <person> expects <m:10-36> guests on <weekday>. How much of each is needed if every guest has one portion?",
        "Every <k:3-9> minutes a <vehicle> leaves the <place> with at most <c:8-45> people. If <n:150-600/25> people are waiting and nobody else comes, after how many minutes has the last of them left?",
    ),
    "chat": (
        "Explain <science> to <audience>. Use one everyday comparison and avoid technical terms where you can.",
        "Write <document> to <recipient> about <occasion>. The tone should be <manner>, and it should fit on a phone screen.",
        "What are the strongest arguments for and against <question>? Give me <format>, and finish with your own balanced view.",
        "You are <role>. <visitor> has just come in and asks what you are doing. Reply in character in about <n:80-200/20> words.",
        "<dilemma>. I want to <wish>. What should I say, and what had I better leave unsaid?",
        "Help me plan <plan> with <limit>. Present the plan as <format>.",
        "Describe the causes and effects of <history> for <audience>, and mention one common misunderstanding.",
        "Compare <art> with <art#2>: what do they have in common, and where should a beginner start with each?",
        "Summarise what most people get wrong about <science>, as <format>.",
        "Imagine a conversation between <role> and <role#2> about <question>. Write six lines for each of them.",
        "Extract every name, number and day from this message and list them: \"<person> needs <n:2-40> <goods> by <weekday>, <person#2> has only <m:2-30>, and <person#3> will bring the rest to the <place> on <weekday#2>.\"",
        "Put the following in order of importance for somebody with <limit>, and justify the first and the last: <hobby>, <hobby#2>, <hobby#3>, <hobby#4>.",
        "Is <hobby> a good choice for a person who is <a:15-75> years old and has <limit>? Suggest a first month.",
        "Rewrite this note so that it sounds <manner>: \"<person>, the <goods> for the <place> did not arrive on <weekday>, and <recipient> is asking me about it.\"",
        "Which questions would you ask before you believed the claim that <hobby> makes people better at <hobby#2>? Explain why each question matters.",
        "How did <history> change everyday life, and which of those changes can still be seen? Answer for <audience>.",
        "Give me feedback on an idea: an evening about <art> for <recipient>, on a <weekday>, with <limit>. Be <manner>.",
        "<person> is taller than <person#2> but shorter than <person#3>, and <person#4> is taller than <person>. Who can be the tallest? Think it through step by step.",
        "Design a quiz of <n:4-10> questions about <history> or <art>, with answers and a short comment on each, for <audience>.",
        "As <role>, advise me on this: <dilemma>, and I wish to <wish>.",
    ),
    "code": (
        number_function,
        text_function,
        "Write a Python function that finds <problem>, given <input>. Do it <rule>, and explain its running time.",
        "Implement a <structure> in Python as a class with <operation> and <operation#2>. Add a short example.",
        "Write a Python function `<record.0>_by_<group>(<record.0>)` that groups dictionaries by their '<group>' key and returns the <k:2-9> groups with the greatest total '<record.2>'. Handle <edge>.",
        "Here is a piece of Python for a list called <values>:\n\n<bug.0>\n\nThe trouble is that <bug.1>. Explain the cause and give a corrected version that also copes with <edge>.",
        "Create a command-line program in Python that <tool>. It reads <fileformat> files, has a --limit option with default <n:5-60/5>, and prints a clear message for <edge>.",
        "from dataclasses import dataclass\n\n\n@dataclass\nclass <record.1!>:\n    name: str\n    <group>: str\n    <record.2>: float\n\n\ndef top_<record.0>(<record.0>: list[<record.1!>], <group>: str, n: int = <k:2-9>) -> list[str]:\n    \"\"\"Names of the n <record.0> with the given <group> and the greatest <record.2>, best first.\"\"\"\n",
        "Write pytest tests for a function that takes <input> and returns <problem>. Include <edge> and <edge#2>.",
        "How do I write a Python decorator that logs calls to functions working on <record.0>, keeps the last <k:5-100/5> of them, and works <rule>? Show it in use.",
        "Compare two ways to compute <problem> in Python: a simple one and a fast one. The input is <input>. Which would you choose for <edge>?",
        "def parse_<record.1>(line: str) -> dict[str, str | float]:\n    \"\"\"Read one <fileformat> line with the fields name, <group> and <record.2>.\n\n    Raise ValueError with the line in its message if it is damaged; treat <edge> with care.\n    \"\"\"\n",
        "Design a small Python class <adjective!><noun!> that keeps a history of <record.0>. It should offer <operation>, a way to undo the last change, and a limit of <k:3-50> entries.",
        "Write a generator `<adjective>_<noun>(<values>)` in Python that yields the difference of every pair of <values> that lie <k:1-9> places apart, <rule>. What happens for <edge>?",
        "Convert this description to a Python function with a docstring: read <record.0> from a <fileformat> file, keep those whose <record.2> is above <k:5-500/5>, sort them by <group>, and return their names. Work <rule>.",
        "import math\n\n\ndef <adjective>_<noun>(<values>: list[float], width: int = <k:3-9/2>) -> list[float]:\n    \"\"\"Smooth the <values> with a weighted mean over `width` neighbours.\n\n    The weights fall off linearly from the middle; at the ends only the\n    neighbours that exist are used, which covers <edge> too.\n    \"\"\"\n",
        "Write an asynchronous Python worker that handles <record.0> from a queue, at most <k:2-16> at a time, retries <r:2-6> times on failure, and reports the sum of '<record.2>' for each <group>.",
        "Given a SQL-like table of <record.0> as a list of dictionaries, write Python that joins it with a second table on '<group>', <rule>, and say what it does with <edge>.",
    ),
    "creative": (
        "Write <genre> about <hero> who <event>. Set it in <setting>. The tone should be <tone>. About <words> words.",
        "<device>: <hero> in <setting> <event>. Somewhere, <object> must matter.",
        "Compose a <form> about <theme> as seen by <hero>. Let <object> appear only once.",
        "In <setting>, two people who used to be close meet over <object>. Write the scene in <words> words, <tone> and without flashbacks.",
        "Begin <genre> with this sentence: \"Nobody in <setting> asked about <object>.\" <device>.",
        "Give me a monologue by <hero> on the day that everything changed. Theme: <theme>. It should sound <tone>, and we should doubt one thing the speaker says.",
        "Invent a legend that explains how <object> came to <setting>. Include <hero>, a bargain, and a <tone> ending.",
        "Write the opening chapter of a novel in which <hero> <event>. Introduce <setting> through sounds and smells. Stop before anything is explained.",
        "A story in <n:3-9> objects: describe what <hero> carries out of <setting>, ending with <object>. Underneath runs a story of <theme>.",
        "Retell an old tale of your choice with <hero> in the main part and <setting> as its scene. Keep it <tone>. <device>.",
        "Draft a letter from <hero> to <hero#2>, never sent, about <theme>. Mention <object> and the last time they were in <setting>.",
        "Show an argument between <hero> and <hero#2> in <setting> in which neither says what is really wrong. The reader should sense <theme>.",
        "<hero!> and <hero#2> are stuck in <setting> until morning. Turn it into <genre> of <words> words. One of them <event>.",
        "Make <genre> out of a dull announcement: <setting> will close on <weekday>. Whose life does it change? <device>.",
        "Describe <setting> at <h:2-11> o'clock in the morning, and again <y:5-60> years later, through the eyes of <hero>. <tone!> mood, prose only.",
        "Write a dialogue between <object> and <object#2>, both left behind in <setting>. Mix humour with <theme>.",
        "Picture <hero> who <event>, but tell it from the viewpoint of a bystander in <setting> who understands only half of it. Aim for <words> words.",
        "End a story with the line \"and that was how <object> found its way home.\" The story: <hero>, <setting>, <theme>. Style: <tone>.",
    ),
}

_SLOT = re.compile(r"<(\w+)(#\d)?(?:\.(\d))?(?::(\d+)-(\d+)(?:/(\d+))?)?(!)?>")


def fill(shape: Shape, rng: random.Random) -> str:
    """Return the shape's text with every slot filled from ``rng``.

    Raises:
        KeyError: the shape uses a word list that does not exist.
    """
    if callable(shape):
        return _polished(shape(rng))
    numbers: dict[str, int] = {}
    drawn: dict[str, dict[str, str | tuple]] = {}

    def draw(match: re.Match) -> str:
        name, label, part, low, high, step, capital = match.groups()
        if low is not None:
            numbers[name] = rng.randrange(int(low), int(high) + 1, int(step or 1))
        if name in numbers:
            return str(numbers[name])
        entries = drawn.setdefault(name, {})
        if (label or "") not in entries:
            entries[label or ""] = rng.choice([w for w in WORDS[name] if w not in entries.values()])
        entry = entries[label or ""]
        text = entry if part is None else entry[int(part)]
        return text[0].upper() + text[1:] if capital else text

    text = _SLOT.sub(draw, shape)
    return _polished(_SLOT.sub(draw, text))  # the second pass fills slots inside drawn words


def _polished(text: str) -> str:
    """Capitals at the start and after full stops, "an" before vowels; code is left alone."""
    if ">>>" in text or "def " in text:
        return text
    text = re.sub(r"\ba (?=[aeio](?!ne\b))", "an ", text)
    return re.sub(r"(^|[.?!]\s+)([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)
