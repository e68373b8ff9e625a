#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks the checkers: tests/run.sh and the harness of tests/t.h must report programs that fail, crash, hang, lie or test
# nothing. Each case is a tiny program built here.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

cat >"$work/head.h" <<'C'
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "tests/t.h"
C

# build NAME [OBJECT ...]: a test program from the C text on standard input.
build() {
  { cat "$work/head.h"; cat; } >"$work/$1.c"
  program=$1
  shift
  ${CC:-cc} -std=c11 -D_DEFAULT_SOURCE -I"$root" -pthread -o "$work/$program" "$work/$program.c" "$@" "$work/t.o" "$work/status.o" ||
    exit 2
}

# expect NAME LAST_LINE TEXT [run.sh arguments...]: the last line is LAST_LINE, the output holds TEXT, and the exit status fits.
expect() {
  name=$1 last=$2 text=$3
  shift 3
  echo "- $name"
  T_BACKEND=${backend:-} T_TIMEOUT=${limit:-20} T_EXPECTED_SKIPS=${skips:-$work/none} "$root/tests/run.sh" "$@" >"$work/out" 2>&1
  status=$?
  case $last in *" 0 failed"*) want=0 ;; *) want=1 ;; esac
  if [ "$(tail -n 1 "$work/out")" = "$last" ] && [ "$status" -eq "$want" ] && grep -Fq -- "$text" "$work/out"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "  expected the last line \"$last\", \"$text\" and exit status $want; got exit status $status and:"
    sed 's/^/  | /' "$work/out"
  fi
}

for part in tests/t tests/backend common/status; do
  ${CC:-cc} -std=c11 -D_DEFAULT_SOURCE -I"$root" -pthread -c -o "$work/${part##*/}.o" "$root/$part.c" || exit 2
done

