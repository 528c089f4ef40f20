r"""The demo data set, made by seed on first use, and a tokenizer trained on its text.

Adds: `demo_jsonl` (a JSONL file with images beside it) and `demo_tokenizer` (a folder that transformers loads offline).
Leaves out: the drawing (`demo_drawings`), and reading the file (`sources`).

The shape follows AI2D as the_cauldron holds it: one picture, a few multiple-choice turns (1 + geometric), answers of
one letter. What a picture shows is made up first, as facts; picture and answers both come from the facts, so every
answer can be checked against them. Each row has a random stream of its own: row 7 is the same in a set of 10 or of 500.
"""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, permutations
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmdp import demo_drawings as drawings
from mmdp.demo_drawings import Facts
from mmdp.progress import track

VERSION = 1
"""Names the folders; raise it with every change of a text, a picture or the tokenizer."""

VOCABULARY = 4096
TRAINING_ROWS = 2000
"""The tokenizer learns from the text of this many rows of seed 0, the first 500 of which are the default set."""

WIDTHS = (180, 1500)
MEDIAN_WIDTH, WIDTH_SPREAD = 560, 0.42  # of the lognormal that AI2D's widths follow
ASPECTS = (0.75, 1.9)
JPEG_SHARE = 0.1
FAMILIES = ("food_web", "cycle", "bar_chart", "labelled_parts")
CONTINUE, MOST_TURNS = 0.675, 15  # 1 + geometric, mean about 3.07 as in AI2D of the_cauldron
TWO_IMAGES, NO_IMAGE = 0.03, 0.03


def _table(text: str) -> dict[str, str]:
    """The entries of a text of lines `key: value`; a line that starts with a space goes on with the one above."""
    return dict(line.split(": ", 1) for line in text.strip().replace("\n  ", " ").splitlines())


def _split(text: str, mark: str = ", ") -> list[str]:
    return [part.strip() for part in text.split(mark)]


# The levels of each food web, from those that live on light to the top.
HABITATS = _table("""
a pond: algae, duckweed, lily, lotus, pondweed, hornwort, rush | snail, tadpole, water flea, mayfly, midge, shrimp,
  mussel | newt, frog, beetle, dragonfly, toad, perch, leech | heron, pike, otter, mink, kingfisher, grass snake
a forest: oak, moss, fern, hazel, birch, bramble, beech, ivy | aphid, slug, moth, beetle, caterpillar, wood mouse,
  woodlouse | robin, shrew, spider, hedgehog, wren, blue tit, nuthatch | owl, fox, hawk, marten, badger, wild cat,
  lynx
a meadow: grass, clover, daisy, thistle, dandelion, nettle, yarrow | vole, bee, cricket, hare, butterfly, grasshopper,
  weevil | toad, lizard, mole, starling, weasel, skylark, wasp | stoat, adder, buzzard, kestrel, fox, white stork
the sea: kelp, algae, diatoms, eelgrass, plankton, sea lettuce | krill, limpet, copepod, urchin, prawn, barnacle, sea
  hare | herring, squid, crab, cod, mackerel, octopus, sardine | seal, orca, shark, tuna, dolphin, gannet, swordfish
a desert: cactus, yucca, agave, mesquite, sagebrush, saltbush | locust, jerboa, tortoise, ant, harvester ant, gerbil,
  quail | gecko, scorpion, shrike, tarantula, meerkat, horned toad | coyote, eagle, caracal, rattlesnake, roadrunner,
  monitor
the tundra: lichen, sedge, moss, willow, saxifrage, cotton grass | lemming, vole, hare, ptarmigan, goose, ground
  squirrel | stoat, skua, weasel, raven, arctic fox, gull | wolf, owl, gyrfalcon, wolverine, polar bear, sea eagle
a savanna: acacia, grass, marula, baobab, star grass, aloe | termite, hare, weaver, impala, locust, dung beetle,
  striped mouse | genet, civet, mongoose, jackal, hornbill, baboon, chameleon | lion, leopard, python, cheetah, hyena,
  martial eagle
a rainforest: fig, orchid, bamboo, liana, palm, cacao, bromeliad | ant, macaw, agouti, sloth, toucan, stick insect,
  katydid | frog, coati, bat, iguana, anteater, tree frog, mantis | jaguar, boa, caiman, ocelot, margay, harpy eagle
a river: reed, willow, algae, moss, watercress, sedge, alder | caddis, snail, stonefly, crayfish, minnow, blackfly,
  mussel | trout, dipper, barbel, grayling, salmon, bullhead, eel | osprey, otter, heron, mink, cormorant, goosander
a garden: rose, lettuce, cabbage, bean, carrot, pear tree, tulip, pea | aphid, slug, snail, whitefly, cutworm, sawfly,
  earwig | wren, thrush, ladybird, blackbird, lacewing, toad, robin | cat, hawk, magpie, sparrowhawk, hedgehog, tawny
  owl
a mountain: pine, larch, gentian, edelweiss, heather, crocus, juniper | pika, marmot, vole, beetle, grouse, crossbill,
  moth | stoat, raven, viper, marten, dotterel, alpine newt, chough | eagle, wolf, lynx, snow leopard, bear, vulture
a coral reef: algae, seagrass, red algae, kelp, green algae, diatoms | urchin, conch, damselfish, parrotfish, blenny,
  sea slug | wrasse, lionfish, octopus, goby, triggerfish, lobster, crab | shark, moray, grouper, barracuda, snapper,
  stingray
""")

