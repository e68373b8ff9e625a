/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/train/auto.h"

#include <stdio.h>
#include <string.h>

#include "common/hostmem.h"

#define UNKNOWN (INT64_MAX / 4) /* over a limit by an amount that the failure did not tell */
#define OADAMW_UNIT 64          /* bucket borders fall on multiples of this */
#define SLOTS_WANTED 3          /* copy in, update, copy out */
#define SLOTS_MANY 6
#define BLOCK_WANTED 4096 /* tokens of all ranks in a block of the one-pass projection: fewer make thin products */
#define BUCKETS_WANTED 16 /* below this, filling and draining the pipeline shows: rather more and smaller slots */

/* Caps in the order in which they are reported. */
typedef enum cap_id {
  CAP_CONTEXT,
  CAP_KEEP,
  CAP_HOST,
  CAP_CHUNK,
  CAP_FOREIGN,
  CAP_TILE_ROWS,
  CAP_TILE_COLS,
  CAP_ONE_PASS,
  CAP_BUCKET,
  CAP_SLOTS,
  CAP_MUON,
  CAP_EMBED,
  CAP_FFN,
  CAP_BLOCK_Q,
  CAP_BLOCK_K,
  CAP_WORKSPACE,
  CAPS
} cap_id;

static const char *const cap_names[CAPS] = {
    "parallel.context",          "memory.sco_keep_attention", "memory.sco_host_budget",   "memory.llep_chunk_rows",
    "memory.llep_foreign_slots", "memory.rdtp_tile_rows",     "memory.rdtp_tile_cols",    "memory.rdtp_one_pass",
    "memory.oadamw_bucket",      "memory.oadamw_slots",       "memory.muon_bucket_bytes", "memory.embed_tile_tokens",
    "memory.ffn_tile_rows",      "memory.attention_block_q",  "memory.attention_block_k", "memory.attention_workspace"};

/* How far a plan is over each limit; negative = room left. */
typedef struct over {
  int64_t device, host;
} over;

typedef struct search {
  lev_config *c;
  const lev_config *given;         /* before the search */
  const lev_ceilings *rates;       /* NULL = unknown */
  size_t device_limit, host_limit; /* SIZE_MAX = none */
  int active[LEV_RANKS_MAX];       /* ranks that are planned in each probe */
  int n_active;
  int64_t step[CAPS];         /* of the caps chosen */
  int64_t hint[CAPS];         /* where an earlier search with fewer ranks ended; 0 = none */
  int64_t buckets;            /* likewise */
  int64_t tokens;             /* N cap of any rank */
  size_t boundary, attention; /* strides of kept items */
} search;

/* ---- caps as numbers ---- */

static int64_t read_cap(const lev_config *c, cap_id id) {
  const int64_t values[CAPS] = {[CAP_CONTEXT] = c->parallel.context,
                                [CAP_KEEP] = c->memory.sco_keep_attention,
                                [CAP_HOST] =
                                    c->memory.sco_host_budget > INT64_MAX ? -1 : (int64_t)c->memory.sco_host_budget,
                                [CAP_CHUNK] = c->memory.llep_chunk_rows,
                                [CAP_FOREIGN] = c->memory.llep_foreign_slots,
                                [CAP_TILE_ROWS] = c->memory.rdtp_tile_rows,
                                [CAP_TILE_COLS] = c->memory.rdtp_tile_cols,
                                [CAP_ONE_PASS] = c->memory.rdtp_one_pass,
                                [CAP_BUCKET] = c->memory.oadamw_bucket,
                                [CAP_SLOTS] = c->memory.oadamw_slots,
                                [CAP_MUON] = (int64_t)c->memory.muon_bucket_bytes,
                                [CAP_EMBED] = c->memory.embed_tile_tokens,
                                [CAP_FFN] = c->memory.ffn_tile_rows,
                                [CAP_BLOCK_Q] = c->memory.attention_block_q,
                                [CAP_BLOCK_K] = c->memory.attention_block_k,
                                [CAP_WORKSPACE] = (int64_t)c->memory.attention_workspace};
  return values[id];
}

static void write_cap(lev_config *c, cap_id id, int64_t value) {
  if (id == CAP_KEEP) {
    c->memory.sco_keep_attention = value != 0;
  } else if (id == CAP_ONE_PASS) {
    c->memory.rdtp_one_pass = value != 0;
  } else if (id == CAP_HOST) {
    c->memory.sco_host_budget = value < 0 ? SIZE_MAX : (size_t)value;
  } else if (id == CAP_MUON) {
    c->memory.muon_bucket_bytes = (size_t)value;
  } else if (id == CAP_WORKSPACE) {
    c->memory.attention_workspace = (size_t)value;
  } else {
    int64_t *const fields[CAPS] = {
        [CAP_CONTEXT] = &c->parallel.context,          [CAP_CHUNK] = &c->memory.llep_chunk_rows,
        [CAP_FOREIGN] = &c->memory.llep_foreign_slots, [CAP_TILE_ROWS] = &c->memory.rdtp_tile_rows,
        [CAP_TILE_COLS] = &c->memory.rdtp_tile_cols,   [CAP_BUCKET] = &c->memory.oadamw_bucket,
        [CAP_SLOTS] = &c->memory.oadamw_slots,         [CAP_EMBED] = &c->memory.embed_tile_tokens,
        [CAP_FFN] = &c->memory.ffn_tile_rows,          [CAP_BLOCK_Q] = &c->memory.attention_block_q,
        [CAP_BLOCK_K] = &c->memory.attention_block_k};
    *fields[id] = value;
  }
}

