/* SPDX-License-Identifier: Apache-2.0 */
/* What the five examples share: one cpu device, stream and ledger per rank, ranks as threads, memory as planned, and
 * the comparisons that decide the exit code. A program of your own has its own versions of these. */
#ifndef LEV_EXAMPLES_EXAMPLE_H
#define LEV_EXAMPLES_EXAMPLE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/arena.h"
#include "common/comm.h"
#include "common/device.h"
#include "common/ledger.h"
#include "common/walker.h"

typedef struct ex_rank {
  int rank, ranks;
  lev_device *device;
  lev_stream *stream;
  lev_ledger *ledger;
  lev_comm *comm;                    /* NULL where there is one rank */
  lev_arena *arena[LEV_MEM_CLASSES]; /* made by ex_arenas; NULL for a class without bytes */
} ex_rank;

/* Opens a cpu device and a stream per rank, joins the ranks, runs `body` on a thread of each and tears down. A rank
 * that fails prints its error and wakes the others. Returns whether all succeeded. */
bool ex_run(int ranks, lev_status (*body)(ex_rank *r, void *problem), void *problem);

/* Takes exactly `bytes` of each class from the device and puts an arena on each block: the arena posts every region to
 * the ledger under its tag. */
lev_status ex_arenas(ex_rank *r, const size_t bytes[LEV_MEM_CLASSES]);
/* An array of the caller's in device memory: a copy of `host`, made on the rank's stream, or zeros where host is NULL.
 */
lev_status ex_array(ex_rank *r, const void *host, size_t bytes, void **out);

/* A lev_region_fn: one printed line. */
void ex_print_region(void *unused, const lev_region *region);
/* Prints the refusal that a plan gave for a budget that is too small; fails unless it is LEV_ERR_BUDGET. */
lev_status ex_refused(const ex_rank *r, size_t budget, lev_status status);
/* Compares the ledger's peaks with the planned bytes; every rank checks, rank 0 prints. */
lev_status ex_as_planned(const ex_rank *r, const size_t planned[LEV_MEM_CLASSES]);

/* Normal random numbers that depend on (tensor, element) only. */
void ex_random(double *x, int64_t n, double scale, uint32_t tensor);
/* Prints ||got - want|| / ||want|| and returns whether it is at most `limit`. */
bool ex_close(const char *name, const double *got, const double *want, int64_t n, double limit);

#endif
