// Preloaded into a process, it lets the Nth call on files of one folder fail, or kills the process there; tests/faults/exhaust.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
#include <fcntl.h>

enum { WRITE = 1, SYNC = 2, RENAME = 4, CHANGE = 8, MAP = 16, READ = 32, OPEN = 64, ALLOCATE = 128 };
static char folder[PATH_MAX];
static size_t folder_length;
static int kinds, error, halves, lasting;
static long nth, calls, struck, seen[8];  // of all kinds together; of each
static uintptr_t from, until;  // of the extension's code
static uint64_t wanted;  // see shim_arm
static struct { uint64_t site; long calls; } sites[1 << 14];  // of allocations, by hash

// kinds: some of the above. error: its errno, or 0 to kill the process. halves: a write does half of its work, and says so.
// lasting: all calls behind the Nth too. site: of allocations only those that come from there count; 1: how many come from each
// site is counted; 0: where they come from is not looked at.
void shim_arm(const char *under, int kinds_, long nth_, int error_, int halves_, int lasting_, uintptr_t from_, uintptr_t until_, uint64_t site_) {
    strncpy(folder, under, sizeof folder - 1);
    folder_length = strlen(folder);
    error = error_, halves = halves_, lasting = lasting_, from = from_, until = until_;
    memset(seen, 0, sizeof seen);
    memset(sites, 0, sizeof sites);
    wanted = site_;
    nth = nth_, calls = struck = 0, kinds = kinds_;
}
void shim_disarm(void) { kinds = 0; }
long shim_seen(int bit) { return seen[bit]; }
long shim_struck(void) { return struck; }
// How many calls came from the next site; 0: that was the last. place: begins at 0.
long shim_site(int *place, uint64_t *site) {
    for (; *place < (int) (sizeof sites / sizeof *sites); ++*place)
        if (sites[*place].site) return *site = sites[*place].site, sites[(*place)++].calls;
    return 0;
}

#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

