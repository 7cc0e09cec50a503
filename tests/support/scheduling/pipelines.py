"""Configurations made into pipelines with a clock and a randomness of the test's own."""

from random import Random

from epp.configuration.loader import Pipeline, load_text

RANDOM = Random(0)


def clock() -> float:
    return 0.0


def loaded(text: str, previous: Pipeline | None = None, where: str = "") -> Pipeline:
    return load_text(text, clock=clock, random=RANDOM, where=where, previous=previous)
