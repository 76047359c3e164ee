"""One line, one JSON entry and one bar per figure."""

import json
from pathlib import Path


def figure(name: str, measured: float, aim: float, unit: str = "", at_least: bool = False, **details: float) -> dict:
    """Print a figure beside its aim; returns it as a dict. details: what it was made of or compared to."""
    met = measured >= aim if at_least else measured <= aim
    sign = "≥" if at_least else "≤"
    text = ", ".join(f"{key} {value:,.4g}" for key, value in details.items())
    print(f"{name:72s} {measured:9.2f} {unit:4s} aim {sign} {aim:g}  {'ok  ' if met else 'MISS'} {text}", flush=True)
    return {"name": name, "measured": measured, "aim": aim, "unit": unit, "at_least": at_least, "met": met, **details}


def save(title: str, figures: list[dict], directory: Path) -> list[Path]:
    """Write the figures as <title>.json, and as <title>.png: measured over aim, a bar each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{title}.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False))
    drawn = [f for f in figures if f["aim"]][::-1]
    plot, axis = pyplot.subplots(figsize=(12, 1 + 0.4 * len(drawn)), layout="constrained")
    colors = ["tab:green" if f["met"] else "tab:red" for f in drawn]
    labels = [
        f"{f['name']}: {f['measured']:.3g} {f['unit']} ({'≥' if f['at_least'] else '≤'} {f['aim']:g})" for f in drawn
    ]
    axis.barh(labels, [f["measured"] / f["aim"] for f in drawn], color=colors)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlabel("measured / aim")
    axis.set_title(f"bench.py {title}")
    plot.savefig(directory / f"{title}.png", dpi=100)
    pyplot.close(plot)
    return [directory / f"{title}.json", directory / f"{title}.png"]
