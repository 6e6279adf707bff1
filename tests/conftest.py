"""Fixtures that every test may ask for."""

from lab import lab, lab_of_session

__all__ = ["lab", "lab_of_session"]
