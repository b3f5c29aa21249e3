"""System calls that programs may not make, by number on x86_64 and aarch64. Standard library only.

A number is None if the machine has no such call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

SyscallNumbers = tuple[int | None, int | None]

# Calls from this number on (Linux 5.17) do not exist for a program, since their effects
# have not been reviewed. Some change modes and attributes (fchmodat2, setxattrat, file_setattr).
FIRST_UNKNOWN = 450

# Further calls that do not exist for a program.
ABSENT: dict[str, SyscallNumbers] = {
    "clone3": (
        435,
        435,
    ),  # its flags are in memory, invisible to a filter; libraries fall back to clone
    "openat2": (437, 437),
}

# Calls that fail with EPERM.
DENIED: dict[str, SyscallNumbers] = {
    # network; sockets come in pairs only, see CHECKED
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    # processes and programs
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "uselib": (134, None),
    # signals to others, and looking into them
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "get_robust_list": (274, 100),
    # modes, owners, times and attributes of files, which Landlock leaves to whoever owns them
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "truncate": (
        76,
        45,
    ),  # Landlock sees it from Linux 6.2 on; ftruncate needs a descriptor that may write
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "quotactl": (179, 60),
    # around a filter, or into the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    # objects that outlive a process, also those of others: keys, System V and POSIX IPC
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "unshare": (272, 97),
    "setns": (308, 268),
    # the process's scheduling and groups, and the machine's settings
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setaffinity": (203, 122),
    "personality": (135, 92),
    "acct": (163, 89),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
}

# Denied calls that are allowed if other programs may be started.
PROGRAMS = ("fork", "vfork", "execve")


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """A call that depends on the low half of an argument.

    An argument matches a pair (mask, value) if its masked bits equal the value. With `only`, the
    call is allowed if one of `values` matches; without, it is denied if one matches.
    """

    call: SyscallNumbers
    argument: int
    values: tuple[tuple[int, int], ...]
    only: bool


_ALL = 0xFFFFFFFF
_CLONE_THREAD = 0x00010000
# CLONE_NEW*: time, mount, cgroup, UTS, IPC, user, PID and network namespaces.
_CLONE_NEW = tuple(
    (bit, bit)
    for bit in (0x80, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000,
                0x40000000)
)  # fmt: skip
_SET_ID = tuple((bit, bit) for bit in (0o4000, 0o2000))
_ACCESS, _NO_ACCESS, _TRUNCATE = 3, 3, 0o1000
# Landlock checks what a descriptor may do, and these descriptors may neither read nor write. Before
# Linux 6.2 it does not check truncation, so a file that is truncated must be opened for writing.
_SIDE_DOORS = ((_ACCESS, _NO_ACCESS), (_ACCESS | _TRUNCATE, os.O_RDONLY | _TRUNCATE))
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_SETLK, F_SETLKW, F_GETOWN; F_OFD_*;
# F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not allowed: signals of a descriptor (F_SETOWN, F_SETSIG),
# leases, larger pipes.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 9, 36, 37, 38, 1030, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2: required by isatty,
# os.get_terminal_size, os.set_blocking and os.set_inheritable.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)


def _exactly(values: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((_ALL, value) for value in values)


CLONE_THREADS = ArgumentCheck((56, 220), 0, ((_CLONE_THREAD, _CLONE_THREAD),), only=True)
CLONE_PROCESSES = ArgumentCheck((56, 220), 0, _CLONE_NEW, only=False)
CHECKED: tuple[ArgumentCheck, ...] = (
    ArgumentCheck((302, 261), 0, _exactly((0,)), only=True),  # prlimit64: of this process only
    ArgumentCheck((72, 25), 1, _exactly(_FCNTL), only=True),
    ArgumentCheck((16, 29), 1, _exactly(_IOCTL), only=True),
    # socketpair: connected AF_UNIX streams only, since datagrams can be sent to any address.
    ArgumentCheck((53, 199), 0, _exactly((1,)), only=True),
    ArgumentCheck((53, 199), 1, ((0xF, 1),), only=True),
    ArgumentCheck((2, None), 1, _SIDE_DOORS, only=False),  # open
    ArgumentCheck((257, 56), 2, _SIDE_DOORS, only=False),  # openat
    # set-user-id bits of new files: open, openat, creat, mknod, mknodat
    ArgumentCheck((2, None), 2, _SET_ID, only=False),
    ArgumentCheck((257, 56), 3, _SET_ID, only=False),
    ArgumentCheck((85, None), 1, _SET_ID, only=False),
    ArgumentCheck((133, None), 1, _SET_ID, only=False),
    ArgumentCheck((259, 33), 2, _SET_ID, only=False),
)