CYCLES = _table("""
Life cycle of a frog: egg mass, tadpole, tadpole with legs, froglet, adult frog
Life cycle of a butterfly: egg, caterpillar, chrysalis, butterfly
Life cycle of a mosquito: egg raft, larva, pupa, adult
Life cycle of a ladybird: eggs, young larva, grown larva, pupa, beetle
Life cycle of a salmon: eggs in gravel, alevin, fry, parr, smolt, ocean adult, spawner
Life cycle of a hen: egg, embryo, chick, pullet, hen
Life cycle of a sea turtle: buried egg, hatchling, drifter, juvenile, adult, nesting female
Life cycle of a fern: spore, gametophyte, fertilised egg, young fern, grown fern, spore case
Life cycle of a bean: dry seed, swollen seed, seedling, leafy plant, flower, pod
Life cycle of an apple tree: pip, sprout, sapling, blossom, green fruit, ripe apple
Life cycle of a jellyfish: planula, polyp, strobila, ephyra, medusa
Life cycle of a dandelion: seed, rosette, bud, yellow flower, seed head
Water cycle: evaporation, condensation, rain, runoff, river, ocean
Short water cycle: vapour, cloud, rain, lake
Rock cycle: magma, igneous rock, sediment, sandstone, metamorphic rock
Carbon cycle: carbon dioxide, leaf, animal, dead matter, microbes
Nitrogen cycle: nitrogen gas, ammonium, nitrite, nitrate, plant protein, manure
Phases of the moon: new moon, waxing crescent, first quarter, waxing gibbous, full moon, waning gibbous, last quarter,
  waning crescent
Seasons in the north: spring, summer, autumn, winter
Four strokes of an engine: intake, compression, power, exhaust
Cell cycle: growth, copying of DNA, check, mitosis, division
Heartbeat: filling, squeeze of the atria, squeeze of the ventricles, rest
Glass recycling: bottle, bank, sorting, crushing, melting, moulding, filling
Paper recycling: newspaper, bin, pulp, clean pulp, paper roll, printing
Compost cycle: peelings, heap, rotting, compost, bed, vegetables
Programme of a washing machine: soak, wash, drain, rinse, spin
Lights of a crossing: red, red and amber, green, amber
Farm year: plough, sow, weed, harvest, store, fallow
Crop rotation: wheat, clover, barley, turnips
Refrigerator: compressor, condenser, valve, evaporator
Steam power: boiler, turbine, cooling tower, pump
Life of a star: dust, protostar, giant, supernova, nebula
Life cycle of a tick: egg, larva, nymph, adult tick
Way of a library book: shelf, loan desk, reader, return slot, trolley
Project work: question, plan, trial, measurement, review, improvement
Day of a baker: dough, rising, shaping, oven, cooling, counter
Life cycle of a coin: mint, bank, purse, till, worn coin, furnace
Breathing: inhale, pause, exhale, rest
Soil water: shower, puddle, seepage, groundwater, spring, stream
Milk round: cow, milking, dairy, lorry, shop, empty churn
""")

