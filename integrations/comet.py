"""Logs a run to Comet: `log.command = ["python3", "integrations/comet.py"]`.

Needs `pip install comet_ml`. The variables of Comet apply, such as COMET_API_KEY and
COMET_PROJECT_NAME. With COMET_OFFLINE_DIRECTORY, the experiment is a file in that folder, for
`comet upload`.
"""

import json
import os
import pathlib
import signal
import sys
import uuid

import comet_ml


def figures(value, name=""):
    """The numbers of a line by name; those of a list or table have names like `rank_secs/0`."""
    if isinstance(value, (int, float)):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {key: one for part, inner in parts for key, one in figures(inner, f"{name}/{part}".lstrip("/")).items()}


# A stopped run says so in its last line. Processes of the package would inherit SIG_IGN.
signal.signal(signal.SIGTERM, lambda *_: None)
start = json.loads(sys.stdin.readline())
id_file = pathlib.Path(start["output"], "comet_experiment_key")
if not id_file.exists():
    id_file.write_text(uuid.uuid4().hex)
online = "COMET_OFFLINE_DIRECTORY" not in os.environ
run = comet_ml.start(experiment_key=id_file.read_text(), mode="get_or_create", online=online)
run.set_name(start["run"])
run.log_parameters(start)
status = "failed"  # The input of a killed run ends without a status.
for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "metrics":
        step = event.pop("step")
        run.log_metrics(figures(event), step=step)
    elif event["event"] == "end":
        status = event["status"]
run.log_other("status", status)
run.end()
