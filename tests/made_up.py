"""Made-up results in the form that an evaluation writes: plausible numbers without a model."""

import copy
import math

import numpy as np

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
TEXT = (
    "Fellow citizens of the Senate and of the House:\n\n  The Congress has met again, and the "
    'Congress will act. <b>Peace & "plenty"</b>\u2014so the Treasury reports, and the Treasury '
    "does not lie.\n"
)
# Rise of the loss past the training length, in nats per doubling, and the loss at that length, by
# position method.
METHODS = {
    "alibi": (-0.001, 1.21),
    "rotary": (0.42, 1.17),
    "sinusoidal": (0.27, 1.45),
    "t5": (0.11, 1.60),
    "none": (0.024, 1.95),
    "learned": (math.inf, 1.80),
}


POSITIONS = ["alibi", "sinusoidal", "learned", "rotary", "t5", "none"]
CORPUS = {
    "dataset": "sotu",
    "split": "validation",
    "documents": 12,
    "tokens": 504_694,
    "words": 83_000,
    "bytes": 504_682,
}


# The figures of complete results, and of results that have perplexities alone.
FIGURES = [
    "extrapolation",
    "extrapolation_sliding",
    "extrapolation_fixed",
    "decomposition",
    "position_curve",
    "resolution",
]
BARE_FIGURES = ["extrapolation"]

# Keys of a row with numbers that may be None.
MAY_BE_MISSING = ("nll_low", "nll_high", "word_perplexity", "bits_per_byte", "seconds")


def interval(value, half):
    return {"nats": value, "low": value - half, "high": value + half}


