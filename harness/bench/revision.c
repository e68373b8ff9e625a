/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/bench/bench.h"

#ifndef LEV_REVISION
#define LEV_REVISION "unknown"
#endif

const char *bench_revision(void) {
  return LEV_REVISION;
}
