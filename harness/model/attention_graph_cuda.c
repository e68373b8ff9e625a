/* SPDX-License-Identifier: Apache-2.0 */
/* The composite attention graph in cuDNN's backend API. */
#include "harness/model/cudnn_impl.h"

#ifdef LEV_HAVE_CUDNN
#include <string.h>

#define MOST_TENSORS 64
#define MOST_OPS 48
#define ALIGNMENT 16 /* bytes that every tensor starts on a multiple of */

typedef struct tensor {
  cudnnBackendDescriptor_t descriptor;
  int64_t dims[4], strides[4];
} tensor;

/* A graph under construction. After the first failure every call is a no-op; what was made is destroyed at the end. */
typedef struct builder {
  const lev_cudnn_api *api;
  tensor tensors[MOST_TENSORS];
  cudnnBackendDescriptor_t ops[MOST_OPS], details[MOST_OPS]; /* details: kinds of operation */
  int n_tensors, n_ops, n_details;
  int64_t documents;                           /* 0: one sequence */
  const tensor *places[ATTN_PLACES], *lengths; /* made when first asked for */
  cudnnStatus_t status;
  const char *failed; /* what failed */
} builder;

static void note(builder *b, cudnnStatus_t status, const char *what) {
  if (b->status != CUDNN_STATUS_SUCCESS || status == CUDNN_STATUS_SUCCESS) return;
  b->status = status, b->failed = what;
}

static cudnnBackendDescriptor_t make(builder *b, cudnnBackendDescriptorType_t type, const char *what) {
  cudnnBackendDescriptor_t d = NULL;
  if (b->status == CUDNN_STATUS_SUCCESS) note(b, b->api->descriptor_create(type, &d), what);
  return d;
}

static void set(builder *b, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *value, const char *what) {
  if (b->status == CUDNN_STATUS_SUCCESS) note(b, b->api->set(d, name, type, count, value), what);
}
static void set_descriptor(builder *b, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                           cudnnBackendDescriptor_t value, const char *what) {
  set(b, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value, what);
}
static void set_type(builder *b, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnDataType_t value,
                     const char *what) {
  set(b, d, name, CUDNN_TYPE_DATA_TYPE, 1, &value, what);
}

static void finish(builder *b, cudnnBackendDescriptor_t d, const char *what) {
  if (b->status == CUDNN_STATUS_SUCCESS) note(b, b->api->finalize(d), what);
}

/* ---- tensors ---- */

typedef enum tensor_kind { PASSED, BY_VALUE, VIRTUAL } tensor_kind;

static const tensor *add_tensor(builder *b, int64_t id, tensor_kind kind, cudnnDataType_t type, const int64_t dims[4],
                                const int64_t strides[4], const tensor *offsets) {
  static const tensor none;
  if (b->n_tensors == MOST_TENSORS) note(b, CUDNN_STATUS_INTERNAL_ERROR, "too many tensors");
  if (b->status != CUDNN_STATUS_SUCCESS) return &none;
  tensor *t = &b->tensors[b->n_tensors++];
  const int64_t alignment = id == LEV_CUDNN_LSE && offsets ? (int64_t)sizeof(float) : ALIGNMENT;
  const bool yes = true;
  memcpy(t->dims, dims, sizeof t->dims);
  memcpy(t->strides, strides, sizeof t->strides);
  cudnnBackendDescriptor_t d = t->descriptor = make(b, CUDNN_BACKEND_TENSOR_DESCRIPTOR, "tensor");
  set_type(b, d, CUDNN_ATTR_TENSOR_DATA_TYPE, type, "tensor type");
  set(b, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims, "tensor dimensions");
  set(b, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides, "tensor strides");
  set(b, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id, "tensor id");
  set(b, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment, "tensor alignment");
  if (kind == VIRTUAL) set(b, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes, "virtual tensor");
  if (kind == BY_VALUE) set(b, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes, "scalar");
  if (offsets) set_descriptor(b, d, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, offsets->descriptor, "places of documents");
  finish(b, d, "tensor");
  return t;
}

