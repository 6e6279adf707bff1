"""`python -m distrun`."""

from __future__ import annotations

from distrun.cli import main

main()
