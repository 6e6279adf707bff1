#!/bin/sh
# warden.sh CGROUP-NAME PYTHON KEEPER-ARGUMENT...: hold a lab: make the outer namespaces, wait for their end, remove
# the empty control groups that they cannot take along. Whichever process of the lab's own is killed, all end.
group=$1
shift
here=$(dirname "$0")
# A shell gives its background commands /dev/null for standard input; the keeper needs ours.
exec 3<&0
# If this shell is killed, unshare gets KILL, the keeper too, and the kernel ends everything inside.
setpriv --pdeathsig KILL unshare --net --mount --pid --uts --ipc --fork --kill-child=KILL --propagation unchanged \
    sh "$here/outer.sh" "$@" <&3 3<&- &
exec 3<&-
wait $!
code=$?
for try in 1 2 3 4 5 6 7 8 9 10; do
    left=
    for folder in /sys/fs/cgroup/"$group"* /sys/fs/cgroup/*/"$group"*; do
        [ -d "$folder" ] || continue
        find "$folder" -depth -type d -exec rmdir {} + 2>/dev/null
        [ -d "$folder" ] && left=yes
    done
    [ -n "$left" ] || break
    sleep 0.1
done
exit $code