/* Where each document begins, in scalars of a tensor; NULL without documents. */
static const tensor *places(builder *b, attn_place of) {
  if (b->documents == 0) return NULL;
  if (!b->places[of]) {
    const int64_t dims[4] = {b->documents + 1, 1, 1, 1}, ones[4] = {1, 1, 1, 1};
    b->places[of] = add_tensor(b, LEV_CUDNN_PLACES + of, PASSED, CUDNN_DATA_INT64, dims, ones, NULL);
  }
  return b->places[of];
}
/* Tokens of each document; NULL without documents. */
static const tensor *lengths(builder *b) {
  if (b->documents == 0) return NULL;
  if (!b->lengths) {
    const int64_t dims[4] = {b->documents, 1, 1, 1}, ones[4] = {1, 1, 1, 1};
    b->lengths = add_tensor(b, LEV_CUDNN_LENGTHS, PASSED, CUDNN_DATA_INT32, dims, ones, NULL);
  }
  return b->lengths;
}

static int64_t batch(const builder *b) {
  return b->documents == 0 ? 1 : b->documents;
}

/* Rows of `dim` scalars as the caller stores them. */
static const tensor *rows(builder *b, lev_cudnn_tensor id, int64_t heads, int64_t tokens, int64_t dim, attn_layout at,
                          attn_place of) {
  const int64_t dims[4] = {batch(b), heads, tokens, dim}, strides[4] = {tokens * at.row, at.head, at.row, 1};
  return add_tensor(b, id, PASSED, CUDNN_DATA_BFLOAT16, dims, strides, places(b, of));
}
/* The same, each head transposed. */
static const tensor *columns(builder *b, lev_cudnn_tensor id, int64_t heads, int64_t tokens, int64_t dim,
                             attn_layout at, attn_place of) {
  const int64_t dims[4] = {batch(b), heads, dim, tokens}, strides[4] = {tokens * at.row, at.head, 1, at.row};
  return add_tensor(b, id, PASSED, CUDNN_DATA_BFLOAT16, dims, strides, places(b, of));
}

static const tensor *scalar(builder *b, lev_cudnn_tensor id) {
  const int64_t ones[4] = {1, 1, 1, 1};
  return add_tensor(b, id, BY_VALUE, CUDNN_DATA_FLOAT, ones, ones, NULL);
}

/* [heads, m, n], dense. */
static const tensor *dense(builder *b, int64_t id, tensor_kind kind, cudnnDataType_t type, int64_t heads, int64_t m,
                           int64_t n) {
  const int64_t dims[4] = {batch(b), heads, m, n}, strides[4] = {heads * m * n, m * n, n, 1};
  return add_tensor(b, id, kind, type, dims, strides, NULL);
}
static int64_t fresh(const builder *b) {
  return 100 + b->n_tensors;
}
static const tensor *like(builder *b, const tensor *x, cudnnDataType_t type) {
  return add_tensor(b, fresh(b), VIRTUAL, type, x->dims, x->strides, NULL);
}
/* [heads, rows, 1] virtual, f32. */
static const tensor *column_like(builder *b, const tensor *x) {
  return dense(b, fresh(b), VIRTUAL, CUDNN_DATA_FLOAT, x->dims[1], x->dims[2], 1);
}
/* Log-sum-exp of every row. */
static const tensor *log_sums(builder *b, const attn_block_shape *s) {
  if (b->documents == 0) return dense(b, LEV_CUDNN_LSE, PASSED, CUDNN_DATA_FLOAT, s->heads, s->queries, 1);
  const int64_t dims[4] = {b->documents, s->heads, s->queries, 1};
  const int64_t strides[4] = {s->queries * s->lse.row, s->lse.head, s->lse.row, 1};
  return add_tensor(b, LEV_CUDNN_LSE, PASSED, CUDNN_DATA_FLOAT, dims, strides, places(b, ATTN_AT_LSE));
}
/* Scratch of the caller's, [heads, tokens, dim]; with documents [tokens, heads, dim], so that it has the size of all
 * tokens and not that of as many tokens for each. */
