"""Stores the output and pictures of the examples in examples/printed, for docs/.

    python examples/keep.py [NAME ...]    # all examples take about ten minutes

`tests/examples/test_examples.py` runs the examples and compares their output with the stored
output, ignoring numbers.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PRINTED = FOLDER / "printed"
PICTURES = {
    "u03_latent_gradients": ["frozen.png"],
    "u10_lost_gradient": ["u10_lost_gradient_torch.png"],
    "u16_meanflow": ["u16_meanflow_torch.png"],
}
BOTH = "cross_check_minilm"  # needs both backends, and has no option --backend


def keep(name: str) -> None:
    """Runs an example with both backends, and stores its output and pictures."""
    command = [
        sys.executable,
        f"examples/{name}.py",
        *([] if name == BOTH else ["--backend", "both"]),
    ]
    ran = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True, check=True,
                         env={"PYTHONPATH": str(FOLDER.parent), **os.environ})  # fmt: skip
    (PRINTED / f"{name}.txt").write_text(ran.stdout, encoding="utf-8")
    for picture in PICTURES.get(name, ()):
        shutil.copy(FOLDER.parent / "out" / picture, PRINTED / f"{name}.{picture}")


if __name__ == "__main__":
    for name in sys.argv[1:] or [*sorted(path.stem for path in FOLDER.glob("u*.py")), BOTH]:
        print(name, flush=True)
        keep(name)
