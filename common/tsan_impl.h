/* SPDX-License-Identifier: Apache-2.0 */
/* What ThreadSanitizer is told by hand. The queues and wake-ups of the cpu backend synchronise far more than their
 * users asked for (a worker that goes to sleep publishes all it ever did); left visible, that would hide most forgotten
 * event waits. So the mechanics run between lev_tsan_quiet() and lev_tsan_loud(), where nothing is seen, and exactly
 * the promised edges (enqueue -> run, operation -> waiter) are declared with release and acquire. All of these vanish
 * outside -fsanitize=thread builds. */
#ifndef LEV_COMMON_TSAN_IMPL_H
#define LEV_COMMON_TSAN_IMPL_H

#include <stddef.h>

#if defined(__SANITIZE_THREAD__)
#define LEV_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LEV_TSAN 1
#endif
#endif

#ifdef LEV_TSAN

#ifdef __cplusplus
extern "C" {
#endif
void AnnotateIgnoreSyncBegin(const char *file, int line);
void AnnotateIgnoreSyncEnd(const char *file, int line);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
void __tsan_read_range(void *address, unsigned long bytes);
void __tsan_write_range(void *address, unsigned long bytes);
#ifdef __cplusplus
}
#endif

static inline void lev_tsan_quiet(void) {
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
static inline void lev_tsan_loud(void) {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
}
static inline void lev_tsan_release(void *edge) {
  __tsan_release(edge);
}
static inline void lev_tsan_acquire(void *edge) {
  __tsan_acquire(edge);
}
/* Accesses made by code that is not instrumented. */
static inline void lev_tsan_read(const void *address, size_t bytes) {
  if (bytes) __tsan_read_range((void *)(size_t)address, bytes);
}
static inline void lev_tsan_write(void *address, size_t bytes) {
  if (bytes) __tsan_write_range(address, bytes);
}

#else

static inline void lev_tsan_quiet(void) {}
static inline void lev_tsan_loud(void) {}
static inline void lev_tsan_release(void *edge) {
  (void)edge;
}
static inline void lev_tsan_acquire(void *edge) {
  (void)edge;
}
static inline void lev_tsan_read(const void *address, size_t bytes) {
  (void)address, (void)bytes;
}
static inline void lev_tsan_write(void *address, size_t bytes) {
  (void)address, (void)bytes;
}

#endif
#endif
