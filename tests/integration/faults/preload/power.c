/* Journals what a process does to the files under $POWER_DIRECTORY, into the file $POWER_JOURNAL.
 *
 * To be loaded by LD_PRELOAD. Each record is a struct `entry`, a path, a second path and data; one
 * record per operation that has succeeded, in the order in which they ended. disk.py replays them.
 * An operation and its record are one critical section, so a sync covers all writes recorded before.
 * What this file does not intercept would be a hole: a writable shared mapping is recorded as UNSEEN,
 * and disk.py refuses such a journal.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE, WRITE, WRITE_SYNCED, TRUNCATE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, UNSEEN };

struct entry {
  uint32_t operation, path_bytes, other_bytes, unused;
  uint64_t offset, data_bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int journal = -1;

__attribute__((constructor)) static void begin(void) {
  const char *directory = getenv("POWER_DIRECTORY"), *file = getenv("POWER_JOURNAL");
  if (!directory || !file || !realpath(directory, root)) return;
  root_length = strlen(root);
  journal = (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int watched(const char *path) {
  return journal >= 0 && !strncmp(path, root, root_length) &&
         (path[root_length] == '/' || path[root_length] == '\0');
}

static int path_of(int descriptor, char *path) {
  char link[64] = "/proc/self/fd/";
  char digits[16];
  int n = 0, length;
  if (journal < 0 || descriptor < 0) return 0;
  do digits[n++] = (char)('0' + descriptor % 10); while (descriptor /= 10);
  length = (int)strlen(link);
  while (n) link[length++] = digits[--n];
  link[length] = '\0';
  ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  if (size <= 0) return 0;
  path[size] = '\0';
  return watched(path);
}

/* The absolute path of a name whose file may not exist; its directory does. */
static int path_at(int directory, const char *name, char *path) {
  char parent[PATH_MAX];
  if (journal < 0) return 0;
  if (name[0] == '/') {
    strncpy(parent, name, PATH_MAX - 1);
    parent[PATH_MAX - 1] = '\0';
  } else {
    if (directory == AT_FDCWD) {
      if (!getcwd(parent, PATH_MAX)) return 0;
    } else {
      if (!path_of(directory, parent)) return 0;
    }
    if (strlen(parent) + strlen(name) + 2 > PATH_MAX) return 0;
    strcat(strcat(parent, "/"), name);
  }
  size_t length = strlen(parent);
  while (length > 1 && parent[length - 1] == '/') parent[--length] = '\0';
  char *slash = strrchr(parent, '/');
  char base[PATH_MAX];
  strcpy(base, slash + 1);
  slash[slash == parent] = '\0';
  if (!realpath(parent, path) || strlen(path) + strlen(base) + 2 > PATH_MAX) return 0;
  strcat(strcat(path, "/"), base);
  return watched(path);
}

static void record(int operation, const char *path, const char *other, uint64_t offset,
                   const struct iovec *parts, int count, size_t bytes) {
  int saved = errno;
  struct entry entry = {(uint32_t)operation, (uint32_t)strlen(path), (uint32_t)strlen(other), 0, offset, bytes};
  struct iovec head[3] = {{&entry, sizeof entry}, {(void *)path, entry.path_bytes}, {(void *)other, entry.other_bytes}};
  if (syscall(SYS_writev, journal, head, 3) < 0) abort();
  for (int i = 0; i < count && bytes; i++) {
    size_t length = parts[i].iov_len < bytes ? parts[i].iov_len : bytes;
    for (size_t done = 0; done < length;) {
      ssize_t n = syscall(SYS_write, journal, (char *)parts[i].iov_base + done, length - done);
      if (n < 0) abort();
      done += (size_t)n;
    }
    bytes -= length;
  }
  errno = saved;
}

static void record_write(int descriptor, const char *path, off_t offset, const struct iovec *parts, int count,
                         ssize_t bytes) {
  if (bytes <= 0) return;
  int flags = (int)syscall(SYS_fcntl, descriptor, F_GETFL);
  if (offset < 0) offset = (off_t)syscall(SYS_lseek, descriptor, 0, SEEK_CUR) - bytes;
  record(flags & O_DSYNC ? WRITE_SYNCED : WRITE, path, "", (uint64_t)offset, parts, count, (size_t)bytes);
}

#define GUARDED(result, call, after)     \
  do {                                   \
    pthread_mutex_lock(&lock);           \
    result = call;                       \
    if (result >= 0) { after; }          \
    int saved_ = errno;                  \
    pthread_mutex_unlock(&lock);         \
    errno = saved_;                      \
  } while (0)

ssize_t write(int descriptor, const void *data, size_t size) {
  char path[PATH_MAX];
  if (!path_of(descriptor, path)) return syscall(SYS_write, descriptor, data, size);
  struct iovec part = {(void *)data, size};
  ssize_t n;
  GUARDED(n, syscall(SYS_write, descriptor, data, size), record_write(descriptor, path, -1, &part, 1, n));
  return n;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
  char path[PATH_MAX];
  if (!path_of(descriptor, path)) return syscall(SYS_writev, descriptor, parts, count);
  ssize_t n;
  GUARDED(n, syscall(SYS_writev, descriptor, parts, count), record_write(descriptor, path, -1, parts, count, n));
  return n;
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
  char path[PATH_MAX];
  if (!path_of(descriptor, path)) return syscall(SYS_pwrite64, descriptor, data, size, offset);
  struct iovec part = {(void *)data, size};
  ssize_t n;
  GUARDED(n, syscall(SYS_pwrite64, descriptor, data, size, offset),
          record_write(descriptor, path, offset, &part, 1, n));
  return n;
}
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
  return pwrite(descriptor, data, size, offset);
}

