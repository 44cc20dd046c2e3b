"""Shapes of prompts that are broader than the paper's four tasks; see :mod:`dblast.reproduction.prompts.templates`.

``{topic}``, ``{passage}`` and ``{code}`` are filled first: a subject, documentation prose, the beginning of a function.
"""

# ruff: noqa: E501  (a shape is easier to read on one line)

from __future__ import annotations

TOPICS = tuple(
    topic.strip()
    for topic in """
    tectonic plates; the water cycle; photosynthesis; vaccines; the immune system; sleep; vitamins; blood pressure; comets;
    the moons of Jupiter; gravity; magnets; sound waves; rainbows; clouds; hurricanes; volcanoes; coral reefs; mangroves;
    deserts; glaciers; rain forests; wolves; octopuses; hummingbirds; ants; whales; bats; mushrooms; oak trees; orchids;
    compost; soil; honey; coffee; tea; chocolate; olive oil; cheese; sourdough; rice; noodles; curry; fermentation; spices;
    knives; cast-iron pans; bicycles; trains; sailing boats; bridges; canals; skyscrapers; windmills; clocks; paper; ink;
    printing; glass; concrete; steel; aluminium; plastic; cotton; wool; silk; dyes; leather; porcelain; bricks; locks;
    money; banks; inflation; interest rates; insurance; taxes; budgets; pensions; trade; unemployment; strikes; start-ups;
    elections; constitutions; courts; juries; passports; borders; embassies; the United Nations; human rights; censorship;
    newspapers; radio; television; photography; cinema; animation; podcasts; advertising; libraries; museums; archives;
    maps; globes; navigation; satellites; telescopes; microscopes; thermometers; barometers; lasers; X-rays; radar; solar
    panels; wind turbines; hydroelectric dams; batteries; electric cars; heat pumps; insulation; recycling; sewage; floods;
    databases; spreadsheets; search engines; web browsers; encryption; passwords; backups; viruses on computers; robots;
    neural networks; chess computers; compilers; operating systems; version control; unit tests; recursion; sorting;
    hash tables; linked lists; regular expressions; floating-point numbers; binary numbers; logic gates; transistors;
    prime numbers; fractions; percentages; triangles; circles; probability; averages; logarithms; vectors; matrices;
    derivatives; integrals; infinity; proofs; paradoxes; game theory; statistics; sampling; correlation; experiments;
    Ancient Egypt; the Roman Republic; the Vikings; the Aztecs; the Ming dynasty; the Ottoman Empire; feudalism; knights;
    the Black Death; the Renaissance; the Reformation; the Enlightenment; the French Revolution; the Industrial Revolution;
    railways; the First World War; the Cold War; the space race; decolonisation; the European Union; the Great Wall;
    Shakespeare; Greek myths; fairy tales; haikus; sonnets; novels; biographies; diaries; letters; dictionaries; grammar;
    accents; sign language; translation; Latin; Esperanto; alphabets; punctuation; handwriting; typography; proverbs;
    violins; pianos; drums; choirs; folk songs; symphonies; jazz; opera; ballet; theatre; masks; puppets; circuses; clowns;
    painting; sculpture; mosaics; frescoes; tattoos; fashion; hats; shoes; perfume; gardens; parks; beaches; mountains;
    football; tennis; swimming; running; yoga; climbing; skiing; skating; cricket; judo; marathons; referees; the Olympics;
    friendship; patience; courage; jealousy; boredom; habits; memory; attention; dreams; humour; lies; promises; gossip;
    teachers; exams; homework; kindergartens; universities; apprenticeships; interviews; meetings; emails; holidays;
    weddings; birthdays; funerals; neighbours; cats; dogs; goldfish; parrots; horses; farms; markets; villages; cities;
    traffic; airports; hotels; hospitals; dentists; pharmacies; fire brigades; lighthouses; post offices; supermarkets
    """.replace("\n", " ").split(";")
)

