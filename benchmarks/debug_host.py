"""Host time for a small layer without `transformer_engine.debug`, with it imported, and after a session has ended.

    python benchmarks/debug_host.py [--repeats 15] [--steps 300] [--json FILE]

Each repeat runs one fresh interpreter per case, in alternating order, so that a busy machine slows all of them alike.
An interpreter reports CPU time for a forward and backward pass through `te.Linear`, and the number of Python calls
in a warm pass. The record has the median over the repeats. Other processes do not disturb the call count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CASES = {
    "never imported": "",
    "imported": "import nvdlfw_inspect.api, transformer_engine.debug",
    "session ended": """
import nvdlfw_inspect.api as api, pathlib, transformer_engine.debug as debug
pathlib.Path("debug.yaml").write_text("none: {enabled: true, layers: {layer_name_regex_pattern: none}}")
api.initialize("debug.yaml", feature_dirs=[str(pathlib.Path(debug.__file__).parent / "features")], log_dir="logs")
api.end_debug()
""",
}
BODY = """
import json, sys, time
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
{setup}
torch.manual_seed(0)
layer = te.Linear(32, 32, device="cpu")
x = torch.randn(32, 32, requires_grad=True)
chosen = recipe.Float8CurrentScaling()

def step():
    with te.autocast(recipe=chosen):
        y = layer(x)
    y.backward(y)

for _ in range(50):
    step()
begin = time.process_time()
for _ in range({steps}):
    step()
seconds = (time.process_time() - begin) / {steps}
calls = []
sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
step()
sys.setprofile(None)
print(json.dumps([seconds * 1e6, len(calls)]))
"""


def measure(repeats: int, steps: int, folder: str) -> dict[str, dict[str, float]]:
    """{case: median microseconds and Python calls per step}."""
    found: dict[str, list[list[float]]] = {name: [] for name in CASES}
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    for repeat in range(repeats):
        for name in list(CASES)[:: 1 if repeat % 2 == 0 else -1]:
            program = BODY.format(setup=CASES[name], steps=steps)
            done = subprocess.run(
                [sys.executable, "-c", program],
                env=environment,
                cwd=folder,
                check=True,
                capture_output=True,
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {
        name: {
            "microseconds": round(statistics.median(us for us, _ in rows), 1),
            "python_calls": statistics.median(calls for _, calls in rows),
        }
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = measure(chosen.repeats, chosen.steps, folder)
    versions = {name: metadata.version(name) for name in ("torch", "nvdlfw_inspect")}
    text = json.dumps(
        {
            "command": f"python benchmarks/debug_host.py --repeats {chosen.repeats} --steps {chosen.steps}",
            "machine": f"{os.cpu_count()} CPU cores",
            "versions": {"python": platform.python_version(), **versions},
            "step": steps,
        },
        indent=1,
    )
    if chosen.json:
        chosen.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
