"""Logs a run to Trackio: `log.command = ["python3", "integrations/trackio.py"]`.

Needs `pip install trackio`. The variables of trackio apply, such as TRACKIO_DIR and
TRACKIO_SPACE_ID.
"""

import json
import signal
import sys

del sys.path[0]  # The folder of this script, which has the name of the package.
import trackio


def figures(value, name=""):
    """The numbers of a line by name; those of a list or table have names like `rank_secs/0`."""
    if isinstance(value, (int, float)):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {key: one for part, inner in parts for key, one in figures(inner, f"{name}/{part}".lstrip("/")).items()}


# A stopped run says so in its last line. Processes of the package would inherit SIG_IGN.
signal.signal(signal.SIGTERM, lambda *_: None)
start = json.loads(sys.stdin.readline())
resume = "never" if start["resumed_step"] is None else "allow"
trackio.init("finetune", name=start["run"], resume=resume, config=start)
for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "metrics":
        step = event.pop("step")
        trackio.log(figures(event), step=step)
trackio.finish()
