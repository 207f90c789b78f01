"""Word lists and names for the question families."""

from __future__ import annotations

from random import Random


def listed(text: str) -> list[str]:
    """Split `text` into its words."""
    return text.split()


NAMES = listed(
    "Ada Ben Cleo Dan Ella Finn Gina Hugo Iris Jack Kira Leo Mira Noah Olga Paul Rosa Sam Tara Uma "
    "Vera Will Yara Zoe Anna Boris Clara David Emil Fay Grace Henry Ines Jonas Karl Lena Max Nora "
    "Oscar Pia Ruth Simon Tom Ursula Victor Wanda Alma Bruno Diego Edith"
)
CITIES = listed(
    "Oslo Paris Rome Lima Cairo Delhi Tokyo Berlin Madrid Vienna Prague Dublin Lisbon Athens "
    "Warsaw Geneva Boston Quito Seoul Hanoi"
)
JOBS = listed(
    "teacher baker doctor pilot farmer nurse painter writer lawyer sailor tailor driver singer "
    "engineer gardener carpenter"
)
ANIMALS = listed(
    "fox owl cat dog bear wolf hare mouse frog goat horse lion tiger duck swan crow otter badger "
    "beaver rabbit turtle hedgehog squirrel donkey"
)
COLOURS = listed("red blue green yellow black white brown grey pink purple orange silver golden")
OBJECTS = listed(
    "door gate box chest room house key lamp boat bag book car chair clock drawer garden jar "
    "letter locker tower train window"
)
FRUITS = listed(
    "apple pear plum cherry lemon melon grape peach mango banana fig kiwi lime orange papaya quince"
)
PLACES = listed(
    "forest garden village castle valley meadow desert harbour library mountain swamp town cave "
    "barn orchard lighthouse"
)
THINGS = listed(
    "lantern map key coin bell kite book drum ring shell basket compass feather whistle mirror "
    "pebble"
)
PLAIN = listed(
    "bread cloud dance earth field glass heart island juice knife ladder music night ocean paper "
    "queen river stone table uncle violin water yard zebra arrow bridge candle desk engine flower "
    "guitar hammer iron jacket king lake moon needle oil pencil rain salt tree umbrella voice wind"
)
WORDS = tuple(sorted({*ANIMALS, *FRUITS, *PLAIN, *PLACES, *THINGS, *OBJECTS}))
COUNT_WORDS = listed("zero one two three four five six seven eight nine ten eleven twelve")


def invented_name(rng: Random) -> str:
    """Return a random pronounceable name made of syllables."""
    syllables = (
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))
    )
    return ("".join(syllables) + rng.choice(("", "n", "r", "s", "l"))).capitalize()


def person(rng: Random) -> str:
    """Return a random name. 60% of the names are from `NAMES`, the others are invented."""
    return rng.choice(NAMES) if rng.random() < 0.6 else invented_name(rng)