/* ---- probes ---- */

static int64_t minus(size_t bytes, size_t limit) {
  if (limit == SIZE_MAX) return INT64_MIN / 4;
  if (bytes > (size_t)UNKNOWN) return UNKNOWN;
  return (int64_t)bytes - (int64_t)lev_min_i64((int64_t)limit, UNKNOWN);
}

static over over_of(const search *s, const lev_rank_plan *plan) {
  return (over){minus(lev_ledger_peak(plan->ledger, LEV_MEM_DEVICE), s->device_limit),
                minus(lev_rank_plan_host(plan), s->host_limit)};
}

/* Plans the active ranks, or rank 0 where there are none yet, with the present caps. */
static lev_status measure(const search *s, over *out) {
  *out = (over){INT64_MIN / 2, INT64_MIN / 2};
  for (int i = 0; i < lev_max_i64(1, s->n_active); ++i) {
    lev_rank_plan plan;
    lev_status st = lev_plan_rank(s->c, s->n_active > 0 ? s->active[i] : 0, NULL, &plan);
    if (st == LEV_ERR_BUDGET) {
      out->device = UNKNOWN;
      return LEV_OK;
    }
    LEV_TRY(st);
    over o = over_of(s, &plan);
    lev_rank_plan_free(&plan);
    out->device = lev_max_i64(out->device, o.device), out->host = lev_max_i64(out->host, o.host);
  }
  return LEV_OK;
}

static int64_t worst(over o) {
  return lev_max_i64(o.device, o.host);
}

static lev_status measure_at(const search *s, cap_id id, int64_t value, int64_t *out) {
  over o;
  write_cap(s->c, id, value);
  LEV_TRY(measure(s, &o));
  *out = worst(o);
  return LEV_OK;
}

/* A point that was measured: value number and bytes over. */
typedef struct point {
  int64_t at, over;
} point;

/* Where the line through two points crosses zero. */
static int64_t crossing(point a, point b) {
  double slope = (double)(b.over - a.over) / (double)(b.at - a.at);
  return slope > 0 ? b.at - (int64_t)((double)b.over / slope) - 1 : a.at;
}

/* Between `low`, which fits, and `high`, which does not. Bytes are flat while another phase is larger and then rise
 * almost in a line, so the line through two points that do not fit is followed to zero first; every third probe halves.
 */
static int64_t guess(point low, point high, point higher, int round) {
  int64_t at = low.at + (high.at - low.at) / 2;
  bool known = high.over < UNKNOWN;
  if (known && round % 3 == 1 && higher.at > high.at && higher.over < UNKNOWN) at = crossing(high, higher);
  if (known && round % 3 == 0) at = crossing(low, high);
  return lev_max_i64(low.at + 1, lev_min_i64(high.at - 1, at));
}

/* Brackets the end of a climb around the value that an earlier search with fewer ranks ended at: from there down in
 * doubling steps until it fits. */
static lev_status bracket(search *s, cap_id id, int64_t first, int64_t step, point *low, point *high) {
  int64_t at = (s->hint[id] - first) / step, down = 1;
  if (s->hint[id] <= first || at >= high->at) return LEV_OK;
  for (;;) {
    point p = {at, 0};
    LEV_TRY(measure_at(s, id, first + at * step, &p.over));
    if (p.over <= 0) {
      *low = p;
      break;
    }
    *high = p;
    if (at - down <= low->at) break;
    at -= down, down *= 2;
  }
  if (high->at - low->at <= 1 || low->at == 0) return LEV_OK;
  point next = {low->at + 1, 0}; /* nearly always the end */
  LEV_TRY(measure_at(s, id, first + next.at * step, &next.over));
  *(next.over <= 0 ? low : high) = next;
  return LEV_OK;
}

/* Leaves a cap that memory does not bind to its module (`loose`), unless what that chooses takes more than the largest
 * useful value, which it has now: two buffers instead of one, a row more. */
static lev_status loosen(search *s, cap_id id, int64_t loose) {
  int64_t value = read_cap(s->c, id), o;
  LEV_TRY(measure_at(s, id, loose, &o));
  if (o > 0) write_cap(s->c, id, value);
  return LEV_OK;
}

/* Raises a cap from where it is (which fits) to the largest first + i x step <= last that fits. Where `last` itself
 * fits, memory does not bind the cap: it is left at `loose`. */
