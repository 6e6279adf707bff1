"""The copy of the current directory to every host, by rsync."""

from distrun.sync.copier import Copier, copy
from distrun.sync.result import Result, error
from distrun.sync.rules import Rules, make_rules
from distrun.sync.scan import Tree, scan

__all__ = ["Copier", "Result", "Rules", "Tree", "copy", "error", "make_rules", "scan"]
