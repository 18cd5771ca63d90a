/* x @ w.T + bias by a loop over rows of w, for x and out in float32 or bfloat16, on several threads.

   product()  x [m, K] -> float32, padded to whole groups of rows -> arranged -> run() over parts of w's rows -> + bias -> out
   products() the same for several weights that lie one after the other, with results of their own
   rows()     run() over parts of w's rows alone, for decoded weights

   A thread takes parts one by one: one that wakes late, or shares its processor, delays the others by a part at most.

   Threads are those of the OpenMP that torch uses: attach() gets its GOMP_parallel, which compilers call for `omp parallel`.  A
   library of its own would start further threads beside torch's.  Three rules:

   - Another process than the one that attached runs on one thread.  After a fork the threads of the parent are gone, but OpenMP
     waits for them for ever.
   - The number of threads is an argument.  A new thread of Python has OpenMP's default, not torch's number.
   - A region begins and ends when its last thread has come.  If waiting takes LATE longer than the caller's own parts, another
     program uses the processor, and one thread is faster.  Then regions have one thread for a pause, in proportion to what was lost, twice as long if
     the last one was recent. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef void Run(const void *const *tensors, const float *x, const float *arranged, float *out, int64_t N, int64_t K,
                 int64_t begin, int64_t end, int64_t units);
typedef void Arrange(const void *x, float *arranged, int64_t K);
typedef void Body(void *);
typedef void Parallel(Body *, void *, unsigned threads, unsigned flags);

enum { NONE, FLOAT32, BFLOAT16 };
enum { SLOTS = 12, MOST_TENSORS = 8 };
enum { ROW_SHARE = 1 << 18 };                /* numbers of x, arranged by a thread of its own */
enum { LATE = 500000, PAUSE = 20000000, LONGEST = 2000000000 };                                  /* nanoseconds */

/* What a product needs of a loop and of weights of one description: runtime/cpu/prepared.py has the same fields. */
typedef struct {
    Run *run;
    Arrange *arrange;
    int64_t n, k, tiles, units;             /* of the weight, as run() takes them */
    int64_t step, parts, share;             /* parts are multiples of `step` tiles; of them per thread; weights worth a thread */
    int64_t together, arranged;             /* rows of x that run() takes; numbers that arrange() makes of one */
    int64_t type, bias_type;                /* of x and out; of the bias */
    int64_t is_whole;                       /* whether run() takes x and out in their type, and adds the bias */
    int64_t tensors;                        /* addresses that are arguments; tables follow */
    const void *tables[SLOTS - MOST_TENSORS];
} Product;

typedef struct {
    const Product *product;
    const void *const *tensors;
    const float *x, *arranged;
    float *out;
    int64_t first, last, groups;            /* tiles; groups of rows of x */
    int64_t part, parts, next;              /* tiles of a part; parts of a group; the next one to take */
    const char *caller;                     /* tells the calling thread from others */
    int64_t started, done;                  /* when it began, and when it had no part left */
} Work;

static Parallel *parallel;
static pid_t process;
static int64_t resume, pause_length;
static __thread char own;