static const tensor *scratch(builder *b, lev_cudnn_tensor id, cudnnDataType_t type, int64_t heads, int64_t tokens,
                             int64_t dim, attn_place of) {
  if (b->documents == 0) return dense(b, id, PASSED, type, heads, tokens, dim);
  const int64_t dims[4] = {b->documents, heads, tokens, dim}, strides[4] = {heads * tokens * dim, dim, heads * dim, 1};
  return add_tensor(b, id, PASSED, type, dims, strides, places(b, of));
}

/* ---- operations ---- */

static cudnnBackendDescriptor_t add_detail(builder *b, cudnnBackendDescriptorType_t type, const char *what) {
  if (b->n_details == MOST_OPS) note(b, CUDNN_STATUS_INTERNAL_ERROR, "too many operations");
  cudnnBackendDescriptor_t d = make(b, type, what);
  if (d) b->details[b->n_details++] = d;
  return d;
}
static cudnnBackendDescriptor_t add_op(builder *b, cudnnBackendDescriptorType_t type, const char *what) {
  if (b->n_ops == MOST_OPS) note(b, CUDNN_STATUS_INTERNAL_ERROR, "too many operations");
  cudnnBackendDescriptor_t d = make(b, type, what);
  if (d) b->ops[b->n_ops++] = d;
  return d;
}

/* Which of a product's sides are tokens of a document, and so end with it. */
typedef enum product_side { SIDE_M = 1, SIDE_N = 2, SIDE_K = 4 } product_side;

static const tensor *product(builder *b, int sides, const tensor *x, const tensor *y, const tensor *out) {
  static const cudnnBackendAttributeName_t names[3] = {CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC,
                                                       CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC,
                                                       CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC};
  cudnnBackendDescriptor_t kind = add_detail(b, CUDNN_BACKEND_MATMUL_DESCRIPTOR, "product");
  set_type(b, kind, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT, "product");
  finish(b, kind, "product");
  cudnnBackendDescriptor_t op = add_op(b, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, "product");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, x->descriptor, "product");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, y->descriptor, "product");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, out->descriptor, "product");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, kind, "product");
  for (int i = 0; i < 3 && b->documents > 0; ++i)
    if (sides >> i & 1) set_descriptor(b, op, names[i], lengths(b)->descriptor, "product of documents");
  finish(b, op, "product");
  return out;
}

typedef struct pointwise_kind {
  cudnnPointwiseMode_t mode;
  cudnnDataType_t precision;
  int64_t axis; /* -1: none */
} pointwise_kind;

/* y and t may be NULL. */
static const tensor *pointwise(builder *b, pointwise_kind how, const tensor *x, const tensor *y, const tensor *t,
                               const tensor *out) {
  cudnnBackendDescriptor_t kind = add_detail(b, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, "pointwise");
  set(b, kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &how.mode, "pointwise mode");
  set_type(b, kind, CUDNN_ATTR_POINTWISE_MATH_PREC, how.precision, "pointwise precision");
  if (how.axis >= 0) set(b, kind, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &how.axis, "pointwise axis");
  finish(b, kind, "pointwise");
  cudnnBackendDescriptor_t op = add_op(b, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "pointwise");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind, "pointwise");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x->descriptor, "pointwise");
  if (y) set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, y->descriptor, "pointwise");
  if (t) set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t->descriptor, "pointwise");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out->descriptor, "pointwise");
  finish(b, op, "pointwise");
  return out;
}
static const tensor *apply(builder *b, cudnnPointwiseMode_t mode, const tensor *x, const tensor *y, const tensor *out) {
  const pointwise_kind kind = {mode, CUDNN_DATA_FLOAT, -1};
  return pointwise(b, kind, x, y, NULL, out);
}

static const tensor *reduce(builder *b, cudnnReduceTensorOp_t how, const tensor *x, const tensor *out) {
  cudnnBackendDescriptor_t kind = add_detail(b, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, "reduction");
  set_type(b, kind, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT, "reduction");
  set(b, kind, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how, "reduction");
  finish(b, kind, "reduction");
  cudnnBackendDescriptor_t op = add_op(b, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, "reduction");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind, "reduction");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x->descriptor, "reduction");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, out->descriptor, "reduction");
  finish(b, op, "reduction");
  return out;
}