# What the bars of a chart stand for.
GROUPS = _table("""
months: January, February, March, April, May, June, July, August, September, October, November, December
weekdays: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday
fruits: apples, pears, plums, cherries, grapes, figs, melons, peaches, lemons, oranges, kiwis, mangoes, quinces, dates
vegetables: carrots, leeks, onions, beans, peas, spinach, potatoes, pumpkins, tomatoes, radishes, celery, garlic,
  beets
sports: tennis, football, hockey, rowing, judo, cycling, running, golf, chess, fencing, climbing, skating, archery,
  karate
instruments: piano, violin, flute, guitar, drums, trumpet, cello, harp, oboe, clarinet, organ, horn, banjo, tuba
vehicles: cars, buses, trams, lorries, vans, taxis, bicycles, scooters, ferries, tractors, trains, motorbikes
birds: sparrows, finches, swans, ducks, geese, storks, crows, doves, gulls, swifts, terns, cranes, larks, jays
drinks: tea, coffee, milk, cocoa, juice, water, lemonade, cider, mint tea, iced tea, smoothies, broth
subjects: maths, history, music, biology, physics, art, Latin, French, Spanish, geography, chemistry, drama, ethics
materials: steel, glass, paper, wood, copper, rubber, plastic, leather, cotton, wool, concrete, brick, tin, zinc
tools: hammers, saws, drills, pliers, files, chisels, spanners, planes, clamps, axes, rakes, spades, ladders
books: novels, poems, comics, atlases, diaries, cookbooks, plays, fables, guides, thrillers, fairy tales, essays
energy: wind, solar, hydro, gas, coal, biomass, nuclear, tidal, geothermal, oil, peat, waste heat
clothes: shirts, socks, coats, hats, scarves, gloves, skirts, boots, jackets, trousers, belts, dresses, sandals
toys: kites, dolls, puzzles, marbles, balls, robots, blocks, yoyos, puppets, hoops, jigsaws, card games
rooms: kitchen, bathroom, bedroom, hall, cellar, attic, study, garage, pantry, nursery, lounge, porch
animals: cows, sheep, goats, pigs, horses, hens, rabbits, donkeys, turkeys, bees, llamas, ponies, alpacas
fish: carp, trout, pike, bream, perch, eels, tench, roach, catfish, sturgeon, zander, rudd
jobs: nurses, teachers, cooks, farmers, drivers, bakers, painters, tailors, plumbers, miners, pilots, clerks, masons
names: Ada, Ali, Amir, Anna, Ben, Carla, Chen, Dana, David, Elif, Emma, Finn, Grace, Hana, Hugo, Ines, Ivan, Jack,
  Jonas, Kofi, Lara, Leo, Lina, Malik, Maria, Mei, Mona, Nils, Nora, Omar, Paul, Priya, Rosa, Sam, Sara, Tariq, Tess,
  Tom, Uma, Vera, Will, Yuki, Zoe, Zara
""")
# Places that are not: no chart says anything about a real one.
PLACES = [
    start + end
    for start in _split(
        "Ash, Bel, Cor, Dal, Elm, Fen, Gar, Hol, Ink, Kar, Lun, Mor, Nor, Ost, Pel, Rav, Sel, Tor, Ul, Vel, Wen, Yar"
    )
    for end in _split("bury, dale, ford, ham, mere, mouth, port, stead, ton, wick, field, haven")
]
GROUPS["places"] = ", ".join(PLACES)

# Title, unit, what the bars stand for, and the smallest and the largest value.
CHARTS = """
Rain in {place}|mm|months|20 190
Sunshine in {place}|hours|months|40 290
Visitors to {place} castle|people|weekdays|50 980
Books lent in {place}|books|weekdays|20 190
Fruit sold in {place}|kg|fruits|5 95
Harvest near {place}|tonnes|vegetables|10 480
Members of {place} sports club|people|sports|8 140
Pupils of {place} music school|pupils|instruments|3 60
Traffic on {place} bridge|vehicles an hour|vehicles|10 490
Birds counted at {place} lake|birds|birds|5 240
Cups sold at {place} station|cups|drinks|10 390
Favourite lessons in {place}|votes|subjects|2 48
Waste collected in {place}|tonnes|materials|5 190
Tools lent by {place} workshop|loans|tools|2 70
Loans of {place} library|loans|books|10 290
Electricity made near {place}|GWh|energy|10 870
Sales of {place} market|pieces|clothes|5 150
Toys mended in {place}|toys|toys|2 45
Heat used in a house in {place}|kWh|rooms|20 460
Animals on {place} farm|animals|animals|4 120
Fish tagged in {place} weir|fish|fish|5 260
Vacancies in {place}|posts|jobs|2 90
Points scored for {place}|points|names|2 60
Steps walked in {place}|thousand steps|names|3 24
Trees planted in {place} county|trees|places|20 980
Snow depth around {place}|cm|places|2 120
Letters sorted in {place}|thousand|places|5 95
Wells dug around {place}|wells|places|2 40
Minutes read in {place}|minutes|names|10 240
Apples picked near {place}|baskets|names|3 75
"""
INSTRUCTIONS = (
    "Reply with one letter.",
    "Give only the letter of the right choice.",
    "Name the letter of the correct option.",
    "Choose one letter.",
    "Which letter is right?",
)
LETTERS = "EFGHJKLMNPQRSTUVWXYZ"  # marks in a drawing; A to D are the choices


class Question(NamedTuple):
    """A question about facts, before its choices are drawn.

    Attributes:
        ask: what is asked, and of what: all that a checker needs to find the answer in the facts again.
        wording: the question as read.
        right: choices any of which is right.
        wrong: choices none of which is right.
    """

    ask: tuple[Any, ...]
    wording: str
    right: Sequence[str]
    wrong: Sequence[str]


# Facts: what a picture shows.


def _size(random: Random) -> tuple[int, int]:
    width = round(min(max(MEDIAN_WIDTH * math.exp(random.gauss(0, WIDTH_SPREAD)), WIDTHS[0]), WIDTHS[1]))
    return width, round(width / random.uniform(*ASPECTS))


def _web_facts(random: Random, width: int, height: int) -> Facts:
    levels, most = drawings.web_room(width, height)
    while True:
        habitat, pools = random.choice(list(HABITATS.items()))
        title = f"Food web of {habitat}"
        fitting = [
            [n for n in _split(pool) if drawings.web_fits(n, width, height, title, levels, most)]
            for pool in _split(pools, "|")[:levels]
        ]
        if all(fitting):
            break
    chosen = [random.sample(names, min(len(names), random.randint(min(2, most), most))) for names in fitting]
    eats = []
    for lower, upper in pairwise(chosen):
        pairs = [
            (eater, food)
            for eater in upper
            for food in random.sample(lower, min(len(lower), random.choice((1, 1, 2, 2, 3))))
        ]
        left = [food for food in lower if all(food != eaten for _, eaten in pairs)]
        eats += pairs + [(random.choice(upper), food) for food in left]
    return {"title": title, "levels": chosen, "eats": [list(pair) for pair in eats]}


