/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN at run time: loading, which releases are trusted, plans of blocks, execution. */
#include "harness/model/cudnn_impl.h"

#ifdef LEV_HAVE_CUDNN
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"

#define PLANS 48         /* kept; beyond, the one used least recently goes */
#define CONFIGURATIONS 8 /* of the library's proposals, tried in its order */
#define OLDEST 91501     /* up to 9.15.0, keys not a multiple of 128 give wrong gradients */
#define SONAME "libcudnn.so.9"

typedef struct block_plan {
  bool taken;
  int64_t used; /* when */
  attn_block_shape shape;
  cudnnBackendDescriptor_t plan;
} block_plan;

struct attn_cudnn {
  cudnnHandle_t handle;
  char name[32];
  int64_t clock;
  block_plan plans[PLANS];
};

/* The library itself is loaded once per process and never unloaded. */
static lev_cudnn_api api;
static char missing[256]; /* why it cannot be used; empty: it can */

static void load(void) {
  void *file = dlopen(SONAME, RTLD_NOW | RTLD_LOCAL);
  if (!file) {
    const char *why = dlerror();
    snprintf(missing, sizeof missing, "%s is not found (%.180s)", SONAME, why ? why : "no reason given");
    return;
  }
  struct {
    const char *name;
    void *to; /* of a function pointer in api */
  } symbols[] = {{"cudnnGetVersion", &api.version},
                 {"cudnnGetErrorString", &api.error_string},
                 {"cudnnGetLastErrorString", &api.last_error},
                 {"cudnnCreate", &api.create},
                 {"cudnnDestroy", &api.destroy},
                 {"cudnnSetStream", &api.set_stream},
                 {"cudnnBackendCreateDescriptor", &api.descriptor_create},
                 {"cudnnBackendDestroyDescriptor", &api.descriptor_destroy},
                 {"cudnnBackendFinalize", &api.finalize},
                 {"cudnnBackendSetAttribute", &api.set},
                 {"cudnnBackendGetAttribute", &api.get},
                 {"cudnnBackendExecute", &api.execute}};
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; ++i) {
    void *address = dlsym(file, symbols[i].name);
    if (!address) {
      snprintf(missing, sizeof missing, "%s has no %s", SONAME, symbols[i].name);
      return;
    }
    memcpy(symbols[i].to, &address, sizeof address);
  }
  size_t version = api.version();
  if (version < OLDEST)
    snprintf(missing, sizeof missing, "%s is release %zu.%zu.%zu, and those before %d.%d.%d give wrong gradients",
             SONAME, version / 10000, version / 100 % 100, version % 100, OLDEST / 10000, OLDEST / 100 % 100,
             OLDEST % 100);
}

static lev_status library_fail(cudnnStatus_t status, const char *what) {
  char words[256] = "";
  api.last_error(words, sizeof words);
  bool unsupported = status / 1000 == CUDNN_STATUS_NOT_SUPPORTED / 1000;
  return lev_fail(unsupported ? LEV_ERR_UNSUPPORTED : LEV_ERR_DEVICE, "attention: cuDNN, %s: %s (%s)", what,
                  api.error_string(status), words);
}
#define CUDNN_TRY(call)                                                                                                \
  do {                                                                                                                 \
    cudnnStatus_t status_ = (call);                                                                                    \
    if (status_ != CUDNN_STATUS_SUCCESS) return library_fail(status_, #call);                                          \
  } while (0)

lev_status attn_cudnn_open(attn_cudnn **out) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  *out = NULL;
  pthread_once(&once, load);
  if (missing[0]) return lev_fail(LEV_ERR_UNSUPPORTED, "attention: %s", missing);
  attn_cudnn *library = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *library);
  if (!library) return LEV_ERR_NOMEM;
  cudnnStatus_t status = api.create(&library->handle);
  if (status != CUDNN_STATUS_SUCCESS) {
    lev_free(library);
    (void)library_fail(status, "cudnnCreate");
    return lev_fail(LEV_ERR_UNSUPPORTED, "attention: cuDNN does not start on this GPU: %s", api.error_string(status));
  }
  size_t version = api.version();
  snprintf(library->name, sizeof library->name, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100,
           version % 100);
  *out = library;
  return LEV_OK;
}

void attn_cudnn_close(attn_cudnn *library) {
  if (!library) return;
  for (int i = 0; i < PLANS; ++i)
    if (library->plans[i].plan) (void)api.descriptor_destroy(library->plans[i].plan);
  (void)api.destroy(library->handle);
  lev_free(library);
}

