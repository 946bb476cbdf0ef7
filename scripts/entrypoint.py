"""The image's program: `vllm serve MODEL`, with the options of profile, target and user.

The model is the first argument if that is not an option, else SPARKFORGE_MODEL: a directory in the
container (by default /model, for a mounted checkpoint) or a name on the hub, which is downloaded
first. Further arguments are options of `vllm serve`. docs/serving.md has the steps of a start.

    SPARKFORGE_MODEL            /model
    SPARKFORGE_MODEL_REVISION   commit on the hub; without it the newest
    SPARKFORGE_DOWNLOAD         entrypoint, or vllm: vLLM downloads while it loads
    SPARKFORGE_MODEL_NAME       the model's name for clients; without it the model's own
    SPARKFORGE_PROFILE          exact, balanced or fast, the choices of the image's profile; or a
                                profile file, with a / in its path; empty: no profile
    SPARKFORGE_SERVE_ARGS       options of the target, set by the build
    SPARKFORGE_EXTRA_ARGS       further options, e.g. --max-num-seqs 8
    SPARKFORGE_MXFP4_LAYERS     e.g. qkv,o,lm_head; must fit a chosen profile
    SPARKFORGE_GPU_MEMORY_UTILIZATION   share of all memory; without it: computed (docs/memory.md)
    SPARKFORGE_MEMORY_GUARD     off, warn or on: watch free memory; on where GPU and host share it
    SPARKFORGE_MEMORY_MARKS     GiB below which it warns, refuses requests, ends the server; 6,4,2
    SPARKFORGE_BACKEND_CHECK    fail, warn or off, where vLLM chooses other backends than the
                                profile's, or there is no device
    SPARKFORGE_WARM_UP          off, quick or full: requests before the server counts as healthy
    SPARKFORGE_WARM_UP_SECONDS  for all of them; 900
    SPARKFORGE_WARM_UP_FAILURE  fail or warn, where one of them fails
    SPARKFORGE_PREFLIGHT        auto, off or always: serve a small model with known answers before
                                the real one is downloaded (docs/serving.md)
    SPARKFORGE_PREFLIGHT_SECONDS  for all of it; 1800
    SPARKFORGE_JIT_DIR          folder of compiled kernels, with one for each build and device
    SPARKFORGE_JIT_BUDGET_GIB   of all builds together; the longest unused are removed first; 20
    SPARKFORGE_MAX_BODY_MIB     of a request's body, in MiB; more is refused (413); 8
    SPARKFORGE_ORIGINS          web pages that may ask, e.g. http://localhost:3000
    SPARKFORGE_OPEN_METRICS     1: /metrics needs no API key
    SPARKFORGE_HANG_SECONDS     without progress, until the server is ended; 60; 0: never
    SPARKFORGE_START_LIMIT      starts in a row that may fail to become ready; 3; 0: any number
    SPARKFORGE_RESTART          Docker's restart policy of this container, which cannot see it;
                                where it restarts without limit, the entrypoint waits instead of
                                ending for an error that a restart does not fix (docs/serving.md)
    SPARKFORGE_SHARE            the image's folder of data; for trials outside of an image
    MAX_JOBS                    parallel compilers; without it: as many as free memory holds
    SPARKFORGE_LISTEN_PORT      port in the container
    SPARKFORGE_LISTEN_HOST      address in the container: 127.0.0.1 or 0.0.0.0; without it: all
    SPARKFORGE_CLUSTER_ROLE     head or worker: one half of a model on each of two machines, with
                                _HEAD, _WORKER, _IFNAME and _PORT: docs/two-sparks.md
    SPARKFORGE_ROLE             router: no server, but the router in front of SPARKFORGE_REPLICAS,
                                with SPARKFORGE_ROUTER_POLICY: docs/replicas.md
"""

import os
import sys
from pathlib import Path

# the image's own copy is beside this file; with -I its folder is not searched
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sparkforge.serving import hub, launch, router, starts, state
from sparkforge.serving.errors import EX_CONFIG, StartError
from sparkforge.serving.log import say
from sparkforge.serving.supervise import End


def main(arguments: list[str]) -> int:
    """Serve until the server ends; wait where Docker would only repeat a failure.

    Returns:
        The exit code.
    """
    count, reason = None, "its log gives the reason"
    try:
        if router.asked(os.environ):
            router.run(os.environ)  # HAProxy takes this process's place
        end, count = launch.serve(arguments, os.environ)
    except hub.StoppedError as error:
        say("the download was stopped; the next start continues it")
        return 128 + error.number
    except StartError as error:
        reason, end = str(error), End(error.code)
        say(f"error: {reason}")
    except (OSError, ValueError) as error:
        reason, end = f"{type(error).__name__}: {error}", End(EX_CONFIG)
        say(f"error: {reason}")
    if count is not None and end.stopped():
        count.forget()
    waits = "" if end.stopped() else starts.why_to_wait(end.code, count)
    if waits and starts.repeats(os.environ.get("SPARKFORGE_RESTART", "")):
        if count is not None:
            count.forget()  # a restart by the user tries again
        say(f"waiting without a server: {waits}; the lines above give the reason")
        say("to try again: docker compose restart, or docker compose up after a change of .env")
        state.tell(f"waiting without a server: {waits}: {reason}", given_up=True)
        starts.wait(end.stopped)
    return end.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