void attach(Parallel *function, int64_t pid) {
    parallel = function;
    process = (pid_t)pid;
    resume = 0;
    pause_length = 0;
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void take(void *argument) {
    Work *w = argument;
    const Product *p = w->product;
    if (w->caller == &own)
        w->started = now();
    for (int64_t i; (i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < w->parts * w->groups;) {
        int64_t group = i / w->parts, begin = w->first + i % w->parts * w->part, end = begin + w->part;
        p->run(w->tensors, w->x + group * p->together * p->k, w->arranged + group * p->together * p->arranged,
               w->out + group * p->together * p->n, p->n, p->k, begin, end < w->last ? end : w->last, p->units);
    }
    if (w->caller == &own)
        w->done = now();
}

/* Parts are rows of x. */
static void take_rows(void *argument) {
    Work *w = argument;
    const Product *p = w->product;
    int64_t bytes = p->is_whole && p->type == BFLOAT16 ? 2 : 4;
    if (w->caller == &own)
        w->started = now();
    for (int64_t i; (i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < w->parts;)
        for (int64_t row = i * w->part; row < w->last && row < (i + 1) * w->part; row++)
            p->arrange((const char *)w->x + row * p->k * bytes, (float *)w->arranged + row * p->arranged, p->k);
    if (w->caller == &own)
        w->done = now();
}

/* After a region: pause if its end was late, for long enough that such waits stay few per cent of the time. */
static void judge(int64_t begin, const Work *w, int64_t end) {
    int64_t late = w->started - begin + end - w->done, last = __atomic_load_n(&pause_length, __ATOMIC_RELAXED);
    if (late <= LATE + w->done - w->started)
        return;
    int64_t length = begin - __atomic_load_n(&resume, __ATOMIC_RELAXED) < 4 * last ? 2 * last : PAUSE;
    length = length < 32 * late ? 32 * late : length;
    length = length < LONGEST ? length : LONGEST;
    __atomic_store_n(&pause_length, length, __ATOMIC_RELAXED);
    __atomic_store_n(&resume, end + length, __ATOMIC_RELAXED);
}

/* `body` on several threads, which take parts of `count` pieces, multiples of `step`.  shares: of work that are worth a thread. */
static void divide(Work *w, Body *body, int64_t threads, int64_t count, int64_t step, int64_t shares) {
    int64_t begin = 0;
    threads = threads < shares ? threads : shares;
    if (threads > 1 && (!parallel || (process && process != getpid()) ||
                        (begin = now()) < __atomic_load_n(&resume, __ATOMIC_RELAXED)))
        threads = 1;
    int64_t wanted = threads > 1 ? threads * w->product->parts : 1, steps = (count + step - 1) / step;
    w->part = (steps + wanted - 1) / wanted * step;
    w->parts = w->part ? (count + w->part - 1) / w->part : 0;
    w->next = 0;
    if (threads > 1) {
        w->caller = &own;
        w->started = w->done = begin;
        parallel(body, w, (unsigned)threads, 0);
        judge(begin, w, now());
    } else {
        w->caller = 0;
        body(w);
    }
}

static void divide_tiles(Work *w, int64_t threads) {
    const Product *p = w->product;
    int64_t tiles = w->last - w->first;
    divide(w, take, threads, tiles, p->step, tiles * (p->n / (p->tiles ? p->tiles : 1)) * p->k * w->groups / p->share);
}

void rows(const Product *p, const void *const *tensors, float *out, int64_t first, int64_t last, int64_t threads) {
    Work w = {.product = p, .tensors = tensors, .out = out, .first = first, .last = last, .groups = 1};
    divide_tiles(&w, threads);
}

static void to_floats(const void *source, int64_t type, float *into, int64_t count) {
    if (type == FLOAT32) {
        memcpy(into, source, count * sizeof(float));
        return;
    }
    const uint16_t *halves = source;
    uint32_t *words = (uint32_t *)into;
    for (int64_t i = 0; i < count; i++)
        words[i] = (uint32_t)halves[i] << 16;
}

static void from_floats(const float *source, int64_t type, void *into, int64_t count) {
    if (type == FLOAT32) {
        memcpy(into, source, count * sizeof(float));
        return;
    }
    const uint32_t *words = (const uint32_t *)source;
    uint16_t *halves = into;
    for (int64_t i = 0; i < count; i++) {                                     /* to nearest even; NaN as torch writes it */
        uint32_t word = words[i], rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
        halves[i] = (word & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
    }
}

static void add(float *out, const void *bias, int64_t type, int64_t n) {
    const uint16_t *halves = bias;
    const float *floats = bias;
    if (type == FLOAT32)
        for (int64_t i = 0; i < n; i++)
            out[i] += floats[i];
    else
        for (int64_t i = 0; i < n; i++) {
            uint32_t word = (uint32_t)halves[i] << 16;
            float value;
            memcpy(&value, &word, sizeof value);
            out[i] += value;
        }
}

/* The sums [m, N] in float32: in `out`, if there is room for whole groups of rows, else in *memory, which the caller frees.
   0 if there is no memory. */
static float *multiply(const Product *p, const void *x, float *out, int64_t m, int64_t threads, const void *const *tensors,
                       float **memory) {
    int64_t count = (m + p->together - 1) / p->together * p->together;
    int64_t is_whole = p->is_whole || (count == m && p->type == FLOAT32);
    int64_t of_x = is_whole ? 0 : count * p->k, of_out = is_whole && out ? 0 : count * p->n;
    int64_t of_arranged = p->arrange ? (p->is_whole ? (count + 15) / 16 * 16 : count) * p->arranged : 0;
    if (of_x + of_out + of_arranged && !(*memory = malloc((of_x + of_out + of_arranged + 3 * 16) * sizeof(float))))
        return 0;
    float *start = (float *)(((uintptr_t)*memory + 63) / 64 * 64);            /* each at a multiple of 64 bytes */
    const float *floats = x;
    float *sums = of_out ? start + (of_x + 15) / 16 * 16 : out, *arranged = 0;
    if (!is_whole) {
        floats = start;
        to_floats(x, p->type, start, m * p->k);
        memset(start + m * p->k, 0, (count - m) * p->k * sizeof(float));
    }
    if (p->arrange) {
        arranged = start + (of_x + 15) / 16 * 16 + (of_out + 15) / 16 * 16;
        Work w = {.product = p, .x = floats, .arranged = arranged, .last = count};
        divide(&w, take_rows, threads, count, 1, count * p->k / ROW_SHARE);
    }
    Work w = {.product = p, .tensors = tensors, .x = floats, .arranged = arranged ? arranged : floats, .out = sums,
              .last = p->tiles, .groups = count / p->together};
    divide_tiles(&w, threads);
    return sums;
}

/* 0, or 1 if there is no memory. */
int64_t product(const Product *p, const void *x, const void *bias, void *out, int64_t m, int64_t threads, const void *a,
                const void *b, const void *c, const void *d, const void *e, const void *f, const void *g, const void *h) {
    const void *given[MOST_TENSORS] = {a, b, c, d, e, f, g, h}, *tensors[SLOTS];
    memcpy(tensors, given, p->tensors * sizeof *given);
    memcpy(tensors + p->tensors, p->tables, sizeof p->tables);
    int64_t is_direct = p->is_whole || (p->type == FLOAT32 && m % p->together == 0);
    float *memory = 0, *sums = multiply(p, x, is_direct ? out : 0, m, threads, tensors, &memory);
    if (!sums)
        return 1;
    for (int64_t row = 0; bias && row < m; row++)
        add(sums + row * p->n, bias, p->bias_type, p->n);
    if (!is_direct)
        from_floats(sums, p->type, out, m * p->n);
    free(memory);
    return 0;
}

/* The products of x by several weights whose rows lie one after the other: w has the rows of all, rows[i] are those of one.
   Each has a bias, or 0, and a result [m, rows[i]] of its own.  0, or 1 if there is no memory. */
int64_t products(const Product *p, const void *x, int64_t m, int64_t threads, const void *w, const int64_t *rows, int64_t count,
                 const void *a, const void *b, const void *c, const void *d, void *e, void *f, void *g, void *h) {
    const void *biases[] = {a, b, c, d}, *tensors[SLOTS] = {w};
    void *results[] = {e, f, g, h};
    float *memory = 0, *sums = multiply(p, x, 0, m, threads, tensors, &memory);
    if (!sums)
        return 1;
    int64_t first = 0, bytes = p->type == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    for (int64_t i = 0; i < count; first += rows[i++])
        for (int64_t row = 0; row < m; row++) {
            float *own = sums + row * p->n + first;
            if (biases[i])
                add(own, biases[i], p->bias_type, rows[i]);
            from_floats(own, p->type, (char *)results[i] + row * rows[i] * bytes, rows[i]);
        }
    free(memory);
    return 0;
}