static int under(const char *path) {
    return path && !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int under_fd(int fd) {
    char link[40], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return under(path);
}

static int under_at(int fd, const char *path) { return path && path[0] != '/' && fd != AT_FDCWD ? under_fd(fd) : under(path); }

static int counted(int kind) {
    __atomic_add_fetch(&seen[__builtin_ctz(kind)], 1, __ATOMIC_SEQ_CST);
    const long number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (number != nth && !(lasting && number > nth)) return 0;
    __atomic_add_fetch(&struck, 1, __ATOMIC_SEQ_CST);
    return 1;
}

// Whether a call is to fail. Kills where that is asked for and nothing is to be done before.
static int due(int kind, int is_under) {
    if (!is_under || !counted(kind)) return 0;
    if (!error && kind != WRITE) kill(getpid(), SIGKILL);
    errno = error;
    return 1;
}
#define DUE_FD(kind, fd) ((kinds & (kind)) && due(kind, under_fd(fd)))
#define DUE_AT(kind, fd, path) ((kinds & (kind)) && due(kind, under_at(fd, path)))

// What of a write that fails is done, and what it returns. Half of one is no error: whoever wrote has to go on.
#define WRITES(name, declared, fd, half, whole)                       \
    ssize_t name declared {                                           \
        if (!DUE_FD(WRITE, fd)) return REAL(name) whole;              \
        const ssize_t done = halves || !error ? REAL(name) half : -1; \
        if (!error) kill(getpid(), SIGKILL);                          \
        if (done < 0) errno = error;                                  \
        return done;                                                  \
    }
WRITES(write, (int fd, const void *p, size_t n), fd, (fd, p, (n + 1) / 2), (fd, p, n))
WRITES(pwrite, (int fd, const void *p, size_t n, off_t at), fd, (fd, p, (n + 1) / 2, at), (fd, p, n, at))
WRITES(pwrite64, (int fd, const void *p, size_t n, off64_t at), fd, (fd, p, (n + 1) / 2, at), (fd, p, n, at))
WRITES(writev, (int fd, const struct iovec *v, int n), fd, (fd, v, (n + 1) / 2), (fd, v, n))
extern ssize_t sendfile(int, int, off_t *, size_t), sendfile64(int, int, off64_t *, size_t);
WRITES(sendfile, (int to, int of, off_t *at, size_t n), to, (to, of, at, (n + 1) / 2), (to, of, at, n))
WRITES(sendfile64, (int to, int of, off64_t *at, size_t n), to, (to, of, at, (n + 1) / 2), (to, of, at, n))
WRITES(copy_file_range, (int of, off64_t *a, int to, off64_t *b, size_t n, unsigned f), to, (of, a, to, b, (n + 1) / 2, f), (of, a, to, b, n, f))
size_t fwrite(const void *p, size_t size, size_t n, FILE *file) {
    if (!DUE_FD(WRITE, fileno(file))) return REAL(fwrite)(p, size, n, file);
    const size_t done = REAL(fwrite)(p, size, n / 2, file);
    if (error) return done;
    fflush(file);
    kill(getpid(), SIGKILL);
    return done;
}

#define FAILS_FD(type, kind, bad, name, declared, fd, whole) \
    type name declared { return DUE_FD(kind, fd) ? bad : REAL(name) whole; }
#define FAILS_AT(kind, name, declared, fd, path, whole) \
    int name declared { return DUE_AT(kind, fd, path) ? -1 : REAL(name) whole; }
FAILS_FD(int, SYNC, -1, fsync, (int fd), fd, (fd))
FAILS_FD(int, SYNC, -1, fdatasync, (int fd), fd, (fd))
FAILS_AT(RENAME, rename, (const char *a, const char *b), AT_FDCWD, b, (a, b))
FAILS_AT(RENAME, renameat, (int f, const char *a, int g, const char *b), g, b, (f, a, g, b))
FAILS_AT(RENAME, renameat2, (int f, const char *a, int g, const char *b, unsigned flags), g, b, (f, a, g, b, flags))
FAILS_FD(int, CHANGE, -1, ftruncate, (int fd, off_t n), fd, (fd, n))
FAILS_FD(int, CHANGE, -1, ftruncate64, (int fd, off64_t n), fd, (fd, n))
FAILS_AT(CHANGE, truncate, (const char *path, off_t n), AT_FDCWD, path, (path, n))
FAILS_AT(CHANGE, truncate64, (const char *path, off64_t n), AT_FDCWD, path, (path, n))
FAILS_AT(CHANGE, unlink, (const char *path), AT_FDCWD, path, (path))
FAILS_AT(CHANGE, unlinkat, (int fd, const char *path, int flags), fd, path, (fd, path, flags))
FAILS_AT(CHANGE, rmdir, (const char *path), AT_FDCWD, path, (path))
FAILS_AT(CHANGE, mkdir, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
FAILS_AT(CHANGE, mkdirat, (int fd, const char *path, mode_t mode), fd, path, (fd, path, mode))
FAILS_AT(CHANGE, link, (const char *a, const char *b), AT_FDCWD, b, (a, b))
FAILS_AT(CHANGE, linkat, (int f, const char *a, int g, const char *b, int flags), g, b, (f, a, g, b, flags))
FAILS_AT(CHANGE, symlink, (const char *a, const char *b), AT_FDCWD, b, (a, b))
FAILS_AT(CHANGE, chmod, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
int posix_fallocate(int fd, off_t at, off_t n) { return DUE_FD(CHANGE, fd) ? error : REAL(posix_fallocate)(fd, at, n); }
int posix_fallocate64(int fd, off64_t at, off64_t n) { return DUE_FD(CHANGE, fd) ? error : REAL(posix_fallocate64)(fd, at, n); }
FAILS_FD(void *, MAP, MAP_FAILED, mmap, (void *p, size_t n, int prot, int flags, int fd, off_t at), fd, (p, n, prot, flags, fd, at))
FAILS_FD(void *, MAP, MAP_FAILED, mmap64, (void *p, size_t n, int prot, int flags, int fd, off64_t at), fd, (p, n, prot, flags, fd, at))
FAILS_FD(ssize_t, READ, halves ? REAL(read)(fd, p, (n + 1) / 2) : -1, read, (int fd, void *p, size_t n), fd, (fd, p, n))
FAILS_FD(ssize_t, READ, halves ? REAL(pread)(fd, p, (n + 1) / 2, at) : -1, pread, (int fd, void *p, size_t n, off_t at), fd, (fd, p, n, at))
FAILS_FD(ssize_t, READ, halves ? REAL(pread64)(fd, p, (n + 1) / 2, at) : -1, pread64, (int fd, void *p, size_t n, off64_t at), fd, (fd, p, n, at))
FAILS_FD(ssize_t, READ, -1, readv, (int fd, const struct iovec *v, int n), fd, (fd, v, n))
FAILS_FD(size_t, READ, REAL(fread)(p, size, n / 2, file), fread, (void *p, size_t size, size_t n, FILE *file), fileno(file), (p, size, n, file))

#define OPENS(name, declared, fd, path, ...)                            \
    int name declared {                                                 \
        va_list rest;                                                   \
        va_start(rest, flags);                                          \
        const mode_t mode = va_arg(rest, mode_t);                       \
        va_end(rest);                                                   \
        return DUE_AT(OPEN, fd, path) ? -1 : REAL(name)(__VA_ARGS__, mode); \
    }
OPENS(open, (const char *path, int flags, ...), AT_FDCWD, path, path, flags)
OPENS(open64, (const char *path, int flags, ...), AT_FDCWD, path, path, flags)
OPENS(openat, (int fd, const char *path, int flags, ...), fd, path, fd, path, flags)
OPENS(openat64, (int fd, const char *path, int flags, ...), fd, path, fd, path, flags)
FILE *fopen(const char *path, const char *mode) { return DUE_AT(OPEN, AT_FDCWD, path) ? NULL : REAL(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { return DUE_AT(OPEN, AT_FDCWD, path) ? NULL : REAL(fopen64)(path, mode); }

// Where in the extension's code the innermost calls are that led here.
static uint64_t site_of(void) {
    void *frames[16];
    const int count = backtrace(frames, 16);
    uint64_t hash = 14695981039346656037u;
    for (int frame = 0, taken = 0; frame < count && taken < 4; ++frame) {
        const uintptr_t at = (uintptr_t) frames[frame] - from;
        if (at < until - from) hash = (hash ^ at) * 1099511628211u, ++taken;
    }
    return (hash >> 2) + 2;  // neither 0 nor 1
}

static int is_wanted(void) {
    if (!wanted) return 1;
    const uint64_t site = site_of();
    if (wanted != 1) return site == wanted;
    const int most = sizeof sites / sizeof *sites;
    for (int step = 0; step < most; ++step) {
        const int place = (site + step) % most;
        uint64_t free = 0;
        if (__atomic_compare_exchange_n(&sites[place].site, &free, site, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) || free == site) {
            __atomic_add_fetch(&sites[place].calls, 1, __ATOMIC_SEQ_CST);
            break;
        }
    }
    return 1;
}

// Allocations that the extension's own code asks for. C++'s are asked for what nobody has, and throw by themselves.
#define OURS ((kinds & ALLOCATE) && (uintptr_t) __builtin_return_address(0) - from < until - from && is_wanted() && counted(ALLOCATE))
extern void *_Znwm(size_t), *_ZnwmSt11align_val_t(size_t, size_t);
void *_Znwm(size_t n) { return REAL(_Znwm)(OURS ? (size_t) PTRDIFF_MAX : n); }
void *_ZnwmSt11align_val_t(size_t n, size_t unit) { return REAL(_ZnwmSt11align_val_t)(OURS ? (size_t) PTRDIFF_MAX / 2 : n, unit); }
void *aligned_alloc(size_t unit, size_t n) { return OURS ? (errno = ENOMEM, NULL) : REAL(aligned_alloc)(unit, n); }