static lev_status climb(search *s, cap_id id, int64_t last, int64_t step, int64_t loose, bool *bound) {
  int64_t first = read_cap(s->c, id), n = (last - first) / step;
  point low = {0, 0}, high = {n, 0}, higher = {n, 0};
  *bound = false;
  s->step[id] = 0;
  LEV_TRY(measure_at(s, id, first, &low.over));
  if (n > 0) LEV_TRY(measure_at(s, id, first + n * step, &high.over));
  if (n <= 0 || high.over <= 0) return loosen(s, id, loose);
  LEV_TRY(bracket(s, id, first, step, &low, &high));
  for (int round = 0; high.at - low.at > 1; ++round) {
    point p = {guess(low, high, higher, round), 0};
    LEV_TRY(measure_at(s, id, first + p.at * step, &p.over));
    if (p.over <= 0)
      low = p;
    else
      higher = high, high = p;
  }
  s->hint[id] = first + low.at * step;
  write_cap(s->c, id, s->hint[id]);
  s->step[id] = step;
  *bound = true;
  return LEV_OK;
}

/* ---- single caps ---- */

static int64_t head_rows(const lev_config *c) {
  return lev_ceil_div(c->model.vocab_size, lev_layout_of(c, (int)c->parallel.ranks, 0).vocab);
}

static int64_t worst_rows(const search *s) {
  int64_t ep = lev_layout_of(s->c, (int)s->c->parallel.ranks, 0).experts;
  return lev_min_i64(INT32_MAX, s->tokens * ep * s->c->model.num_experts_per_tok);
}

static bool has_ffn(const lev_config *c) {
  return c->model.n_shared_experts > 0 || c->model.first_k_dense_replace > 0;
}

static bool is_bounded(int schedule) {
  return schedule == LEV_SCHEDULE_BOUNDED;
}

static lev_status raise_chunk(search *s) {
  bool bound;
  if (!is_bounded(s->c->schedule.pipelined_llep)) return LEV_OK;
  return climb(s, CAP_CHUNK, worst_rows(s), 1, 0, &bound);
}

/* Whether the estimate of a step is better with one pass over the vocabulary than with two: less time at the rates, or
 * where none are known nothing more of any cost (one product of the four less, but it may send more). */
static lev_status one_pass_is_faster(search *s, bool *out) {
  static const lev_ceilings unit = {1, 1, 1, 1, 1, 1, 1};
  lev_estimate e[2];
  for (int one = 0; one < 2; ++one) {
    write_cap(s->c, CAP_ONE_PASS, one);
    lev_status st = lev_estimate_step(s->c, s->active[0], s->rates ? s->rates : &unit, &e[one]);
    *out = false;
    if (st == LEV_ERR_CAPACITY) return LEV_OK; /* more events than can be counted */
    LEV_TRY(st);
  }
  *out = e[1].cost[LEV_COST_VOCABULARY].amount < e[0].cost[LEV_COST_VOCABULARY].amount;
  for (int i = 0; i < LEV_COSTS && !s->rates; ++i) *out &= e[1].cost[i].amount <= e[0].cost[i].amount;
  if (s->rates) *out &= e[1].step < e[0].step;
  return LEV_OK;
}

/* One pass over the vocabulary, where a block of BLOCK_WANTED tokens fits and that is the faster; then more rows. */
static lev_status raise_block(search *s, bool *taken) {
  lev_config *c = s->c;
  int64_t rows0 = c->memory.rdtp_tile_rows, cols0 = c->memory.rdtp_tile_cols, o;
  int ranks = lev_layout_of(c, (int)c->parallel.ranks, 0).vocab;
  int64_t rows = lev_min_i64(s->tokens, lev_ceil_div(BLOCK_WANTED, ranks));
  bool bound;
  *taken = c->memory.rdtp_one_pass;
  if (!*taken) {
    c->memory.rdtp_one_pass = true, c->memory.rdtp_tile_cols = 0;
    LEV_TRY(measure_at(s, CAP_TILE_ROWS, rows, &o));
    if (o <= 0) LEV_TRY(one_pass_is_faster(s, taken));
    c->memory.rdtp_one_pass = *taken;
    if (!*taken) c->memory.rdtp_tile_rows = rows0, c->memory.rdtp_tile_cols = cols0;
    if (!*taken) return LEV_OK;
  }
  s->step[CAP_TILE_COLS] = 0;
  return climb(s, CAP_TILE_ROWS, s->tokens, 1, rows, &bound);
}

