/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products through OpenBLAS's serial library: each is computed by one thread, hence always in the same order.
 * The library's pool of working buffers is not locked, so that two threads can be given the same buffer; the linker is
 * told to send its two pool functions through the lock below (--wrap, see LIBS in the GNUmakefile). */
#include <openblas-serial/cblas.h>
#include <pthread.h>
#include <sys/mman.h>

#include "common/dims.h"
#include "common/gemm_ops.h"
#include "common/tsan_impl.h"

void *__real_blas_memory_alloc(int position);
void __real_blas_memory_free(void *buffer);
void *__wrap_blas_memory_alloc(int position);
void __wrap_blas_memory_free(void *buffer);

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pool_freed = PTHREAD_COND_INITIALIZER;
static int64_t pool_held, pool_size; /* buffers in use, buffers that the pool has made */

/* Whether the pool can make one more buffer. It would try for ever where memory has run out (an address space limit,
 * say); its buffers take 128 MiB and some alignment. */
static bool pool_can_grow(void) {
  size_t bytes = (size_t)168 << 20;
  void *probe = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe != MAP_FAILED) munmap(probe, bytes);
  return probe != MAP_FAILED;
}

lev_status lev_gemm_cpu_ready(void) {
  lev_status st = LEV_OK;
  lev_tsan_quiet();
  pthread_mutex_lock(&pool_lock);
  if (pool_size == 0) {
    if (pool_can_grow()) {
      __real_blas_memory_free(__real_blas_memory_alloc(0));
      pool_size = 1;
    } else {
      st = lev_fail(LEV_ERR_NOMEM, "OpenBLAS needs 168 MiB of address space for its working buffer; raise ulimit -v");
    }
  }
  pthread_mutex_unlock(&pool_lock);
  lev_tsan_loud();
  return st;
}

/* Quiet: the lock must not look like an order between the ranks' own operations. Where the pool cannot grow, the caller
 * waits for another's buffer. */
void *__wrap_blas_memory_alloc(int position) {
  lev_tsan_quiet();
  pthread_mutex_lock(&pool_lock);
  while (pool_held > 0 && pool_held == pool_size && !pool_can_grow()) pthread_cond_wait(&pool_freed, &pool_lock);
  void *buffer = __real_blas_memory_alloc(position);
  pool_size = lev_max_i64(pool_size, ++pool_held);
  pthread_mutex_unlock(&pool_lock);
  lev_tsan_loud();
  return buffer;
}

void __wrap_blas_memory_free(void *buffer) {
  lev_tsan_quiet();
  pthread_mutex_lock(&pool_lock);
  __real_blas_memory_free(buffer);
  --pool_held;
  pthread_cond_signal(&pool_freed);
  pthread_mutex_unlock(&pool_lock);
  lev_tsan_loud();
}

/* bf16: edge of the square blocks that are widened to f32. Large enough that widening (2 x 512 x 512 conversions) is
 * small beside the product (512^3 multiply-adds). */
#define BLOCK 512

size_t lev_gemm_cpu_workspace(lev_dtype ab_type) {
  return ab_type == LEV_BF16 ? 3 * sizeof(float) * BLOCK * BLOCK : 0; /* A block, B block, sums */
}

/* OpenBLAS is not instrumented: say row by row what it touches. Its own copies into pool buffers stay unseen (quiet):
 * the pool's lock orders those. */
static void mark_read(const void *data, int64_t rows, int64_t cols, int64_t ld, size_t elem) {
#ifdef LEV_TSAN
  for (int64_t i = 0; i < rows; ++i) lev_tsan_read((const char *)data + (size_t)(i * ld) * elem, (size_t)cols * elem);
#else
  (void)data, (void)rows, (void)cols, (void)ld, (void)elem;
#endif
}

static void mark_operands(const lev_gemm_args *g, size_t elem) {
#ifdef LEV_TSAN
  mark_read(g->a, g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k, g->lda, elem);
  mark_read(g->b, g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n, g->ldb, elem);
  for (int64_t i = 0; i < g->m; ++i) lev_tsan_write((char *)g->c + (size_t)(i * g->ldc) * elem, (size_t)g->n * elem);
#else
  (void)g, (void)elem, (void)mark_read;
#endif
}

static CBLAS_TRANSPOSE transpose(bool set) {
  return set ? CblasTrans : CblasNoTrans;
}

/* C = beta * C; beta = 0 overwrites. */
static void scale_f64(const lev_gemm_args *g) {
  for (int64_t i = 0; i < g->m; ++i) {
    double *row = (double *)g->c + i * g->ldc;
    for (int64_t j = 0; j < g->n; ++j) row[j] = g->beta == 0 ? 0 : g->beta * row[j];
  }
}
static void scale_f32(const lev_gemm_args *g) {
  float beta = (float)g->beta;
  for (int64_t i = 0; i < g->m; ++i) {
    float *row = (float *)g->c + i * g->ldc;
    for (int64_t j = 0; j < g->n; ++j) row[j] = beta == 0 ? 0 : beta * row[j];
  }
}

static bool only_scales(const lev_gemm_args *g) {
  return g->k == 0 || g->alpha == 0;
}