const char *attn_cudnn_name(const attn_cudnn *library) {
  return library->name;
}

/* ---- plans ---- */

/* The library's proposals for a graph, best first; the caller destroys them. */
static lev_status propose(cudnnBackendDescriptor_t graph, cudnnBackendDescriptor_t found[CONFIGURATIONS],
                          int64_t *count) {
  cudnnBackendDescriptor_t search;
  const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  CUDNN_TRY(api.descriptor_create(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &search));
  cudnnStatus_t status =
      api.set(search, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
  if (!status) status = api.set(search, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  if (!status) status = api.finalize(search);
  for (int i = 0; !status && i < CONFIGURATIONS; ++i)
    status = api.descriptor_create(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &found[i]);
  if (!status)
    status =
        api.get(search, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGURATIONS, count, found);
  (void)api.descriptor_destroy(search);
  return status ? library_fail(status, "search for an engine") : LEV_OK;
}

/* A plan of one proposal; *plan stays NULL where that proposal does not work. */
static cudnnStatus_t finish_plan(cudnnHandle_t handle, cudnnBackendDescriptor_t configuration,
                                 cudnnBackendDescriptor_t *plan, int64_t *bytes) {
  int64_t one;
  cudnnBackendDescriptor_t p;
  cudnnStatus_t status = api.descriptor_create(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &p);
  if (status) return status;
  status = api.set(p, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
  if (!status)
    status = api.set(p, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &configuration);
  if (!status) status = api.finalize(p);
  if (!status) status = api.get(p, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &one, bytes);
  if (status)
    (void)api.descriptor_destroy(p);
  else
    *plan = p;
  return status;
}

static lev_status no_plan(const attn_block_shape *s, const char *why) {
  return lev_fail(
      LEV_ERR_UNSUPPORTED, "attention: cuDNN has no plan for %lld/%lld heads of %lld, %lld queries x %lld keys: %s",
      (long long)s->heads, (long long)s->kv_heads, (long long)s->dim, (long long)s->queries, (long long)s->keys, why);
}

static lev_status make_plan(attn_cudnn *library, const attn_block_shape *s, cudnnBackendDescriptor_t *plan) {
  cudnnBackendDescriptor_t graph, found[CONFIGURATIONS] = {NULL};
  int64_t count = 0, bytes = 0;
  *plan = NULL;
  LEV_TRY(lev_cudnn_build(&api, library->handle, s, &graph));
  lev_status st = propose(graph, found, &count);
  char why[200] = "nothing proposed";
  for (int64_t i = 0; st == LEV_OK && i < count && !*plan; ++i)
    if (finish_plan(library->handle, found[i], plan, &bytes)) api.last_error(why, sizeof why);
  for (int i = 0; i < CONFIGURATIONS; ++i)
    if (found[i]) (void)api.descriptor_destroy(found[i]);
  (void)api.descriptor_destroy(graph);
  LEV_TRY(st);
  if (!*plan) return no_plan(s, why);
  if (bytes < 0 || (size_t)bytes <= attn_library_bytes(s)) return LEV_OK;
  (void)api.descriptor_destroy(*plan);
  return lev_fail(
      LEV_ERR_CAPACITY,
      "attention: %s wants %lld bytes of workspace, planned were %zu; run.attention = \"tiled\" does without",
      library->name, (long long)bytes, attn_library_bytes(s));
}

static lev_status find_plan(attn_cudnn *library, const attn_block_shape *shape, block_plan **out) {
  block_plan *oldest = &library->plans[0];
  ++library->clock;
  for (int i = 0; i < PLANS; ++i) {
    block_plan *p = &library->plans[i];
    if (p->taken && memcmp(&p->shape, shape, sizeof *shape) == 0) {
      p->used = library->clock;
      *out = p;
      return p->plan ? LEV_OK : no_plan(shape, "it had none before");
    }
    if (!p->taken || (oldest->taken && p->used < oldest->used)) oldest = p;
  }
  cudnnBackendDescriptor_t plan = NULL;
  lev_status st = make_plan(library, shape, &plan);
  if (st != LEV_OK && st != LEV_ERR_UNSUPPORTED) return st;
  if (oldest->plan) (void)api.descriptor_destroy(oldest->plan);
  *oldest = (block_plan){true, library->clock, *shape, plan}; /* also that there is none: asking takes long */
  *out = oldest;
  return st;
}

lev_status attn_cudnn_prepare(attn_cudnn *library, const attn_block_shape *shape) {
  block_plan *plan;
  return find_plan(library, shape, &plan);
}

/* ---- execution ---- */

typedef struct arguments {
  int64_t ids[LEV_CUDNN_TENSORS], count;
  const void *pointers[LEV_CUDNN_TENSORS];
} arguments;

static void pass(arguments *a, lev_cudnn_tensor id, const void *pointer) {
  a->ids[a->count] = id;
  a->pointers[a->count++] = pointer;
}

static void pass_documents(arguments *a, const attn_block_shape *s, const attn_block_data *data) {
  pass(a, LEV_CUDNN_LENGTHS, data->lengths);
  for (int i = 0; i < (s->backward ? ATTN_PLACES : ATTN_AT_DK); ++i)
    pass(a, (lev_cudnn_tensor)(LEV_CUDNN_PLACES + i), data->places[i]);
  if (!s->backward || s->heads == s->kv_heads) return;
  pass(a, LEV_CUDNN_DK_HEADS, data->dk_heads);
  pass(a, LEV_CUDNN_DV_HEADS, data->dv_heads);
}

static cudnnStatus_t execute(attn_cudnn *library, const block_plan *plan, const arguments *a, const void *workspace) {
  cudnnBackendDescriptor_t pack;
  cudnnStatus_t status = api.descriptor_create(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
  if (status) return status;
  status = api.set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, a->count, a->ids);
  if (!status)
    status = api.set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, a->count, a->pointers);
  if (!status) status = api.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
  if (!status) status = api.finalize(pack);
  if (!status) status = api.execute(library->handle, plan->plan, pack);
  (void)api.descriptor_destroy(pack);
  return status;
}

lev_status attn_cudnn_run(attn_cudnn *library, const attn_block_shape *s, const attn_block_data *data,
                          void *cuda_stream) {
  block_plan *plan;
  LEV_TRY(find_plan(library, s, &plan));
  const float lowest = -INFINITY, one = 1, window = (float)s->window;
  arguments a = {.count = 0};
  pass(&a, LEV_CUDNN_Q, data->q);
  pass(&a, LEV_CUDNN_K, data->k);
  pass(&a, LEV_CUDNN_V, data->v);
  pass(&a, LEV_CUDNN_O, data->o);
  pass(&a, LEV_CUDNN_LSE, data->lse);
  pass(&a, LEV_CUDNN_SCALE, &data->scale);
  if (s->causal) pass(&a, LEV_CUDNN_LOWEST, &lowest);
  if (s->window > 0) pass(&a, LEV_CUDNN_WINDOW, &window);
  if (s->backward) {
    pass(&a, LEV_CUDNN_D_O, data->d_o);
    pass(&a, LEV_CUDNN_DQ, data->dq);
    pass(&a, LEV_CUDNN_DK, data->dk);
    pass(&a, LEV_CUDNN_DV, data->dv);
    pass(&a, LEV_CUDNN_DQ_SUM, data->dq_sum);
    pass(&a, LEV_CUDNN_DELTA, data->delta);
    pass(&a, LEV_CUDNN_ONE, &one);
  }
  if (s->documents > 0) pass_documents(&a, s, data);
  CUDNN_TRY(api.set_stream(library->handle, (cudaStream_t)cuda_stream));
  CUDNN_TRY(execute(library, plan, &a, data->library));
  return LEV_OK;
}

#else

lev_status attn_cudnn_open(attn_cudnn **out) {
  *out = NULL;
  return lev_fail(LEV_ERR_UNSUPPORTED, "attention: built without cuDNN's headers");
}
void attn_cudnn_close(attn_cudnn *library) {
  (void)library;
}
const char *attn_cudnn_name(const attn_cudnn *library) {
  (void)library;
  return "no cuDNN";
}
lev_status attn_cudnn_prepare(attn_cudnn *library, const attn_block_shape *shape) {
  (void)library, (void)shape;
  return lev_fail(LEV_ERR_UNSUPPORTED, "attention: built without cuDNN's headers");
}
lev_status attn_cudnn_run(attn_cudnn *library, const attn_block_shape *shape, const attn_block_data *data,
                          void *cuda_stream) {
  (void)library, (void)shape, (void)data, (void)cuda_stream;
  return lev_fail(LEV_ERR_UNSUPPORTED, "attention: built without cuDNN's headers");
}
#endif
