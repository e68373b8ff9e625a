# SPDX-License-Identifier: Apache-2.0
"""Tables of the newest benchmark records, in Markdown.

    python3 harness/bench/table.py [NAME ...]        prints a table of each area or case, or of the cases that begin so
    python3 harness/bench/table.py --write FILE.md   fills FILE.md between <!-- bench NAME ... --> and <!-- /bench -->

The newest record of a case by `time` counts (of two of one second, the later line). A name without a record is an
error, as a mistyped one is, unless its area has none at all yet.
"""

import json
import pathlib
import re
import sys

AREAS = ("kernels", "gemm", "grouped", "attn", "modules", "train")
RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def newest(area):
    """case -> its newest record, in the order in which cases first appear."""
    out, path = {}, RESULTS / f"{area}.jsonl"
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            record = json.loads(line)
        except ValueError:  # a run that was killed while it wrote
            print(f"{path}:{number}: no record, left out", file=sys.stderr)
            continue
        before = out.get(record["case"])
        if before is None or record["time"] >= before["time"]:
            out[record["case"]] = record
    return out


def number(x):
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


def percent(record, key):
    return f"{100 * record[key]:.0f} %" if record.get(key) else ""


def size(record, key):
    return f"{record[key] / 2**30:.2f} GiB" if record.get(key) else ""


COLUMNS = [  # heading, text of a record; a column that is empty throughout is left out
    ("case", lambda r: f"`{r['case']}`"),
    ("shape", lambda r: r.get("shape", "")),
    ("value", lambda r: f"{number(r['value'])} {r['unit']}"),
    ("ms", lambda r: number(r["ms"]) if "ms" in r and "torch_ms" not in r else ""),
    ("of copy rate", lambda r: percent(r, "copy_fraction")),
    ("of matrix rate", lambda r: percent(r, "matmul_fraction")),
    ("x plain", lambda r: number(r["times_plain"]) if "times_plain" in r else ""),
    ("x torch", lambda r: number(r["times_torch"]) if "times_torch" in r else ""),
    ("bytes", lambda r: size(r, "held_bytes")),
    ("plain bytes", lambda r: size(r, "plain_bytes")),
]


def select(names):
    """The newest records that the names stand for, as `levee bench` selects cases."""
    rows = []
    for name in names:
        area = newest(name.split(".")[0])
        found = [r for case, r in area.items() if case == name or case.startswith(name + ".")]
        if area and not found:
            sys.exit(f"no record of {name}; there are {' '.join(area)}")
        rows += [r for r in found if r not in rows]
    return fold(rows)


def fold(rows):
    """<case>.vs_torch as a column of <case>, and no row of its own for <case>.tflops, which says the same again."""
    by_case = {r["case"]: dict(r) for r in rows}
    for case in list(by_case):
        base, _, last = case.rpartition(".")
        if base in by_case and last in ("vs_torch", "tflops"):
            extra = by_case.pop(case)
            if last == "vs_torch" and extra.get("our_time") == by_case[base]["time"]:  # of this record
                by_case[base]["times_torch"] = extra["value"]
    return list(by_case.values())


def table(names):
    for name in names:
        if not (RESULTS / f"{name.split('.')[0]}.jsonl").exists() and name.split(".")[0] not in AREAS:
            sys.exit(f"no area {name}; there are {' '.join(AREAS)}")
    rows = select(names)
    if not rows:
        return "No record yet.\n"
    texts = [[text(r) for _, text in COLUMNS] for r in rows]
    used = [i for i in range(len(COLUMNS)) if any(t[i] for t in texts)]
    lines = ["| " + " | ".join(COLUMNS[i][0] for i in used) + " |", "|" + "---|" * len(used)]
    lines += ["| " + " | ".join(t[i] for i in used) + " |" for t in texts]
    made = {(r["device"], r["time"][:10], r["revision"]) for r in rows}
    where = "; ".join(f"{device}, {day}, revision {revision}" for device, day, revision in sorted(made))
    return "\n".join(lines) + "\n\n" + where + "\n"


OPEN, CLOSE = re.compile(r"<!-- bench ([^-]+) -->"), "<!-- /bench -->"


def write(path):
    """Fills the tables of a file. The markers stand on lines of their own."""
    out, opened, n = [], None, 0
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(keepends=True), 1):
        marker = OPEN.fullmatch(line.strip())
        closes = line.strip() == CLOSE
        if opened and marker:
            sys.exit(f"{path}:{opened}: no {CLOSE} before the next table")
        if closes and not opened:
            sys.exit(f"{path}:{number}: {CLOSE} of no table")
        if closes:
            opened = None
        if not opened:
            out.append(line)
        if marker:
            out.append(table(marker[1].split()))
            opened, n = number, n + 1
    if opened:
        sys.exit(f"{path}:{opened}: no {CLOSE} after it")
    if n == 0:
        sys.exit(f"{path} has no <!-- bench NAME ... --> ... {CLOSE}")
    pathlib.Path(path).write_text("".join(out))


if sys.argv[1:2] == ["--write"]:
    if len(sys.argv) == 2:
        sys.exit("--write takes files")
    for name in sys.argv[2:]:
        write(name)
else:
    for name in sys.argv[1:] or sorted(p.stem for p in RESULTS.glob("*.jsonl")):
        print(f"### {name}\n\n{table([name])}")
