"""Runs a command as a container runtime would, without one: in a root folder of its own, read-only, as uid 65532, as process 1.

Only /run (an empty tmpfs) can be written; /proc is new, /dev and /sys are the machine's. The network is the machine's, so that a
test reaches the daemon on loopback. Needs root. Not there: cgroup limits, seccomp, a network of its own.
"""

import os
import pathlib
import shutil
import subprocess

UID = 65532
# What every Debian has and a program that was linked against it needs: glibc, and nothing of ours.
GLIBC = ("ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libresolv.so.2")

SCRIPT = """
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=1777 tmpfs "$root/run"
for file in hosts resolv.conf; do [ ! -e "$root/etc/$file" ] || mount --bind "/etc/$file" "$root/etc/$file"; done
mount -o remount,bind,ro "$root"
exec chroot --userspec=65532:65532 --groups=65532 "$root" /opt/locks-kvd/bin/"$@"
"""


def why_not():
    """Why no such root can be used here; empty if it can."""
    if os.geteuid() != 0:
        return "not root: a root folder of its own needs it"
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()}"


def make_bare_root(root):
    """glibc, empty folders, a hosts file."""
    root = pathlib.Path(root)
    for folder in ("proc", "dev", "sys", "run", "etc", "opt", "lib64", "lib/x86_64-linux-gnu"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in GLIBC:
        found = next(p for p in (f"/lib/x86_64-linux-gnu/{name}", f"/lib64/{name}") if os.path.exists(p))
        shutil.copy(found, root / "lib/x86_64-linux-gnu" / name)
    shutil.copy("/lib64/ld-linux-x86-64.so.2", root / "lib64")
    for file in ("hosts", "resolv.conf"):
        (root / "etc" / file).touch()


def start(root, command, **options):
    """Popen of /opt/locks-kvd/bin/COMMAND in the root. It is process 1 of its namespace: see first_process."""
    return subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", SCRIPT, "root", root, *command],
                            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, **options)


def first_process(outer):
    """The id, out here, of the namespace's process 1; to send it a signal."""
    children = pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
    return int(children[0])
