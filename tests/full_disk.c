/*
 * A disk that is full, or broken, for as long as the file DISK_RULES has lines in it. Loaded with
 * LD_PRELOAD into every process of a run.
 *
 *   28 checkpoints*.bin write,open   these calls fail with errno 28 where the target has this in it
 *   short checkpoints/ write         a write takes only half of what it is given
 *   room 4096                        what statvfs says is available, in bytes
 *
 * Calls are write (pwrite too), fsync (fdatasync too), fallocate, open (that makes a file), link and
 * rename. The file is read at every call: emptying it is the disk getting room again.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define SHORT (-1)

static long read_rules(char *text, size_t room)
{
    const char *place = getenv("DISK_RULES");
    if (place == NULL)
        return 0;
    long fd = syscall(SYS_openat, AT_FDCWD, place, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    long size = syscall(SYS_read, fd, text, room - 1);
    syscall(SYS_close, fd);
    text[size > 0 ? size : 0] = 0;
    return size;
}

/* The errno that a rule has for this call, SHORT, or 0. */
static int verdict(const char *call, const char *target)
{
    char text[2048], *line, *rest;
    int before = errno;
    long size = read_rules(text, sizeof text);
    errno = before;
    if (size <= 0)
        return 0;
    for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char word[16], wanted[256], calls[256];
        if (sscanf(line, "%15s %255s %255s", word, wanted, calls) != 3)
            continue;
        char pattern[260];
        snprintf(pattern, sizeof pattern, "*%s*", wanted);
        if (fnmatch(pattern, target, 0) == 0 && strstr(calls, call) != NULL)
            return strcmp(word, "short") == 0 ? SHORT : atoi(word);
    }
    return 0;
}

static int verdict_fd(const char *call, int fd)
{
    char link[64], target[4096];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, target, sizeof target - 1);
    errno = before;
    if (size <= 0)
        return 0;
    target[size] = 0;
    return target[0] == '/' ? verdict(call, target) : 0;
}

#define FAIL(found, value)                                                                         \
    do {                                                                                           \
        int error = (found);                                                                       \
        if (error > 0) {                                                                           \
            errno = error;                                                                         \
            return (value);                                                                        \
        }                                                                                          \
    } while (0)

ssize_t write(int fd, const void *data, size_t size)
{
    int found = verdict_fd("write", fd);
    FAIL(found, -1);
    return REAL(write)(fd, data, found == SHORT && size > 1 ? size / 2 : size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    int found = verdict_fd("write", fd);
    FAIL(found, -1);
    return REAL(pwrite)(fd, data, found == SHORT && size > 1 ? size / 2 : size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    int found = verdict_fd("write", fd);
    FAIL(found, -1);
    return REAL(pwrite64)(fd, data, found == SHORT && size > 1 ? size / 2 : size, offset);
}

int fsync(int fd)
{
    FAIL(verdict_fd("fsync", fd), -1);
    return REAL(fsync)(fd);
}

int fdatasync(int fd)
{
    FAIL(verdict_fd("fsync", fd), -1);
    return REAL(fdatasync)(fd);
}

int fallocate(int fd, int mode, off_t offset, off_t size)
{
    FAIL(verdict_fd("fallocate", fd), -1);
    return REAL(fallocate)(fd, mode, offset, size);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t size)
{
    FAIL(verdict_fd("fallocate", fd), -1);
    return REAL(fallocate64)(fd, mode, offset, size);
}

/* A name that is there needs no room to be opened. */
#define OPENING(directory, name, flags)                                                            \
    mode_t mode = 0;                                                                               \
    if ((flags) & O_CREAT) {                                                                       \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode = va_arg(more, mode_t);                                                               \
        va_end(more);                                                                              \
        if (syscall(SYS_faccessat, directory, name, F_OK) != 0)                                    \
            FAIL(verdict("open", name), -1);                                                       \
    }

int open(const char *name, int flags, ...)
{
    OPENING(AT_FDCWD, name, flags);
    return REAL(open)(name, flags, mode);
}

int open64(const char *name, int flags, ...)
{
    OPENING(AT_FDCWD, name, flags);
    return REAL(open64)(name, flags, mode);
}

int openat(int directory, const char *name, int flags, ...)
{
    OPENING(directory, name, flags);
    return REAL(openat)(directory, name, flags, mode);
}

int openat64(int directory, const char *name, int flags, ...)
{
    OPENING(directory, name, flags);
    return REAL(openat64)(directory, name, flags, mode);
}

int rename(const char *from, const char *to)
{
    FAIL(verdict("rename", to), -1);
    return REAL(rename)(from, to);
}

int link(const char *from, const char *to)
{
    FAIL(verdict("link", to), -1);
    return REAL(link)(from, to);
}

int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags)
{
    FAIL(verdict("link", to), -1);
    return REAL(linkat)(from_directory, from, to_directory, to, flags);
}

static int room(struct statvfs *status, int result)
{
    char text[2048];
    unsigned long long bytes;
    if (result != 0 || read_rules(text, sizeof text) <= 0)
        return result;
    char *found = strstr(text, "room ");
    if (found != NULL && sscanf(found, "room %llu", &bytes) == 1)
        status->f_bavail = bytes / status->f_frsize;
    return 0;
}

int statvfs(const char *path, struct statvfs *status)
{
    return room(status, REAL(statvfs)(path, status));
}

/* The same structure on a 64-bit machine. */
int statvfs64(const char *path, struct statvfs64 *status)
{
    return room((struct statvfs *)status, REAL(statvfs64)(path, status));
}