def _cycle_facts(random: Random, width: int, height: int) -> Facts:
    most = drawings.cycle_room(width, height)
    while True:
        title, listed = random.choice(list(CYCLES.items()))
        stages = _split(listed)
        if len(stages) <= most and drawings.cycle_fits(width, height, title, stages):
            break
    first = random.randrange(len(stages))
    return {
        "title": title,
        "stages": stages[first:] + stages[:first],
        "clockwise": random.random() < 0.7,
        "colour": random.choice(drawings.SERIES),
    }


def _chart_facts(random: Random, *sizes: tuple[int, int]) -> list[Facts]:
    """One chart a size: the same things in each, other values and another place."""
    title, unit, group, span = random.choice(CHARTS.strip().splitlines()).split("|")
    least, most = (int(end) for end in span.split())
    names = _split(GROUPS[group])
    count = random.randint(3, min(len(names), *(drawings.chart_room(*size) for size in sizes)))
    if group in ("months", "weekdays"):
        first = random.randrange(len(names) - count + 1)
        names = names[first : first + count]
    else:
        names = random.sample(names, count)
    colours = random.choice(([random.choice(drawings.SERIES)], list(drawings.SERIES)))
    return [
        {
            "title": title.format(place=place),
            "unit": unit,
            "bars": [list(bar) for bar in zip(names, random.sample(range(least, most + 1), count), strict=True)],
            "want_upright": random.random() < 0.6,
            "colours": colours,
        }
        for place in random.sample(PLACES, len(sizes))
    ]


def _parts_facts(random: Random, width: int, height: int) -> Facts:
    key, (title, _, parts) = random.choice(list(drawings.OBJECTS.items()))
    most = min(len(parts), drawings.parts_room(width, height))
    chosen = random.sample(parts, random.randint(4, most))
    letters = random.sample(LETTERS, len(chosen))
    labels = [{"letter": letter, **part._asdict()} for letter, part in zip(letters, chosen, strict=True)]
    return {"title": f"Parts of {title}", "object": key, "labels": labels}


# Questions: each family yields all it can ask about its facts.


def _numbers(value: int, step: int = 1) -> list[str]:
    """Numbers near a value, none of them negative."""
    return [f"{value + step * off}" for off in (-3, -2, -1, 1, 2, 3, 4) if value + step * off >= 0]


def _yes(true: bool) -> tuple[list[str], list[str]]:
    return (["yes"], ["no"]) if true else (["no"], ["yes"])


def _web_questions(facts: Facts, random: Random) -> Iterator[Question]:
    say = random.choice
    living = [name for level in facts["levels"] for name in level]
    foods = {x: [food for eater, food in facts["eats"] if eater == x] for x in living}
    eaters = {x: [eater for eater, food in facts["eats"] if food == x] for x in living}
    for x in living:
        spare = [n for n in living if n != x]
        if eaters[x]:
            who = (
                f"Which of these eats the {x}?",
                f"Who feeds on the {x} in the diagram?",
                f"Where does energy from the {x} go next?",
            )
            yield Question(("eaters", x), say(who), eaters[x], [n for n in spare if n not in eaters[x]])
            whom = (f"Which of these does not eat the {x}?", f"The {x} has nothing to fear from which of these?")
            yield Question(("strangers", x), say(whom), [n for n in spare if n not in eaters[x]], eaters[x])
        if foods[x]:
            what = (
                f"What does the {x} eat?",
                f"Which of these is food for the {x}?",
                f"From which of these does an arrow lead to the {x}?",
            )
            yield Question(("foods", x), say(what), foods[x], [n for n in spare if n not in foods[x]])
            wording = f"On how many kinds of food does the {x} live, according to the arrows?"
            yield Question(("num_foods", x), wording, [f"{len(foods[x])}"], _numbers(len(foods[x])))
            rivals = [n for n in spare if set(foods[n]) & set(foods[x])]
            if rivals:
                wording = f"Which of these competes with the {x} because both eat the same thing?"
                yield Question(("rivals", x), wording, rivals, [n for n in spare if n not in rivals])
        starving = [n for n in eaters[x] if foods[n] == [x]]
        if starving:
            wording = f"Suppose a disease kills every {x}. Which living thing would lose its only food in this web?"
            yield Question(("starving", x), wording, starving, [n for n in spare if n not in starving])
        wording = f"How many living things in the picture feed directly on the {x}?"
        yield Question(("num_eaters", x), wording, [f"{len(eaters[x])}"], _numbers(len(eaters[x])))
        for y in spare:
            wording = say((f"Does the {x} eat the {y}?", f"Does an arrow run from the {y} to the {x}?"))
            yield Question(("eats", x, y), wording, *_yes(y in foods[x]))
    makers = [x for x in living if not foods[x]]
    tops = [x for x in living if not eaters[x]]
    yield Question(
        ("producers",), "Which of these makes its own food from light?", makers, [x for x in living if foods[x]]
    )
    yield Question(("tops",), "Which of these is eaten by nobody here?", tops, [x for x in living if eaters[x]])
    yield Question(
        ("num_arrows",),
        "How many arrows does the diagram have?",
        [f"{len(facts['eats'])}"],
        _numbers(len(facts["eats"])),
    )
    yield Question(("num_living",), "How many living things are shown?", [f"{len(living)}"], _numbers(len(living)))
    wording = "How many producers stand at the beginning of this food web?"
    yield Question(("num_producers",), wording, [f"{len(makers)}"], _numbers(len(makers)))
    chains = [(a, b, c) for a in living for b in eaters[a] for c in eaters[b]]
    for start in sorted({chain[0] for chain in chains}):
        right = [", ".join(chain) for chain in chains if chain[0] == start]
        tries = [tuple(random.sample(living, 3)) for _ in range(9)] + [chain[::-1] for chain in chains[:3]]
        wrong = sorted({", ".join(three) for three in tries if three not in chains})
        yield Question(("chains", start), f"Which food chain can be read from the arrows, {start} first?", right, wrong)


