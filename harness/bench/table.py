# SPDX-License-Identifier: Apache-2.0
"""Tables of the newest benchmark records, in Markdown.

    python3 harness/bench/table.py [NAME ...]        prints a table of each area or case, or of the cases that begin so
    python3 harness/bench/table.py --write FILE.md   fills FILE.md between <!-- bench NAME ... --> and <!-- /bench -->

The newest record of a case by `time` counts (of two of one second, the later line).
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
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
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
        found = [r for case, r in newest(name.split(".")[0]).items() if case == name or case.startswith(name + ".")]
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


def write(path):
    text = pathlib.Path(path).read_text()
    fill = lambda m: f"{m[1]}\n{table(m[2].split())}{m[3]}"
    new, n = re.subn(r"(<!-- bench ([\w. ]+?) -->)\n.*?(<!-- /bench -->)", fill, text, flags=re.S)
    if n == 0:
        sys.exit(f"{path} has no <!-- bench NAME ... --> ... <!-- /bench -->")
    pathlib.Path(path).write_text(new)


if sys.argv[1:2] == ["--write"]:
    for name in sys.argv[2:]:
        write(name)
else:
    for name in sys.argv[1:] or sorted(p.stem for p in RESULTS.glob("*.jsonl")):
        print(f"### {name}\n\n{table([name])}")
