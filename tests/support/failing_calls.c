/* Preloaded: the call of a kind that comes after `left` others on files below a folder fails.  Maps of files are not calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { READS = 1, WRITES = 2, FLUSHES = 4 };

static char folder[1024];
static long left = -1;                                           /* -1: no call fails */
static int kinds, error;

void fail_after(const char *path, long count, int of_kinds, int with)
{
    snprintf(folder, sizeof folder, "%s/", path);
    left = count, kinds = of_kinds, error = with;
}

static int fails(int file, int kind)
{
    char link[32], path[1024];
    if (left < 0 || !(kinds & kind))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (strncmp(path, folder, strlen(folder)) || left-- > 0)
        return 0;
    errno = error;
    return 1;
}

#define CALL(type, name, kind, parameters, arguments)                  \
    type name parameters                                               \
    {                                                                  \
        static type(*next) parameters;                                 \
        if (!next)                                                     \
            next = (type(*) parameters)dlsym(RTLD_NEXT, #name);        \
        return fails(file, kind) ? -1 : next arguments;                \
    }

CALL(ssize_t, read, READS, (int file, void *to, size_t size), (file, to, size))
CALL(ssize_t, pread, READS, (int file, void *to, size_t size, off_t at), (file, to, size, at))
CALL(ssize_t, pread64, READS, (int file, void *to, size_t size, off64_t at), (file, to, size, at))
CALL(ssize_t, write, WRITES, (int file, const void *from, size_t size), (file, from, size))
CALL(ssize_t, pwrite, WRITES, (int file, const void *from, size_t size, off_t at), (file, from, size, at))
CALL(ssize_t, pwrite64, WRITES, (int file, const void *from, size_t size, off64_t at), (file, from, size, at))
CALL(int, fsync, FLUSHES, (int file), (file))
CALL(int, fdatasync, FLUSHES, (int file), (file))
