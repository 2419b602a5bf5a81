"""Logs a run to MLflow: `log.command = ["python3", "integrations/mlflow.py"]`.

Needs `pip install mlflow`. The variables of mlflow apply, such as MLFLOW_TRACKING_URI and
MLFLOW_EXPERIMENT_NAME.
"""

import json
import pathlib
import signal
import sys

del sys.path[0]  # The folder of this script, which has the name of the package.
import mlflow


def figures(value, name=""):
    """The numbers of a line by name; those of a list or table have names like `rank_secs/0`."""
    if isinstance(value, (int, float)):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {key: one for part, inner in parts for key, one in figures(inner, f"{name}/{part}".lstrip("/")).items()}


# A stopped run says so in its last line. Processes of the package would inherit SIG_IGN.
signal.signal(signal.SIGTERM, lambda *_: None)
start = json.loads(sys.stdin.readline())
id_file = pathlib.Path(start["output"], "mlflow_run_id")
run_id = id_file.read_text() if id_file.exists() else None
run = mlflow.start_run(run_id=run_id, run_name=start["run"])
if run_id is None:
    id_file.write_text(run.info.run_id)
    mlflow.log_params(start.pop("recipe") | start)
status = "failed"  # The input of a killed run ends without a status.
for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "metrics":
        step = event.pop("step")
        mlflow.log_metrics(figures(event), step=step, synchronous=False)
    elif event["event"] == "end":
        status = event["status"]
mlflow.flush_async_logging()
mlflow.end_run({"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[status])