def _cycle_questions(facts: Facts, random: Random) -> Iterator[Question]:
    say = random.choice
    stages = facts["stages"]
    count = len(stages)
    for k, x in enumerate(stages):
        spare = [n for n in stages if n != x]
        after, before = stages[(k + 1) % count], stages[k - 1]
        wording = say(
            (
                f"Which stage comes right after '{x}'?",
                f"What does '{x}' turn into next?",
                f"Where does the arrow from '{x}' lead?",
            )
        )
        yield Question(("after", x), wording, [after], [n for n in spare if n != after])
        wording = say((f"Which stage comes just before '{x}'?", f"What leads directly to '{x}'?"))
        yield Question(("before", x), wording, [before], [n for n in spare if n != before])
        wording = say((f"Which stage carries the number {k + 1}?", f"What stands at place {k + 1} of the cycle?"))
        yield Question(("at", k + 1), wording, [x], spare)
        wording = say((f"Which number does the stage '{x}' carry?", f"At which place of the cycle is '{x}'?"))
        yield Question(("number", x), wording, [f"{k + 1}"], [f"{n + 1}" for n in range(count) if n != k])
        for jump in range(2, count):
            y = stages[(k + jump) % count]
            wording = f"Start at '{x}' and follow {jump} arrows. Which stage do you reach?"
            yield Question(("follow", x, jump), wording, [y], [n for n in stages if n != y])
            wording = f"How many arrows lie on the way from '{x}' to '{y}'?"
            yield Question(("arrows", x, y), wording, [f"{jump}"], [f"{n}" for n in range(1, count + 2) if n != jump])
        for y in spare:
            yield Question(("follows", y, x), f"Does '{y}' follow directly on '{x}'?", *_yes(y == after))
        three = [stages[(k + step) % count] for step in range(3)]
        order = [[three[i] for i in places] for places in ((0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))]
        good = [[stages[(j + step) % count] for step in range(3)] for j in range(count)]
        wording = f"Which three stages follow one another in this order, '{three[1]}' among them?"
        yield Question(
            ("order", three[1]), wording, [", then ".join(three)], [", then ".join(o) for o in order if o not in good]
        )
    yield Question(("num_stages",), "How many stages does the cycle have?", [f"{count}"], _numbers(count))
    strangers = [n for title, listed in CYCLES.items() for n in _split(listed) if n not in stages]
    yield Question(("missing",), "Which of these is not a stage in the picture?", random.sample(strangers, 3), stages)
    turning = ["clockwise", "anticlockwise"] if facts["clockwise"] else ["anticlockwise", "clockwise"]
    yield Question(("turning",), "In which direction do the arrows run?", turning[:1], turning[1:])


