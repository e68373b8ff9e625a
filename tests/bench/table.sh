#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# harness/bench/table.py: tables of the newest records between their markers; what is refused leaves the file as it was.
# Closes on "N passed, N failed, N skipped".
. "$(dirname "$0")/../check.sh"
cp "$(dirname "$0")/../../harness/bench/table.py" "$work/table.py"
mkdir "$work/results"
record() { # CASE VALUE TIME
  printf '{"case":"%s","value":%s,"unit":"GB/s","revision":"r","device":"d","time":"2026-01-0%sT00:00:00Z"}\n' "$@"
}
{
  record gemm.square 1 1
  record gemm.square 2 3
  record gemm.square 3 2
  record gemm.tall 4 1
  printf '{"case":"gemm.sq\n'
} > "$work/results/gemm.jsonl"

# page LINE...: a file of these lines, and a copy to compare with.
page() {
  printf '%s\n' "$@" > "$work/page.md"
  cp "$work/page.md" "$work/before.md"
}
write() { python3 "$work/table.py" --write "$@" 2> "$work/err"; }
# refused TEXT: the page is, with that in the one line that says why, and stays as it was.
refused() {
  if write "$work/page.md"; then return 1; fi
  cat "$work/err"
  [ "$(grep -vc 'left out$' "$work/err")" = 1 ] && grep -q -- "$1" "$work/err" && cmp "$work/page.md" "$work/before.md"
}
filled() {
  write "$work/page.md" || { cat "$work/err"; return 1; }
  cat > "$work/want.md" <<'MD'
before `<!-- bench AREA -->` and `<!-- /bench -->`
<!-- bench gemm.square -->
| case | value |
|---|---|
| `gemm.square` | 2 GB/s |

d, 2026-01-03, revision r
<!-- /bench -->
between
<!-- bench attn -->
No record yet.
<!-- /bench -->
MD
  diff "$work/page.md" "$work/want.md"
}

page 'before `<!-- bench AREA -->` and `<!-- /bench -->`' '<!-- bench gemm.square -->' 'old' '<!-- /bench -->' 'between' \
  '<!-- bench attn -->' '<!-- /bench -->'
check "markers are filled with the newest records" filled
check "a line that is no record is named" grep -q 'gemm.jsonl:5: no record' "$work/err"
check "again, nothing changes" filled
page '<!-- bench gemm -->' 'text' '<!-- bench attn -->' '<!-- /bench -->'
check "a table without its end, before another" refused 'page.md:1: no <!-- /bench -->'
page '<!-- bench gemm -->' '<!-- /bench -->' '<!-- bench attn -->' 'text'
check "a table without its end, the last one" refused 'page.md:3: no <!-- /bench -->'
page '<!-- bench gemm -->' '<!-- /bench -->' 'text' '<!-- /bench -->'
check "an end of no table" refused 'page.md:4: '
page '<!-- bench gemm.squar -->' 'old' '<!-- /bench -->'
check "a mistyped case" refused 'no record of gemm.squar; there are gemm.square gemm.tall'
page '<!-- bench gem -->' 'old' '<!-- /bench -->'
check "a mistyped area" refused 'no area gem;'
page 'text'
check "no table" refused 'has no <!-- bench'
no_file() { if write; then return 1; else grep -q 'takes files' "$work/err"; fi; }
check "no file" no_file
check "an area as text" sh -c "python3 '$work/table.py' gemm.tall | grep -q '4 GB/s'"
finish
