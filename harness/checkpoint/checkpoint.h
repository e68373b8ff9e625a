/* SPDX-License-Identifier: Apache-2.0 */
/* Training checkpoints: FOLDER/step-N/ with one safetensors file per rank and a manifest, renamed into place as a
 * whole.
 *
 * A file holds this rank's rows of every state tensor under "<state>.<Hugging Face name>" (master, exp_avg, exp_avg_sq,
 * momentum), with the offsets of its block in the metadata entry DCP_SHARDING_INFO, as PyTorch's distributed checkpoint
 * reader expects. The manifest names step, rank layout, a digest of model, data and optimizer, and size and XXH3-128 of
 * each file. Weights are not stored: they are the rounded masters. A checkpoint resumes on any rank layout, each rank
 * taking its rows from the files that have them; bit for bit on the layout that wrote it, where each needs its own
 * file.
 *
 * Commit order: files written and fsynced, all ranks agree, manifest written and fsynced, directory fsynced, renamed,
 * parent fsynced; only then are old ones removed. So a kill at any moment leaves the previous checkpoint whole. */
#ifndef LEV_CHECKPOINT_CHECKPOINT_H
#define LEV_CHECKPOINT_CHECKPOINT_H

#include "common/comm.h"
#include "harness/checkpoint/file.h"
#include "harness/checkpoint/pieces.h"

typedef struct lev_checkpoint {
  const char *folder;
  lev_comm *world;
  const char *digest; /* of everything that must agree for a resume to go on with the same run */
  const char *layout; /* of the ranks, in words */
  int64_t keep;       /* newest ones to keep, >= 2 */
  lev_fault *fault;   /* nullable */
} lev_checkpoint;

/* Writes a checkpoint of `step`. Collective. Errors: LEV_ERR_IO (the earlier checkpoints are untouched; training may go
 * on), LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_checkpoint_save(const lev_checkpoint *c, int64_t step, const lev_state_piece *pieces,
                                              int n);
/* Reads the newest checkpoint that is whole (sizes and hashes match) into the pieces; *step = 0 if there is none. A
 * damaged one is passed over with a warning in the log and, once a whole one was read, renamed to step-N.damaged, so
 * that it does not count as one of those kept. One of another layout is read with a warning: sums differ in their last
 * bits from there on. Collective. Errors: LEV_ERR_CONFIG (the newest whole one belongs to another model, optimizer or
 * data), LEV_ERR_FORMAT (there are some, but none is whole), LEV_ERR_IO. */
LEV_MUST_CHECK lev_status lev_checkpoint_load(const lev_checkpoint *c, int64_t *step, const lev_state_piece *pieces,
                                              int n);
/* Fills pieces, all of them masters, from `dir`, the step-N of any run whose model has the same tensors, on any layout.
 * Collective. Errors, the same on every rank: LEV_ERR_FORMAT (damaged, or tensors that differ: the detail names one),
 * LEV_ERR_IO, LEV_ERR_CONFIG (of an older release). */
LEV_MUST_CHECK lev_status lev_checkpoint_weights(const char *dir, lev_comm *world, lev_fault *fault,
                                                 const lev_state_piece *pieces, int n);
/* The step-N folder of the newest checkpoint below `folder` or, where `folder` is such a one, itself, with its files
 * checked against the manifest; *files of them. Errors: LEV_ERR_IO, LEV_ERR_FORMAT, LEV_ERR_CONFIG (none there, or of
 * an older release). */
LEV_MUST_CHECK lev_status lev_checkpoint_find(const char *folder, char *dir, size_t size, int *files);
/* Path of file `shard` (from 0) of a step-N folder. */
void lev_checkpoint_shard(const void *dir, int shard, char *out, size_t size);
/* Starting over: renames a folder that holds checkpoints to FOLDER.1 (or .2, ...), so that they neither count as newer
 * than the new run's nor get lost. Collective. Errors: LEV_ERR_IO. */
LEV_MUST_CHECK lev_status lev_checkpoint_set_aside(const lev_checkpoint *c);

#endif
