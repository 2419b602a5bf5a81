/* Strikes at a chosen one of the calls by which a process changes files below a folder: with an error, with SIGKILL, SIGINT
 * or SIGSTOP. Preloaded; what it shall do stands in the environment:
 *   FAULT_ROOT    the folder, absolute; nothing else is counted
 *   FAULT_LOG     where each counted call gets a line: a letter and a path
 *   FAULT_OPS     the letters that count: o create, w write, t truncate, s fsync, r rename, l link, m mkdir, u unlink or
 *                 rmdir, i open what is there, d list a folder
 *   FAULT_ONLY    a part that a path must have to count
 *   FAULT_AT      the number of the call that is struck, from 1
 *   FAULT_DO      the number of an error, "kill", "int" or "stop"
 *   FAULT_STICKY  the letters of which every later call is struck too
 *   FAULT_THREADS the number of the thread, from 1, from which on none is started (EAGAIN)
 *   FAULT_FREE    what a disk tells of its free bytes, from call FAULT_AT of fstatvfs on
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *root, *ops, *only, *what, *sticky, *free_bytes;
static long at, threads_from;
static int log_fd = -1;
static atomic_long count, asked, threads;
/* The first half of what this thread is writing, which a kill lets through. */
static __thread struct {
    int fd;
    const void *bytes;
    size_t length;
} half;

__attribute__((constructor)) static void start(void) {
    root = getenv("FAULT_ROOT");
    ops = getenv("FAULT_OPS");
    only = getenv("FAULT_ONLY");
    what = getenv("FAULT_DO");
    sticky = getenv("FAULT_STICKY");
    free_bytes = getenv("FAULT_FREE");
    const char *number = getenv("FAULT_AT"), *log = getenv("FAULT_LOG");
    at = number ? atol(number) : 0;
    const char *from = getenv("FAULT_THREADS");
    threads_from = from ? atol(from) : 0;
    /* A shell starts what it puts into the background with this signal ignored. */
    if (what && !strcmp(what, "int")) signal(SIGINT, SIG_DFL);
    if (log) log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

/* Whether a call is to fail, with errno set; it may not return at all. */
static int strikes(char op, const char *path, const char *to) {
    if (!root || !path || strncmp(path, root, strlen(root)) != 0) return 0;
    if (only && !strstr(path, only) && !(to && strstr(to, only))) return 0;
    if (ops && !strchr(ops, op)) {
        if (!at || count < at || !sticky || !strchr(sticky, op)) return 0;
        errno = atoi(what);
        return 1;
    }
    long number = ++count;
    if (log_fd >= 0) {
        char line[4200];
        int length = snprintf(line, sizeof line, "%c %s\n", op, to ? to : path);
        if (length > 0) syscall(SYS_write, log_fd, line, (size_t)length);
    }
    if (!what || at == 0 || number < at) return 0;
    if (number > at && !(sticky && strchr(sticky, op))) return 0;
    if (!strcmp(what, "kill")) {
        if (half.length) syscall(SYS_write, half.fd, half.bytes, half.length);
        syscall(SYS_kill, (long)getpid(), SIGKILL);
        for (;;) pause();
    }
    if (!strcmp(what, "stop")) {
        syscall(SYS_tgkill, (long)getpid(), syscall(SYS_gettid), SIGSTOP);
        return 0;
    }
    if (!strcmp(what, "int")) {
        syscall(SYS_kill, (long)getpid(), SIGINT);
        /* Time for whoever waits for the signal. */
        usleep(2000000);
        return 0;
    }
    errno = atoi(what);
    return 1;
}

static int strikes_file(char op, int fd) {
    if (!root) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return strikes(op, path, NULL);
}

ssize_t write(int fd, const void *bytes, size_t length) {
    half.fd = fd, half.bytes = bytes, half.length = length / 2;
    int struck = strikes_file('w', fd);
    half.length = 0;
    return struck ? -1 : syscall(SYS_write, fd, bytes, length);
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
    return strikes_file('w', fd) ? -1 : syscall(SYS_writev, fd, parts, number);
}
ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t start) {
    return strikes_file('w', fd) ? -1 : syscall(SYS_pwrite64, fd, bytes, length, start);
}
int fsync(int fd) { return strikes_file('s', fd) ? -1 : (int)syscall(SYS_fsync, fd); }
int fdatasync(int fd) { return strikes_file('s', fd) ? -1 : (int)syscall(SYS_fdatasync, fd); }
int ftruncate(int fd, off_t length) { return strikes_file('t', fd) ? -1 : (int)syscall(SYS_ftruncate, fd, length); }
int ftruncate64(int fd, off64_t length) { return strikes_file('t', fd) ? -1 : (int)syscall(SYS_ftruncate, fd, length); }
int rename(const char *from, const char *to) {
    return strikes('r', from, to) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    return strikes('r', from, to) ? -1 : (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
}
int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    return strikes('l', from, to) ? -1 : (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags);
}
DIR *opendir(const char *path) {
    DIR *(*next)(const char *) = (DIR *(*)(const char *))dlsym(RTLD_NEXT, "opendir");
    return strikes('d', path, NULL) ? NULL : next(path);
}
int mkdir(const char *path, mode_t mode) {
    return strikes('m', path, NULL) ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}
int unlink(const char *path) {
    return strikes('u', path, NULL) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
int rmdir(const char *path) {
    return strikes('u', path, NULL) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}
int unlinkat(int folder, const char *path, int flags) {
    int struck = folder == AT_FDCWD ? strikes('u', path, NULL) : strikes_file('u', folder);
    return struck ? -1 : (int)syscall(SYS_unlinkat, folder, path, flags);
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
    if (strikes(flags & O_CREAT ? 'o' : 'i', path, NULL)) return -1;
    return (int)syscall(SYS_openat, folder, path, flags, mode);
}
#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }
int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return opened(folder, path, flags, mode); }

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*work)(void *), void *with) {
    typedef int (*creator)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (threads_from && ++threads >= threads_from) return EAGAIN;
    return ((creator)dlsym(RTLD_NEXT, "pthread_create"))(thread, how, work, with);
}

static void tell_free(struct statvfs *facts) {
    if (!free_bytes || ++asked < (at ? at : 1)) return;
    facts->f_frsize = facts->f_bsize = 1;
    facts->f_bavail = facts->f_bfree = (fsblkcnt_t)atoll(free_bytes);
}
int fstatvfs(int fd, struct statvfs *facts) {
    int (*next)(int, struct statvfs *) = (int (*)(int, struct statvfs *))dlsym(RTLD_NEXT, "fstatvfs");
    int status = next(fd, facts);
    if (status == 0) tell_free(facts);
    return status;
}
int fstatvfs64(int fd, struct statvfs64 *facts) {
    int (*next)(int, struct statvfs64 *) = (int (*)(int, struct statvfs64 *))dlsym(RTLD_NEXT, "fstatvfs64");
    int status = next(fd, facts);
    if (status == 0) tell_free((struct statvfs *)facts);
    return status;
}