/* x with its last two dimensions exchanged, in bf16. */
static const tensor *transpose(builder *b, const tensor *x, const tensor *of) {
  const int64_t dims[4] = {x->dims[0], x->dims[1], x->dims[3], x->dims[2]};
  const int64_t strides[4] = {x->strides[0], x->strides[1], x->strides[3], x->strides[2]};
  const tensor *out = add_tensor(b, fresh(b), VIRTUAL, CUDNN_DATA_BFLOAT16, dims, strides, of);
  cudnnBackendDescriptor_t op = add_op(b, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, "transposition");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x->descriptor, "transposition");
  set_descriptor(b, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, out->descriptor, "transposition");
  finish(b, op, "transposition");
  return out;
}

/* ---- attention ---- */

static const tensor *index_of(builder *b, const tensor *like_this, int64_t axis, cudnnDataType_t type) {
  pointwise_kind kind = {CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, axis};
  return pointwise(b, kind, like_this, NULL, NULL, like(b, like_this, type));
}

static const tensor *select_where(builder *b, const tensor *x, const tensor *lowest, const tensor *mask) {
  pointwise_kind kind = {CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, -1};
  return pointwise(b, kind, x, lowest, mask, like(b, x, CUDNN_DATA_FLOAT));
}

/* Rows and columns beyond a document's length. */
static const tensor *within(builder *b, const tensor *x, const tensor *lowest) {
  pointwise_kind index = {CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, 2};
  pointwise_kind less = {CUDNN_POINTWISE_CMP_LT, CUDNN_DATA_BOOLEAN, -1};
  pointwise_kind both = {CUDNN_POINTWISE_LOGICAL_AND, CUDNN_DATA_BOOLEAN, -1};
  const tensor *row = pointwise(b, index, x, NULL, NULL, like(b, x, CUDNN_DATA_INT32));
  index.axis = 3;
  const tensor *column = pointwise(b, index, x, NULL, NULL, like(b, x, CUDNN_DATA_INT32));
  row = pointwise(b, less, row, lengths(b), NULL, like(b, x, CUDNN_DATA_BOOLEAN));
  column = pointwise(b, less, column, lengths(b), NULL, like(b, x, CUDNN_DATA_BOOLEAN));
  return select_where(b, x, lowest, pointwise(b, both, row, column, NULL, like(b, x, CUDNN_DATA_BOOLEAN)));
}

/* Scores of unseen keys become -infinity. The library knows causal attention and windows by these very operations. */
static const tensor *masked(builder *b, const attn_block_shape *s, const tensor *x) {
  if (!s->causal && s->window == 0) return x;
  const tensor *lowest = scalar(b, LEV_CUDNN_LOWEST);
  if (b->documents > 0) x = within(b, x, lowest);
  if (s->causal) {
    const tensor *row = index_of(b, x, 2, CUDNN_DATA_INT32), *column = index_of(b, x, 3, CUDNN_DATA_INT32);
    pointwise_kind above = {CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, -1};
    x = select_where(b, x, lowest, pointwise(b, above, row, column, NULL, like(b, x, CUDNN_DATA_BOOLEAN)));
  }
  if (s->window > 0) {
    const tensor *row = index_of(b, x, 2, CUDNN_DATA_FLOAT), *column = index_of(b, x, 3, CUDNN_DATA_FLOAT);
    pointwise_kind add = {CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, 3};
    const tensor *end = pointwise(b, add, column, scalar(b, LEV_CUDNN_WINDOW), NULL, like(b, column, CUDNN_DATA_FLOAT));
    pointwise_kind after = {CUDNN_POINTWISE_CMP_GT, CUDNN_DATA_BOOLEAN, -1};
    x = select_where(b, x, lowest, pointwise(b, after, end, row, NULL, like(b, x, CUDNN_DATA_BOOLEAN)));
  }
  return x;
}

