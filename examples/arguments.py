"""What the examples' command lines share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("%r is not a whole number of at least 1" % text)
    return int(text)
