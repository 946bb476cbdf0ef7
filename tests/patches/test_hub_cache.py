"""A hub's cache that the server can only read, offline: our way to it, and the locked hub's own."""

import json
import os
import subprocess
from pathlib import Path

from tests.patches.checkout import CHECKOUT

REPOSITORY, REVISION = "openai/gpt-oss-120b", "b5c939de8f754692c1647ca79fbf85e8c1e70f8a"
CODE = f"""
import json, os
from huggingface_hub import get_token, hf_hub_download
from sparkforge.serving import checkpoint, supervise
try:
    os.open(os.environ["HF_HOME"] + "/new", os.O_CREAT | os.O_WRONLY)
    raise SystemExit("the test's folder can be written")
except PermissionError:
    pass
folder = checkpoint.fetch("{REPOSITORY}", "{REVISION}", os.environ, supervise.Signals())
try:
    files = [hf_hub_download("{REPOSITORY}", name, revision="{REVISION}")
             for name in ("config.json", "model.safetensors")]
    print(json.dumps([open(file).read() for file in files] + [str(folder), get_token()]))
except PermissionError as error:
    print(json.dumps(str(error)))
"""


def offline(python: Path, home: Path, **variables: str) -> object:
    """Read the cache as somebody who may not write there; returns what the code printed."""
    # root may write everywhere, unless these rights are taken away
    rights = "-dac_override,-dac_read_search,-fowner"
    without = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    done = subprocess.run(
        [*(without if os.geteuid() == 0 else []), python, "-c", CODE],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(home),
            "PYTHONPATH": str(CHECKOUT),
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_cache_that_can_only_be_read_is_enough(patched_python: Path, tmp_path: Path) -> None:
    home = tmp_path / "huggingface"
    model = home / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = model / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for name, text in (("config.json", "{}"), ("model.safetensors", "weights")):
        (model / "blobs" / name).write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    token = home / "token"
    token.write_text("secret")
    token.chmod(0)  # of somebody else, who alone may read it
    for folder, _, _ in os.walk(home):
        Path(folder).chmod(0o555)
    before = sorted(home.rglob("*"))
    refused = offline(patched_python, home)
    assert "token" in str(refused), "docker-compose.yml's HF_TOKEN_PATH is not needed any more"
    found = offline(patched_python, home, HF_TOKEN_PATH="/dev/null")
    assert found == ["{}", "weights", str(snapshot), None]
    assert sorted(home.rglob("*")) == before
    for folder, _, _ in os.walk(home):
        Path(folder).chmod(0o755)  # for the next run of pytest, which removes it