SHAPES = (
    "What is the most important thing to know about {topic}?",
    "Define {topic} in one sentence. Then give an example.",
    "Tell me about {topic}.",
    "{topic}?",
    "give me <n:3-12> facts about {topic}, short ones",
    "Write a paragraph about {topic} for an encyclopedia.",
    "I have to give a talk on {topic} tomorrow. Write me an outline with <n:3-7> points.",
    "Write a short essay: how {topic} and {topic} are connected.",
    "List <n:5-15> words that have to do with {topic} and explain each of them.",
    "Make a multiple-choice question about {topic} with four answers, and say which is right.",
    "What would the world be like without {topic}?",
    "Compare {topic} and {topic} in a table with <n:2-5> rows.",
    "Who should care about {topic}, and why?",
    "My daughter asked me about {topic} and I did not know what to say. Help!",
    "Write a product description for something that combines {topic} with {topic}.",
    "Write <n:3-8> headlines for an article about {topic}.",
    "Write a tweet about {topic}. Then write one that says the opposite.",
    "Write a rhyme about {topic}.",
    "Tell a joke about {topic}.",
    "Write a scene in which two friends argue about {topic}.",
    "Write a letter of complaint about {topic}.",
    "Give step-by-step instructions for somebody who wants to learn about {topic} in <n:2-8> weeks.",
    "Name <n:3-9> common mistakes of beginners when it comes to {topic}.",
    "Answer as a pirate: what do you think of {topic}?",
    'Translate into French: "I have always been interested in {topic}."',
    'Translate into Spanish and German: "Where can I find a book about {topic}?"',
    "Invent a recipe that makes one think of {topic}. Ingredients first, then the steps.",
    "What happened in the history of {topic}? Give a timeline.",
    "Pros and cons of {topic}, please.",
    "Is it true that {topic} can be dangerous? Explain.",
    "Explain {topic} like I'm five",
    "Write the beginning of a Wikipedia-style article on {topic}, with section headings.",
    'Return a JSON object with the keys "title", "summary" and "keywords" about {topic}. JSON only.',
    "Write an email to a colleague. Subject: {topic}. Ask for <n:2-5> things.",
    "Summarise this in one sentence:\n\n{passage}",
    "Rewrite the following so that a child understands it.\n\n{passage}",
    "{passage}\n\nWhat does this mean? Explain it in your own words.",
    'Find the key points of this text and list them:\n"{passage}"',
    "Correct the grammar and the style of this paragraph: {passage}",
    "Read the passage and write <n:2-5> questions that test whether somebody has understood it.\n\nPassage: {passage}",
    "Continue this text:\n\n{passage}",
    "Turn this into bullet points.\n\n{passage}",
    "What does this function do?\n\n```python\n{code}\n```",
    "Add comments to this code:\n\n{code}",
    "Complete the function.\n\n```python\n{code}\n",
    "Write a docstring for this:\n\n{code}",
    "Translate this Python to JavaScript:\n\n```python\n{code}\n```",
    "Is there a bug in here?\n\n{code}",
    "Write a test for the following function.\n\n{code}",
    "Write a SQL query that counts the rows of a table called {topic} by month.",
    "Write a shell command that finds all files larger than <n:2-90> megabytes.",
    "Write a C function that returns the <n:2-9> largest numbers of an array.",
    "Write an HTML page about {topic} with a heading, a list and a link.",
    "What is <a:12-999> times <b:3-99>? Show the steps.",
    "Convert <a:2-900> kilometres to miles and <b:5-90> degrees Celsius to Fahrenheit.",
    "Solve for x: <a:2-19>x + <b:1-60> = <c:61-400>.",
    "If I buy <a:2-30> tickets at <b:3-45> euros each and get <c:5-50/5> percent off, what do I pay?",
    "Sort these numbers: <a:1-99>, <b:1-99>, <c:1-99>, <d:1-99>, <e:1-99>. Then give the median.",
    'Classify the mood of each sentence as positive, negative or neutral: "I love {topic}." "{topic} again." "Nobody told me about {topic}!"',
    "Give me three names for a company in the field of {topic} and a slogan for each.",
    "Plan a day out for a family that likes {topic} and {topic}.",
    "What should I ask an expert on {topic}? Write an interview with questions and answers.",
    "Think step by step: which is older, {topic} or {topic}?",
    "hi! can you help me with {topic}",
    "<person> and <person#2> disagree about {topic}. <person> thinks it is overrated. Who is right?",
    "Write a diary entry by <person>, who has just discovered {topic}.",
    "Explain the difference between {topic} and {topic} to <audience>.",
    "<dilemma>. What would you do?",
    "Describe <setting> in <n:3-9> sentences.",
    "Write a story about <hero>. Keep it under <n:60-300/20> words.",
    "Write a six-line dialogue between <role> and <visitor>.",
)

#: What a second turn says after any answer.
FOLLOW_UPS = (
    "Make that shorter.",
    "Can you say that in simpler words?",
    "Thanks! Can you give me an example?",
    "Why?",
    "Are you sure? Check it again.",
    "Now write it as a list.",
    "Rewrite it for <audience>.",
    "What did you leave out?",
    "Go on.",
    "I don't understand the last part. Can you explain it again?",
    "Now make it sound <manner>.",
    "Turn it into <n:3-8> questions with answers.",
    "How does that relate to {topic}?",
    "Interesting. And what about {topic}?",
    "Summarise what you just said in one line.",
    "Write the same thing as a poem.",
)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a patient teacher. Use short sentences.",
    "You answer in at most three sentences.",
    "You are an experienced programmer who explains every step.",
    "You are <role>.",
    "Answer in the form of <format>.",
    "You are a librarian. Be <manner>.",
    "Always finish with a question to the user.",
)

#: Beginnings that the target continues without its chat template.
BEGINNINGS = (
    "{topic}\n\nIntroduction\n\n",
    "# {topic}\n\n",
    "The history of {topic} began",
    "Once upon a time, <hero> in <setting>",
    "Q: What is the connection between {topic} and {topic}?\nA:",
    "In this lesson we learn about {topic}. By the end of it, you will be able to",
    "Dear <person>,\n\nThank you for your letter about {topic}.",
    "<person>: Have you ever thought about {topic}?\n<person#2>:",
    "Chapter <n:1-12>: {topic}\n\n<person> had never",
    "Abstract. We study {topic} and",
    "Top <n:3-10> reasons to learn about {topic}:\n\n1.",
    "{passage}",
    "{passage}\n\n",
    "{code}",
    "{code}\n",
    "```python\n{code}",
)
