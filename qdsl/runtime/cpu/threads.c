/* A thread's share of a loop's rows: parts, one after the other, as long as there are any. */
#include <stdint.h>

typedef void Run(const uint8_t *const *, const float *, const float *, float *, int64_t, int64_t, int64_t, int64_t, int64_t);
typedef struct { int64_t next, last, part; Run *run; const void *tensors, *x, *ordered; void *out; int64_t N, K, units; } Work;

void take(Work *w) {
    for (int64_t begin; (begin = __atomic_fetch_add(&w->next, w->part, __ATOMIC_RELAXED)) < w->last;)
        w->run(w->tensors, w->x, w->ordered, w->out, w->N, w->K, begin, begin + w->part < w->last ? begin + w->part : w->last,
               w->units);
}