void lev_gemm_host(const lev_gemm_args *g) {
  if (g->m <= 0 || g->n <= 0) return;
  int m = (int)g->m, n = (int)g->n, k = (int)g->k;
  int lda = (int)g->lda, ldb = (int)g->ldb, ldc = (int)g->ldc;
  if (g->ab_type == LEV_F64) {
    if (only_scales(g)) {
      scale_f64(g);
      return;
    }
    mark_operands(g, sizeof(double));
    lev_tsan_quiet();
    cblas_dgemm(CblasRowMajor, transpose(g->trans_a), transpose(g->trans_b), m, n, k, g->alpha, g->a, lda, g->b, ldb,
                g->beta, g->c, ldc);
    lev_tsan_loud();
  } else if (g->ab_type == LEV_F32) {
    if (only_scales(g)) {
      scale_f32(g);
      return;
    }
    mark_operands(g, sizeof(float));
    lev_tsan_quiet();
    cblas_sgemm(CblasRowMajor, transpose(g->trans_a), transpose(g->trans_b), m, n, k, (float)g->alpha, g->a, lda, g->b,
                ldb, (float)g->beta, g->c, ldc);
    lev_tsan_loud();
  }
}

/* ---- bf16 ---- */

static void widen(const lev_bf16 *restrict from, int64_t ld, int64_t rows, int64_t cols, float *restrict to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) to[i * cols + j] = lev_bf16_to_f32(from[i * ld + j]);
}

/* Rows [row, row + rows) and columns [col, ...) of op(X), widened in the order in which X is stored. */
static void widen_block(const void *x, int64_t ld, bool trans, int64_t row, int64_t rows, int64_t col, int64_t cols,
                        float *to) {
  const lev_bf16 *from = x;
  if (trans)
    widen(from + col * ld + row, ld, cols, rows, to);
  else
    widen(from + row * ld + col, ld, rows, cols, to);
}

static void store_block(const lev_gemm_args *g, int64_t row, int64_t rows, int64_t col, int64_t cols,
                        const float *restrict sums) {
  float alpha = (float)g->alpha, beta = (float)g->beta;
  for (int64_t i = 0; i < rows; ++i) {
    const float *from = sums + i * cols;
    int64_t at = (row + i) * g->ldc + col;
    if (g->c_type == LEV_F32) {
      float *restrict to = (float *)g->c + at;
      if (beta == 0)
        for (int64_t j = 0; j < cols; ++j) to[j] = alpha * from[j];
      else
        for (int64_t j = 0; j < cols; ++j) to[j] = alpha * from[j] + beta * to[j];
    } else {
      lev_bf16 *restrict to = (lev_bf16 *)g->c + at;
      if (beta == 0)
        for (int64_t j = 0; j < cols; ++j) to[j] = lev_bf16_from_f32(alpha * from[j]);
      else
        for (int64_t j = 0; j < cols; ++j) to[j] = lev_bf16_from_f32(alpha * from[j] + beta * lev_bf16_to_f32(to[j]));
    }
  }
}

static void block_bf16(const lev_gemm_args *g, int64_t row, int64_t col, float *workspace) {
  float *a = workspace, *b = a + BLOCK * BLOCK, *sums = b + BLOCK * BLOCK;
  int64_t rows = lev_min_i64(BLOCK, g->m - row), cols = lev_min_i64(BLOCK, g->n - col);
  if (only_scales(g))
    for (int64_t i = 0; i < rows * cols; ++i) sums[i] = 0;
  for (int64_t at = 0; at < g->k && g->alpha != 0; at += BLOCK) {
    int64_t depth = lev_min_i64(BLOCK, g->k - at);
    widen_block(g->a, g->lda, g->trans_a, row, rows, at, depth, a);
    widen_block(g->b, g->ldb, g->trans_b, at, depth, col, cols, b);
    lev_gemm_host(&(lev_gemm_args){.m = rows,
                                   .n = cols,
                                   .k = depth,
                                   .trans_a = g->trans_a,
                                   .trans_b = g->trans_b,
                                   .a = a,
                                   .b = b,
                                   .c = sums,
                                   .lda = g->trans_a ? rows : depth,
                                   .ldb = g->trans_b ? depth : cols,
                                   .ldc = cols,
                                   .ab_type = LEV_F32,
                                   .c_type = LEV_F32,
                                   .alpha = 1,
                                   .beta = at > 0});
  }
  store_block(g, row, rows, col, cols, sums);
}

static void gemm_cpu(const void *args) {
  const lev_gemm_launch *launch = args;
  const lev_gemm_args *g = &launch->gemm;
  size_t elem = lev_dtype_bytes(g->c_type), pitch = (size_t)g->ldc * elem;
  for (int64_t i = 0; i < g->m && g->add && g->beta != 0; ++i)
    memcpy((unsigned char *)g->c + (size_t)i * pitch, (const unsigned char *)g->add + (size_t)i * pitch,
           (size_t)g->n * elem);
  if (g->ab_type != LEV_BF16) {
    lev_gemm_host(g);
    return;
  }
  for (int64_t row = 0; row < g->m; row += BLOCK)
    for (int64_t col = 0; col < g->n; col += BLOCK) block_bf16(g, row, col, launch->workspace);
}

const lev_kernel lev_gemm_kernel = {.name = "gemm", .cpu = gemm_cpu, .cuda = LEV_CUDA(lev_gemm_cuda)};
