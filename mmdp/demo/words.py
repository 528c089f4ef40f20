"""The words of the demo set: what webs, cycles and charts are about, and what is said to the reader.

Adds: `HABITATS`, `CYCLES`, `GROUPS`, `PLACES`, `CHARTS`, `INSTRUCTIONS`, `LETTERS`; `split`, which takes a list apart.
Leaves out: the objects with parts (`shapes`), and the wording of questions (`*_questions`).
"""

from __future__ import annotations


def _table(text: str) -> dict[str, str]:
    """The entries of a text of lines `key: value`; a line that starts with a space goes on with the one above."""
    return dict(line.split(": ", 1) for line in text.strip().replace("\n  ", " ").splitlines())


def split(text: str, mark: str = ", ") -> list[str]:
    """The parts of a list in words, without the space around them."""
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
    for start in split(
        "Ash, Bel, Cor, Dal, Elm, Fen, Gar, Hol, Ink, Kar, Lun, Mor, Nor, Ost, Pel, Rav, Sel, Tor, Ul, Vel, Wen, Yar"
    )
    for end in split("bury, dale, ford, ham, mere, mouth, port, stead, ton, wick, field, haven")
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
