"""What can go wrong with a lab."""

from __future__ import annotations


class LabError(Exception):
    """A lab, or a fault in it, could not be made; the text says what was tried and what came of it."""


class Unavailable(LabError):
    """This machine or user cannot have a lab at all (or not this fault); the text says why."""
