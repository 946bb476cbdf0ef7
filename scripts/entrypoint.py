"""The image's program: `vllm serve MODEL`, with the options of profile, target and user.

The model is the first argument if that is not an option, else SPARKFORGE_MODEL: a directory in the
container (by default /model, for a mounted checkpoint) or a name on the hub, which is downloaded
first. Further arguments are options of `vllm serve`. docs/serving.md has the steps of a start;
docs/variables.md has all variables.
"""

import os
import sys
from pathlib import Path

# the image's own copy is beside this file; with -I its folder is not searched
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sparkforge.serving import launch

if __name__ == "__main__":
    sys.exit(launch.main(sys.argv[1:], os.environ))
