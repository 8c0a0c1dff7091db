/* What this machine can do at most, by plain loops: arithmetic in registers, reading memory.
   Independent of every engine. Built with -march=native; prints one JSON object: for each loop
   that the processor has, 10^9 operations (a multiplication and an addition are two) or bytes a
   second, all threads together, the median of the rounds. Run: limits THREADS ROUNDS */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef double (*Loop)(void *memory, size_t bytes); /* work done, in operations or bytes */

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

#define STEPS 4000000L
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
static volatile float sink;

#if defined(__AVX512F__)
static double fma_f32(void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-9f);
#define X(i) __m512 s##i = _mm512_set1_ps(1.0f + i);
    EACH(X)
#undef X
    for (long n = 0; n < STEPS; n++) {
#define X(i) s##i = _mm512_fmadd_ps(s##i, a, b);
        EACH(X)
#undef X
        __asm__ volatile("" ::: "memory");
    }
#define X(i) sink += _mm512_reduce_add_ps(s##i);
    EACH(X)
#undef X
    return 2.0 * 16 * 12 * STEPS;
}

static double read_bytes(void *memory, size_t bytes) {
    const char *at = memory;
    __m512i s0 = _mm512_setzero_si512(), s1 = s0, s2 = s0, s3 = s0;
    for (size_t i = 0; i + 256 <= bytes; i += 256) {
        s0 = _mm512_or_si512(s0, _mm512_load_si512(at + i));
        s1 = _mm512_or_si512(s1, _mm512_load_si512(at + i + 64));
        s2 = _mm512_or_si512(s2, _mm512_load_si512(at + i + 128));
        s3 = _mm512_or_si512(s3, _mm512_load_si512(at + i + 192));
    }
    s0 = _mm512_or_si512(_mm512_or_si512(s0, s1), _mm512_or_si512(s2, s3));
    sink += (float)_mm512_reduce_or_epi32(s0);
    return (double)bytes;
}
#else
static double read_bytes(void *memory, size_t bytes) {
    const uint64_t *at = memory;
    uint64_t s[16] = {0};
    for (size_t i = 0; i + 16 <= bytes / 8; i += 16)
        for (int k = 0; k < 16; k++) s[k] |= at[i + k];
    for (int k = 0; k < 16; k++) sink += (float)s[k];
    return (double)bytes;
}
#endif

#if defined(__AVX512BF16__)
static double dot_bf16(void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x0080);
#define X(i) __m512 s##i = _mm512_set1_ps(1.0f + i);
    EACH(X)
#undef X
    for (long n = 0; n < STEPS; n++) {
#define X(i) s##i = _mm512_dpbf16_ps(s##i, a, b);
        EACH(X)
#undef X
        __asm__ volatile("" ::: "memory");
    }
#define X(i) sink += _mm512_reduce_add_ps(s##i);
    EACH(X)
#undef X
    return 2.0 * 32 * 12 * STEPS;
}
#endif

#if defined(__AVX512VNNI__)
static double dot_int8(void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(1);
#define X(i) __m512i s##i = _mm512_set1_epi32(i);
    EACH(X)
#undef X
    for (long n = 0; n < STEPS; n++) {
#define X(i) s##i = _mm512_dpbusd_epi32(s##i, a, b);
        EACH(X)
#undef X
        __asm__ volatile("" ::: "memory");
    }
#define X(i) sink += (float)_mm512_reduce_add_epi32(s##i);
    EACH(X)
#undef X
    return 2.0 * 64 * 12 * STEPS;
}
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1
static int tiles_allowed(void) { /* Linux gives tiles to processes that ask */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
static void configure_tiles(void) {
    uint8_t shape[64] __attribute__((aligned(64))) = {0};
    shape[0] = 1;
    for (int tile = 0; tile < 8; tile++) {
        shape[16 + 2 * tile] = 64; /* bytes a row */
        shape[48 + tile] = 16;     /* rows */
    }
    __asm__ volatile("" : : "r"(shape) : "memory"); /* some gcc drops the stores otherwise */
    _tile_loadconfig(shape);
    static const uint8_t zeros[1024];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(5, zeros, 64);
    _tile_loadd(6, zeros, 64);
    _tile_loadd(7, zeros, 64);
}
static double tile_bf16(void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    configure_tiles();
    for (long n = 0; n < STEPS / 4; n++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 2.0 * 16 * 16 * 32 * STEPS;
}
static double tile_int8(void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    configure_tiles();
    for (long n = 0; n < STEPS / 4; n++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return 2.0 * 16 * 16 * 64 * STEPS;
}
#endif

static Loop loop;
static pthread_barrier_t gate;
static double works[1024];
static char *memories[1024];
static size_t part_bytes;

static void *run(void *index) {
    long self = (long)(intptr_t)index;
    if (!memories[self]) { /* touched by the thread that reads it */
        memories[self] = mmap(0, part_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                              -1, 0);
        if (memories[self] == MAP_FAILED) abort();
        madvise(memories[self], part_bytes, MADV_HUGEPAGE);
        memset(memories[self], 1, part_bytes);
    }
    pthread_barrier_wait(&gate);
    works[self] = loop(memories[self], part_bytes);
    pthread_barrier_wait(&gate);
    return 0;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const char *name, Loop which, int threads, int rounds, int first) {
    double rates[100];
    loop = which;
    for (int round = 0; round < rounds; round++) {
        pthread_t others[1024];
        for (long i = 0; i < threads; i++)
            pthread_create(&others[i], 0, run, (void *)(intptr_t)i);
        pthread_barrier_wait(&gate);
        double begin = now();
        pthread_barrier_wait(&gate);
        double seconds = now() - begin, work = 0;
        for (int i = 0; i < threads; i++) pthread_join(others[i], 0), work += works[i];
        rates[round] = work / seconds / 1e9;
    }
    qsort(rates, (size_t)rounds, sizeof rates[0], by_value);
    printf("%s\"%s\": %.1f", first ? "" : ", ", name, rates[rounds / 2]);
}

int main(int count, char **words) {
    int threads = count > 1 ? atoi(words[1]) : 1, rounds = count > 2 ? atoi(words[2]) : 5;
    if (threads < 1 || threads > 1024 || rounds < 1 || rounds > 100) return 2;
    part_bytes = ((size_t)1 << 30) / (size_t)threads & ~(size_t)4095;
    pthread_barrier_init(&gate, 0, (unsigned)threads + 1);
    printf("{");
    measure("read_gb_per_s", read_bytes, threads, rounds, 1);
#if defined(__AVX512F__)
    measure("fma_f32", fma_f32, threads, rounds, 0);
#endif
#if defined(__AVX512BF16__)
    measure("dot_bf16", dot_bf16, threads, rounds, 0);
#endif
#if defined(__AVX512VNNI__)
    measure("dot_int8", dot_int8, threads, rounds, 0);
#endif
#if defined(HAS_TILES)
    if (tiles_allowed()) {
        measure("tile_bf16", tile_bf16, threads, rounds, 0);
        measure("tile_int8", tile_int8, threads, rounds, 0);
    }
#endif
    printf("}\n");
    return 0;
}
