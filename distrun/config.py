"""The user's configuration file: what a site does differently, in a section for each engine. Reads one file.

It is `$XDG_CONFIG_HOME/distrun/config.ini` (`~/.config` where that is unset), in the form of Python's `configparser`
without interpolation:

    [slurm]
    submit = /opt/site/bin/sbatch
    template = ~/templates/slurm.sh
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from distrun.errors import UsageError


def path(env: Mapping[str, str]) -> Path:
    """Return where the file is, or would be. Pure but for the home folder."""
    base = env.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "distrun" / "config.ini"


def section(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a section by name; none if there is no file, or no such section.

    Raises:
        UsageError: the file cannot be read or understood; the message has its path, and the line.
    """
    import configparser  # for engines only

    file = path(env)
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, configparser.Error) as err:
        raise UsageError(
            f"the configuration file cannot be read: {' '.join(str(err).split())}", f"correct {file}"
        ) from err
    return dict(parser.items(name)) if parser.has_section(name) else {}
