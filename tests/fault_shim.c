/*
 * A layer between a process and the kernel that counts what changes files, sockets or processes,
 * and strikes at one of these calls. Loaded with LD_PRELOAD into every process of a run.
 *
 * FAULT_MAP is a file of `struct map`, shared by the test and by all of these processes. Only the
 * processes of one role are counted, and only while the map is armed, so that the count begins with
 * a request and goes on through every life of that role. At the call with the index `strike_at` the
 * fault happens, once: a kill of the process itself, of the other role, of both, an error in place
 * of the call, or a SIGTERM to the supervisor. Armed with 2, the count begins when a supervisor is
 * about to take the lock of its run. Every counted call leaves a line in FAULT_LOG: index, name, target.
 *
 * Not counted: memory, reads, and what the threads of zmq write to wake each other up.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum role { NOBODY, SUPERVISOR, TRAINER, HELPER };
enum fault { NOTHING, KILL_SELF, KILL_OTHER, KILL_BOTH, NO_SPACE, IO_ERROR, STOP_SUPERVISOR };

struct map {
    int64_t armed;
    int64_t role;
    int64_t fault;
    int64_t strike_at;
    int64_t count;
    int64_t struck;
    int64_t pid[4];
};

static struct map *map;
static enum role role;
static int log_fd = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
/* Past everything below, this library's own calls among it. */
#define RAW REAL(syscall)

