"""The program `distrun`, also as `python -m distrun`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit. What a shell asks while the user types is answered without loading commands."""
    if sys.argv[1:2] == ["_complete"]:
        from distrun import completion

        completion.main(sys.argv[2:])
    from distrun import cli

    cli.main()


if __name__ == "__main__":
    main()
