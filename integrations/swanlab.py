"""Logs a run to SwanLab: `log.command = ["python3", "integrations/swanlab.py"]`.

Needs `pip install swanlab`. The variables of SwanLab apply, such as SWANLAB_API_KEY and
SWANLAB_MODE.
"""

import json
import pathlib
import signal
import sys
import uuid

del sys.path[0]  # The folder of this script, which has the name of the package.
import swanlab


def figures(value, name=""):
    """The numbers of a line by name; those of a list or table have names like `rank_secs/0`."""
    if isinstance(value, (int, float)):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {key: one for part, inner in parts for key, one in figures(inner, f"{name}/{part}".lstrip("/")).items()}


# A stopped run says so in its last line. Processes of the package would inherit SIG_IGN.
signal.signal(signal.SIGTERM, lambda *_: None)
start = json.loads(sys.stdin.readline())
id_file = pathlib.Path(start["output"], "swanlab_run_id")
if not id_file.exists():
    id_file.write_text(uuid.uuid4().hex[:21])
swanlab.init(id=id_file.read_text(), resume="allow", name=start["run"], config=start)
status = "failed"  # The input of a killed run ends without a status.
for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "metrics":
        step = event.pop("step")
        swanlab.log(figures(event), step=step)
    elif event["event"] == "end":
        status = event["status"]
states = {"finished": "success", "failed": "crashed", "stopped": "aborted"}
swanlab.finish(states[status])