def _chart_questions(facts: Facts, random: Random) -> Iterator[Question]:
    say, unit = random.choice, facts["unit"]
    value: dict[str, int] = dict(facts["bars"])
    names = list(value)
    ranked = sorted(names, key=lambda name: -value[name])
    step = max(1, max(value.values()) // 20)
    for wording, kind, place in (
        (say(("Which bar is the longest?", "Where is the value highest?")), "most", 0),
        (say(("Which bar is the shortest?", "Where is the value lowest?")), "least", -1),
        ("Which one has the second largest value?", "second", 1),
    ):
        yield Question((kind,), wording, [ranked[place]], [n for n in names if n != ranked[place]])
    for x in names:
        others = [f"{value[n]} {unit}" for n in names if n != x]
        wording = say(
            (
                f"What is the value of {x}?",
                f"How much does the chart show for {x}?",
                f"Read the bar of {x}. Which figure belongs to it?",
            )
        )
        yield Question(("value", x), wording, [f"{value[x]} {unit}"], others)
        wording = say(
            (f"To which bar does the value {value[x]} belong?", f"Which one reaches exactly {value[x]} {unit}?")
        )
        yield Question(("holder", value[x]), wording, [x], [n for n in names if n != x])
        for y in names:
            if x == y:
                continue
            yield Question(
                ("longer", x, y), f"Is the bar of {x} longer than the bar of {y}?", *_yes(value[x] > value[y])
            )
            if value[x] > value[y]:
                gap, both = value[x] - value[y], value[x] + value[y]
                wording = say((f"By how much does {x} exceed {y}?", f"What is the difference between {x} and {y}?"))
                yield Question(("gap", x, y), wording, [f"{gap} {unit}"], [f"{n} {unit}" for n in _numbers(gap, step)])
                wording = f"How much do {x} and {y} make together?"
                yield Question(
                    ("both", x, y), wording, [f"{both} {unit}"], [f"{n} {unit}" for n in _numbers(both, step)]
                )
    for limit in drawings.axis_ticks(max(value.values()))[1:-1]:
        above, below = [n for n in names if value[n] > limit], [n for n in names if value[n] <= limit]
        yield Question(
            ("num_above", limit), f"How many bars rise above {limit} {unit}?", [f"{len(above)}"], _numbers(len(above))
        )
        if above and below:
            yield Question(("above", limit), f"Which of these has a value of more than {limit} {unit}?", above, below)
            yield Question(("up_to", limit), f"Which of these stays at or below {limit} {unit}?", below, above)
    for _ in range(4):
        three = random.sample(names, 3)
        falling = sorted(three, key=lambda name: -value[name])
        wrong = [", ".join(order) for order in permutations(three) if list(order) != falling]
        wording = (
            f"Sort {three[0]}, {three[1]} and {three[2]} from the longest bar to the shortest. Which list is right?"
        )
        yield Question(("order", *three), wording, [", ".join(falling)], wrong)
    total, span = sum(value.values()), value[ranked[0]] - value[ranked[-1]]
    yield Question(
        ("total",), "What do all bars add up to?", [f"{total} {unit}"], [f"{n} {unit}" for n in _numbers(total, step)]
    )
    wording = "How far apart are the largest and the smallest value?"
    yield Question(("span",), wording, [f"{span} {unit}"], [f"{n} {unit}" for n in _numbers(span, step)])
    yield Question(("num_bars",), "How many bars does the chart have?", [f"{len(names)}"], _numbers(len(names)))


def _parts_questions(facts: Facts, random: Random) -> Iterator[Question]:
    say = random.choice
    labels = facts["labels"]
    names, letters = [label["name"] for label in labels], [label["letter"] for label in labels]
    for k, label in enumerate(labels):
        name, letter, role = label["name"], label["letter"], label["role"]
        other = labels[:k] + labels[k + 1 :]
        wording = say(
            (
                f"Which part is marked {letter}?",
                f"What does the line from {letter} point at?",
                f"Name the part labelled {letter}.",
            )
        )
        yield Question(("part", letter), wording, [name], [o["name"] for o in other])
        wording = say((f"Which letter marks the {name}?", f"Where is the {name} in the drawing?"))
        yield Question(("letter", name), wording, [letter], [o["letter"] for o in other])
        wording = say(
            (f"What is true of the part marked {letter}?", f"Which task has the part with the letter {letter}?")
        )
        yield Question(("role", letter), wording, [f"It {role}."], [f"It {o['role']}." for o in other])
        yield Question(
            ("actor", name), f"Which letter belongs to the part that {role}?", [letter], [o["letter"] for o in other]
        )
        for o in labels:
            yield Question(("marks", o["letter"], name), f"Does {o['letter']} mark the {name}?", *_yes(o is label))
    yield Question(("num_letters",), "How many parts carry a letter?", [f"{len(labels)}"], _numbers(len(labels)))
    unmarked = [part.name for part in drawings.OBJECTS[facts["object"]][2] if part.name not in names]
    if unmarked:
        yield Question(("unmarked",), "Which part of the object has no letter here?", unmarked, names)
    strange = [letter for letter in LETTERS if letter not in letters]
    yield Question(("absent",), "Which of these letters is missing in the drawing?", random.sample(strange, 4), letters)
    for end, word in ((0, "highest"), (-1, "lowest")):
        ordered = sorted(labels, key=lambda label: label["point"][1])
        ordered = ordered if end == 0 else ordered[::-1]
        if abs(ordered[0]["point"][1] - ordered[1]["point"][1]) >= 5:
            wording = f"Which of the marked points lies {word} in the drawing?"
            yield Question((word,), wording, [ordered[0]["name"]], [o["name"] for o in ordered[1:]])


def _pair_questions(first: Facts, second: Facts, random: Random) -> Iterator[Question]:
    one, two = dict(first["bars"]), dict(second["bars"])
    unit, pictures = first["unit"], ["the first picture", "the second picture"]
    step = max(1, max(*one.values(), *two.values()) // 20)
    for x in one:
        if one[x] != two[x]:
            ranked = pictures if one[x] > two[x] else pictures[::-1]
            yield Question(("larger_in", x), f"In which picture is the value of {x} larger?", ranked[:1], ranked[1:])
        gap, both = abs(one[x] - two[x]), one[x] + two[x]
        wording = f"How far apart are the two values of {x}?"
        yield Question(("gap_of", x), wording, [f"{gap} {unit}"], [f"{n} {unit}" for n in _numbers(gap, step)])
        wording = f"What do both pictures together show for {x}?"
        yield Question(("both_of", x), wording, [f"{both} {unit}"], [f"{n} {unit}" for n in _numbers(both, step)])
    if sum(one.values()) != sum(two.values()):
        ranked = pictures if sum(one.values()) > sum(two.values()) else pictures[::-1]
        yield Question(("larger_total",), "In which picture do the bars add up to more?", ranked[:1], ranked[1:])
    same = max(one, key=lambda n: one[n]) == max(two, key=lambda n: two[n])
    yield Question(("same_most",), "Is the longest bar the same one in both pictures?", *_yes(same))
    for which, facts in zip(("first", "second"), (first, second), strict=True):
        for question in _by_turns(_chart_questions(facts, random), random)[:6]:
            wording = f"Look at the {which} picture. {question.wording}"
            yield Question((which, *question.ask), wording, question.right, question.wrong)


def _text_questions(random: Random) -> Iterator[Question]:
    words = sorted(
        {
            word
            for group in ("fruits", "tools", "clothes", "birds", "sports")
            for word in _split(GROUPS[group])
            if " " not in word
        }
    )
    alphabet, days, months = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", _split(GROUPS["weekdays"]), _split(GROUPS["months"])
    for _ in range(2):
        a, b, c, d = random.randint(12, 98), random.randint(2, 9), random.randrange(25), random.randint(2, 6)
        for kind, wording, value in (
            ("sum", f"What is {a} plus {b * 7}?", a + b * 7),
            ("difference", f"What is {a + b * 5} minus {b * 5}?", a),
            ("product", f"What is {a} times {b}?", a * b),
            ("half", f"What is half of {2 * a}?", a),
            ("minutes", f"How many minutes are {b} hours?", b * 60),
            ("centimetres", f"How many centimetres are {a} metres?", a * 100),
        ):
            numbers = [int(word) for word in wording.replace("?", "").split() if word.isdigit()]
            yield Question(
                (kind, *numbers),
                wording,
                [f"{value}"],
                _numbers(value, 100 if kind == "centimetres" else random.choice((1, 10))),
            )
        wording = f"Which letter follows {alphabet[c]} in the alphabet?"
        yield Question(
            ("next_letter", alphabet[c]), wording, [alphabet[c + 1]], [x for x in alphabet if x != alphabet[c + 1]]
        )
        day, month = random.randrange(7), random.randrange(12)
        due = days[(day + d) % 7]
        wording = f"Today is {days[day]}. Which day of the week is it in {d} days?"
        yield Question(("weekday", days[day], d), wording, [due], [x for x in days if x != due])
        due = months[(month + d) % 12]
        wording = f"A letter sent in {months[month]} arrives {d} months later. In which month?"
        yield Question(("month", months[month], d), wording, [due], [x for x in months if x != due])
        four = random.sample(words, 4)
        yield Question(
            ("dictionary", *four),
            f"Which word stands first in a dictionary: {', '.join(four)}?",
            [min(four)],
            sorted(four)[1:],
        )
        word = random.choice(words)
        yield Question(
            ("letters", word), f"How many letters has the word '{word}'?", [f"{len(word)}"], _numbers(len(word))
        )
        wording = f"Which word is '{word}' read from the back?"
        shuffled = {"".join(random.sample(word, len(word))) for _ in range(9)} - {word[::-1]}
        yield Question(("backwards", word), wording, [word[::-1]], sorted(shuffled))
    for shape, sides in (("triangle", 3), ("square", 4), ("pentagon", 5), ("hexagon", 6), ("octagon", 8)):
        yield Question(
            ("sides", shape),
            f"How many sides has a {shape}?".replace("a octagon", "an octagon"),
            [f"{sides}"],
            _numbers(sides),
        )


def _by_turns(questions: Iterable[Question], random: Random) -> list[Question]:
    """The questions in random order, no wording twice, kinds taking turns: none crowds the others out."""
    kinds: dict[Any, dict[str, Question]] = {}
    for question in questions:
        if question.right and question.wrong:
            kinds.setdefault(question.ask[0], {})[question.wording] = question
    ordered: list[tuple[int, float, Question]] = []
    for group in kinds.values():
        ordered += [(n, random.random(), q) for n, q in enumerate(random.sample(list(group.values()), len(group)))]
    return [question for _, _, question in sorted(ordered, key=lambda entry: entry[:2])]


# Rows, and the files.


def _picture(random: Random, family: str) -> tuple[list[Facts], Iterator[Question]]:
    """The facts of a row's pictures, none to two, and all that can be asked about them."""
    sizes = [_size(random) for _ in range({"text": 0, "two_charts": 2}.get(family, 1))]
    match family:
        case "food_web":
            facts = [_web_facts(random, *sizes[0])]
            questions = _web_questions(facts[0], random)
        case "cycle":
            facts = [_cycle_facts(random, *sizes[0])]
            questions = _cycle_questions(facts[0], random)
        case "labelled_parts":
            facts = [_parts_facts(random, *sizes[0])]
            questions = _parts_questions(facts[0], random)
        case "bar_chart":
            facts = _chart_facts(random, *sizes)
            questions = _chart_questions(facts[0], random)
        case "two_charts":
            facts = _chart_facts(random, *sizes)
            questions = _pair_questions(facts[0], facts[1], random)
        case _:
            facts, questions = [], _text_questions(random)
    drawn = "bar_chart" if family == "two_charts" else family
    sized = [{"family": drawn, "width": w, "height": h, **fact} for (w, h), fact in zip(sizes, facts, strict=True)]
    return sized, questions


def make_row(index: int, seed: int) -> dict[str, Any]:
    """One row of the set, all but its pixels.

    Returns:
        `id`, `images`, `texts` and `source` as every reader of our row form knows them, and `facts`: those of the
        pictures, and for each turn what it asks.
    """
    # A text seeds alike on every machine: Python hashes it with SHA-512.
    random = Random(f"mmdp demo {VERSION}, seed {seed}, row {index}")  # noqa: S311  no secret hangs on it
    kind = random.random()
    family = random.choice(FAMILIES)
    if kind < NO_IMAGE + TWO_IMAGES:
        family = "text" if kind < NO_IMAGE else "two_charts"
    pictures, questions = _picture(random, family)
    turns = 1
    while turns < MOST_TURNS and random.random() < CONTINUE:
        turns += 1
    chosen = _by_turns(questions, random)[:turns]
    assert len(chosen) == turns, f"{family} {pictures} yields {len(chosen)} questions, wanted {turns}"
    instruction = random.choice(INSTRUCTIONS)
    names = []
    for number in range(len(pictures)):
        suffix = "jpg" if random.random() < JPEG_SHARE else "png"
        names.append(f"images/{index:05}-{number}.{suffix}")
    return {
        "id": f"demo-{seed}-{index}",
        "images": names,
        "texts": [_turn(question, instruction, random) for question in chosen],
        "source": family,
        "facts": {"pictures": pictures, "asks": [list(question.ask) for question in chosen]},
    }


def _turn(question: Question, instruction: str, random: Random) -> dict[str, str]:
    options = random.sample(question.wrong, min(3, len(question.wrong)))
    place = random.randrange(len(options) + 1)
    options.insert(place, random.choice(question.right))
    choices = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=False))
    user = f"Question: {question.wording}\nChoices:\n{choices}\n{instruction}"
    return {"user": user, "assistant": f"Answer: {'ABCD'[place]}"}