build good <<'C'
T_TEST(one) { T_EXPECT(1 == 1); }
T_TEST(two) { T_EXPECT_OK(LEV_OK); }
C
build bad <<'C'
T_TEST(one) { T_EXPECT(1 == 1); }
T_TEST(two) { T_EXPECT_EQ_I64(1, 2); }
T_TEST(three) { T_EXPECT_STATUS(LEV_OK, LEV_ERR_IO); }
C
build crash <<'C'
T_TEST(one) { T_EXPECT(1 == 1); }
T_TEST(two) { raise(SIGSEGV); }
C
build late_crash <<'C'
static void late(void) { raise(SIGABRT); }
T_TEST(one) { T_EXPECT(atexit(late) == 0); }
C
build late_status <<'C'
static void late(void) { _exit(23); }
T_TEST(one) { T_EXPECT(atexit(late) == 0); }
C
build early_exit <<'C'
T_TEST(one) { exit(0); }
C
build hang <<'C'
T_TEST(one) { for (;;) sleep(1); }
C
build skip <<'C'
T_TEST(one) { T_EXPECT(1 == 1); }
T_TEST(no_gpu) { t_skip("no GPU"); }
C
build empty <<'C'
C
build idle <<'C'
T_TEST(one) { T_EXPECT(1 == 1); }
T_TEST(two) { if (getenv("NEVER")) T_EXPECT(1 == 1); }
C
build children <<'C'
T_CHILD(entry, value) { T_EXPECT(value[0] == 'g'); }
T_CHILD(quiet_entry, value) { (void)value; }
T_TEST(one) { T_EXPECT(t_child("entry", "good") == 0); T_EXPECT(t_child("entry", "bad") != 0); }
T_TEST(two) { T_EXPECT(t_child("quiet_entry", "") == 0); }
C
build no_child <<'C'
T_CHILD(entry, value) { (void)value; }
T_TEST(one) { (void)t_child("entr", "good"); }
C
build thread_failure <<'C'
static void body(int rank, void *ctx) { (void)ctx; T_EXPECT(rank != 2); }
T_TEST(one) { t_ranks(4, body, NULL); }
C
build cuda <<'C'
T_TEST(one) { t_on_cuda(); T_EXPECT(1 == 1); }
T_TEST(two) { T_EXPECT(1 == 1); }
C
build cuda_bad <<'C'
T_TEST(one) { t_on_cuda(); T_EXPECT(1 == 2); }
C
build cuda_skip <<'C'
T_TEST(one) { T_EXPECT(1 == 1); }
T_TEST(no_gpu) { t_on_cuda(); t_skip("no GPU"); }
C
# The real tests/backend.c on a machine with GPUS GPUs.
build backend "$work/backend.o" <<'C'
#include "tests/backend.h"
int lev_device_count(lev_backend backend) { return backend == LEV_BACKEND_CUDA ? atoi(getenv("GPUS")) : 1; }
lev_status lev_device_open(const lev_device_config *c, lev_device **d) { (void)c, (void)d; return LEV_ERR_UNSUPPORTED; }
lev_status lev_device_alloc(lev_device *d, lev_mem m, size_t n, void **p) {
  (void)d, (void)m, (void)n, (void)p;
  return LEV_ERR_UNSUPPORTED;
}
void lev_device_free(lev_device *d, void *p) { (void)d, (void)p; }
T_TEST(one) { T_EXPECT(t_backend() == (getenv("T_BACKEND")[0] ? LEV_BACKEND_CUDA : LEV_BACKEND_CPU)); }
C
printf '#!/bin/sh\necho "3 passed, 0 failed, 0 skipped"\nexit 1\n' >"$work/liar.sh"
printf '#!/bin/sh\necho "0 passed, 0 failed, 0 skipped"\n' >"$work/nothing.sh"
printf '#!/bin/sh\necho "all fine"\n' >"$work/mute.sh"
printf '#!/bin/sh\necho "1 passed, 0 failed, 2 skipped"\n' >"$work/secretive.sh"
printf '#!/bin/sh\necho "2 passed, 1 failed, 0 skipped"\n' >"$work/soft.sh"
chmod +x "$work"/*.sh
echo 'no_gpu   # needs one' >"$work/skips"

expect selftest_pass "2 passed, 0 failed, 0 skipped" "ok $work/good" "$work/good"
expect selftest_sum "5 passed, 2 failed, 0 skipped" "ok $work/good" "$work/good" "$work/bad" "$work/good"
expect selftest_fail "1 passed, 2 failed, 0 skipped" "expected 2 = 2" "$work/bad"
expect selftest_crash "0 passed, 1 failed, 0 skipped" "killed by signal 11" "$work/crash"
expect selftest_crash_after_the_closing_line "1 passed, 1 failed, 0 skipped" "killed by signal 6" "$work/late_crash"
expect selftest_status_after_the_closing_line "1 passed, 1 failed, 0 skipped" "exit status 23" "$work/late_status"
expect selftest_exit_without_closing_line "0 passed, 1 failed, 0 skipped" "no closing line" "$work/early_exit"
limit=1
expect selftest_hang "0 passed, 1 failed, 0 skipped" "no end after 1 s" "$work/hang"
limit=20
expect selftest_unexpected_skip "1 passed, 1 failed, 1 skipped" "skipped without being expected: no_gpu" "$work/skip"
skips=$work/skips
expect selftest_expected_skip "1 passed, 0 failed, 1 skipped" "1 skipped" "$work/skip"
skips=$work/none
expect selftest_no_tests "0 passed, 1 failed, 0 skipped" "no test executed" "$work/empty"
expect selftest_nothing_checked "1 passed, 1 failed, 0 skipped" "two checked nothing" "$work/idle"
expect selftest_children_do_not_count "2 passed, 0 failed, 0 skipped" "ok $work/children" "$work/children"
expect selftest_child_that_is_not_there "0 passed, 1 failed, 0 skipped" "no T_CHILD(entr, ...) here" "$work/no_child"
expect selftest_no_tests_and_good_exit "0 passed, 1 failed, 0 skipped" "no test executed" "$work/nothing.sh"
expect selftest_failure_on_a_thread "0 passed, 1 failed, 0 skipped" "rank != 2" "$work/thread_failure"
expect selftest_bad_exit "3 passed, 1 failed, 0 skipped" "exit status 1 although no test failed" "$work/liar.sh"
expect selftest_no_closing_line "0 passed, 1 failed, 0 skipped" "no closing line" "$work/mute.sh"
expect selftest_unnamed_skips "1 passed, 2 failed, 2 skipped" "(unnamed)" "$work/secretive.sh"
expect selftest_failures_with_good_exit "2 passed, 1 failed, 0 skipped" "1 failed" "$work/soft.sh"
expect selftest_missing_program "0 passed, 1 failed, 0 skipped" "no closing line" "$work/absent"
expect selftest_no_programs "0 passed, 1 failed, 0 skipped" "no test executed"
expect selftest_goes_on_after_a_crash "2 passed, 1 failed, 0 skipped" "ok $work/good" "$work/crash" "$work/good"

# On a GPU each program must have passed a test there; neither its other tests nor listed skips stand in for that.
backend=cuda GPUS=0
export GPUS
expect selftest_cuda "2 passed, 0 failed, 0 skipped" "1 passed on cuda" "$work/cuda"
expect selftest_cuda_nothing_there "2 passed, 1 failed, 0 skipped" "no test passed on cuda" "$work/good"
expect selftest_cuda_in_one_program_alone "4 passed, 1 failed, 0 skipped" "FAILED $work/good: no test passed on cuda" "$work/cuda" "$work/good"
expect selftest_cuda_failed_there "0 passed, 1 failed, 0 skipped" "1 failed" "$work/cuda_bad"
expect selftest_cuda_no_gpu "0 passed, 1 failed, 0 skipped" "no GPU" "$work/backend"
GPUS=2
expect selftest_cuda_with_gpus "1 passed, 0 failed, 0 skipped" "1 passed on cuda" "$work/backend"
skips=$work/skips
expect selftest_cuda_listed_skip "1 passed, 1 failed, 1 skipped" "no test passed on cuda" "$work/cuda_skip"
skips=$work/none backend= GPUS=0
expect selftest_cuda_not_asked_for "1 passed, 0 failed, 0 skipped" "ok $work/backend" "$work/backend"

# What shell tests share.
cat >"$work/shell.sh" <<SH
#!/bin/sh
. "$root/tests/check.sh"
check "true" true
check "false" sh -c "echo spoken; false"
check "exit code" expect_exit 3 sh -c "echo one >&2; exit 3"
check "another exit code" expect_exit 2 sh -c "exit 3"
check "an error of many lines" expect_exit 1 sh -c "printf '1\\n2\\n3\\n4\\n' >&2; exit 1"
skip no_gpu "none here"
finish
echo "not reached"
SH
printf '#!/bin/sh\n. "%s/tests/check.sh"\ncheck one true\nfinish\n' "$root" >"$work/shell_good.sh"
chmod +x "$work"/shell*.sh
skips=$work/skips
expect selftest_shell "2 passed, 3 failed, 1 skipped" "  | spoken" "$work/shell.sh"
expect selftest_shell_good "1 passed, 0 failed, 0 skipped" "ok $work/shell_good.sh" "$work/shell_good.sh"
skips=$work/none
echo "- selftest_shell_is_shared"
if grep -l '^check()' "$root"/tests/*/*.sh >"$work/out"; then
  failed=$((failed + 1)); sed 's/$/ has a check of its own/' "$work/out"
else
  passed=$((passed + 1))
fi

# The harness itself: a name that matches nothing executes nothing, which is a failure.
echo "- selftest_filter"
if "$work/good" absent >"$work/out"; then
  failed=$((failed + 1)); sed 's/^/  | /' "$work/out"
else
  passed=$((passed + 1))
fi

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