ssize_t pwritev(int descriptor, const struct iovec *parts, int count, off_t offset) {
  char path[PATH_MAX];
  if (!path_of(descriptor, path)) return syscall(SYS_pwritev, descriptor, parts, count, offset, 0);
  ssize_t n;
  GUARDED(n, syscall(SYS_pwritev, descriptor, parts, count, offset, 0),
          record_write(descriptor, path, offset, parts, count, n));
  return n;
}
ssize_t pwritev64(int descriptor, const struct iovec *parts, int count, off64_t offset) {
  return pwritev(descriptor, parts, count, offset);
}

int ftruncate(int descriptor, off_t size) {
  char path[PATH_MAX];
  if (!path_of(descriptor, path)) return (int)syscall(SYS_ftruncate, descriptor, size);
  int n;
  GUARDED(n, (int)syscall(SYS_ftruncate, descriptor, size), record(TRUNCATE, path, "", (uint64_t)size, NULL, 0, 0));
  return n;
}
int ftruncate64(int descriptor, off64_t size) { return ftruncate(descriptor, size); }

int fsync(int descriptor) {
  char path[PATH_MAX];
  if (!path_of(descriptor, path)) return (int)syscall(SYS_fsync, descriptor);
  int n;
  GUARDED(n, (int)syscall(SYS_fsync, descriptor), record(SYNC, path, "", 0, NULL, 0, 0));
  return n;
}

int fdatasync(int descriptor) {
  char path[PATH_MAX];
  if (!path_of(descriptor, path)) return (int)syscall(SYS_fdatasync, descriptor);
  int n;
  GUARDED(n, (int)syscall(SYS_fdatasync, descriptor), record(SYNC, path, "", 0, NULL, 0, 0));
  return n;
}

static int open_(int directory, const char *name, int flags, mode_t mode) {
  char path[PATH_MAX];
  if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !path_at(directory, name, path))
    return (int)syscall(SYS_openat, directory, name, flags, mode);
  int n, is_new = syscall(SYS_faccessat, AT_FDCWD, path, F_OK) != 0;
  GUARDED(n, (int)syscall(SYS_openat, directory, name, flags, mode), {
    if (is_new) record(CREATE, path, "", 0, NULL, 0, 0);
    else if (flags & O_TRUNC) record(TRUNCATE, path, "", 0, NULL, 0, 0);
  });
  return n;
}

#define WITH_MODE(directory, name, flags)          \
  mode_t mode = 0;                                 \
  if (flags & (O_CREAT | O_TMPFILE)) {             \
    va_list rest;                                  \
    va_start(rest, flags);                         \
    mode = va_arg(rest, mode_t);                   \
    va_end(rest);                                  \
  }                                                \
  return open_(directory, name, flags, mode)

int open(const char *name, int flags, ...) { WITH_MODE(AT_FDCWD, name, flags); }
int open64(const char *name, int flags, ...) { WITH_MODE(AT_FDCWD, name, flags); }
int openat(int directory, const char *name, int flags, ...) { WITH_MODE(directory, name, flags); }
int openat64(int directory, const char *name, int flags, ...) { WITH_MODE(directory, name, flags); }

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
  char old[PATH_MAX], new[PATH_MAX];
  int seen = path_at(from_directory, from, old) && path_at(to_directory, to, new), n;
  GUARDED(n, (int)syscall(SYS_renameat2, from_directory, from, to_directory, to, 0),
          if (seen) record(RENAME, old, new, 0, NULL, 0, 0));
  return n;
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int unlinkat(int directory, const char *name, int flags) {
  char path[PATH_MAX];
  int seen = path_at(directory, name, path), n;
  GUARDED(n, (int)syscall(SYS_unlinkat, directory, name, flags),
          if (seen) record(flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, "", 0, NULL, 0, 0));
  return n;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int directory, const char *name, mode_t mode) {
  char path[PATH_MAX];
  int seen = path_at(directory, name, path), n;
  GUARDED(n, (int)syscall(SYS_mkdirat, directory, name, mode), if (seen) record(MKDIR, path, "", 0, NULL, 0, 0));
  return n;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

void *mmap(void *address, size_t size, int protection, int flags, int descriptor, off_t offset) {
  char path[PATH_MAX];
  if ((flags & MAP_SHARED) && (protection & PROT_WRITE) && path_of(descriptor, path)) {
    pthread_mutex_lock(&lock);
    record(UNSEEN, path, "", 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
  }
  return (void *)syscall(SYS_mmap, address, size, protection, flags, descriptor, offset);
}
void *mmap64(void *address, size_t size, int protection, int flags, int descriptor, off64_t offset) {
  return mmap(address, size, protection, flags, descriptor, offset);
}
