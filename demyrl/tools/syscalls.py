"""Which system calls a program in the sandbox may make, compiled to a seccomp filter.

An allow-list: what Python, its standard library and threads need to compute, to write files below
their own folder and to talk over their own pipes. What a program might reasonably try but must not
have (a second process, the network, another process's memory) answers "not permitted"; the rest
answers "not implemented", so that the C library falls back from calls newer than this list.
"""

import errno
import functools
import socket
import tempfile

FILES = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range
open openat creat stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir unlink
unlinkat link linkat symlink symlinkat readlink readlinkat chmod fchmod fchmodat umask truncate
ftruncate fallocate fsync fdatasync utime utimes utimensat futimesat dup dup2 dup3 fcntl flock
pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime sendfile copy_file_range
fadvise64 readahead mknod mknodat
sendto recvfrom sendmsg recvmsg shutdown getsockopt setsockopt getsockname getpeername
"""
MEMORY = "brk mmap munmap mprotect mremap madvise msync mincore membarrier"
THREADS = """
futex futex_waitv set_robust_list get_robust_list rseq set_tid_address exit exit_group gettid
wait4 waitid sched_yield sched_getaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min
"""
# Signals are harmless: the only other process is the first of its pid namespace, which the kernel
# shields from its own members.
SIGNALS = """
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack
kill tkill tgkill pause alarm setitimer getitimer timer_create timer_settime timer_gettime
timer_getoverrun timer_delete signalfd4 restart_syscall
"""
FACTS = """
nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getpid getppid getuid
geteuid getgid getegid getgroups getresuid getresgid getpgid getpgrp getsid uname sysinfo getrusage
getrlimit setrlimit getcpu getpriority getrandom
"""
REFUSED = """
fork vfork execve execveat socket connect bind listen accept accept4 ptrace process_vm_readv
process_vm_writev process_madvise pidfd_open pidfd_getfd pidfd_send_signal unshare setns mount
umount2 pivot_root chroot move_mount open_tree fsopen fsmount open_by_handle_at io_uring_setup
io_uring_enter io_uring_register keyctl add_key request_key bpf perf_event_open userfaultfd
memfd_create memfd_secret shmget shmat shmctl semget semop semctl msgget msgsnd msgrcv mq_open
setuid setgid setgroups setresuid setresgid setreuid setregid capset seccomp personality setpgid
setsid sched_setaffinity sched_setscheduler sched_setattr setpriority ioprio_set fanotify_init
inotify_init inotify_init1 setxattr fsetxattr lsetxattr chown fchown lchown fchownat reboot swapon
kexec_load init_module finit_module delete_module syslog sethostname quotactl acct
"""

CLONE_THREAD = 0x10000
TERMINAL_QUERIES = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, ..., FIONREAD, ...
NAME_A_THREAD = (15, 16)  # PR_SET_NAME, PR_GET_NAME
LOW_32_BITS = 0xFFFFFFFF  # the kernel ignores the upper half of an int argument, so must we


# Allowed only where an argument, under a mask, has a value: name -> (argument, mask, values).
CONDITIONS = {
    "clone": (0, CLONE_THREAD, (CLONE_THREAD,)),  # a thread, not a process
    "prlimit64": (0, LOW_32_BITS, (0,)),  # its own limits only
    "socketpair": (0, LOW_32_BITS, (socket.AF_UNIX,)),  # an asyncio loop wakes itself with one
    "ioctl": (1, LOW_32_BITS, TERMINAL_QUERIES),
    "prctl": (0, LOW_32_BITS, NAME_A_THREAD),
}


@functools.cache
def filter_program() -> bytes:
    """The filter as the kernel's array of BPF instructions, for this machine's architecture.

    Raises ImportError (no pyseccomp), RuntimeError (no libseccomp) or OSError (too old a one).
    """
    import pyseccomp  # loads libseccomp, which only the isolated sandbox needs

    program = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))

    def add(action: int, name: str, *arguments) -> None:
        try:
            number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        except ValueError:
            return  # unknown to this libseccomp: it stays unavailable
        if number >= 0:  # negative where the architecture lacks the call
            program.add_rule(action, number, *arguments)

    for name in (FILES + MEMORY + THREADS + SIGNALS + FACTS).split():
        add(pyseccomp.ALLOW, name)
    for name in REFUSED.split():
        add(pyseccomp.ERRNO(errno.EPERM), name)
    for name, (argument, mask, values) in CONDITIONS.items():
        for value in values:
            condition = pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, mask, value)
            add(pyseccomp.ALLOW, name, condition)
    no_thread = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_THREAD, 0)
    add(pyseccomp.ERRNO(errno.EPERM), "clone", no_thread)
    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()
