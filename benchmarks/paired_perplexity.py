"""The perplexity of one model beside that of another on the same passages, from two reports of ``streamkl evaluate``.

    python benchmarks/paired_perplexity.py report-dense dense report-sparse "indexers k256 b64"

prints the perplexity of each, and by how much the second is above the first, with Student's interval over the passages
at 95%. A report names its methods in ``results.jsonl``; without a second method it is the report's only one that is not
dense.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean

from streamkl.evaluation.statistics import mean


def losses(report: Path, method: str) -> dict[tuple[int, int], float]:
    """The mean loss per token of each passage, by its length and number.

    Raises:
        SystemExit: The report has no such method.
    """
    lines = [json.loads(line) for line in (report / "results.jsonl").read_text().splitlines()]
    found = [line for line in lines if line.get("task") == "perplexity"]
    methods = dict.fromkeys(line["method"] for line in found)
    if not method:
        method = next((name for name in methods if name != "dense"), "")
    if method not in methods:
        raise SystemExit(f"{report} has {', '.join(methods)}, and not {method!r}")
    return {
        (line["length"], line["number"]): line["found"]["nll"] / line["found"]["tokens"]
        for line in found
        if line["method"] == method
    }


def main() -> None:
    """Prints the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("report", Path), ("method", str), ("other_report", Path), ("other_method", str)):
        parser.add_argument(name, type=kind, **({"nargs": "?", "default": ""} if name == "other_method" else {}))
    given = parser.parse_args()
    one, other = losses(given.report, given.method), losses(given.other_report, given.other_method)
    both = sorted(one.keys() & other.keys())
    if not both:
        raise SystemExit("the reports have no passage in common")
    found = mean([other[key] - one[key] for key in both])
    low, value, high = (100 * math.expm1(x) for x in (found.low, found.value, found.high))
    a, b = (math.exp(fmean(of_one[key] for key in both)) for of_one in (one, other))
    print(f"{a:.3f} and {b:.3f} on {len(both)} passages: {value:+.2f}% [{low:+.2f}, {high:+.2f}]")


if __name__ == "__main__":
    main()