/* Doubles the tile, kept within rows x cols, as long as it fits. */
static lev_status double_tile(search *s, int64_t rows, int64_t cols) {
  lev_config *c = s->c;
  int64_t o = 0, rows0 = c->memory.rdtp_tile_rows, cols0 = c->memory.rdtp_tile_cols;
  int64_t side = 2 * lev_min_i64(rows0, cols0);
  do {
    rows0 = c->memory.rdtp_tile_rows, cols0 = c->memory.rdtp_tile_cols;
    c->memory.rdtp_tile_rows = lev_min_i64(rows, lev_max_i64(rows0, side));
    LEV_TRY(measure_at(s, CAP_TILE_COLS, lev_min_i64(cols, lev_max_i64(cols0, side)), &o));
    side *= 2;
  } while (o <= 0 && side / 2 < lev_max_i64(rows, cols));
  if (o > 0) c->memory.rdtp_tile_rows = rows0, c->memory.rdtp_tile_cols = cols0;
  return LEV_OK;
}

/* The tile grows as a square first, then by columns and by rows. It stays below the whole of either side, so that both
 * can be raised; a tile of everything is left to the module. */
static lev_status raise_tile(search *s) {
  lev_config *c = s->c;
  int64_t rows = s->tokens - 1, cols = (head_rows(c) - 1) / 16 * 16;
  bool row_bound, col_bound, one_pass;
  if (!is_bounded(c->schedule.ring_dtp)) return LEV_OK;
  LEV_TRY(raise_block(s, &one_pass));
  if (one_pass || rows < c->memory.rdtp_tile_rows || cols < c->memory.rdtp_tile_cols) return LEV_OK;
  int64_t rows0 = c->memory.rdtp_tile_rows, hint = s->hint[CAP_TILE_ROWS], o = 1;
  if (hint > rows0) LEV_TRY(measure_at(s, CAP_TILE_ROWS, hint - hint / 64, &o)); /* near the end of an earlier search */
  if (o > 0) c->memory.rdtp_tile_rows = rows0;
  if (o > 0 && s->step[CAP_TILE_ROWS] == 0) LEV_TRY(double_tile(s, rows, cols));
  LEV_TRY(climb(s, CAP_TILE_COLS, cols, 16, cols, &col_bound));
  LEV_TRY(climb(s, CAP_TILE_ROWS, rows, 1, rows, &row_bound));
  if (!row_bound && col_bound) { /* fewer rows, so that columns take the room and both stay below their ends */
    c->memory.rdtp_tile_rows = lev_max_i64(1, rows - rows / 4);
    LEV_TRY(climb(s, CAP_TILE_COLS, cols, 16, cols, &col_bound));
    LEV_TRY(climb(s, CAP_TILE_ROWS, rows, 1, rows, &row_bound));
  }
  bool bound = row_bound || col_bound;
  s->step[CAP_TILE_ROWS] = bound ? 1 : 0, s->step[CAP_TILE_COLS] = bound ? 16 : 0;
  if (bound) return LEV_OK;
  rows = c->memory.rdtp_tile_rows, c->memory.rdtp_tile_rows = 0;
  LEV_TRY(measure_at(s, CAP_TILE_COLS, 0, &o));
  if (o > 0) c->memory.rdtp_tile_rows = rows, c->memory.rdtp_tile_cols = cols;
  return LEV_OK;
}

/* Fewest elements of AdamW state on an active rank. */
static lev_status adamw_elements(const search *s, int64_t *out) {
  size_t scalar = lev_dtype_bytes(lev_dtype_arith((lev_dtype)s->c->model.dtype));
  *out = INT64_MAX;
  for (int i = 0; i < s->n_active; ++i) {
    lev_rank_plan plan;
    LEV_TRY(lev_plan_rank(s->c, s->active[i], NULL, &plan));
    *out = lev_min_i64(*out, (int64_t)(lev_ledger_tag_peak(plan.ledger, LEV_MEM_PINNED, "oadamw.master") / scalar));
    lev_rank_plan_free(&plan);
  }
  return LEV_OK;
}

/* Largest bucket that cuts n elements into `buckets`: equal parts, on borders of OADAMW_UNIT. */
static int64_t bucket_of(int64_t n, int64_t buckets) {
  int64_t units = lev_ceil_div(n, OADAMW_UNIT);
  return buckets == 1 ? units * OADAMW_UNIT : (lev_ceil_div(units, buckets - 1) - 1) * OADAMW_UNIT;
}

/* Fewest buckets, starting the search at *buckets, that fit with the present slots. Bytes are 3 slots x the size of a
 * part, whatever the cap within a part's range, so the number of parts is searched. */
static lev_status fewest_buckets(search *s, int64_t n, int64_t *buckets) {
  int64_t most = lev_max_i64(1, lev_ceil_div(n, OADAMW_UNIT)), o;
  double element =
      3.0 * (double)s->c->memory.oadamw_slots * (double)lev_dtype_bytes(lev_dtype_arith((lev_dtype)s->c->model.dtype));
  for (;;) {
    LEV_TRY(measure_at(s, CAP_BUCKET, bucket_of(n, *buckets), &o));
    if (o <= 0 || *buckets == most) break;
    double part = (double)n / (double)*buckets - (double)o / element;
    int64_t next = 4 * part > (double)n / (double)*buckets ? (int64_t)((double)n / part) : 4 * *buckets;
    *buckets = lev_min_i64(most, lev_max_i64(*buckets + 1, next));
  }
  while (*buckets > 1) {
    LEV_TRY(measure_at(s, CAP_BUCKET, bucket_of(n, *buckets - 1), &o));
    if (o > 0) break;
    --*buckets;
  }
  int64_t bucket = bucket_of(n, *buckets);
  bool bound;
  if (*buckets == 1) return measure_at(s, CAP_BUCKET, bucket, &o);
  LEV_TRY(measure_at(s, CAP_BUCKET, bucket + OADAMW_UNIT, &o));
  write_cap(s->c, CAP_BUCKET, bucket);
  return o > 0 ? LEV_OK : climb(s, CAP_BUCKET, bucket_of(n, *buckets - 1), OADAMW_UNIT, 0, &bound);
}

