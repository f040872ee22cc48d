/* Preloaded into a service, this notes how far each file is written and how far it is synced, so that tests/attack can
   take away what a power loss may take. It also lets the machine have another boot id.

   SHIM_TABLE names a file of slots {u64 inode, u64 written, u64 synced, u64 unused}, shared by all processes: the bytes
   up to `synced` are on the disk, those up to `written` may be. SHIM_BOOT names the file that stands for the boot id. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#define SLOTS 16384
typedef struct { uint64_t inode, written, synced, pad; } slot;
static slot *table;
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }
/* The slot of an open regular file; 0 without one. */
static slot *of(int fd) {
  struct stat st;
  if (!table) {
    const char *path = getenv("SHIM_TABLE");
    if (!path) return 0;
    int t = ((int(*)(const char *, int, ...))real("open"))(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (t < 0) return 0;
    if (ftruncate(t, SLOTS * sizeof(slot))) { close(t); return 0; }
    void *m = mmap(0, SLOTS * sizeof(slot), PROT_READ | PROT_WRITE, MAP_SHARED, t, 0);
    close(t);
    if (m == MAP_FAILED) return 0;
    table = m;
  }
  if (fstat(fd, &st) || !S_ISREG(st.st_mode)) return 0;
  uint64_t ino = st.st_ino;
  for (uint64_t i = ino * 11400714819323198485ull % SLOTS, n = 0; n < SLOTS; i = (i + 1) % SLOTS, n++) {
    uint64_t expected = 0;
    if (__atomic_load_n(&table[i].inode, __ATOMIC_SEQ_CST) == ino) return &table[i];
    if (__atomic_compare_exchange_n(&table[i].inode, &expected, ino, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return &table[i];
    if (expected == ino) return &table[i];
  }
  return 0;
}
static void wrote(int fd, uint64_t from, ssize_t n) {
  if (n <= 0) return;
  slot *s = of(fd);
  if (!s) return;
  if (from == 0) { s->written = n; s->synced = 0; return; }
  if (from + n > s->written) s->written = from + n;
  if (from < s->synced) s->synced = from;  /* written again: what follows may be new */
}
ssize_t pwritev(int fd, const struct iovec *v, int c, off_t o) {
  ssize_t n = ((ssize_t(*)(int, const struct iovec *, int, off_t))real("pwritev"))(fd, v, c, o); wrote(fd, o, n); return n; }
ssize_t pwritev64(int fd, const struct iovec *v, int c, off64_t o) {
  ssize_t n = ((ssize_t(*)(int, const struct iovec *, int, off64_t))real("pwritev64"))(fd, v, c, o); wrote(fd, o, n); return n; }
ssize_t pwritev2(int fd, const struct iovec *v, int c, off_t o, int f) {
  ssize_t n = ((ssize_t(*)(int, const struct iovec *, int, off_t, int))real("pwritev2"))(fd, v, c, o, f); wrote(fd, o, n); return n; }
ssize_t pwritev64v2(int fd, const struct iovec *v, int c, off64_t o, int f) {
  ssize_t n = ((ssize_t(*)(int, const struct iovec *, int, off64_t, int))real("pwritev64v2"))(fd, v, c, o, f); wrote(fd, o, n); return n; }
ssize_t pwrite(int fd, const void *b, size_t l, off_t o) {
  ssize_t n = ((ssize_t(*)(int, const void *, size_t, off_t))real("pwrite"))(fd, b, l, o); wrote(fd, o, n); return n; }
ssize_t pwrite64(int fd, const void *b, size_t l, off64_t o) {
  ssize_t n = ((ssize_t(*)(int, const void *, size_t, off64_t))real("pwrite64"))(fd, b, l, o); wrote(fd, o, n); return n; }
static int sync_with(const char *name, int fd) {
  slot *s = of(fd);
  uint64_t before = s ? s->written : 0;
  int r = ((int(*)(int))real(name))(fd);
  if (!r && s && before > s->synced) s->synced = before;
  return r;
}
int fdatasync(int fd) { return sync_with("fdatasync", fd); }
int fsync(int fd) { return sync_with("fsync", fd); }
int syncfs(int fd) {
  of(fd);
  int r = ((int(*)(int))real("syncfs"))(fd);
  if (!r && table) for (int i = 0; i < SLOTS; i++) table[i].synced = table[i].written;
  return r;
}
#include <stdarg.h>
#include <string.h>
static const char *which(const char *path) {
  const char *other = getenv("SHIM_BOOT");
  return other && path && !strcmp(path, "/proc/sys/kernel/random/boot_id") ? other : path;
}
#define OPEN(NAME) int NAME(const char *path, int flags, ...) { \
  va_list a; va_start(a, flags); int mode = va_arg(a, int); va_end(a); \
  return ((int(*)(const char *, int, ...))real(#NAME))(which(path), flags, mode); }
OPEN(open)
OPEN(open64)
