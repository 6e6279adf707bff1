#!/bin/sh
# outer.sh PYTHON KEEPER-ARGUMENT...: first process of a lab: mounts that stay inside it, then the keeper.
set -eu
# Our pid as the machine sees it: /proc is still the machine's.
read -r DISTRUN_LAB_PID rest </proc/self/stat
export DISTRUN_LAB_PID

# Nothing that is mounted from here on may be seen outside.
if mountpoint -q /; then
    mount --make-rprivate /
else
    # In a chroot that is no mount point nothing can be said about "/". A tmpfs on /proc (which is one) is private;
    # a copy of the tree on it becomes the lab's root.
    mount --make-private /proc
    mount -t tmpfs lab /proc
    mkdir /proc/root
    mount --rbind / /proc/root
    mount --make-rprivate /proc/root
    exec chroot /proc/root sh -c 'mount -t proc proc /proc && exec "$@"' sh "$@"
fi
mount -t proc proc /proc
exec "$@"