/* Largest bucket for three slots, or for more where few buckets would come of it. */
static lev_status choose_bucket(search *s, int64_t *buckets) {
  lev_config *c = s->c;
  int64_t n;
  LEV_TRY(adamw_elements(s, &n));
  c->memory.oadamw_slots = SLOTS_WANTED;
  if (s->buckets > 0) {
    c->memory.oadamw_slots = s->hint[CAP_SLOTS], *buckets = s->buckets;
    return fewest_buckets(s, n, buckets);
  }
  *buckets = 1;
  LEV_TRY(fewest_buckets(s, n, buckets));
  if (*buckets == 1 || *buckets >= BUCKETS_WANTED) return LEV_OK;
  int64_t slots = lev_min_i64(SLOTS_MANY, lev_ceil_div(SLOTS_WANTED * BUCKETS_WANTED, *buckets));
  *buckets = lev_ceil_div(slots * (*buckets - 1), SLOTS_WANTED); /* no fewer fit: one part less did not */
  c->memory.oadamw_slots = slots;
  return fewest_buckets(s, n, buckets);
}

static lev_status raise_bucket(search *s) {
  lev_config *c = s->c;
  int64_t buckets, o, bucket0 = c->memory.oadamw_bucket, slots0 = c->memory.oadamw_slots;
  if (!is_bounded(c->schedule.offload_adamw) || c->memory.oadamw_placement == OADAMW_CPU) return LEV_OK;
  LEV_TRY(choose_bucket(s, &buckets));
  LEV_TRY(measure_at(s, CAP_BUCKET, c->memory.oadamw_bucket, &o));
  if (o > 0) { /* three of the least do not fit */
    c->memory.oadamw_bucket = bucket0, c->memory.oadamw_slots = slots0;
    return LEV_OK;
  }
  if (buckets == 1) {
    c->memory.oadamw_slots = slots0;
    return loosen(s, CAP_BUCKET, 0);
  }
  while (c->memory.oadamw_slots < OADAMW_SLOTS_MAX) { /* a slot more may fit where the parts are coarse */
    LEV_TRY(measure_at(s, CAP_SLOTS, c->memory.oadamw_slots + 1, &o));
    if (o <= 0) continue;
    --c->memory.oadamw_slots;
    break;
  }
  s->buckets = buckets, s->hint[CAP_SLOTS] = c->memory.oadamw_slots;
  s->step[CAP_BUCKET] = OADAMW_UNIT;
  s->step[CAP_SLOTS] = c->memory.oadamw_slots < OADAMW_SLOTS_MAX;
  return LEV_OK;
}

/* Of whole matrices, so bytes rise in steps: within one matrix per slot of the room the search goes on by halves. */
static lev_status raise_muon(search *s) {
  lev_config *c = s->c;
  lev_rank_plan plan;
  size_t least = 0;
  bool bound;
  if (c->optimizer.name != LEV_OPTIMIZER_MUON || !is_bounded(c->schedule.muon)) return LEV_OK;
  for (int i = 0; i < s->n_active; ++i) {
    LEV_TRY(lev_plan_rank(c, s->active[i], NULL, &plan));
    least = lev_max_size(least, lev_ledger_module_peak(plan.ledger, LEV_MEM_DEVICE, "muon"));
    lev_rank_plan_free(&plan);
  }
  int64_t step = (int64_t)lev_align_up(least / 256 + 1), first = (int64_t)lev_align_up(least), last = first;
  if (s->device_limit != SIZE_MAX) last = lev_max_i64(first, (int64_t)s->device_limit);
  write_cap(c, CAP_MUON, first);
  LEV_TRY(climb(s, CAP_MUON, last + step, step, 0, &bound));
  return LEV_OK;
}

static lev_status raise_embed(search *s) {
  bool bound;
  return climb(s, CAP_EMBED, s->tokens, 1, 0, &bound);
}

static lev_status raise_ffn(search *s) {
  bool bound;
  return has_ffn(s->c) ? climb(s, CAP_FFN, s->tokens, 1, 0, &bound) : LEV_OK;
}

/* Pinned bytes for kept items: as many items as the host holds, in the order in which sco hosts them. False where the
 * host cannot even hold the rest. */
