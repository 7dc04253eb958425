"""What the programs that measure a run share: flags, the folder to write to, tables, figures."""

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lib.files import make_folder, write_json


def add_run_flags(parser, folder):
    """Add --ckpt, --out_dir and --device -> the add_argument of flags that exclude --ckpt."""
    flag, path = parser.add_argument, os.path.expanduser
    mode = parser.add_mutually_exclusive_group().add_argument
    mode("--ckpt", type=path, help="run folder or checkpoint (default: the newest run)")
    flag("--out_dir", type=path, help=f"where to write (default: RUN/{folder})")
    flag("--device", choices=("cpu", "cuda", "mps"), help="default: cuda, else mps, else cpu")
    return mode


def output_folder(path, name, out_dir):
    """-> out_dir, or by default the folder `name` of a run, or for a checkpoint file
    <name>_<checkpoint> beside it."""
    file = Path(path)
    default = file.with_name(f"{name}_{file.stem}") if file.is_file() else file / name
    return Path(out_dir or default)


def write_numbers(file, numbers):
    """Write JSON: arrays with seven decimals, NaN as null, infinity as "inf"."""
    make_folder(Path(file).parent)
    text = json.dumps(numbers, default=lambda array: np.asarray(array).round(7).tolist())
    write_json(file, json.loads(text, parse_constant={"Infinity": "inf"}.get))


def draw_panels(file, panels):
    """Draw panels as a grid -> PNG. A panel is a dictionary with a matrix or with curves."""
    from matplotlib.figure import Figure

    columns, width, height = 1, 9, 3.6
    if "matrix" in panels[0]:
        columns, width, height = min(len(panels), 6), 2.9, 2.5
    if "limits" in panels[0]:
        width, height = 8.4 / columns, 1.8
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    for number, panel in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, number)
        ax.set_title(panel["title"], size=10)
        if "curves" in panel:
            ax.set(**{name: panel[name] for name in panel.keys() & {"xlabel", "ylabel", "yscale"}})
            for name, (x, y) in panel["curves"].items():
                ax.plot(x, y, marker=".", label=name)
            ax.grid(alpha=0.3)
            ax.legend(bbox_to_anchor=(1, 1), loc="upper left")
            continue
        M = np.ma.masked_invalid(panel["matrix"])  # -inf of a causal model stays white
        start = panel["first"] - 0.5
        stop = start + len(M)
        image = ax.imshow(M, "cividis_r", extent=(start, stop, stop, start))
        if "limits" in panel:
            image.set(cmap="PuOr", clim=panel["limits"])
            ax.set(xticks=[], yticks=[])
            continue
        ax.set(xlabel=panel["axes"][0], ylabel=panel["axes"][1])
        # The middle 98%, without the edges, so that [CLS] and [SEP] do not hide the rest.
        image.set_clim(*np.percentile(M[1:-1, 1:-1].compressed(), (1, 99)))
        figure.colorbar(image, ax=ax, fraction=0.046)
    if "limits" in panels[0]:  # one scale for all
        ticks = {-3: "1/8", -2: "1/4", -1: "1/2", 0: "1", 1: "2", 2: "4", 3: "8"}
        bar = figure.colorbar(image, ax=figure.axes, location="bottom", shrink=0.6, aspect=50)
        bar.set_ticks([*ticks], labels=[*ticks.values()])
        bar.set_label("attention of a query (row) to a key (column), relative to uniform attention")
        title = "Attention of layer 1 between identical tokens that differ only in their positions"
        figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold")
    figure.savefig(file, dpi=200)


def write(file, numbers, figures, draw=draw_panels):
    """Write numbers as JSON, and figures {file: panels} beside them if matplotlib is installed."""
    file = Path(file)
    write_numbers(file, numbers)
    written = [file.name]
    if find_spec("matplotlib"):
        for name, panels in figures.items():
            if panels:
                draw(file.with_name(name), panels)
                written.append(name)
    else:
        print("no figures: pip install matplotlib")
    print(f"wrote {file.parent}: {', '.join(written)}")


def print_table(rows):
    """Dictionaries -> a Markdown table, without columns that are empty or hold dictionaries; NaN
    and None become a dash."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name, "") for row in rows]
        if isinstance(cells[0], dict):
            continue
        cells = [f"{x:.4f}" if isinstance(x, float) else str(x) for x in cells]
        if any(cells):
            cells = ["-" if x in ("nan", "None") else x for x in cells]
            width = max(map(len, [name, *cells]))
            columns.append([cell.ljust(width) for cell in (name, "-" * width, *cells)])
    for line in zip(*columns):
        print(f"| {' | '.join(line)} |")
