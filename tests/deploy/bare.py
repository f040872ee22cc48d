"""A bare Debian of a test's own: commands run in it by chroot, and systemd boots it in namespaces.

`make test-all` fetches the root file system that is copied (`fetch_debian`). With TOPICS_REQUIRE_DEBIAN=1 its absence
is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

import pytest

from tests.harness import poll

MASTER: Final = Path(sys.prefix, "debian")
CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
"""The certificates that this machine trusts; a bare system lacks those of its network."""
TIMEOUT_S: Final = 600
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT: Final = """
set -e
ip link set lo up
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount -t sysfs -o ro sys "$1/sys"
mount -t cgroup2 cgroup "$1/sys/fs/cgroup"
mount -t tmpfs -o mode=755 dev "$1/dev"
for name in null zero full random urandom tty; do
  touch "$1/dev/$name"
  mount --bind "/dev/$name" "$1/dev/$name"
done
mkdir "$1/dev/pts" "$1/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666 pts "$1/dev/pts"
ln -s pts/ptmx "$1/dev/ptmx"
mount -t tmpfs -o mode=1777 shm "$1/dev/shm"
mount -t tmpfs -o mode=755 run "$1/run"
cd "$1" # not chroot: the kernel gives no user namespaces to a process whose root is not that of its mounts
pivot_root . mnt
umount --lazy /mnt
mount --make-rshared / # systemd does this itself, but in a container: credentials are mounted by a child
exec env -i PATH="$PATH" container=test /lib/systemd/systemd --show-status=false --unit=multi-user.target
"""

needs_debian = pytest.mark.skipif(
    not MASTER.exists() and os.environ.get("TOPICS_REQUIRE_DEBIAN") != "1",
    reason="there is no bare Debian; `make test-all` fetches one, if it is run by root",
)


class Bare:
    """A root file system in `root`, and the systemd that may run in it. It owns both."""

    def __init__(self, root: Path) -> None:
        assert MASTER.exists(), "TOPICS_REQUIRE_DEBIAN=1, but there is no bare Debian"
        self.root = root
        subprocess.run(["cp", "--archive", str(MASTER), str(root)], check=True)
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        self._booted: subprocess.Popen[bytes] | None = None
        self._group: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._booted is not None:
            self._booted.kill()
            self._booted.wait()
        if self._group is not None:
            # The kernel counts processes as there until they are reaped.
            folders = [path for path in self._group.rglob("*") if path.is_dir()]
            for folder in [*sorted(folders, reverse=True), self._group]:
                poll(f"{folder} to be empty", lambda: _removed(folder))
        shutil.rmtree(self.root)

    def run(self, command: str, *, cwd: str = "/", user: str | None = None, **environ: str) -> str:
        """Run a shell command in it by chroot, with this machine's network; return what it printed."""
        certificates = {name: str(CERTIFICATES) for name in ("PIP_CERT", "SSL_CERT_FILE")}
        chroot = ["chroot", *(["--userspec", user] if user else []), str(self.root)]
        line = f"cd {cwd} && {command}"
        return _output([*chroot, "/bin/sh", "-ec", line], {"PATH": PATH, "LC_ALL": "C.UTF-8"} | certificates | environ)

    def boot(self) -> None:
        """Start systemd as process 1 of namespaces of its own. There is no network but `lo`."""
        hierarchy = next(path for path in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if _is_cgroup2(path))
        self._group = Path(hierarchy, f"topics-test-{os.getpid()}")
        self._group.mkdir()
        enter = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
        namespaces = ["--mount", "--pid", "--uts", "--cgroup", "--ipc", "--net", "--propagation", "private"]
        unshare = ["unshare", *namespaces, "--fork", "--kill-child=SIGKILL"]
        self._booted = subprocess.Popen(
            ["/bin/sh", "-c", enter, str(self._group), *unshare, "/bin/sh", "-c", BOOT, "sh", str(self.root)],
            env={"PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        poll("systemd to have started", self._is_up, TIMEOUT_S, every_s=0.1)

    def _is_up(self) -> bool:
        assert self._booted is not None
        assert self._booted.poll() is None, "systemd has ended"
        children = Path(f"/proc/{self._booted.pid}/task/{self._booted.pid}/children").read_text().split()
        if not children or Path(f"/proc/{children[0]}/comm").read_text().strip() != "systemd":
            return False
        self._init = children[0]
        done = subprocess.run(self._inside("systemctl is-system-running"), capture_output=True, text=True, check=False)
        return done.stdout.strip() in ("running", "degraded")  # a container has no kernel modules to load

    def _inside(self, command: str) -> list[str]:
        entered = ["nsenter", "--target", self._init, "--all", "--root", "--wd"]
        return [*entered, "env", "-i", f"PATH={PATH}", "LC_ALL=C.UTF-8", "/bin/sh", "-ec", command]

    def run_booted(self, command: str) -> str:
        """Run a shell command in the booted system; return what it printed. An error tells the end of the journal."""
        try:
            return _output(self._inside(command), None)
        except AssertionError as error:
            error.add_note(_output(self._inside("journalctl --no-pager --lines 40"), None))
            raise


def _output(command: list[str], environment: dict[str, str] | None) -> str:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\nended with {done.returncode}\n{done.stdout}"
    return done.stdout


def _is_cgroup2(path: str) -> bool:
    return Path(path, "cgroup.controllers").exists()


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True
