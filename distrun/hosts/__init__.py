"""The hosts that the user names: files in one grammar for all launchers' files, lists, what queue systems say.

`parse` and what it calls is pure; `find` and `read` read files.
"""

from distrun.hosts.find import VARIABLES, WAYS, find, of_file, read
from distrun.hosts.grammar import FORMATS, HostSpec, Inventory, local, named, write
from distrun.hosts.parse import parse, parse_list
from distrun.hosts.ranges import expand, fold, generic

__all__ = [
    "FORMATS",
    "VARIABLES",
    "WAYS",
    "HostSpec",
    "Inventory",
    "expand",
    "find",
    "fold",
    "generic",
    "local",
    "named",
    "of_file",
    "parse",
    "parse_list",
    "read",
    "write",
]
