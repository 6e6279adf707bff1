"""Test hosts on one machine, for the tests and by hand (`scripts/lab`).

A lab is N hosts `h1`..`hN` and a launcher. Each host has its own network (two interfaces, IPv4 and IPv6), host name,
process table, /tmp and sshd, and a copy-on-write copy of this machine's file system; it has nothing of the launcher's
but folders that are shared on purpose. The launcher has its own ~/.ssh, /etc/hosts and host name, and this machine's
files. All of it is in one set of namespaces: it ends with its keeper, and nothing of the machine is changed.

* `layout`: what a lab looks like, as text and values.
* `warden.sh`, `outer.sh`, `keeper`, `host.sh`: the processes that hold one, from the outermost in.
* `lab`, `host`: `Lab` and `Host`, what tests and the command use: enter, look, break, mend.
* `processes`, `cgroups`, `netem`: looking into it through /proc; freezing and limits; slow packets.
"""

from hostlab.errors import LabError, Unavailable
from hostlab.host import Host
from hostlab.lab import Lab
from hostlab.layout import Options
from hostlab.processes import Process

__all__ = ["Host", "Lab", "LabError", "Options", "Process", "Unavailable"]
