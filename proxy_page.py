"""What the proxy shows of itself: its status page, and Prometheus' text."""

from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


def metrics(now: dict) -> bytes:
    """Prometheus' text for what `stats` returns."""
    replicas = now["replicas"]
    values = [
        (GaugeMetricFamily, "ready", "1 if it is ready", "replica", {r["id"]: r["state"] == "ready" for r in replicas}),
        (GaugeMetricFamily, "inflight", "Completions in flight", "replica", {r["id"]: r["inflight"] for r in replicas}),
        (CounterMetricFamily, "routed", "Completions sent to it", "replica", {r["id"]: r["routed"] for r in replicas}),
        (GaugeMetricFamily, "policies", "Policies", "state", {key: len(now[key]) for key in ("policies", "retiring")}),
        (CounterMetricFamily, "router", "Routed requests", "outcome", now["router"]),
        (CounterMetricFamily, "events", "Loads, failed loads, requests sent again", "kind", now["counts"]),
    ]
    families = []
    for kind, name, text, label, numbers in values:
        families.append(kind(f"proxy_{name}", text, labels=[label]))
        for key, number in numbers.items():
            families[-1].add_metric([key], number)
    return generate_latest(SimpleNamespace(collect=lambda: families))


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>{{ ready }}/{{ replicas|length }} ready</title><style>
:root { color-scheme: light dark; --line: light-dark(#dde1e6, #3a3f47); --soft: light-dark(#5f6773, #9aa3af) }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .4rem .8rem .4rem 0;
border-bottom: 1px solid var(--line); vertical-align: top } th, .soft { color: var(--soft); font-weight: normal }
td.number, th.number { text-align: right } code { font-size: .9em; overflow-wrap: anywhere }
.state { padding: .1rem .6rem; border-radius: 1rem; color: #fff; background: #8a6d00 }
.ready { background: #1a7f4b } .down { background: #c0392b } .draining { background: #6b7280 }
.bar { display: flex; height: 1rem; border-radius: .5rem; overflow: hidden; background: var(--line) }
.affinity { background: #2b6cb0 } .spilled { background: #d97706 } .unmatched { background: #94a3b8 }
.bar span { display: block } .key { display: inline-block; width: .7rem; height: .7rem; border-radius: .2rem }
</style></head><body>
<h1>{{ ready }} of {{ replicas|length }} replicas ready{{ ", paused" if paused }}</h1>
<p class="soft">{{ requests }} requests in flight{{ ", now: " + busy_with if busy_with }}</p>
<table><tr><th>replica<th>state<th class="number">in flight<th class="number">routed<th class="number">policies<th>
{% for r in replicas %}<tr><td>{{ r.id }}<br><code class="soft">{{ r.job or r.url }}</code>
<td><span class="state {{ r.state }}">{{ r.state }}</span><td class="number">{{ r.inflight }}
<td class="number">{{ r.routed }}<td class="number">{{ r.policies|length }}<td class="soft">{{ r.reason }}{% endfor %}
</table>
<h2>Live policies</h2>
<p>{% for name in policies %}<code>{{ name }}</code> {% else %}<span class="soft">none</span>{% endfor %}
{% for name in retiring %}<code class="soft">{{ name }} (retiring)</code> {% endfor %}</p>
<h2>Routing</h2>
{% set total = router.affinity + router.spilled + router.unmatched %}
<div class="bar">{% for kind in ("affinity", "spilled", "unmatched") if total %}
<span class="{{ kind }}" style="width: {{ 100 * router[kind] / total }}%"></span>{% endfor %}</div>
<p>{% for kind in ("affinity", "spilled", "unmatched") %}<span class="key {{ kind }}"></span> {{ kind }}
{{ router[kind] }} &nbsp; {% endfor %}<span class="soft">{{ router.tracked_blocks }} blocks tracked</span></p>
<h2>Events</h2>
<table>{% for event in events|reverse %}<tr><td class="soft">{{ (now - event.time)|int }}&nbsp;s&nbsp;ago
<td>{{ event.text }}{% else %}<tr><td class="soft">none{% endfor %}</table>
</body></html>"""
