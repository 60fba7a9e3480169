"""The figures of linear layers and trees in docs/attention-figures.md are those that the benchmarks wrote."""

import json
from pathlib import Path

TOP = Path(__file__).parents[3]
PAGE = (TOP / "docs/attention-figures.md").read_text()
PROSE = " ".join(PAGE.split())  # lines joined: a sentence may be wrapped anywhere


def results(name):
    return json.loads((TOP / "benchmarks/results" / name).read_text())


def rows_of(header):
    """The cells of the table whose header begins so."""
    lines = PAGE.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_linear_layers():
    found = {row["tokens"]: row for row in results("linear_attention.json")["results"]}
    for tokens, *cells in rows_of("| tokens | one rank s |"):
        row = found[int(tokens.replace(",", ""))]
        seconds = [f"{row[name]:.3f}" for name in ("single_s", "forward_s", "backward_s")]
        gains = [f"{row['speedup']:.2f}", f"{row['machine_speedup']:.2f}"]
        assert cells == [*seconds, *gains, f"{row['bytes_sent_per_rank'] / 1e6:.3f}"]


def test_trees():
    found = results("trees.json")
    rows = rows_of("| pack | s | forward s |")
    assert [row[0] for row in rows] == list(found["rows"])
    for name, *cells in rows:
        row = found["rows"][name]
        sizes = [f"{row[each] / 1e6:.2f}" for each in ("bytes", "least_bytes")]
        assert cells == [f"{row['seconds']:.3f}", f"{row['forward_s']:.3f}", f"{row['pairs'] / 1e6:.1f} M", *sizes]
    ratio, work = found["time_ratio"], found["work_ratio"]
    assert f"{ratio:.2f} times as fast as the faster flattened pack for {work:.2f} times less work (pairs" in PROSE
    assert f"the ratio of work is {work / ratio:.3f} of that of time" in PROSE


def test_bytes():
    found = results("layer_bytes.json")["results"]
    names = {
        "MLA of DeepSeek-V3 with 16 heads, latent": ["MLA, latent"],
        "the same, K and V": ["MLA, kv"],
        "delta rule or KDA": ["delta rule, pipeline", "KDA, pipeline"],
        "delta rule or KDA, `gather`": ["delta rule, gather", "KDA, gather"],
        "Mamba-2": ["Mamba-2, pipeline"],
        "Mamba-2, `gather`": ["Mamba-2, gather"],
        "convolution": ["convolution"],
        "softmax, tree": ["softmax, tree"],
        "softmax, flattened": ["softmax, flattened"],
        "delta rule, tree": ["delta rule, tree"],
        "delta rule, flattened": ["delta rule, flattened"],
    }
    rows = rows_of("| layer | tokens | forward |")
    assert {row[0] for row in rows} == set(names)
    for name, tokens, forward, least_forward, backward, least_backward in rows:
        lengths = {int(each.replace(",", "")) for each in tokens.split(" / ")}
        chosen = [row for row in found if row["layer"] in names[name]]
        assert {row["length"] for row in chosen} == lengths  # of all lengths alike
        for row in chosen:
            sent = [f"{row['forward_bytes']:,}", f"{row['minimum'][0]:,}"]
            sent += [f"{row['backward_bytes']:,}", f"{row['minimum'][1]:,}"]
            assert [forward, least_forward, backward, least_backward] == sent
