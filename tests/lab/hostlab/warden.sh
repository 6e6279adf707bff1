#!/bin/sh
# warden.sh CGROUP-NAME PYTHON KEEPER-ARGUMENT...: hold a lab: make the outer namespaces, wait for their end, remove
# the empty control groups that they cannot take along. Whichever process of the lab's own is killed, all end.
group=$1
shift
here=$(dirname "$0")

# sweep DIR: remove the lab's groups below it.
sweep() {
    for try in 1 2 3 4 5 6 7 8 9 10; do
        left=
        for folder in "$1"/"$group"* "$1"/*/"$group"*; do
            [ -d "$folder" ] || continue
            find "$folder" -depth -type d -exec rmdir {} + 2>/dev/null
            [ -d "$folder" ] && left=yes
        done
        [ -n "$left" ] || break
        sleep 0.1
    done
}

if [ "$1" = --sweep ]; then
    # In a mount namespace of our own, on a machine that shows us no control groups: mount them where it is private.
    mount --make-private /proc && mount -t tmpfs lab /proc || exit 0
    mkdir /proc/unified /proc/memory /proc/cpu /proc/pids
    mount -t cgroup2 lab /proc/unified
    for name in memory cpu pids; do mount -t cgroup -o $name lab /proc/$name; done 2>/dev/null
    sweep /proc
    exit 0
fi

# A shell gives its background commands /dev/null for standard input; the keeper needs ours.
exec 3<&0
# If this shell is killed, unshare gets KILL, the keeper too, and the kernel ends everything inside.
setpriv --pdeathsig KILL unshare --net --mount --pid --uts --ipc --fork --kill-child=KILL --propagation unchanged \
    sh "$here/outer.sh" "$@" <&3 3<&- &
exec 3<&-
wait $!
code=$?
if [ -e /sys/fs/cgroup/cgroup.controllers ] || [ -e /sys/fs/cgroup/unified/cgroup.controllers ]; then
    sweep /sys/fs/cgroup
else
    unshare --mount --propagation unchanged sh "$0" "$group" --sweep
fi
exit $code
