"""The copy of the current directory to every host, by rsync."""

from distrun.sync.copier import REPORT_S, Copier, CopyRequest, CopyResult, Says, error
from distrun.sync.rules import CopyRules, check_folder, make_rules
from distrun.sync.tree import Tree, scan

__all__ = [
    "REPORT_S",
    "Copier",
    "CopyRequest",
    "CopyResult",
    "CopyRules",
    "Says",
    "Tree",
    "check_folder",
    "error",
    "make_rules",
    "scan",
]
