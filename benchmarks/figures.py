"""Writes the tables of figures in README.md and in pages of docs/, from benchmarks/results.

    python benchmarks/figures.py    # writes the tables between their two marks

Each row names the file that contains its figures. A test compares the pages with the output of
this program.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FROZEN, MEASURED = ROOT / "docs" / "frozen.md", ROOT / "docs" / "measured.md"
PAGES = {  # each page, with the relative path to benchmarks/
    ROOT / "README.md": "",
    MEASURED: "../",
    FROZEN: "../",
}
MARKS = "<!-- figures: generated -->\n\n", "\n\n<!-- end of figures -->"

Row = dict[str, str]


def rows(name: str, *holding: str, under: str = "") -> list[Row]:
    """Returns the rows that contain the cells `holding`, from all tables of a results file.

    under: A substring of the heading of the section that contains the rows.
    """
    found, columns, heading = [], [], ""
    for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
        heading = line if line[:1] == "#" else heading
        if under not in heading:
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif set(holding) <= set(cells):
            found.append(dict(zip(columns, cells, strict=True)))
    return found


def both(name: str, column: str, *holding: str, jax: str = "JAX", unit: str = "") -> list[str]:
    """Returns a cell for PyTorch and one for JAX, each from the row with the cells `holding`."""
    cells = []
    for framework in ("PyTorch", jax):
        (row,) = rows(name, framework, *holding)
        cells.append(row[column] + unit)
    return cells


def table(page: Path) -> str:
    """Returns the table of a page in Markdown. README.md contains only the first rows."""
    if page == FROZEN:
        return _of_frozen()
    return f"{_of_all(page)}\n\n{_of_steps()}" if page == MEASURED else _of_all(page)


def _of_steps() -> str:
    """Returns the table of steps.md below a caption."""
    found = [row for row in rows("steps.md", under="# Steps") if row["work"] != "---"]
    over = [r for r in found if r["goal"] and float(r["now"]) > float(r["goal"])]
    counted = [r for r in found if r["goal"]]
    lines = [
        "The next table compares gradtools with hand-written code or with another package. The "
        "figures are ratios of CPU times, unless the row names another quantity. "
        f"{len(counted) - len(over)} of {len(counted)} goals are met; for the other goals, "
        "[steps](../benchmarks/results/steps.md#floors) lists the numbers of operations "
        "and Python calls. The column *before* shows the figures at the time when the goals were "
        "set.",
        "",
        "| work | peer | before | goal | now |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(lines + [f"| {' | '.join(row.values())} |" for row in found])


def _of_all(page: Path) -> str:
    mb = {"unit": " MB"}
    scanned = {"jax": "JAX, jit and scan"}
    found = [
        ("contrastive step, memory: whole batch at once",
         both("chunked.md", "peak, MB", "plain, the whole batch", **mb), "chunked"),
        ("contrastive step, memory: `chunked`, 8 chunks",
         both("chunked.md", "peak, MB", "gt.chunked", **mb), "chunked"),
        ("contrastive step, time of `chunked` relative to the whole batch at once",
         _relative("gt.chunked", "plain, the whole batch"), "chunked"),
        ("second derivative, 64 layers, memory: double backward",
         both("mixed_partial.md", "memory, MB", "64", "double backward", **scanned, **mb),
         "mixed_partial"),
        ("second derivative, 64 layers, memory: `mixed_partial`",
         both("mixed_partial.md", "memory, MB", "64", "mixed_partial", **scanned, **mb),
         "mixed_partial"),
        ("`reverse_gradient`, 512 x 512, time relative to hand-written code",
         [_overhead("reversal, 512 x 512, PyTorch"),
          _overhead("gradient with a reversal, 512 x 512, JAX jit")], "overhead"),
        ("importing gradtools after the framework", _imports(), "import_time"),
        ("`grad` at 8 x 8, time relative to hand-written code",
         [_overhead("gradient, 8 x 8, PyTorch"), ""], "overhead"),
        ("`grad` at 512 x 512, time relative to hand-written code",
         [_overhead("gradient, 512 x 512, PyTorch"), ""], "overhead"),
        *_peaks(),
        *_beside_peers(),
    ]  # fmt: skip
    way, shown = PAGES[page], found if PAGES[page] else found[:5]
    lines = ["| measurement | PyTorch | JAX | source |", "|---|---|---|---|"]
    for text, (torch, jax), name in shown:
        lines.append(f"| {text} | {torch} | {jax} | [{name}]({way}benchmarks/results/{name}.md) |")
    return "\n".join(lines)


def _of_frozen() -> str:
    """Returns the costs of `frozen` for each network of frozen.md."""
    lines = [
        "| G | work relative to double backward | time relative to double backward "
        "| peak MB at 64 uses | double backward, MB |",
        "|---|---|---|---|---|",
    ]
    for row in rows("frozen.md", "gt.frozen", under="Work"):
        of = row["framework"], row["G"]
        peaks = [
            one["N = 64"]
            for way in ("gt.frozen", "double backward")
            for one in rows("frozen.md", *of, way, under="Peak MB by")
        ]
        times = [x for head in ("## Time", "## Depth: time") for x in _cells(head, *of)]
        work = [
            a / b
            for head in ("## Work", "## Depth: work")
            for a, b in zip(
                _cells(head, *of), _cells(head, *of, way="double backward"), strict=True
            )
        ]
        name = " ".join(reversed(of))
        lines.append(f"| {name} | {_span(work)} | {_span(times)} | {' | '.join(peaks)} |")
    return "\n".join(lines)


def _cells(under: str, *of: str, way: str = "gt.frozen") -> list[float]:
    (row,) = rows("frozen.md", *of, way, under=under)
    return [float(cell) for name, cell in row.items() if name not in ("framework", "G", "method")]


def _span(numbers: list[float]) -> str:
    least, most = f"{min(numbers):.2f}", f"{max(numbers):.2f}"
    return least if least == most else f"{least} to {most}"


def _peaks() -> list[tuple[str, list[str], str]]:
    """Returns the memory for several numbers of chunks, for the whole batch and for `chunked`."""
    found = []
    for text, way in (
        ("at once", "plain, the whole batch"),
        ("`chunked`", "gt.chunked"),
    ):
        (torch,), (jax,) = (rows("chunked.md", f"{name}, {way}") for name in ("PyTorch", "JAX"))
        numbers = [[f"{float(row[n]):.0f}" for n in ("4", "8", "16", "32")] for row in (torch, jax)]
        cells = [", ".join(row) + " MB" for row in numbers]
        found.append((f"memory of a step over 4, 8, 16, 32 chunks: {text}", cells, "chunked"))
    return found


def _beside_peers() -> list[tuple[str, list[str], str]]:
    """Returns the cells of the framework's method and of gradtools' method, from peers.md."""
    double, rule = "double backward", '`grad(mode="forward_over_reverse")`'
    mean = "`GradientAccumulator.mean({})`"
    ways = [
        ("token means, error: a mean of ranks' means, `GradientAccumulator`", "off by",
         "Token", ("DDP, each rank's token mean", "each rank's token mean, mean over ranks"),
         (mean.format("group"), mean.format("axis_name")), ""),
        ("Jacobian of 3,000 columns in three bands, memory: dense, `sparsity=`", "peak MB",
         "Sparse", ("`torch.func.jacrev`, dense", "`jax.jacrev`, dense"),
         ("`sparsity=pattern`",) * 2, " MB"),
        ("gradient through 6 inner steps, memory: double backward, `forward_over_reverse`",
         "peak MB", "Unrolled", (double, "`jax.grad` under `scan`"), (rule, rule), " MB"),
    ]  # fmt: skip
    found = []
    for text, column, under, plain, ours, unit in ways:
        pairs = zip(("PyTorch", "JAX"), plain, ours, strict=True)
        cells = [
            ", ".join(rows("peers.md", name, way, under=under)[0][column] for way in two) + unit
            for name, *two in pairs
        ]
        found.append((text, cells, "peers"))
    return found


def _relative(way: str, other: str) -> list[str]:
    """Returns the ratio of the times of two methods for a contrastive step."""
    times = [both("chunked.md", "times two passes by hand", one) for one in (way, other)]
    return [f"{float(a) / float(b):.2f}" for a, b in zip(*times, strict=True)]


def _overhead(what: str) -> str:
    (row,) = rows("overhead.md", what, "gradtools")
    return row["relative to hand-written"]


def _imports() -> list[str]:
    return [
        f"{row['then the backend, ms']} ms"
        for framework in ("torch", "jax")
        for row in rows("import_time.md")
        if row["backend"].startswith(framework)
    ]


def parts(page: str) -> tuple[str, str, str]:
    """Splits a page into the text before the table, the table, and the text after the table."""
    before, begin, rest = page.partition(MARKS[0])
    now, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"the page lacks {MARKS[0].strip()} or {MARKS[1].strip()}")
    return before + begin, now, end + after


def write(page: Path) -> None:
    before, _, after = parts(page.read_text(encoding="utf-8"))
    page.write_text(before + table(page) + after, encoding="utf-8")


if __name__ == "__main__":
    for page in PAGES:
        write(page)
