"""The image's program: `vllm serve MODEL`, with the options of profile, target and user.

The model is the first argument if that is not an option, else SPARKFORGE_MODEL: a directory in the
container (by default /model, for a mounted checkpoint) or a name on the hub, which is downloaded
first. Further arguments are options of `vllm serve`. docs/serving.md has the steps of a start;
sparkforge/serving/settings.py has all variables.
"""

import os
import sys
from pathlib import Path

# the image's own copy is beside this file; with -I its folder is not searched
sys.path.insert(0, str(Path(__file__).resolve().parent))

from sparkforge.serving import hub, launch, router, state
from sparkforge.serving.errors import EX_CONFIG, StartError, say
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
    waits = "" if end.stopped() else state.why_to_wait(end.code, count)
    if waits and state.repeats(os.environ.get("SPARKFORGE_RESTART", "")):
        if count is not None:
            count.forget()  # a restart by the user tries again
        say(f"waiting without a server: {waits}; the lines above give the reason")
        say("to try again: docker compose restart, or docker compose up after a change of .env")
        state.tell(f"waiting without a server: {waits}: {reason}", given_up=True)
        state.wait(end.stopped)
    return end.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
