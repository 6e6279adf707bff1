#!/bin/sh
# host.sh LAB NAME: pid 1 of a host. Builds its root: a copy-on-write copy of this machine's, with file systems of its
# own where programs write; then becomes its sshd, which as pid 1 also reaps orphans.
set -eu
lab=$1
name=$2
mine=$lab/hosts.d/$name
. "$mine/boot"

mount -t proc proc /proc
hostname "$name"

mount -t tmpfs -o mode=755 lab "$lab/root"
cd "$lab/root"
mkdir upper work host
mount -t overlay -o lowerdir=/,upperdir="$PWD/upper",workdir="$PWD/work" lab host || {
    echo "a lab needs overlayfs, and this machine cannot lay one over its root"
    exit 1
}
cd host
mount --rbind /dev dev
mount -t proc proc proc
mount -t sysfs sysfs sys 2>/dev/null || mount --rbind /sys sys

# fresh DIR [SIZE-IN-MIB]: an empty file system there.
fresh() {
    mkdir -p ".$1"
    mount -t tmpfs -o "mode=755,size=${2:-64}m" lab ".$1"
}
while read -r path size; do fresh "$path" "$size"; done <<END
$disks
END
chmod 1777 tmp var/tmp dev/shm
chmod 700 root
mkdir run/sshd run/lock
while read -r path; do [ -z "$path" ] || fresh "$path"; done <<END
$hide
END
while read -r path; do
    [ -n "$path" ] || continue
    if [ -d "$path" ]; then
        mkdir -p ".$path"
    else
        mkdir -p "$(dirname ".$path")"
        : >".$path"
    fi
    mount --rbind "$path" ".$path"
done <<END
$share
END

cp "$lab/etc/hosts" "$lab/etc/nsswitch.conf" etc/
for file in passwd shadow group; do cp "$lab/etc/host-$file" "etc/$file"; done
home=root
if [ -n "$shared_home" ]; then
    home=${lab#/}/home
    mkdir -p "$home"
    mount --bind "$lab/home" "$home"
    sed -i "s|^root:\(.*\):/root:|root:\1:/$home:|" etc/passwd
fi
echo "$name" >etc/hostname
mkdir -p etc/ssh
rm -rf etc/ssh/ssh_config.d etc/ssh/sshd_config.d
cp "$mine/key" etc/ssh/lab_host_key
cp "$mine/key.pub" etc/ssh/lab_host_key.pub
cp "$mine/sshd_config" etc/ssh/lab_sshd_config
chmod 600 etc/ssh/lab_host_key

# home DIR OWNER KEYS: a home folder as a new user has it. (No chown -R: a shared folder may be mounted below.)
home() {
    mkdir -p "$1/.ssh"
    chmod 700 "$1" "$1/.ssh"
    set -- "$1" "$2" "$3" "$1" "$1/.ssh"
    if [ -n "$3" ]; then
        cp "$lab/home/.ssh/id_ed25519.pub" "$1/.ssh/authorized_keys"
        set -- "$@" "$1/.ssh/authorized_keys"
    fi
    if [ -n "$noisy" ]; then
        echo 'echo "Welcome to $(hostname), have a nice day"; echo "quota: 93 % used" >&2' >"$1/.bashrc"
        echo '. ~/.bashrc' >"$1/.profile"
        set -- "$@" "$1/.bashrc" "$1/.profile"
    fi
    owner=$2
    shift 3
    chown "$owner:$owner" "$@"
}
home "$home" 0 yes
home home/alice "$alice" yes
home home/bob "$bob" ''
[ -z "$mesh" ] || cp "$lab/home/.ssh/id_ed25519" "$lab/home/.ssh/known_hosts" root/.ssh/
[ -n "$python" ] || rm -f usr/bin/python* usr/local/bin/python*

sshd="/usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/sbin/sshd -D -e -f /etc/ssh/lab_sshd_config"
mkdir .old
pivot_root . .old
# shellcheck disable=SC2086
exec chroot . sh -c 'umount -l /.old; rmdir /.old; exec "$@"' sh $sshd