static const tensor *scores(builder *b, const attn_block_shape *s, const tensor *q, const tensor *k_columns,
                            const tensor *scale) {
  const tensor *out = dense(b, fresh(b), VIRTUAL, CUDNN_DATA_FLOAT, s->heads, s->queries, s->keys);
  product(b, SIDE_M | SIDE_N, q, k_columns, out);
  return apply(b, CUDNN_POINTWISE_MUL, out, scale, like(b, out, CUDNN_DATA_FLOAT));
}

static void forward_graph(builder *b, const attn_block_shape *s) {
  const tensor *q = rows(b, LEV_CUDNN_Q, s->heads, s->queries, s->dim, s->q, ATTN_AT_Q);
  const tensor *k = columns(b, LEV_CUDNN_K, s->kv_heads, s->keys, s->dim, s->k, ATTN_AT_K);
  const tensor *v = rows(b, LEV_CUDNN_V, s->kv_heads, s->keys, s->dim, s->v, ATTN_AT_V);
  const tensor *o = rows(b, LEV_CUDNN_O, s->heads, s->queries, s->dim, s->o, ATTN_AT_O);
  const tensor *lse = log_sums(b, s);
  const tensor *x = masked(b, s, scores(b, s, q, k, scalar(b, LEV_CUDNN_SCALE)));
  const tensor *most = reduce(b, CUDNN_REDUCE_TENSOR_MAX, x, column_like(b, x));
  x = apply(b, CUDNN_POINTWISE_SUB, x, most, like(b, x, CUDNN_DATA_FLOAT));
  x = apply(b, CUDNN_POINTWISE_EXP, x, NULL, like(b, x, CUDNN_DATA_FLOAT));
  const tensor *sum = reduce(b, CUDNN_REDUCE_TENSOR_ADD, x, column_like(b, x));
  const tensor *log = apply(b, CUDNN_POINTWISE_LOG, sum, NULL, column_like(b, x));
  apply(b, CUDNN_POINTWISE_ADD, most, log, lse);
  x = apply(b, CUDNN_POINTWISE_DIV, x, sum, like(b, x, CUDNN_DATA_BFLOAT16));
  product(b, SIDE_M | SIDE_K, x, v, o);
}

/* Sum over the query heads of each key head, where there are several: of one head each in `heads`. */
static void key_gradient(builder *b, const attn_block_shape *s, const tensor *weights, const tensor *x,
                         const tensor *out, lev_cudnn_tensor heads) {
  const cudnnDataType_t bf16 = CUDNN_DATA_BFLOAT16;
  const tensor *turned = transpose(b, weights, NULL), *all;
  if (s->heads == s->kv_heads) {
    product(b, SIDE_M | SIDE_K, turned, x, out);
    return;
  }
  if (b->documents == 0)
    all = dense(b, fresh(b), VIRTUAL, bf16, s->heads, s->keys, s->dim);
  else
    all = scratch(b, heads, bf16, s->heads, s->keys, s->dim, ATTN_AT_HEADS);
  reduce(b, CUDNN_REDUCE_TENSOR_ADD, product(b, SIDE_M | SIDE_K, turned, x, all), out);
}

