"""Attacks of programs on what is around them. As a script it tries them all in one sandbox and
prints the outcomes.

Each of ATTACKS tries several ways and prints those that succeeded: none. Each of BOMBS makes more
and more of something until it is stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TOOLS = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, stat, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
succeeded = []
open("own", "w").write("x")
paths = [VICTIM, "own"]
def attack(name, call, *arguments):
    try:
        result = call(*arguments)
    except (OSError, AttributeError):
        return
    if result != -1:
        succeeded.append(name)
def opened(path):
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return -1
"""

ATTACKS = {
    "modes": """
for path in paths:
    attack("chmod", os.chmod, path, 0o4755)
    attack("fchmod", libc.fchmod, opened(path), 0o4755)
    attack("fchmodat", libc.fchmodat, -100, path.encode(), 0o4755, 0)
    attack("fchmodat2", libc.syscall, 452, -100, path.encode(), 0o4755, 0)
    attack("ioctl FS_IOC_SETFLAGS", libc.ioctl, opened(path), ctypes.c_ulong(0x40086602), bytes(8))
    size = ctypes.c_size_t(24)
    attack("file_setattr", libc.syscall, 469, -100, path.encode(), bytes(24), size, 0)
attack("fchmod of Python's files", libc.fchmod, opened(os.__file__), 0o4755)
""",
    "owners": """
for path in paths:
    attack("chown", os.chown, path, os.getuid(), os.getgid())
    attack("lchown", os.lchown, path, os.getuid(), os.getgid())
    attack("fchown", libc.fchown, opened(path), os.getuid(), os.getgid())
""",
    "times": """
for path in paths:
    attack("utime", os.utime, path, (1, 1))
    attack("utimes", libc.utimes, path.encode(), None)
    attack("futimens", libc.futimens, opened(path), None)
""",
    "attributes": """
for path in paths:
    attack("setxattr", os.setxattr, path, "user.a", b"b")
    attack("fsetxattr", libc.fsetxattr, opened(path), b"user.a", b"b", ctypes.c_size_t(1), 0)
    attack("removexattr", os.removexattr, path, "user.kept")
    value = struct.pack("QII", 0, 0, 0)
    attack("setxattrat", libc.syscall, 463, -100, path.encode(), 0, b"user.a", value, 16)
""",
    "sizes": """
for path in paths:
    attack("truncate", os.truncate, path, 0)
    attack("O_RDONLY | O_TRUNC", os.open, path, os.O_RDONLY | os.O_TRUNC)
    attack("O_ACCMODE | O_TRUNC", os.open, path, os.O_ACCMODE | os.O_TRUNC)
    attack("O_ACCMODE", os.open, path, os.O_ACCMODE)
    how = struct.pack("QQQ", os.O_TRUNC, 0, 0)
    attack("openat2", libc.syscall, 437, -100, path.encode(), how, ctypes.c_size_t(24))
""",
    "new files with set-user-id": """
attack("open", os.open, "a", os.O_CREAT | os.O_WRONLY, 0o4755)
attack("setgid", os.open, "b", os.O_CREAT | os.O_WRONLY, 0o2755)
attack("mknod", os.mknod, "c", stat.S_IFREG | 0o4755)
attack("creat", libc.creat, b"d", 0o4755)
""",
    "signals": """
ours, theirs = socket.socketpair()
for descriptor in (ours.fileno(), opened("own")):
    attack("F_SETOWN", fcntl.fcntl, descriptor, fcntl.F_SETOWN, PID)
    attack("F_SETOWN_EX", fcntl.fcntl, descriptor, 15, struct.pack("ii", 1, PID))
    attack("F_SETSIG", fcntl.fcntl, descriptor, 10, signal.SIGKILL)
    attack("F_SETLEASE", fcntl.fcntl, descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    attack("F_NOTIFY", fcntl.fcntl, descriptor, fcntl.F_NOTIFY, 2)
    attack("FIOSETOWN", fcntl.ioctl, descriptor, 0x8901, struct.pack("i", PID))
    attack("SIOCSPGRP", fcntl.ioctl, descriptor, 0x8902, struct.pack("i", PID))
    attack("FIOASYNC", fcntl.ioctl, descriptor, 0x5452, struct.pack("i", 1))
fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
theirs.send(b"x")
for victim in (PID, os.getppid()):
    attack("kill", os.kill, victim, signal.SIGKILL)
    attack("tgkill", libc.tgkill, victim, victim, signal.SIGKILL)
    attack("pidfd_open", os.pidfd_open, victim)
    attack("sigqueue", libc.sigqueue, victim, signal.SIGKILL, None)
    attack("prlimit", resource.prlimit, victim, resource.RLIMIT_CPU, (0, 0))
    attack("setpriority", os.setpriority, os.PRIO_PROCESS, victim, 19)
    attack("process_vm_readv", libc.process_vm_readv, victim, None, 0, None, 0, 0)
    attack("ptrace", libc.ptrace, 16, victim, None, None)
attack("all of them", os.kill, -1, signal.SIGKILL)
""",
    "processes and programs": """
attack("fork", os.fork)
attack("vfork", libc.vfork)
attack("posix_spawn", os.posix_spawn, "/bin/true", ["true"], {})
attack("clone3", libc.syscall, 435, bytes(88), ctypes.c_size_t(88))
attack("execve", os.execv, "/bin/true", ["true"])
attack("unshare", libc.unshare, 0x10000000)
attack("setsid", os.setsid)
""",
    "the memory of the sandbox": """
for name in ("mem", "environ", "maps", "fd/0", "cwd/x"):
    attack(name, open, f"/proc/{os.getppid()}/{name}", "rb")
""",
    "sockets": """
attack("datagrams to others", socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
attack("packets", socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET)
attack("TIPC", libc.socketpair, 30, 1, 0, (ctypes.c_int * 2)())
attack("internet", socket.socket)
""",
    "objects that outlive a program": """
attack("shmctl IPC_RMID", libc.shmctl, SEGMENT, 0, None)
attack("shmat", libc.syscall, SHMAT, SEGMENT, None, 0)
attack("shmget", libc.shmget, 0, ctypes.c_size_t(4096), 0o1600)
attack("msgget", libc.msgget, 0, 0o1600)
attack("semget", libc.semget, 0, 1, 0o1600)
attack("memfd_create", os.memfd_create, "x")
attack("inotify", libc.inotify_init1, 0)
attack("io_setup", libc.syscall, IO_SETUP, 1, ctypes.byref(ctypes.c_long(0)))
""",
}

