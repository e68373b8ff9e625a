/* SPDX-License-Identifier: Apache-2.0 */
/* Learns byte-level BPE merges: again and again the most frequent adjacent pair of symbols becomes a new one. Among
 * equally frequent pairs the one of smallest (left id, right id) wins, so the result depends on the counts alone. Pair
 * counts are kept up to date per merge (only words that hold the pair are visited) and the maximum comes from a heap.
 */
#ifndef LEV_DATA_BPE_TRAIN_H
#define LEV_DATA_BPE_TRAIN_H

#include "harness/data/bpe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lev_bpe_trainer lev_bpe_trainer;

LEV_MUST_CHECK lev_status lev_bpe_trainer_create(lev_bpe_trainer **out);
void lev_bpe_trainer_close(lev_bpe_trainer *trainer); /* NULL is fine */
/* Counts one piece of text, as it comes out of the splitting; memory grows with the number of different pieces. */
LEV_MUST_CHECK lev_status lev_bpe_trainer_add(lev_bpe_trainer *trainer, const unsigned char *piece, size_t bytes);
/* Ids 0 to 255 are the bytes in the order of their printable forms (GPT-2's order), then one id per merge, `limit` in
 * all: fewer when the text offers no further pair. LEV_ERR_CONFIG if limit < 256. Run once; then close. The caller
 * destroys the result. */
LEV_MUST_CHECK lev_status lev_bpe_trainer_run(lev_bpe_trainer *trainer, int64_t limit, lev_bpe **out);

#ifdef __cplusplus
}
#endif
#endif