def demo_jsonl(cache: Path, *, rows: int = 500, seed: int = 0) -> Path:
    """The path of the demo set's JSONL file; made where it is not there yet.

    Args:
        cache: the folder to keep it in.
        rows: samples.
        seed: another seed gives another set.

    Returns:
        `cache/demo-VERSION-ROWS-SEED/train.jsonl`, its images in `images/` beside it.
    """
    folder = cache / f"demo-{VERSION}-{rows}-{seed}"
    _make_once(folder, lambda empty: _write_rows(empty, rows, seed))
    return folder / "train.jsonl"


def _make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder whole or not at all, whoever else tries at the same time and whenever it is interrupted."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        fill(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # the name is taken: another process was quicker, and its files are the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_rows(folder: Path, rows: int, seed: int) -> None:
    (folder / "images").mkdir()
    with (folder / "train.jsonl").open("w", encoding="ascii", newline="\n") as file:
        for index in track(range(rows), "drawing the demo set"):
            row = make_row(index, seed)
            for name, facts in zip(row["images"], row["facts"]["pictures"], strict=True):
                image, facts["places"] = drawings.draw(facts)
                if name.endswith(".jpg"):
                    image.convert("RGB").save(folder / name, quality=90)
                else:
                    image.save(folder / name, compress_level=4)  # a tenth larger than 6, in half the time
            file.write(json.dumps(row) + "\n")


# The tokenizer.

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def demo_tokenizer(cache: Path) -> Path:
    """The folder of the demo tokenizer, a byte-level BPE with ChatML marks; trained where it is not there yet.

    Args:
        cache: the folder to keep it in.

    Returns:
        A folder with `tokenizer.json` and `tokenizer_config.json`, as `AutoTokenizer.from_pretrained` takes it.
    """
    folder = cache / f"demo-tokenizer-{VERSION}"
    _make_once(folder, _write_tokenizer)
    return folder


def _texts() -> Iterator[str]:
    for index in range(TRAINING_ROWS):
        for turn in make_row(index, seed=0)["texts"]:
            yield f"user\n{turn['user']}\nassistant\n{turn['assistant']}\nsystem\n"


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,  # the text is small: a word read once is worth an entry
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "extra_special_tokens": {"image_token": "<|image|>"},
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="ascii")