static lev_status raise_host(search *s, bool *fits) {
  lev_config *c = s->c;
  over o;
  int64_t layers = c->model.num_hidden_layers, items = lev_max_i64(0, layers - 2);
  int64_t boundary = lev_max_i64(1, (int64_t)s->boundary),
          attention = c->memory.sco_keep_attention ? (int64_t)s->attention : 0;
  s->step[CAP_HOST] = 0;
  c->memory.sco_fraction = 1;
  if (!is_bounded(c->schedule.sco)) {
    LEV_TRY(measure(s, &o));
    *fits = o.host <= 0;
    return LEV_OK;
  }
  write_cap(c, CAP_HOST, 0);
  LEV_TRY(measure(s, &o));
  *fits = o.host <= 0;
  if (o.host > 0) return LEV_OK;
  int64_t boundaries = lev_min_i64(items, -o.host / boundary), left = -o.host - boundaries * boundary;
  int64_t outputs = attention > 0 ? lev_min_i64(items, left / attention) : 0;
  bool all = boundaries == items && (attention == 0 || outputs == items);
  write_cap(c, CAP_HOST, all ? -1 : boundaries * boundary + outputs * attention);
  if (!all) s->step[CAP_HOST] = boundaries < items ? boundary : attention;
  return LEV_OK;
}

/* ---- the whole ---- */

/* How much is given up so that the rest fits, from nothing on. */
typedef struct mode {
  bool keep;       /* attention outputs are kept */
  int shift;       /* caps begin at the modules' defaults / 2^shift, not below the least that is reasonable */
  int64_t foreign; /* lent experts a rank can hold; 0 = half of its own, -1 = none */
  int64_t blocks;  /* of attention; 0 = chosen */
} mode;
static const mode modes[] = {{true, 0, 0, 0},    {false, 0, 0, 0},    {false, 3, 0, 0},
                             {false, 6, 0, 0},   {false, 62, 0, 0},   {false, 62, 1, 0},
                             {false, 62, -1, 0}, {false, 62, -1, 32}, {false, 62, -1, 8}};
enum { MODES = sizeof modes / sizeof *modes, MODES_GOOD = 2 };

/* Where the caps begin. The least ones make some hundred pieces, more of which would cost time without bound. */
static void begin_caps(search *s, const mode *m) {
  lev_config *c = s->c;
  int64_t n = s->tokens, k = c->model.num_experts_per_tok, cols = head_rows(c);
  int64_t ep = lev_layout_of(c, (int)c->parallel.ranks, 0).experts;
  int64_t chunk = lev_min_i64(worst_rows(s), lev_max_i64(ep, 4096) * k);
  if (2 * chunk >= worst_rows(s)) chunk = worst_rows(s); /* one buffer, where less takes two */
  int64_t few = lev_min_i64(chunk, lev_max_i64(ep * k, lev_ceil_div(n * k, 512)));
  const int64_t usual[CAPS] = {
      [CAP_CHUNK] = chunk,    [CAP_TILE_ROWS] = lev_min_i64(n, 1024), [CAP_TILE_COLS] = lev_min_i64(cols, 4096),
      [CAP_BUCKET] = 1 << 24, [CAP_EMBED] = lev_min_i64(n, 256),      [CAP_FFN] = lev_min_i64(n, 1024)};
  const int64_t least[CAPS] = {[CAP_CHUNK] = few,
                               [CAP_TILE_ROWS] = lev_ceil_div(n, 128),
                               [CAP_TILE_COLS] = lev_min_i64(cols, lev_max_i64(16, cols / 64 / 16 * 16)),
                               [CAP_BUCKET] = 1 << 16,
                               [CAP_EMBED] = lev_ceil_div(n, 512),
                               [CAP_FFN] = lev_ceil_div(n, 512)};
  static const cap_id begun[] = {CAP_CHUNK, CAP_TILE_ROWS, CAP_TILE_COLS, CAP_BUCKET, CAP_EMBED, CAP_FFN};
  for (size_t i = 0; i < sizeof begun / sizeof *begun; ++i)
    if (begun[i] != CAP_FFN || has_ffn(c))
      write_cap(c, begun[i], lev_min_i64(usual[begun[i]], lev_max_i64(least[begun[i]], usual[begun[i]] >> m->shift)));
  write_cap(c, CAP_ONE_PASS, 0);
  write_cap(c, CAP_SLOTS, 2);
  write_cap(c, CAP_MUON, 0);
  write_cap(c, CAP_KEEP, m->keep);
  write_cap(c, CAP_FOREIGN, m->foreign);
  bool gpu = lev_run_backend(c) == LEV_BACKEND_CUDA, least_scratch = gpu && m->shift > 0;
  write_cap(c, CAP_BLOCK_Q, gpu ? 0 : m->blocks); /* kernels of a GPU have blocks of their own */
  write_cap(c, CAP_BLOCK_K, gpu ? 0 : m->blocks);
  lev_model model = lev_model_of(c);
  attn_config attention = lev_attention_config(c, &model, n);
  size_t workspace = least_scratch ? attn_least_workspace((int)c->parallel.context, &attention) : 0;
  write_cap(c, CAP_WORKSPACE, (int64_t)workspace);
}