def row(protocol, length, stride, nll, half=0.015):
    smallest = {"nonoverlapping": 1, "fixed": length}.get(protocol, length - stride + 1)
    targets = 512 if protocol == "fixed" else 504_693
    return {
        "protocol": protocol,
        "length": length,
        "stride": stride,
        "rescaling_factor": 1.0,
        "nll": nll,
        "nll_low": nll - half,
        "nll_high": nll + half,
        "perplexity": math.exp(nll),
        "word_perplexity": math.exp(6.07 * nll),
        "bits_per_byte": nll / math.log(2),
        "targets": targets,
        "words": targets // 6,
        "bytes": targets - 11,
        "windows": -(-targets // stride),
        "min_context": smallest,
        "smallest_context": smallest if protocol == "fixed" else 1,
        "mean_context": length - (length - smallest) / 2,
        "largest_context": length,
        "resampled": "12 documents",
        "seconds": 12.25,
        "compile_seconds": 1.5,
    }


def error_row(protocol, length, stride, error):
    return {
        "protocol": protocol,
        "length": length,
        "stride": stride,
        "rescaling_factor": 1.0,
        "error": error,
    }


def bare_row(length, perplexity, stride=None):
    """A row of non-overlapping windows, or of sliding ones with a stride; an error row for None."""
    protocol = "nonoverlapping" if stride is None else "sliding"
    if perplexity is None:
        error = f"no embedding, for a length of {length}"
        return error_row(protocol, length, stride or length, error)
    return row(protocol, length, stride or length, math.log(perplexity)) | {
        "perplexity": perplexity
    }


def bare_run(position, rows, train_length=128, name=None, rescaling="none"):
    """A run with these rows, and no other part measured."""
    return {
        "workdir": f"runs/{name or position}",
        "position": position,
        "rescaling": rescaling,
        "train_length": train_length,
        "step": 600,
        "split": "validation",
        "config": {
            "data": {"dataset": "sotu", "tokenizer": "bytes"},
            "train": {"length": train_length, "seed": 17},
        },
        "trained_by": provenance("train.py"),
        "corpus": CORPUS,
        "rows": rows,
        "position_nll": {},
        "early_token": {},
        "decomposition": None,
        "attention": [],
        "gain": None,
    }


def six_bare_runs():
    """Six methods at three lengths; `learned` has errors at the two lengths past its table."""
    return [
        bare_run(
            position,
            [
                bare_row(128, 4.5 + number),
                bare_row(256, None if position == "learned" else 5.25 + number),
                bare_row(1024, None if position == "learned" else 4.0 + 10.0**number),
            ],
        )
        for number, position in enumerate(POSITIONS)
    ]


def decomposition(windows, fixed, half=0.003):
    """A decomposition from the losses of both protocols by length; the shortest is the base."""
    base = min(windows)
    lengths = []
    for length in windows:
        half_width = 0.0 if length == base else half
        curse = windows[length] - fixed[length]
        lengths.append(
            {
                "length": length,
                "nonoverlapping": interval(windows[length], 0.02),
                "fixed": interval(fixed[length], 0.02),
                "curse": interval(curse, half),
                "gain": interval(windows[base] - windows[length], half_width),
                "early_tokens": interval(windows[base] - fixed[base] - curse, half_width),
                "smallest_context": 1,
                "mean_context": (length + 1) / 2,
                "largest_context": length,
                "context": interval(fixed[base] - fixed[length], half_width),
            }
        )
    return {"base": base, "targets": 512, "resampled": "12 documents", "lengths": lengths}


def run(position, lengths=LENGTHS, seed=0):
    slope, start = METHODS[position]
    rng = np.random.default_rng(seed)
    short = lengths[0]

    def rise(length):
        return slope * math.log2(length / short) if length > short else 0.0

    served = [length for length in lengths if length == short or math.isfinite(slope)]
    fixed = {length: start + rise(length) - 0.06 for length in served}
    windows = {length: fixed[length] + 0.06 * short / length for length in served}
    rows = []
    for protocol, values, stride in (
        ("nonoverlapping", windows, 0),
        ("sliding", fixed, 64),
        ("fixed", fixed, 1),
    ):
        for length in lengths:
            if length in served:
                rows.append(row(protocol, length, stride or length, values[length]))
            else:
                error = f"no embedding past 128, for a length of {length}"
                rows.append(error_row(protocol, length, stride or length, error))
    curves = {}
    for length in served:
        bins, begin = [], 0
        while begin < length:
            end = min(max(2 * begin, begin + 1), length)
            nll = fixed[length] + 1.9 / (begin + 1) ** 0.8
            targets = (end - begin) * (504_693 // length)
            bins.append(
                {"context_from": begin + 1, "context_to": end, "nll": nll, "targets": targets}
            )
            begin = end
        curves[str(length)] = bins
    attention = []
    for length in lengths:
        if length not in served:
            attention.append({"length": length, "error": f"no embedding for {length}"})
            continue
        layers = []
        for layer in range(2):
            resolution = max(0.05, 0.8 - 0.1 * layer - 0.15 * max(rise(length), 0.0))
            heads = [
                {
                    "resolution": resolution + 0.01 * head,
                    "distance": 3.25 * 2**head,
                    "entropy": 1.5 + 0.25 * head,
                }
                for head in range(4)
            ]
            layers.append({"layer": layer, "resolution": resolution + 0.015, "heads": heads})
        mean = sum(layer["resolution"] for layer in layers) / 2
        attention.append({"length": length, "windows": 8, "resolution": mean, "layers": layers})
    return bare_run(position, rows) | {
        "step": 2400,
        "config": {
            "data": {"dataset": "sotu", "tokenizer": "bytes"},
            "model": {"position": position, "num_layers": 2, "num_heads": 4},
            "train": {"length": 128, "seed": 17, "steps": 2400},
        },
        "position_nll": curves,
        "early_token": {
            str(length): {"nats": windows[length] - fixed[length], "stride": 64}
            for length in served
        },
        "decomposition": decomposition(windows, fixed),
        "attention": attention,
        "gain": gain(rng, short, served[-1], fixed) if len(served) > 1 else None,
    }


def gain(rng, short, long, fixed):
    def piece(text):
        before = 3 * rng.random()
        more = rng.normal(fixed[short] - fixed[long], 0.4) if rng.random() < 0.6 else 0.0
        more = min(more, before)
        return {"text": text, "nll_short": before, "nll_long": before - more, "gain": more}

    largest = sorted((piece(text) for text in TEXT[:40]), key=lambda piece: -piece["gain"])[:20]
    return {
        "short": short,
        "long": long,
        "targets": 512,
        "nats": interval(fixed[short] - fixed[long], 0.003),
        "improved": 0.5234,
        "quantiles": [
            {"share": share, "nats": 0.9 * (share - 0.5)}
            for share in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
        ],
        "concentration": [
            {"targets": targets, "gain": share}
            for targets, share in ((0.01, 0.31), (0.05, 0.6), (0.1, 0.75), (0.25, 0.9), (0.5, 1.0))
        ],
        "long_ppl": {
            "judge": "runs/alibi",
            "alpha": 2.0,
            "beta": -2.0,
            "key_targets": 12,
            "perplexity": 2.3125,
        },
        "largest": [
            {
                "target": 1000 + 37 * number,
                "before": TEXT[:number] + "before, ",
                "after": " after",
                **piece,
            }
            for number, piece in enumerate(largest)
        ],
        "passage": {"first": 1234, "pieces": [piece(character) for character in 6 * TEXT]},
    }


def provenance(command):
    return {
        "command": command,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "python": "3.11.9",
        "versions": {"jax": "0.10.2", "flax": "0.12.8"},
        "devices": "2 x cpu",
        "processes": 1,
    }


def results(runs):
    """Results of these runs; a number stands for one run of each of the first methods."""
    if isinstance(runs, int):
        runs = [run(position, seed=seed) for seed, position in enumerate(list(METHODS)[:runs])]
    return {
        "version": 2,
        **provenance("eval.py --workdir=runs/alibi"),
        "asked": {
            "lengths": "128,256,512,1024,2048,4096",
            "protocols": "nonoverlapping,sliding:64,fixed",
            "rescalings": "none",
            "attention": None,
            "judge": None,
            "split": "validation",
            "step": None,
            "documents": False,
            "bos": False,
            "targets": 512,
            "passage": 2000,
            "seed": 0,
            "batch_tokens": 65_536,
            "confidence": 0.95,
        },
        "runs": runs,
    }


def without_optional_parts(run):
    """The same run without the parts of it that may be missing."""
    run = copy.deepcopy(run)
    for row in run["rows"]:
        if "error" not in row:
            row |= dict.fromkeys(MAY_BE_MISSING) | {"resampled": ""}
    decomposition, gain = run["decomposition"], run["gain"]
    decomposition["resampled"] = ""
    for entry in decomposition["lengths"]:
        for part in ("nonoverlapping", "fixed", "curse", "gain", "early_tokens", "context"):
            entry[part] |= {"low": None, "high": None}
    gain["nats"] |= {"low": None, "high": None}
    gain["long_ppl"] = {"judge": "runs/judge", "error": "no checkpoint"}
    gain["passage"] = {"error": "the split is shorter"}
    gain["largest"] = []
    gain["concentration"] = []
    return run
