"""docs/internals/performance.md from what the benchmarks wrote: pure, no clock, no machine.

A figure is the median of its rounds with the smallest and the largest in brackets.  A benchmark that
did not come to an end is named with its error in the place of its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median

from benchmarks.markdown import INTERNALS, Result, figure, number, range_of, table

PERFORMANCE_PAGE = INTERNALS / "performance.md"


def performance_page(results: Result) -> str:
    """The page from {benchmark: its result, or {"error": ...}} and ``machine``."""
    m = results["machine"]
    gpu = m["gpu"] or "no GPU"
    lines = [
        "<!-- written by: make bench (benchmarks/run_all.py --write-docs) -->",
        "",
        "# Performance",
        "",
        f"Measured on {m['date']}: {m['cores']} cores ({m['cpu']}), {m['memory_gb']} GB, {gpu}, torch"
        f" {m['torch']}; load {m['load_before']} before the first benchmark."
        f" All of it took {m['minutes']:.0f} minutes." + _alone(m) + _busy(m),
        "",
        "A figure is the median of interleaved rounds, (smallest to largest). **Ratios are the result**:"
        " both sides ran in turns, so what else the machine did fell on both. Seconds are of this"
        " machine. One thread a process unless said otherwise.",
        "",
        "    make bench",
        "",
    ]
    lines += table(("", "ratio", "at best"), _glance(results))
    for name, title, write in SECTIONS:
        lines += [f"## {title}", ""]
        result = results.get(name)
        if result is None:
            lines += ["Not measured in this run.", ""]
        elif "error" in result:
            lines += [f"**Failed**: `{result['error']}`", ""]
        else:
            lines += write(result)
    return "\n".join(lines).rstrip() + "\n"


def _alone(m: Result) -> str:
    alone = m.get("alone", {})
    if not alone:
        return ""
    return " Measured alone since: " + ", ".join(f"{n} ({day})" for n, day in alone.items()) + "."


def _busy(m: Result) -> str:
    if m["load_before"] <= m["cores"] / 2:
        return ""
    return " **The machine was busy with other things: take every figure as rough.**"


def _glance(results: Result) -> Iterator[list[str]]:
    """One row a ratio, of the benchmarks that came to an end."""
    done = {n: r for n, r in results.items() if isinstance(r, Mapping) and "error" not in r}
    if r := done.get("rollout_rate"):
        returned = r["over_no_routes"]["recorded and returned"]
        yield ["rollout tokens/s, with routed experts / without", figure(returned), "1"]
    if r := done.get("replay_overhead"):
        yield ["train step, replay / without", figure(r["replay_over_native"]), "1"]
        yield ["train step, replay and check / without", figure(r["check_over_native"]), "1"]
        yield ["train step, replay and check / replay", figure(r["check_over_replay"]), "1"]
    if r := done.get("route_path"):
        over = r["path"]["path_over_one_copy_of_the_wire"]
        yield ["route path / one copy of the wire's bytes", figure(over), "reading the wire once"]
    if r := done.get("weight_sync"):
        for way in ("broadcast", "disk"):
            yield [f"weight sync by {way} / one copy", figure(r["over_copy"][way]), "1"]
    if r := done.get("async_overlap"):
        over = [x["ratio"] for x in r["runs"]]
        yield ["step, asynchronous / synchronous, sides alike", range_of(over), "0.5"]
    for name, s in done.get("against_trl", {"shapes": {}})["shapes"].items():
        ours = max(_ours(s).values(), key=lambda x: x["median"])
        yield [f"samples/s, r3train / TRL, {name} ({s['response']} tokens)", figure(ours), ""]


def _ours(shape: Result) -> dict[str, Result]:
    """The ratios of r3train's arms to TRL's best."""
    return {n: x for n, x in shape["over_best_trl"].items() if n.startswith("r3train")}


def _rollout(r: Result) -> Iterator[str]:
    cost = 1 - r["over_no_routes"]["recorded and returned"]["median"]
    yield f"Routed experts cost **{cost:.1%}** of the rollout's tokens a second here."
    yield ""
    rates = r["tokens_per_s"]
    yield from table(
        ("server", "tokens/s over no routes", "tokens/s"),
        ([n, figure(r["over_no_routes"][n]), figure(rates[n])] for n in rates),
    )
    yield f"{r['requests']} requests at once, {r['response']} tokens each; {r['model']}. Two real servers,"
    yield "one started without routed experts, take turns. The floor is 1. Recording is SGLang's copy of"
    yield "every layer's top-k; returning is base64, HTTP and our strict decoding. A tiny model makes"
    yield "both large: the routes of a token do not grow with the hidden size, its arithmetic does."
    yield ""


def _replay(r: Result) -> Iterator[str]:
    yield from table(
        ("train step (old log-probs, forward, backward, update)", "ratio", "aim"),
        (
            ["replay / without", figure(r["replay_over_native"]), "1.01"],
            ["replay and check / without", figure(r["check_over_native"]), ""],
            ["replay and check / replay", figure(r["check_over_replay"]), "1.05"],
        ),
    )
    native = r["seconds"]["native"]
    yield f"{r['tokens']} tokens, {r['model']}, {r['device']}; a step without replay takes"
    yield f"{figure(native)} s. {r['rounds']} rounds; three actors in one process take turns in"
    yield "rotating order, in CPU time of the process. Replay's floor is 1: it leaves out the router's"
    yield "top-k and adds a lookup."
    yield ""


def _replay_growth(r: Result) -> Iterator[str]:
    yield from table(
        ("train step of", "replay / without", "check / without", "check / replay"),
        (
            [
                f"{x['tokens']} tokens, {x['layers']} layers, top {x['topk']} of {x['experts']}",
                figure(x["replay_over_native"]),
                figure(x["check_over_native"]),
                figure(x["check_over_replay"]),
            ]
            for x in r["shapes"]
        ),
    )


def _route_path(r: Result) -> Iterator[str]:
    p, fill = r["path"], r["fill"]
    yield "The whole path, from SGLang's base64 to routes on the device, takes"
    yield f"**{figure(p['path_over_one_copy_of_the_wire'])}** times one plain copy of the wire's bytes into"
    yield f"fresh memory. {p['shape']}: {p['route_gigabytes']} GB of routes, {p['wire_gigabytes']} GB on the"
    yield f"wire, {p['whole_path_seconds']} s of one core, {p['wire_gigabytes_a_second']} GB/s of wire."
    yield ""
    speeds = p["gigabytes_a_second"]
    total = sum(1 / v for v in speeds.values())
    yield from table(
        ("stage", "GB/s of uint8 routes", "share of the path"),
        ([n, number(v), f"{1 / v / total:.0%}"] for n, v in speeds.items()),
    )
    yield "The floor is reading the wire once: base64 of int32 is 5.3 bytes for each byte that is kept."
    yield f"Filling missing slots takes 1/{number(fill['one_hot_over_ours'])} of the time of the"
    low, high = fill["ratio_range"]
    yield f"formulation by one-hot ({number(low)} to {number(high)})."
    yield ""


def _growth(r: Result) -> Iterator[str]:
    base = r["base"]
    yield f"Base: {r['samples']} samples of {base['tokens']} tokens, {base['layers']} layers, top"
    yield f"{base['topk']} of {base['experts']}, one rank: {figure(r['base_s'])} s."
    yield ""
    rows = []
    for x in r["grown"]:
        grown = x["value"] / base[x["what"]]
        rows.append([x["what"], str(x["value"]), f"{grown:.3g} x", figure(x["over_base"])])
    yield from table(("changed", "to", "grown by", "cost over base"), rows)
    yield "Tokens, layers and top-k are bytes, and cost what bytes cost. The number of experts alone changes"
    yield "none of them, but that an id takes two bytes above 255 experts. Ranks are context-parallel ranks for which rank 0 cuts"
    yield "the shares: the bytes stay the same, each rank adds its own index arithmetic."
    yield ""


def _weight_sync(r: Result) -> Iterator[str]:
    names = {
        "copy": "one copy in memory (the floor)",
        "gather": "gathered under Hugging Face names, not sent",
        "broadcast": "published by broadcast",
        "disk": "published by disk",
    }
    yield from table(
        ("the same bytes", "over one copy", "seconds"),
        ([names[n], figure(r["over_copy"][n]), figure(r["seconds"][n])] for n in names),
    )
    gather, whole = (r["seconds"][n]["median"] for n in ("gather", "broadcast"))
    yield f"{r['gigabytes']} GB in {r['tensors']} tensors, float32, one rank to one real server. Of a"
    yield f"broadcast {gather / whole:.0%} is gathering on our side; the rest is flattening, gloo's TCP over"
    yield "loopback, and the server's own loading of every tensor into its fused experts, while trainer and"
    yield "server share this machine's cores and memory. Publishing by disk skips TCP and writes and reads"
    yield "the files through the page cache."
    yield ""


def _start_up(r: Result) -> Iterator[str]:
    phases = r["phases_s"]
    total = sum(x["median"] for x in phases.values())
    yield from table(
        ("from the command to the first trained step", "share", "seconds"),
        ([n, f"{x['median'] / total:.0%}", figure(x)] for n, x in phases.items()),
    )
    first, later = r["first_step"], r["later_steps"]
    yield f"{r['ranks']} ranks and a server, R3 and its check on, installation excluded; {figure(r['total_s'])}"
    yield "s in all. The server starts before the actor is built, so its row is what is left to wait for;"
    yield "the floor is its own start, nearly all imports."
    yield ""
    yield from table(
        ("part of a step, seconds", "first step", "quickest later step"),
        (
            [n.removeprefix("perf/").removesuffix("_s"), figure(first[n]), figure(later[n])]
            for n in first
        ),
    )
    yield "The first publish makes the process group with the server."
    yield ""


def _async(r: Result) -> Iterator[str]:
    runs = r["runs"]
    ratios = [x["ratio"] for x in runs]
    yield f"Asynchronous over synchronous: **{range_of(ratios)}** of the"
    yield "time of a step, where training and a rollout cost the same. The floor is 0.5."
    yield ""
    yield from table(
        ("", "seconds a step", "training waits", "generation idles"),
        (
            [
                name,
                number(median(x[key]["step_s"] for x in runs)),
                f"{median(x[key]['train_wait_share'] for x in runs):.0%}",
                f"{median(x[key]['rollout_idle_share'] for x in runs):.0%}",
            ]
            for name, key in (("synchronous", "sync"), ("asynchronous", "async"))
        ),
    )
    yield "A real server generates; training is a sleep as long as a rollout alone took, for two cores"
    yield f"cannot hold both. Updates pause generation by `{r['mode']}`."
    yield ""


def _trl(r: Result) -> Iterator[str]:
    for name, s in r["shapes"].items():
        ours = _ours(s)
        best = max(ours, key=lambda n: ours[n]["median"])
        share = ours[best]["median"]
        verdict = "faster" if share >= 1 else "slower"
        yield f"**{name}** ({s['model']}; {s['response']} tokens a response): r3train's best arm makes"
        yield f"**{number(share)} times** the samples a second of TRL's best, so it is {verdict}."
        yield ""
        rates = s["samples_per_s"]
        yield from table(
            ("arm", "over TRL's best", "samples/s"),
            ([n, figure(s["over_best_trl"][n]), figure(rates[n])] for n in rates),
        )
        split = s["step_parts_s"][best]
        whole = split["perf/step_s"]["median"]
        parts = ", ".join(
            f"{words} {split[key]['median'] / whole:.0%}"
            for key, words in (
                ("perf/rollout_wait_s", "waiting for the rollout"),
                ("perf/train_s", "log-probs and training"),
                ("perf/publish_s", "publishing and pausing for it"),
            )
        )
        generating = s["trl_generate_share"]
        quickest = max(generating, key=lambda n: rates[n]["median"])
        yield f"A step of {best}: {number(whole)} s, of it {parts}. Of a step of {quickest},"
        yield f"{generating[quickest]['median']:.0%} is generation."
        yield ""
    yield f"TRL {r['trl']}, GRPO. The same: checkpoint, prompts, prompts a step, group size, exactly so many"
    yield "tokens a response, one optimizer step a rollout, AdamW, float32, learning rate; the first"
    yield f"{r['warm_up']} steps and all start-up are left out. What differs:"
    yield ""
    yield "- TRL generates in its own process with transformers, the whole batch in step, on 1 or 2"
    yield "  threads; weights need no transport. Ours are 1 or 2 ranks and a server, one thread each, that"
    yield "  share the same 2 cores and talk over HTTP and gloo."
    yield "- r3train takes the log-probs once more before it trains, replays the rollout's experts in both"
    yield "  passes, and writes and judges its evidence at every step. TRL does none of the three."
    yield "- TRL is synchronous. Our asynchronous arms update weights in place, one step behind at most, but"
    yield "  on 2 busy cores there is nothing idle to overlap with. Neither side uses a KL reference."
    yield ""
    yield "With a tiny model and short responses a step is fixed costs (a request, a Python call, a small"
    yield "matrix), which one process without transport has fewest of; the longer the responses and the"
    yield "larger the matrices, the less they weigh. None of it says anything about GPUs."
    yield ""


SECTIONS: tuple[tuple[str, str, Callable[[Result], Iterator[str]]], ...] = (
    ("rollout_rate", "Rollout with routed experts", _rollout),
    ("replay_overhead", "Train step with replay and with the check", _replay),
    ("replay_growth", "How the cost of replay grows", _replay_growth),
    ("route_path", "Route path", _route_path),
    ("growth", "How the route path grows", _growth),
    ("weight_sync", "Weight sync", _weight_sync),
    ("start_up", "Start-up", _start_up),
    ("async_overlap", "Asynchronous against synchronous", _async),
    ("against_trl", "End to end against TRL's GRPO trainer", _trl),
)