/* Whether the active ranks fit the device where everything goes to the host that can. */
static lev_status fits_device(search *s, bool *fits) {
  const lev_slabs most = {{[LEV_MEM_DEVICE] = s->device_limit, [LEV_MEM_PINNED] = SIZE_MAX, [LEV_MEM_HOST] = SIZE_MAX}};
  write_cap(s->c, CAP_HOST, -1);
  s->c->memory.sco_fraction = 1;
  *fits = true;
  for (int i = 0; i < lev_max_i64(1, s->n_active) && *fits; ++i)
    LEV_TRY(lev_plan_fits(s->c, s->n_active > 0 ? s->active[i] : 0, &most, fits));
  return LEV_OK;
}

static lev_status try_mode(search *s, int64_t context, const mode *m, bool *fits) {
  lev_model model = lev_model_of(s->c);
  over o;
  if (s->c->parallel.ranks > 1) write_cap(s->c, CAP_CONTEXT, context);
  s->tokens = 0;
  for (int r = 0; r < (int)context; ++r)
    s->tokens = lev_max_i64(s->tokens, attn_shard_tokens(s->c->train.context, (int)context, r));
  s->boundary = lev_align_up(lev_bytes(s->tokens, model.hidden, lev_dtype_bytes(model.dtype)));
  s->attention = lev_align_up(lev_attention_item_bytes(&model, s->tokens));
  memset(s->step, 0, sizeof s->step);
  begin_caps(s, m);
  LEV_TRY(fits_device(s, fits));
  if (!*fits) return LEV_OK;
  LEV_TRY(raise_host(s, fits));
  if (!*fits) return LEV_OK;
  LEV_TRY(measure(s, &o));
  *fits = worst(o) <= 0;
  return LEV_OK;
}

/* The least that is given up, in the smallest context group with which that fits; where none does, whether the host's
 * limit alone is why. Groups without a sequence would be
 * idle, so there are no more groups than sequences. */
static lev_status choose_mode(search *s, int64_t given_context, bool *fits, bool *host_binds) {
  int64_t ranks = s->c->parallel.ranks;
  *fits = false;
  for (int good = 1; good >= 0; --good)
    for (int64_t d = given_context > 0 ? given_context : 1; d <= ranks; ++d) {
      bool possible = ranks % d == 0 && (ranks / d <= s->c->train.global_batch || d == ranks);
      if (given_context == 0 && !possible) continue;
      for (int m = good ? 0 : MODES_GOOD; m < (good ? MODES_GOOD : MODES) && !*fits; ++m)
        LEV_TRY(try_mode(s, d, &modes[m], fits));
      if (*fits || given_context > 0) break;
    }
  bool host;
  *host_binds = false;
  if (*fits) return LEV_OK;
  LEV_TRY(fits_device(s, host_binds));
  return raise_host(s, &host); /* it still takes what it can */
}

/* Raises the caps one after the other; `again`: only those that memory bound before, from where they are. */
static lev_status raise_all(search *s, bool again) {
  static const struct {
    cap_id id;
    lev_status (*raise)(search *);
  } caps[] = {{CAP_CHUNK, raise_chunk}, {CAP_TILE_ROWS, raise_tile}, {CAP_BUCKET, raise_bucket},
              {CAP_MUON, raise_muon},   {CAP_EMBED, raise_embed},    {CAP_FFN, raise_ffn}};
  for (size_t i = 0; i < sizeof caps / sizeof *caps; ++i)
    if (!again || s->step[caps[i].id] > 0) LEV_TRY(caps[i].raise(s));
  return LEV_OK;
}

/* Larger chunks have smaller tables on the host: an item more may fit there now, which frees the device for more. */
static lev_status refill(search *s) {
  for (bool fits = true; fits;) {
    int64_t before = read_cap(s->c, CAP_HOST);
    LEV_TRY(raise_host(s, &fits));
    if (read_cap(s->c, CAP_HOST) == before) break;
    LEV_TRY(raise_all(s, true));
  }
  return LEV_OK;
}

/* Attention outputs were given up for a phase that is smaller now: perhaps there is room for them after all. */
static lev_status keep_after_all(search *s) {
  int64_t host = read_cap(s->c, CAP_HOST), step = s->step[CAP_HOST], o = 1;
  bool fits;
  if (s->c->memory.sco_keep_attention) return LEV_OK;
  LEV_TRY(measure_at(s, CAP_KEEP, 1, &o));
  if (o > 0) {
    write_cap(s->c, CAP_KEEP, 0);
    return LEV_OK;
  }
  LEV_TRY(raise_host(s, &fits));
  over room;
  LEV_TRY(measure(s, &room));
  if (fits && worst(room) <= 0) return refill(s);
  write_cap(s->c, CAP_HOST, host);
  s->step[CAP_HOST] = step;
  return LEV_OK;
}

