"""What the proxy shows of itself: as JSON, as Prometheus' text, and as a page."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


def stats(fleet: Any) -> dict:
    """What there is to see, JSON-ready."""
    keys = ("id", "url", "job", "state", "reason", "inflight", "routed")
    with fleet.lock:
        replicas = list(fleet.replicas.values())
        named = {state: [p.name for p in fleet.policies.values() if p.state == state] for state in ("live", "retiring")}
        return {
            "ready": len(fleet.ready()), "paused": bool(fleet.pause), "policies": named["live"],
            "replicas": [{key: getattr(r, key) for key in keys} | {"policies": sorted(r.checked)} for r in replicas],
            "retiring": named["retiring"], "requests": fleet.num_requests, "counts": dict(fleet.counts),
            "router": {**fleet.router.counts, "tracked_blocks": len(fleet.router.blocks)},
            "events": [{"time": when, "text": text} for when, text in fleet.events],
        }  # fmt: skip


def metrics(now: dict) -> bytes:
    """Prometheus' text for what `stats` returns."""
    ready = {r["id"]: r["state"] == "ready" for r in now["replicas"]}
    inflight, routed = ({r["id"]: r[key] for r in now["replicas"]} for key in ("inflight", "routed"))
    families = [
        GaugeMetricFamily("proxy_ready", "1 if it is ready", labels=["replica"]), ready,
        GaugeMetricFamily("proxy_inflight", "Completions in flight", labels=["replica"]), inflight,
        CounterMetricFamily("proxy_routed", "Completions sent to it", labels=["replica"]), routed,
        CounterMetricFamily("proxy_router", "Routed requests", labels=["outcome"]), now["router"],
        CounterMetricFamily("proxy_events", "Loads, failed loads, requests sent again", labels=["kind"]), now["counts"],
    ]  # fmt: skip
    for family, numbers in zip(families[::2], families[1::2], strict=True):
        for key, number in numbers.items():
            family.add_metric([key], number)
    return generate_latest(SimpleNamespace(collect=lambda: families[::2]))


PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>{{ ready }}/{{ replicas|length }} ready</title><style>
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .4rem .8rem .4rem 0;
border-bottom: 1px solid #8886; vertical-align: top } th { font-weight: normal; color: #888 }</style></head><body>
<h1>{{ ready }} of {{ replicas|length }} replicas ready{{ ", paused" if paused }}</h1>
<p>{{ requests }} requests in flight. {% for key, num in router.items() %}{{ key }} {{ num }} &nbsp; {% endfor %}</p>
<table><tr><th>replica<th><th>state<th>in flight<th>routed<th>policies<th>
{% for r in replicas %}<tr><td>{{ r.id }}<td><code>{{ r.job or r.url }}</code><td>{{ r.state }}<td>{{ r.inflight }}
<td>{{ r.routed }}<td>{{ r.policies|length }}<td>{{ r.reason }}{% endfor %}</table>
<h2>Live policies</h2><p>{% for name in policies %}<code>{{ name }}</code> {% else %}none{% endfor %}
{% for name in retiring %}<code>{{ name }}</code> (retiring) {% endfor %}</p>
<h2>Events</h2><table>{% for event in events|reverse %}<tr><td>{{ (now - event.time)|int }}&nbsp;s&nbsp;ago
<td>{{ event.text }}{% endfor %}</table></body></html>"""
