"""The copy of the current directory to every host: by rsync over ssh, or over the channels of the job's agents."""

from distrun.sync.channels import ChannelCopier
from distrun.sync.copier import REPORT_S, Copier, CopyRequest, CopyResult, FileCopier, Says, error
from distrun.sync.rules import CopyRules, check_folder, make_rules
from distrun.sync.tree import Snapshot, Tree, check_channel_size, scan, take_snapshot

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
