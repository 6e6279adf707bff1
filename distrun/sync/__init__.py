"""The copy of the current directory to every host: by rsync over ssh, or over the channels of the job's agents."""

from distrun.sync.channels import ChannelCopier
from distrun.sync.copier import REPORT_S, Copier, CopyRequest, CopyResult, FileCopier, Says, error
from distrun.sync.rules import CopyRules, check_folder, make_rules
from distrun.sync.snapshot import Snapshot, check_channel_size, take_snapshot
from distrun.sync.tree import Tree, scan

__all__ = [
    "REPORT_S",
    "ChannelCopier",
    "Copier",
    "CopyRequest",
    "CopyResult",
    "CopyRules",
    "FileCopier",
    "Says",
    "Snapshot",
    "Tree",
    "check_channel_size",
    "check_folder",
    "error",
    "make_rules",
    "scan",
    "take_snapshot",
]
