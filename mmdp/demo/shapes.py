"""The objects with parts: how each is drawn, and where its parts are and what they do.

Adds: `OBJECTS`, `Part`. In a shape, numbers are positions 0..100 across and down; those of `line` and `ring` start with
the width of the stroke. Leaves out: drawing them (`parts_drawing`), and which parts are marked (`facts`).
"""

from __future__ import annotations

from typing import NamedTuple

from mmdp.demo.layout import Point

SHAPES = """
flower: a flower
line brown 1.5 50 86 38 98; line brown 1.5 50 86 62 98; line brown 1.5 50 84 50 99; line green 3 50 45 50 86
poly green 50 86 62 74 86 70 74 86; poly green 50 74 36 60 16 58 28 72; line green 2 50 72 72 60
oval pink 68 51 79 64; oval pink 38 2 62 26; oval pink 53 10 77 34; oval pink 53 26 77 50; oval pink 38 33 62 57
oval pink 23 26 47 50; oval pink 23 10 47 34; oval yellow 38 18 62 42
part petal 28 20: draws insects with its colour; part stem 50 68: carries water up to the blossom
part leaf 74 78: makes sugar from sunlight; part pollen disc 50 30: holds the pollen
part root 41 95: takes up water from the soil; part bud 74 57: opens into the next blossom

fish: a fish
poly orange 76 50 98 30 92 50 98 70; poly orange 34 28 52 12 66 30; poly orange 44 70 50 84 60 70; oval sky 8 26 82 74
poly orange 44 52 58 46 58 62; line grey 1 34 50 76 50; line brown 1.2 30 36 33 50 30 64; oval white 15 40 24 49
oval ink 18 42 22 46; line ink 1.5 9 55 17 57
part tail fin 92 40: drives the animal forward; part back fin 52 20: keeps the body from rolling over
part belly fin 51 78: helps to brake and to turn; part eye 20 44: sees the prey
part gill slit 32 50: takes oxygen out of the water; part mouth 10 56: takes in the food
part side line 68 50: feels pressure waves in the water; part breast fin 54 54: steers up and down

boat: a sailing boat
poly sky 0 80 100 80 100 92 0 92; poly brown 40 82 56 82 52 98 44 98; poly red 84 72 90 72 88 94 83 94
poly orange 8 68 90 68 80 84 20 84; line brown 1.6 48 4 48 68; line brown 1.4 48 62 84 62; poly white 50 8 50 59 82 59
poly yellow 46 14 46 62 14 62; poly pink 48 3 60 6 48 10
part mast 48 65: holds up the sails; part mainsail 60 48: catches most of the wind
part jib 36 50: is the small sail in front; part hull 30 77: keeps the water out and floats; part rudder 86 88: steers
part keel 48 92: keeps the vessel from tipping over; part boom 74 62: stretches the foot of the large sail
part pennant 53 6: shows where the wind comes from

bicycle: a bicycle
ring ink 1.6 3 48 43 88; ring ink 1.6 57 48 97 88; line grey 0.6 23 48 23 88; line grey 0.6 3 68 43 68
line grey 0.6 77 48 77 88; line grey 0.6 57 68 97 68; line red 2.4 23 68 36 36 66 36 50 68 23 68
line red 2.4 36 36 50 68; line red 2 33 29 36 36; poly ink 26 25 43 25 41 30 28 30; line blue 2.2 64 24 66 36 77 68
line ink 2.2 56 22 64 24 74 20; oval yellow 65 27 73 35; line grey 1.2 23 65 50 64 50 72 23 71; oval grey 45 63 55 73
line ink 1.4 50 68 56 78; line ink 2.4 52 79 60 77
part saddle 34 27: carries the rider; part handlebar 59 23: turns the front of the machine
part chain 36 71: brings the power to the back; part pedal 57 78: takes the push of the foot
part front wheel 95 60: rolls first over every stone; part rear wheel 5 60: is driven
part fork 73 56: holds the axle that is steered; part frame 54 37: joins all the other pieces
part lamp 69 31: lights the road

house: a house
box green 0 92 100 98; box brown 66 10 76 34; poly red 10 44 50 10 90 44; box white 18 44 82 92; box brown 42 60 58 92
oval yellow 54 75 57 78; box sky 24 54 36 68; box sky 64 54 76 68; line ink 0.8 30 54 30 68; line ink 0.8 24 61 36 61
line ink 0.8 70 54 70 68; line ink 0.8 64 61 76 61; box grey 38 92 62 96; oval sky 44 26 56 38
poly orange 24 68 36 68 34 72 26 72
part roof 32 34: keeps off the rain; part chimney 71 18: leads the smoke away; part door 48 80: lets people in
part window 70 64: lets daylight into the room; part wall 22 82: bears the beams
part step 50 94: leads up to the entrance; part attic window 50 32: lights the space under the tiles
part flower box 30 70: is planted in spring

volcano: a volcano
oval grey 34 2 56 20; oval grey 48 0 72 18; oval grey 42 8 62 26; box brown 0 78 100 98; box orange 0 84 100 88
poly brown 6 78 40 28 60 28 94 78; oval red 34 80 66 98; poly red 47 82 53 82 52 28 48 28
poly red 50 27 60 28 76 52 68 54; line red 2.4 50 62 30 52 26 50; poly orange 18 56 24 46 30 54
line ink 0.8 40 28 60 28
part ash cloud 52 12: darkens the sky; part crater 44 28: is the open mouth at the top
part main pipe 50 44: leads the melt up; part magma chamber 44 90: stores the melt
part lava stream 68 44: glows on the slope; part side pipe 38 56: feeds a smaller opening
part rock layer 14 86: was laid down long before

cell: a plant cell
card green 4 8 96 94; card yellow 8 12 92 90; oval pink 14 20 44 50; oval red 24 30 34 40; card sky 46 36 84 80
oval green 52 17 68 27; oval green 16 62 32 72; oval green 72 19 88 29; oval orange 18 76 38 86
oval orange 36 54 44 70
part wall 6 60: gives a stiff shape; part nucleus 18 35: keeps the plan of the whole unit
part nucleolus 29 35: builds ribosomes; part vacuole 66 60: stores water and salts
part chloroplast 60 22: turns light into sugar; part mitochondrion 28 81: frees energy from food
part cytoplasm 44 85: is the jelly around everything else

ant: an ant
line ink 1.4 40 52 30 72 24 90; line ink 1.4 46 52 48 74 44 92; line ink 1.4 52 52 64 72 70 90
line ink 1.2 20 40 10 22 2 18; line ink 1.2 24 38 20 20 12 10; poly ink 8 52 2 60 12 57; oval brown 58 32 98 64
oval brown 53 44 61 52; oval red 32 38 56 56; oval orange 6 34 34 58; oval ink 12 41 18 47
part feeler 12 10: smells and touches; part eye 15 44: sees movement; part jaw 5 57: cuts and carries
part head 26 50: holds the brain; part chest 46 47: moves all the legs; part abdomen 82 46: holds the stomach
part leg 65 75: walks; part waist 57 48: lets the body bend

mushroom: a mushroom
box green 0 84 100 88; line grey 1.2 44 88 30 98; line grey 1.2 50 88 50 99; line grey 1.2 56 88 72 97
oval white 36 74 64 94; poly white 43 44 57 44 60 86 40 86; poly orange 20 42 80 42 60 52 40 52
poly white 40 56 60 56 66 64 34 64; oval red 12 6 88 46; oval white 28 16 38 24; oval white 50 10 62 18
oval white 66 24 76 32; oval white 42 28 50 34
part cap 20 30: shelters the spores from rain; part gills 32 46: let the spores fall
part stalk 50 72: lifts the head up; part ring 38 60: is left of the veil
part cup 38 84: is left of the young wrapping; part threads 68 95: feed on rotting wood
part scale 56 14: is a flake on the skin

rocket: a rocket
poly yellow 40 82 60 82 50 100; poly red 45 82 55 82 50 93; poly grey 38 76 62 76 66 84 34 84
poly blue 34 54 34 78 14 86; poly blue 66 54 66 78 86 86; poly white 34 30 66 30 66 78 34 78
poly red 34 30 50 2 66 30; oval sky 43 35 57 49; box orange 34 54 66 58; card grey 44 62 56 74
part nose cone 50 16: cuts through the air; part porthole 50 42: lets the crew look out
part fin 22 80: keeps the flight straight; part nozzle 62 80: aims the jet; part flame 50 94: is burning gas
part hatch 50 68: lets the crew in; part stripe 38 56: marks where the stages part; part tank 62 66: carries the fuel

tree: a tree
box green 0 90 100 94; line brown 2 46 90 30 99; line brown 2 54 90 72 99; line brown 2 50 90 50 99
poly brown 43 92 57 92 54 40 46 40; line brown 3 50 62 74 46; line brown 3 50 58 26 44; oval green 8 18 50 58
oval green 50 18 92 58; oval green 24 2 76 46; oval red 24 36 30 42; oval red 70 30 76 36; oval red 46 14 52 20
oval ink 46 66 54 78; poly orange 62 50 76 44 78 52 68 55
part crown 34 12: turns sunlight into sugar; part trunk 46 84: bears the weight; part root 68 97: grips the soil
part fruit 73 33: carries the seeds; part hollow 50 72: shelters an owl; part nest 72 50: holds eggs in spring

kettle: a kettle
ring ink 3 34 8 70 50; poly sky 76 48 96 30 98 36 80 64; poly sky 24 40 78 40 88 88 14 88; oval grey 28 34 74 44
oval ink 47 27 55 35; box red 14 88 88 94; card white 40 54 62 64; line blue 1 42 70 60 70; line blue 1 42 76 60 76
line grey 1.4 96 26 94 22 98 17 94 12 98 7
part spout 92 38: pours; part lid 34 39: closes the top; part knob 51 30: is lifted to fill in water
part handle 36 20: is held while pouring; part body 24 76: holds the water; part base 30 91: heats
part steam 96 14: shows that the water boils; part gauge 51 59: shows how hot the water is
"""


class Part(NamedTuple):
    """A part of an object: its name, where it is (0..100 across and down), and what it does."""

    name: str
    point: Point
    role: str


def _read_objects() -> dict[str, tuple[str, list[list[str]], list[Part]]]:
    objects = {}
    for block in SHAPES.strip().split("\n\n"):
        head, *lines = block.split("\n")
        key, _, title = head.partition(": ")
        shapes, parts = [], []
        for entry in "; ".join(lines).split("; "):
            words = entry.split()
            if words[0] == "part":
                named, _, role = entry.partition(": ")
                *name, x, y = named.split()[1:]
                parts.append(Part(" ".join(name), (float(x), float(y)), role))
            else:
                shapes.append(words)
        objects[key] = title, shapes, parts
    return objects


OBJECTS = _read_objects()
