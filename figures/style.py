"""How every figure looks: one colour and one marker for each way to run a walk, in every figure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLUMN_IN = 3.3  # printed width of one column
PAGE_IN = 7.0  # printed width of both columns
INK = "#222222"
MUTED = "#6b6b6b"
FAINT = "#d9d9d9"
NOTE_PT = 5.2


@dataclass(frozen=True)
class Look:
    """A variant's name in print, its colour and its marker."""

    label: str
    color: str
    marker: str


# Colours of Okabe and Ito, told apart with any colour vision; the stock arms are greys and dark tones, ours are bright.
LOOKS: Mapping[str, Look] = MappingProxyType(
    {
        "sglang_folded": Look("SGLang, default", "#222222", "s"),
        "sglang_greedy": Look("SGLang, greedy only", "#7a7a7a", "D"),
        "sglang_markov_greedy_step": Look("SGLang, two kernels a step", "#a9a9a9", "8"),
        "vllm_addmm": Look("vLLM, addmm", "#CC79A7", "v"),
        "vllm_loop_greedy": Look("vLLM, loop", "#8c3b6b", "H"),
        "vllm_loop_gumbel": Look("vLLM, loop with Gumbel noise", "#b0588f", ">"),
        "vllm_two_launch": Look("vLLM, two launches a step", "#b58fd6", "d"),
        "vllm_inverse_cdf": Look("vLLM, inverse CDF", "#6a4fa3", "p"),
        "vllm_int8_walk": Look("vLLM, int8 in one launch", "#E69F00", "h"),
        "candidate_walk": Look("candidates only (approximate)", "#56B4E9", "X"),
        "pdl_chain": Look("two chained kernels a step, int8", "#006b4e", "P"),
        "streaming_bf16": Look("one launch, streaming bf16", "#009E73", "^"),
        "streaming_int8": Look("one launch, streaming int8", "#0072B2", "<"),
        "resident": Look("one launch, resident int8", "#D55E00", "o"),
        "fixed_point_sm90": Look("one launch, resident int8, four positions a pass", "#8C564B", "$4$"),
        "certified_sm80": Look("one launch, certified", "#7F9400", "*"),
        "reference": Look("reference", "#00507d", "."),
    }
)
# The ways to agree on a token: the chosen pair has the colour of the resident walk that uses it; families have shades of one colour.
PROTOCOLS: Mapping[str, Look] = MappingProxyType(
    {
        "pair": Look("{key, count} pair", "#D55E00", "o"),
        "striped_2": Look("pair on 2 lines", "#00507d", "<"),
        "striped_4": Look("pair on 4 lines", "#0072B2", ">"),
        "striped_8": Look("pair on 8 lines", "#56B4E9", "^"),
        "cluster_2": Look("clusters of 2, then pair", "#006b4e", "s"),
        "cluster_4": Look("clusters of 4, then pair", "#009E73", "D"),
        "cluster_8": Look("clusters of 8, then pair", "#63c5a8", "h"),
        "pair_acquire": Look("pair, acquired", "#E69F00", "P"),
        "mailboxes": Look("mailboxes", "#CC79A7", "v"),
        "grid_sync": Look("grid.sync()", "#222222", "X"),
    }
)
# The formats of one byte: int8 has the colour of the resident walk that keeps it.
FORMATS: Mapping[str, Look] = MappingProxyType(
    {
        "int8": Look("int8 levels", "#D55E00", "o"),
        "e4m3": Look("e4m3 levels", "#0072B2", "s"),
        "e5m2": Look("e5m2 levels", "#009E73", "^"),
    }
)
TIERS: Mapping[str, str] = MappingProxyType(
    {"registers": "registers", "shared_memory": "shared memory", "tensor_memory": "tensor memory", "l2": "L2 cache", "hbm": "HBM"},
)
_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.6,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "path.simplify": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib with our defaults, independent of the machine's own configuration."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.use("Agg")
        for name, value in _RC.items():
            mpl.rcParams[name] = value
        yield


def look(variant: str) -> Look:
    """The look of `variant`; a KeyError that says where to add one."""
    if variant not in LOOKS:
        raise KeyError(f"variant {variant!r} has no colour yet; add it to LOOKS in figures/style.py.")
    return LOOKS[variant]


def protocol_look(protocol: str) -> Look:
    """The look of `protocol`; a KeyError that says where to add one."""
    if protocol not in PROTOCOLS:
        raise KeyError(f"protocol {protocol!r} has no colour yet; add it to PROTOCOLS in figures/style.py.")
    return PROTOCOLS[protocol]


def break_axis(figure: Figure, lower: Axes, upper: Axes, size: float = 0.012) -> None:
    """Join two stacked axes of `figure` with break marks on their left spine: the values between them are not drawn."""
    upper.spines["bottom"].set_visible(False)
    upper.tick_params(bottom=False, labelbottom=False)
    width, height = figure.get_size_inches()
    for axes, edge in ((lower, 1.0), (upper, 0.0)):
        box = axes.get_position()
        across, along = size / box.width, size * width / height / box.height
        mark: dict[str, Any] = {"transform": axes.transAxes, "color": INK, "linewidth": 0.8, "clip_on": False}
        axes.plot((-across, across), (edge - along / 2, edge + along / 2), **mark)


def note(figure: Figure, text: str) -> float:
    """Small grey lines at the foot of a figure: what the marks mean and which record they come from.

    Every line of `text` is wrapped to the figure's width. Returns where the note ends, as a share of the figure's height.
    """
    width_in, height_in = figure.get_size_inches()
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, int(72 * width_in / (0.55 * NOTE_PT)))]
    figure.text(0.01, 0.005, "\n".join(lines), fontsize=NOTE_PT, color=MUTED, ha="left", va="bottom", linespacing=1.25)
    return 0.005 + len(lines) * 1.3 * NOTE_PT / (72 * height_in)