/* Plans all ranks; finds the one that is most over a limit (or nearest to it), and by how much. */
static lev_status most_over(const search *s, lev_auto_result *out, int *rank, int64_t *bytes) {
  lev_world_plan world;
  *bytes = INT64_MIN;
  LEV_TRY(lev_plan_world(s->c, &world));
  out->device_excess = out->host_excess = 0;
  for (int i = 0; i < world.classes.n; ++i) {
    over o = over_of(s, &world.plan[i]);
    if (worst(o) > *bytes) *bytes = worst(o), *rank = world.classes.first[i];
    out->device_excess = lev_max_size(out->device_excess, (size_t)lev_max_i64(0, o.device));
    out->host_excess = lev_max_size(out->host_excess, (size_t)lev_max_i64(0, o.host));
  }
  lev_world_plan_free(&world);
  return LEV_OK;
}

/* Where the search finds nothing: what was given may fit yet, with caps below the least of the search. Otherwise the
 * least caps stay, and what they take over the limits. */
static lev_status keep_given(search *s, lev_auto_result *out) {
  const lev_config least = *s->c;
  int64_t bytes;
  int rank;
  *s->c = *s->given;
  lev_status st = most_over(s, out, &rank, &bytes);
  out->fits = st == LEV_OK && bytes <= 0;
  if (out->fits) {
    out->host_binds = false;
    memset(s->step, 0, sizeof s->step);
    return LEV_OK;
  }
  *s->c = least;
  return st == LEV_OK || st == LEV_ERR_BUDGET ? most_over(s, out, &rank, &bytes) : st;
}

/* The caps of the chosen mode for the active ranks; then all ranks are planned. If one is over a limit it joins the
 * active ones, and the caps are searched again. */
static lev_status settle(search *s, int64_t given_context, lev_auto_result *out, bool *again) {
  int64_t bytes;
  int rank = 0;
  *again = false;
  LEV_TRY(choose_mode(s, given_context, &out->fits, &out->host_binds));
  if (!out->fits) return keep_given(s, out);
  if (s->n_active == 0) LEV_TRY(most_over(s, out, &s->active[s->n_active++], &bytes));
  LEV_TRY(raise_all(s, false));
  LEV_TRY(refill(s));
  LEV_TRY(keep_after_all(s));
  LEV_TRY(most_over(s, out, &rank, &bytes));
  *again = bytes > 0;
  if (!*again) return LEV_OK;
  for (int i = 0; i < s->n_active; ++i)
    if (s->active[i] == rank) return lev_fail(LEV_ERR_INTERNAL, "rank %d was planned and does not fit", rank);
  s->active[s->n_active++] = rank;
  return LEV_OK;
}

static void list_words(const search *s, const lev_config *before, lev_auto_result *out) {
  const lev_config *c = s->c;
  for (int id = 0; id < CAPS; ++id) {
    int64_t value = read_cap(c, (cap_id)id);
    if (s->step[id] == 0 && value == read_cap(before, (cap_id)id)) continue;
    lev_auto_word *w = &out->word[out->n_words++];
    *w = (lev_auto_word){.name = cap_names[id], .value = value, .step = s->step[id]};
    if (id == CAP_KEEP || id == CAP_ONE_PASS)
      snprintf(w->text, sizeof w->text, "--%s=%s", w->name, value ? "true" : "false");
    else if (id == CAP_HOST && value < 0)
      snprintf(w->text, sizeof w->text, "--%s=unlimited", w->name);
    else
      snprintf(w->text, sizeof w->text, "--%s=%lld", w->name, (long long)value);
  }
  if (c->memory.sco_fraction != before->memory.sco_fraction) {
    lev_auto_word *w = &out->word[out->n_words++];
    *w = (lev_auto_word){.text = "--memory.sco_fraction=1", .name = "memory.sco_fraction", .value = 1};
  }
}

lev_status lev_auto_plan(lev_config *config, const lev_ceilings *rates, lev_auto_result *out) {
  const lev_config before = *config;
  const size_t device = lev_device_limit(config);
  search s = {
      .c = config, .given = &before, .rates = rates, .device_limit = SIZE_MAX, .host_limit = SIZE_MAX, .n_active = 0};
  bool again = true;
  memset(out, 0, sizeof *out);
  if (device == 0 && config->memory.host_memory == 0)
    return lev_fail(LEV_ERR_CONFIG, "choosing caps needs memory.device_memory (and memory.host_memory)");
  if (device > 0) s.device_limit = device;
  if (config->memory.host_memory > 0) s.host_limit = config->memory.host_memory;
  lev_rank_classes classes; /* refuses what planning would refuse */
  LEV_TRY(lev_rank_classes_create(config, &classes));
  lev_rank_classes_free(&classes);
  while (again) LEV_TRY(settle(&s, before.parallel.context, out, &again));
  list_words(&s, &before, out);
  return LEV_OK;
}
