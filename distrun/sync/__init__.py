"""The copy of the current directory to every host, by rsync."""

from distrun.sync.copier import REPORT_S, Copier
from distrun.sync.remote import check_folder
from distrun.sync.result import Result, error
from distrun.sync.rules import Rules, make_rules
from distrun.sync.scan import Tree, scan

__all__ = ["REPORT_S", "Copier", "Result", "Rules", "Tree", "check_folder", "error", "make_rules", "scan"]