BOMBS = {
    "threads": """
threading.stack_size(32768)
while True:
    try:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    except RuntimeError:
        if OWN_USER: raise
        time.sleep(100)
""",
    "files": """
number = 0
while True:
    try:
        open(str(number), "w").close()
    except OSError as error:
        if error.errno == errno.ENOSPC: raise
        time.sleep(100)
    number += 1
""",
    "bytes": """
number = 0
while True:
    with open(str(number), "wb", buffering=0) as file:
        for _ in range(16):
            if file.write(bytes(1 << 20)) < 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    number += 1
""",
    "directories in directories": """
while True:
    try:
        os.mkdir("d"); os.chdir("d")
    except OSError as error:
        if error.errno == errno.ENOSPC: raise
        time.sleep(100)
""",
    "a directory that nobody can look into": """
os.mkdir("d", 0o300)
if OWN_USER or MEMORY: raise SystemExit("looked into by root, or by nobody, for it is in memory")
time.sleep(100)
""",
}

# Attacks that only some layers stop; a program that ends well has done it.
REACH = {
    "reads a file of its user's": 'open("/etc/hostname").read()',
    "writes a file of its user's": 'open(VICTIM, "r+").close()',
    "writes to the temporary directory": 'open("/tmp/sluice-escaped", "w").close(); '
    'os.unlink("/tmp/sluice-escaped")',
}

LEGITIMATE = """
import asyncio, concurrent.futures, pathlib, shutil, tempfile
with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "a")
    path.write_text("some"); path.touch(); path.rename(path.with_name("b"))
    with open(path.with_name("b"), "r+") as file: file.truncate(2)
    shutil.copyfile(path.with_name("b"), path)
    text = path.read_text()
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    total = sum(pool.map(len, ["ab"] * 8))
async def later():
    await asyncio.sleep(0)
    return os.isatty(0), shutil.get_terminal_size().columns, os.cpu_count() > 0
print(text, total, asyncio.run(later()), os.get_inheritable(0))
"""

INT_80 = """
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid of i386); int 0x80; ret
print("called", ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""


def _state(victim: Path) -> list[Any]:
    status = victim.stat()
    return [
        victim.read_text(),
        status.st_mode,
        status.st_mtime_ns,
        status.st_uid,
        sorted(os.listxattr(victim)),
    ]


def tools_against(victim: Path, pid: int, segment: int, layers: Sequence[str]) -> str:
    """Return the code that starts each attack: its victims, and a helper that tries."""
    machine = os.uname().machine
    victims = {
        "VICTIM": str(victim),
        "PID": pid,
        "SEGMENT": segment,
        "OWN_USER": "uid" in layers,
        "MEMORY": "namespaces" in layers,
        "SHMAT": {"x86_64": 30}.get(machine, 196),
        "IO_SETUP": {"x86_64": 206}.get(machine, 0),
    }
    return "".join(f"{name} = {value!r}\n" for name, value in victims.items()) + _TOOLS


def main() -> None:
    from sluice.rewards.sandbox import Sandbox

    sandbox = Sandbox()
    layers = sandbox.isolation.layers
    process = subprocess.Popen(["sleep", "1000"])
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, ctypes.c_size_t(4096), 0o1600)
    machine = os.uname().machine
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        victim = Path(directory, "victim")
        victim.write_text("untouched")
        os.setxattr(victim, "user.kept", b"1")
        before = _state(victim)
        tools = tools_against(victim, process.pid, segment, layers)

        def run(source: str) -> list[str]:
            ran = sandbox.run(
                source=tools + source, input="", seconds=60.0, memory=1 << 30, cpu_seconds=60
            )
            return [ran.status, ran.output, ran.error]

        answer = {
            "isolation": str(sandbox.isolation),
            "missing": sandbox.isolation.missing,
            "attacks": {name: run(source + "print(succeeded)") for name, source in ATTACKS.items()},
            "bombs": {name: run(source) for name, source in BOMBS.items()},
            "reach": {name: run(source)[0] for name, source in REACH.items()},
            "legitimate": run(LEGITIMATE),
            "int 0x80": run(INT_80) if machine == "x86_64" else None,
            "untouched": _state(victim) == before,
            "alive": process.poll() is None,
            "segment": libc.shmctl(segment, 0, None) == 0,
        }
    process.kill()
    process.wait()
    sandbox.close()
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