static void backward_graph(builder *b, const attn_block_shape *s) {
  const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
  const tensor *q = rows(b, LEV_CUDNN_Q, s->heads, s->queries, s->dim, s->q, ATTN_AT_Q);
  const tensor *k = columns(b, LEV_CUDNN_K, s->kv_heads, s->keys, s->dim, s->k, ATTN_AT_K);
  const tensor *v = columns(b, LEV_CUDNN_V, s->kv_heads, s->keys, s->dim, s->v, ATTN_AT_V);
  const tensor *o = rows(b, LEV_CUDNN_O, s->heads, s->queries, s->dim, s->o, ATTN_AT_O);
  const tensor *d_o = rows(b, LEV_CUDNN_D_O, s->heads, s->queries, s->dim, s->o, ATTN_AT_O);
  const tensor *dq = rows(b, LEV_CUDNN_DQ, s->heads, s->queries, s->dim, s->dq, ATTN_AT_HEADS);
  const tensor *dk = rows(b, LEV_CUDNN_DK, s->kv_heads, s->keys, s->dim, s->dk, ATTN_AT_DK);
  const tensor *dv = rows(b, LEV_CUDNN_DV, s->kv_heads, s->keys, s->dim, s->dv, ATTN_AT_DV);
  const tensor *lse = log_sums(b, s);
  const tensor *delta = scratch(b, LEV_CUDNN_DELTA, f32, s->heads, s->queries, 1, ATTN_AT_DELTA);
  const tensor *dq_sum = scratch(b, LEV_CUDNN_DQ_SUM, f32, s->heads, s->queries, s->dim, ATTN_AT_HEADS);
  const tensor *scale = scalar(b, LEV_CUDNN_SCALE);
  const tensor *both = dense(b, fresh(b), VIRTUAL, f32, s->heads, s->queries, s->dim);
  apply(b, CUDNN_POINTWISE_MUL, d_o, o, both);
  const tensor *sums = reduce(b, CUDNN_REDUCE_TENSOR_ADD, both, column_like(b, both));
  apply(b, CUDNN_POINTWISE_MUL, sums, scalar(b, LEV_CUDNN_ONE), delta);
  const tensor *x = scores(b, s, q, k, scale);
  x = masked(b, s, apply(b, CUDNN_POINTWISE_SUB, x, lse, like(b, x, f32)));
  const tensor *p = apply(b, CUDNN_POINTWISE_EXP, x, NULL, like(b, x, f32));
  key_gradient(b, s, p, d_o, dv, LEV_CUDNN_DV_HEADS);
  x = product(b, SIDE_M | SIDE_N, d_o, v, dense(b, fresh(b), VIRTUAL, f32, s->heads, s->queries, s->keys));
  x = apply(b, CUDNN_POINTWISE_SUB, x, delta, like(b, x, f32));
  x = apply(b, CUDNN_POINTWISE_MUL, x, p, like(b, x, f32));
  x = apply(b, CUDNN_POINTWISE_MUL, x, scale, like(b, x, f32));
  key_gradient(b, s, x, q, dk, LEV_CUDNN_DK_HEADS);
  product(b, SIDE_M | SIDE_K, x, transpose(b, k, places(b, ATTN_AT_K)), dq_sum);
  apply(b, CUDNN_POINTWISE_IDENTITY, dq_sum, NULL, dq);
}

static void destroy_all(builder *b) {
  for (int i = 0; i < b->n_ops; ++i) (void)b->api->descriptor_destroy(b->ops[i]);
  for (int i = 0; i < b->n_details; ++i) (void)b->api->descriptor_destroy(b->details[i]);
  for (int i = 0; i < b->n_tensors; ++i)
    if (b->tensors[i].descriptor) (void)b->api->descriptor_destroy(b->tensors[i].descriptor);
}

lev_status lev_cudnn_build(const lev_cudnn_api *api, cudnnHandle_t handle, const attn_block_shape *shape,
                           cudnnBackendDescriptor_t *graph) {
  builder b = {.api = api, .status = CUDNN_STATUS_SUCCESS, .documents = shape->documents};
  *graph = NULL;
  if (shape->backward)
    backward_graph(&b, shape);
  else
    forward_graph(&b, shape);
  cudnnBackendDescriptor_t g = make(&b, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "graph");
  set(&b, g, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, b.n_ops, b.ops, "operations");
  if (handle) set(&b, g, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle, "graph");
  finish(&b, g, "graph");
  char words[256] = "";
  if (b.status != CUDNN_STATUS_SUCCESS) {
    api->last_error(words, sizeof words);
    if (g) (void)api->descriptor_destroy(g);
    destroy_all(&b);
    return lev_fail(LEV_ERR_UNSUPPORTED, "attention: cuDNN takes no %s: %s (%s)", b.failed, api->error_string(b.status),
                    words);
  }
  destroy_all(&b);
  *graph = g;
  return LEV_OK;
}
#endif