static int command_has(long pid, const char *wanted)
{
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%ld/cmdline", pid);
    long fd = RAW(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    long size = RAW(SYS_read, fd, text, sizeof text - 1);
    RAW(SYS_close, fd);
    if (size <= 0)
        return 0;
    for (long i = 0; i < size - 1; i++)
        if (text[i] == 0)
            text[i] = ' ';
    text[size] = 0;
    return strncmp(text, "/bin/sh", 7) != 0 && strstr(text, wanted) != NULL;
}

static const char *commands[] = {"", " -m supervisor start", "saboteur.py",
                                 " -m supervisor.verifier"};

__attribute__((constructor)) static void begin(void)
{
    const char *place = getenv("FAULT_MAP"), *log = getenv("FAULT_LOG");
    if (place == NULL || log == NULL)
        return;
    if (getenv("FAULT_TRAINER") != NULL)
        commands[TRAINER] = getenv("FAULT_TRAINER");
    for (enum role one = SUPERVISOR; one <= HELPER; one++)
        if (command_has(getpid(), commands[one]))
            role = one;
    if (role == NOBODY)
        return;
    long fd = RAW(SYS_openat, AT_FDCWD, place, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *found = mmap(NULL, sizeof *map, PROT_READ | PROT_WRITE, MAP_SHARED, (int)fd, 0);
    RAW(SYS_close, fd);
    if (found == MAP_FAILED)
        return;
    log_fd = (int)RAW(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CLOEXEC);
    map = found;
    map->pid[role] = getpid();
}

static void signal_role(enum role one, int number)
{
    long pid = map->pid[one];
    /* The number may be another process's by now. */
    if (pid > 0 && command_has(pid, commands[one]))
        RAW(SYS_kill, pid, number);
}

/* The errno to fail with, or 0 to go on. `can_fail` is whether the kernel could refuse this. */
static int passes(const char *name, const char *target, int can_fail)
{
    if (map == NULL || map->armed != 1 || map->role != role)
        return 0;
    int64_t index = __atomic_fetch_add(&map->count, 1, __ATOMIC_SEQ_CST);
    char line[512];
    int size = snprintf(line, sizeof line, "%ld %s%s %s\n", (long)index, name,
                        can_fail ? "" : "!", target);
    RAW(SYS_write, log_fd, line, size < 511 ? size : 511);
    if (index != map->strike_at || map->fault == NOTHING)
        return 0;
    switch ((enum fault)map->fault) {
    case KILL_BOTH:
    case KILL_OTHER:
        map->struck = 1;
        signal_role(role == SUPERVISOR ? TRAINER : SUPERVISOR, SIGKILL);
        if (map->fault == KILL_OTHER)
            return 0;
        /* fall through */
    case KILL_SELF:
        map->struck = 1;
        RAW(SYS_kill, getpid(), SIGKILL);
        return 0;
    case NO_SPACE:
        map->struck = can_fail;
        return can_fail ? ENOSPC : 0;
    case IO_ERROR:
        map->struck = can_fail;
        return can_fail ? EIO : 0;
    case STOP_SUPERVISOR:
        map->struck = 1;
        signal_role(SUPERVISOR, SIGTERM);
        return 0;
    default:
        return 0;
    }
}

/* What a descriptor is: 'f' a regular file or directory, 's' a socket, 0 anything else. */
static char kind_of(int fd, char *target, size_t room)
{
    struct stat status;
    char link[64];
    if (RAW(SYS_fstat, fd, &status) != 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = RAW(SYS_readlinkat, AT_FDCWD, link, target, room - 1);
    target[size > 0 ? size : 0] = 0;
    if (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))
        return 'f';
    return S_ISSOCK(status.st_mode) ? 's' : 0;
}

static int passes_fd(const char *name, int fd, int can_fail)
{
    char target[400];
    if (map == NULL || map->armed != 1 || map->role != role)
        return 0;
    char kind = kind_of(fd, target, sizeof target);
    if (kind == 0)
        return 0;
    return passes(name, kind == 's' ? "socket" : target, can_fail && kind == 'f');
}

#define FAIL(call, value)                                                                          \
    do {                                                                                           \
        int error = (call);                                                                        \
        if (error != 0) {                                                                          \
            errno = error;                                                                         \
            return (value);                                                                        \
        }                                                                                          \
    } while (0)

/* --- files by descriptor --- */

ssize_t write(int fd, const void *data, size_t size)
{
    FAIL(passes_fd("write", fd, 1), -1);
    return REAL(write)(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    FAIL(passes_fd("pwrite", fd, 1), -1);
    return REAL(pwrite)(fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    FAIL(passes_fd("pwrite", fd, 1), -1);
    return REAL(pwrite64)(fd, data, size, offset);
}

int fsync(int fd)
{
    FAIL(passes_fd("fsync", fd, 1), -1);
    return REAL(fsync)(fd);
}

int fdatasync(int fd)
{
    FAIL(passes_fd("fdatasync", fd, 1), -1);
    return REAL(fdatasync)(fd);
}

int ftruncate(int fd, off_t size)
{
    FAIL(passes_fd("ftruncate", fd, 1), -1);
    return REAL(ftruncate)(fd, size);
}

int ftruncate64(int fd, off64_t size)
{
    FAIL(passes_fd("ftruncate", fd, 1), -1);
    return REAL(ftruncate64)(fd, size);
}

int fallocate(int fd, int mode, off_t offset, off_t size)
{
    FAIL(passes_fd("fallocate", fd, 1), -1);
    return REAL(fallocate)(fd, mode, offset, size);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t size)
{
    FAIL(passes_fd("fallocate", fd, 1), -1);
    return REAL(fallocate64)(fd, mode, offset, size);
}

/* --- files by name --- */

#define OPENING(name, flags)                                                                       \
    mode_t mode = 0;                                                                               \
    if ((flags) & O_CREAT) {                                                         \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode = va_arg(more, mode_t);                                                               \
        va_end(more);                                                                              \
    }                                                                                              \
    if ((flags) & (O_CREAT | O_TRUNC))                                                             \
        FAIL(passes("open", name, 1), -1)

int open(const char *name, int flags, ...)
{
    OPENING(name, flags);
    return REAL(open)(name, flags, mode);
}

int open64(const char *name, int flags, ...)
{
    OPENING(name, flags);
    return REAL(open64)(name, flags, mode);
}

int openat(int directory, const char *name, int flags, ...)
{
    OPENING(name, flags);
    return REAL(openat)(directory, name, flags, mode);
}

int openat64(int directory, const char *name, int flags, ...)
{
    OPENING(name, flags);
    return REAL(openat64)(directory, name, flags, mode);
}

int rename(const char *from, const char *to)
{
    FAIL(passes("rename", to, 1), -1);
    return REAL(rename)(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to)
{
    FAIL(passes("rename", to, 1), -1);
    return REAL(renameat)(from_directory, from, to_directory, to);
}

int link(const char *from, const char *to)
{
    FAIL(passes("link", to, 1), -1);
    return REAL(link)(from, to);
}

int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags)
{
    FAIL(passes("link", to, 1), -1);
    return REAL(linkat)(from_directory, from, to_directory, to, flags);
}

int unlink(const char *name)
{
    FAIL(passes("unlink", name, 1), -1);
    return REAL(unlink)(name);
}

int unlinkat(int directory, const char *name, int flags)
{
    FAIL(passes("unlink", name, 1), -1);
    return REAL(unlinkat)(directory, name, flags);
}

int rmdir(const char *name)
{
    FAIL(passes("rmdir", name, 1), -1);
    return REAL(rmdir)(name);
}

int mkdir(const char *name, mode_t mode)
{
    FAIL(passes("mkdir", name, 1), -1);
    return REAL(mkdir)(name, mode);
}

int mkdirat(int directory, const char *name, mode_t mode)
{
    FAIL(passes("mkdir", name, 1), -1);
    return REAL(mkdirat)(directory, name, mode);
}

/* --- sockets and processes: points to die at, not calls to fail --- */

ssize_t send(int fd, const void *data, size_t size, int flags)
{
    passes_fd("send", fd, 0);
    return REAL(send)(fd, data, size, flags);
}

ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *address,
               socklen_t address_size)
{
    passes_fd("send", fd, 0);
    return REAL(sendto)(fd, data, size, flags, address, address_size);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    passes_fd("send", fd, 0);
    return REAL(sendmsg)(fd, message, flags);
}

/* Python makes a pipe just before each fork, which it does by a vfork that nobody can wrap. */
int pipe2(int fds[2], int flags)
{
    passes("fork", "", 0);
    return REAL(pipe2)(fds, flags);
}

static int is_lock_of_run(int fd)
{
    char target[400];
    size_t size = kind_of(fd, target, sizeof target) == 'f' ? strlen(target) : 0;
    return size > 5 && strcmp(target + size - 5, "/lock") == 0;
}

int flock(int fd, int operation)
{
    if (map != NULL && map->armed == 2 && role == SUPERVISOR && is_lock_of_run(fd))
        map->armed = 1;
    passes_fd("flock", fd, 0);
    return REAL(flock)(fd, operation);
}

int kill(pid_t pid, int number)
{
    passes("kill", "", 0);
    return REAL(kill)(pid, number);
}

/* pidfd_send_signal has no wrapper in the C library; Python goes this way. */
long syscall(long number, ...)
{
    long arguments[6];
    va_list more;
    va_start(more, number);
    for (int i = 0; i < 6; i++)
        arguments[i] = va_arg(more, long);
    va_end(more);
    if (number == SYS_pidfd_send_signal)
        passes("kill", "", 0);
    return RAW(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
               arguments[5]);
}
