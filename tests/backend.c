/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/backend.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/t.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static lev_device *pinned; /* gives t_alloc its memory on cuda */

static bool asks_cuda(void) {
  const char *text = getenv("T_BACKEND");
  return text && strcmp(text, "cuda") == 0;
}

__attribute__((constructor)) static void fail_without_gpu(void) {
  if (!asks_cuda() || lev_device_count(LEV_BACKEND_CUDA) > 0) return;
  printf("- cuda\n  FAILED: no GPU or no driver here\n0 passed, 1 failed, 0 skipped\n");
  exit(1);
}

lev_backend t_backend(void) {
  if (!asks_cuda()) return LEV_BACKEND_CPU;
  t_on_cuda();
  return LEV_BACKEND_CUDA;
}

int t_gpu(int rank) {
  int gpus = asks_cuda() ? lev_device_count(LEV_BACKEND_CUDA) : 0;
  return gpus > 0 ? rank % gpus : 0;
}

void *t_alloc(size_t bytes) {
  void *memory = NULL;
  if (t_backend() == LEV_BACKEND_CPU) {
    memory = malloc(bytes ? bytes : 1);
  } else {
    pthread_mutex_lock(&lock);
    lev_status st = LEV_OK;
    if (!pinned) st = lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CUDA}, &pinned);
    if (st == LEV_OK) st = lev_device_alloc(pinned, LEV_MEM_PINNED, bytes ? bytes : 1, &memory);
    pthread_mutex_unlock(&lock);
    if (st != LEV_OK) fprintf(stderr, "%s\n", lev_detail());
  }
  if (memory) return memory;
  fprintf(stderr, "no memory for a test\n");
  exit(2);
}

void t_free(void *memory) {
  if (!asks_cuda()) {
    free(memory);
    return;
  }
  pthread_mutex_lock(&lock);
  lev_device_free(pinned, memory);
  pthread_mutex_unlock(&lock);
}

lev_mem t_mem(lev_mem cls) {
  return t_backend() == LEV_BACKEND_CUDA && cls == LEV_MEM_DEVICE ? LEV_MEM_PINNED : cls;
}
